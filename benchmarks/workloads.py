"""The workloads: equal environments, networks, minibatches and gradient steps a sample for all contestants."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from environments import ATARI_ARGUMENTS, WITHOUT_VELOCITIES
from typing_extensions import override

ENDLESS_STEPS = 1_000_000_000
"""Step limit of a run that the benchmark ends from outside."""


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """One row of the table, and the length of its measurement."""

    name: str
    title: str
    algorithm: str
    """The algorithm's name in specs."""
    env_id: str
    num_envs: int
    num_steps: int
    """Steps of each environment in an iteration."""
    minibatch_size: int
    learning_rate: float
    discount: float
    network: Literal["mlp", "cnn"] = "mlp"
    """Dense layers, or the network of Mnih et al. (2015)."""
    step_seconds: float = 0.0
    """Seconds that each environment step sleeps."""
    vectorization: Literal["loop", "native", "threads"] = "loop"
    """How rlsrl's actors step environments. ``native`` applies to every contestant that supports it."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of each contestant's network. rlsrl's policy workers act on it, too."""
    actors: int = 1
    policy_workers: int = 0
    ring_size: int = 1
    """Groups of each actor's environments. The actor steps one while the policy worker answers for another."""
    compile: Literal["off", "upfront", "background"] = "upfront"
    """When rlsrl's training step is compiled: before the window, unless the start itself is measured."""
    trainer_threads: int = 1
    """Threads of rlsrl's trainer. Peers use as many as are fastest."""
    max_policy_lag: int = 1
    """Training steps by which the acting weights may be behind. Peers have no such lag."""
    goal: float | None = None
    """Mean return of the last 100 episodes that ends the run. None: the benchmark ends the run."""
    total_steps: int = ENDLESS_STEPS
    """Environment steps that end the run."""
    warm_seconds: float = 4.0
    """Training time before the window begins."""
    window_seconds: float = 12.0
    trial_seconds: float = 4.0
    """Window of a trial turn, which only finds a peer's fastest setting."""

    @property
    def evaluations(self) -> tuple[int, int]:
        """The env steps between two evaluations without exploration, and the episodes of each. (0, 0): none."""
        return 0, 0

    @property
    def program(self) -> str:
        """Which of a peer's programs runs it."""
        return self.algorithm

    @property
    @abstractmethod
    def is_gathered_by_workers(self) -> bool:
        """Whether peers may step environments in processes of their own."""

    @property
    def latency_limit(self) -> float | None:
        """Environment steps a second if only the environments' sleep took time; None if they do not sleep."""
        return self.num_envs / self.step_seconds if self.step_seconds else None

    def experiment(self, *, seed: int = 1) -> dict[str, Any]:
        """Return the experiment for ``rlsrl run``."""
        asked = {"policyWorkers": {"replicas": self.policy_workers, "device": self.device}}
        policy_workers = asked if self.policy_workers else {}
        goal = {} if self.goal is None else {"returnMean": self.goal}
        threads = {} if self.trainer_threads == 1 else {"threads": self.trainer_threads}
        return {
            "apiVersion": "rlsrl.dev/v1alpha1",
            "kind": "RLExperiment",
            "metadata": {"name": f"bench-{self.name.lower()}"},
            "spec": {
                "seed": seed,
                "environment": self._environment(),
                "policy": self._policy(),
                "algorithm": self._algorithm(),
                "actors": {
                    "replicas": self.actors,
                    "environments": self.num_envs,
                    "rolloutLength": self.num_steps,
                    "ringSize": self.ring_size,
                    "vectorization": self.vectorization,
                },
                **policy_workers,
                "trainers": {"compile": self.compile, "device": self.device, **threads},
                "pacing": self._pacing(),
                **self._stored(),
                "stop": {"envSteps": self.total_steps, **goal},
            },
        }

    def peer_arguments(self, *, seed: int = 1) -> list[str]:
        """Return the arguments of the peers' programs, without those that choose threads and processes."""
        goal = {} if self.goal is None else {"goal": self.goal}
        options = {"env-id": self.env_id, "seed": seed, **self._peer_options(), "total-steps": self.total_steps, **goal}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*words, *self._peer_flags(), "--report"]

    @abstractmethod
    def _policy(self) -> dict[str, Any]:
        """Return ``spec.policy``."""

    @abstractmethod
    def _algorithm(self) -> dict[str, Any]:
        """Return ``spec.algorithm``."""

    @abstractmethod
    def _pacing(self) -> dict[str, Any]:
        """Return ``spec.pacing``."""

    def _stored(self) -> dict[str, Any]:
        """Return ``spec.parameters`` with its name, if it is not the default."""
        return {}

    @abstractmethod
    def _peer_options(self) -> dict[str, Any]:
        """Return the options of the peers' programs by name, apart from those that all have."""

    def _peer_flags(self) -> tuple[str, ...]:
        """Return the options of the peers' programs that have no value."""
        return ()

    def _environment(self) -> dict[str, Any]:
        if self.step_seconds:
            kwargs = {"env_id": self.env_id, "step_seconds": self.step_seconds}
            return {"factory": "environments:make", "kwargs": kwargs}
        if self.env_id == WITHOUT_VELOCITIES:
            return {"factory": "environments:make", "kwargs": {"env_id": self.env_id}}
        if self.network == "cnn":
            # The same Gymnasium wrappers as in `environments.make`. The algorithm clips the reward.
            return {"id": self.env_id, "kwargs": dict(ATARI_ARGUMENTS), "atari": {}, "frameStack": 4}
        return {"id": self.env_id}


@dataclass(frozen=True, kw_only=True)
class PpoWorkload(Workload):
    """A workload of PPO."""

    algorithm: Literal["ppo"] = "ppo"
    epochs: int
    gae_lambda: float
    clip_range: float = 0.2
    entropy_coefficient: float = 0.0
    normalize: bool = False
    """Whether running statistics normalise observations and rewards."""
    recurrent: Literal["gru", "lstm"] | None = None
    """A recurrent layer of 64 units behind one hidden layer of 64, which policy and value share."""
    sequence_length: int = 16
    """Steps of the sequences that a recurrent network is trained on."""

    @property
    @override
    def program(self) -> str:
        return self.algorithm if self.recurrent is None else f"{self.algorithm}, {self.recurrent}"

    @property
    @override
    def is_gathered_by_workers(self) -> bool:
        return True

    @override
    def _policy(self) -> dict[str, Any]:
        network: dict[str, Any] = {"mlp": {"hiddenSizes": [64, 64], "activation": "tanh"}}
        if self.network == "cnn":
            network = {"cnn": {"precision": "bfloat16"}}
        elif self.recurrent is not None:
            network = {"mlp": {"hiddenSizes": [64]}, "recurrent": {"kind": self.recurrent, "size": 64}}
        return {"network": network, "normalizeObservations": self.normalize}

    @override
    def _algorithm(self) -> dict[str, Any]:
        clipped = {"rewardClip": 1} if self.network == "cnn" else {}
        settings = {
            "learningRate": self.learning_rate,
            "discount": self.discount,
            "gaeLambda": self.gae_lambda,
            "clipRange": self.clip_range,
            "entropyCoefficient": self.entropy_coefficient,
            "clipValueLoss": False,
            "normalizeRewards": self.normalize,
            "epochs": self.epochs,
            "minibatchSize": self.minibatch_size,
            **({} if self.recurrent is None else {"sequenceLength": self.sequence_length}),
            **clipped,
        }
        return {"ppo": settings}

    @override
    def _pacing(self) -> dict[str, Any]:
        return {"maxPolicyLag": self.max_policy_lag}

    @override
    def _peer_options(self) -> dict[str, Any]:
        return {
            "step-seconds": self.step_seconds,
            "num-envs": self.num_envs,
            "num-steps": self.num_steps,
            "minibatch-size": self.minibatch_size,
            "epochs": self.epochs,
            "learning-rate": self.learning_rate,
            "discount": self.discount,
            "gae-lambda": self.gae_lambda,
            "entropy-coefficient": self.entropy_coefficient,
            "clip-range": self.clip_range,
            "network": self.network,
            "device": self.device,
            **self._recurrent_options(),
        }

    def _recurrent_options(self) -> dict[str, Any]:
        return {} if self.recurrent is None else {"recurrent": self.recurrent, "sequence-length": self.sequence_length}

    @override
    def _peer_flags(self) -> tuple[str, ...]:
        return ("--no-anneal", "--normalize" if self.normalize else "--no-normalize")


@dataclass(frozen=True, kw_only=True)
class ReplayWorkload(Workload):
    """A workload of an algorithm that draws from a store, with two layers of 256 units or the network for images.

    Targets and exploration are those that the peers' programs have by default.
    """

    algorithm: Literal["dqn", "sac", "td3"]
    updates_per_env_step: float
    capacity: int = 100_000
    start: int = 1000
    """Transitions before training begins."""
    double: bool = True
    """Whether DQN is with double Q-learning, which Stable-Baselines3 does not have: it evaluates a network less."""
    evaluate_every: int = 0
    """Env steps from one evaluation without exploration to the next; 0: none."""
    evaluation_episodes: int = 0

    @property
    @override
    def is_gathered_by_workers(self) -> bool:
        return False

    @property
    @override
    def evaluations(self) -> tuple[int, int]:
        return self.evaluate_every, self.evaluation_episodes

    @override
    def _policy(self) -> dict[str, Any]:
        if self.network == "cnn":
            return {"network": {"cnn": {"precision": "bfloat16"}}}
        return {"network": {"mlp": {"hiddenSizes": [256, 256], "activation": "relu"}}}

    @override
    def _algorithm(self) -> dict[str, Any]:
        clipped = {"rewardClip": 1} if self.network == "cnn" else {}
        shared = {
            "learningRate": self.learning_rate,
            "discount": self.discount,
            "minibatchSize": self.minibatch_size,
            "replay": {"capacity": self.capacity, "start": self.start},
            **clipped,
        }
        if self.algorithm != "dqn":
            return {self.algorithm: {**shared, "criticLearningRate": self.learning_rate}}
        epsilon = {"epsilon": 1, "epsilonSchedule": {"linear": {"to": 0.04, "envSteps": 8000}}}
        plain = {} if self.double else {"double": False}
        return {"dqn": {**shared, "targetPeriod": 128, **plain, **epsilon}}

    @override
    def _pacing(self) -> dict[str, Any]:
        return {"trainStepsPerEnvStep": self.updates_per_env_step}

    @override
    def _stored(self) -> dict[str, Any]:
        """Keep a version for each evaluation: they are played when the run has ended."""
        if not self.evaluate_every:
            return {}
        steps = max(1, round(self.evaluate_every / (self.num_envs * self.num_steps)))
        return {"parameters": {"everySteps": steps, "everySeconds": 1_000_000, "keepLast": 10_000}}

    @override
    def _peer_options(self) -> dict[str, Any]:
        rates = {"network": self.network} if self.algorithm == "dqn" else {"critic-learning-rate": self.learning_rate}
        return {
            "algorithm": self.algorithm,
            "num-envs": self.num_envs,
            "num-steps": self.num_steps,
            "updates-per-env-step": self.updates_per_env_step,
            "minibatch-size": self.minibatch_size,
            "capacity": self.capacity,
            "start": self.start,
            "learning-rate": self.learning_rate,
            **rates,
            "discount": self.discount,
            **({"evaluate-every": self.evaluate_every} if self.evaluate_every else {}),
            **({"evaluation-episodes": self.evaluation_episodes} if self.evaluate_every else {}),
        }

    @override
    def _peer_flags(self) -> tuple[str, ...]:
        return () if self.double else ("--plain",)


_CARTPOLE: dict[str, Any] = {
    "env_id": "CartPole-v1",
    "learning_rate": 1e-3,
    "discount": 0.98,
    "gae_lambda": 0.9,
}
_PONG: dict[str, Any] = {
    "env_id": "ALE/Pong-v5",
    "network": "cnn",
    "learning_rate": 2.5e-4,
    "discount": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.1,
    "entropy_coefficient": 0.01,
    # A peer's iteration takes seconds, and a window needs several.
    "window_seconds": 24.0,
    "trial_seconds": 8.0,
}
_W1: dict[str, Any] = {**_CARTPOLE, "num_envs": 8, "num_steps": 128, "minibatch_size": 256, "epochs": 4}
_M1: dict[str, Any] = {**_W1, "env_id": WITHOUT_VELOCITIES}
_B1: dict[str, Any] = {**_CARTPOLE, "num_envs": 64, "num_steps": 64, "minibatch_size": 1024, "epochs": 1, "actors": 2}
_W2: dict[str, Any] = {**_PONG, "num_envs": 8, "num_steps": 128, "minibatch_size": 256, "epochs": 4}
_B2: dict[str, Any] = {**_PONG, "num_envs": 16, "num_steps": 64, "minibatch_size": 512, "epochs": 1, "actors": 2}
CORES = len(os.sched_getaffinity(0))
_G2: dict[str, Any] = {
    **_PONG,
    "num_envs": 8 * CORES,
    "num_steps": 128,
    "minibatch_size": 256 * CORES,
    "epochs": 4,
    "actors": CORES,
    "policy_workers": 1,
    "ring_size": 2,
    "device": "cuda",
}
_W4: dict[str, Any] = {
    **_CARTPOLE,
    "num_steps": 32,
    "minibatch_size": 256,
    "epochs": 4,
    "step_seconds": 0.005,
    "vectorization": "threads",
}
_ALL = (
    PpoWorkload(name="W1", title="CartPole 8 x 128, minibatch 256, 4 epochs", **_W1),
    PpoWorkload(name="B1", title="CartPole 64 x 64, minibatch 1024, 1 epoch", **_B1),
    PpoWorkload(
        name="B1N",
        title="B1, environments vectorised or compiled where supported",
        vectorization="native",
        **{**_B1, "actors": 1},  # one step of 64 lanes costs half of two steps of 32
    ),
    PpoWorkload(
        name="W1N",
        title="W1, environments vectorised or compiled where supported",
        vectorization="native",
        **_W1,
    ),
    PpoWorkload(name="W2", title="Pong 8 x 128, minibatch 256, 4 epochs", **_W2),
    PpoWorkload(name="B2", title="Pong 16 x 64, minibatch 512, 1 epoch", **_B2),
    PpoWorkload(
        name="W3",
        title="HalfCheetah 8 x 256, minibatch 512, 4 epochs",
        env_id="HalfCheetah-v5",
        num_envs=8,
        num_steps=256,
        minibatch_size=512,
        epochs=4,
        learning_rate=3e-4,
        discount=0.99,
        gae_lambda=0.95,
        normalize=True,
        actors=2,
    ),
    PpoWorkload(name="W4-16", title="CartPole, 5 ms more a step, 16 x 32, minibatch 256, 4 epochs", num_envs=16, **_W4),
    PpoWorkload(
        name="W4-64",
        title="CartPole, 5 ms more a step, 64 x 32, minibatch 256, 4 epochs",
        num_envs=64,
        actors=2,  # one interpreter's lock is too slow for 64 threads
        **_W4,
    ),
    PpoWorkload(name="R1", title="W1 with a policy worker over gRPC", policy_workers=1, **_W1),
    PpoWorkload(
        name="RB1",
        title="B1 with a policy worker over gRPC, one actor",
        policy_workers=1,
        ring_size=2,
        **{**_B1, "actors": 1},  # a request of 32 lanes costs hardly more than one of 16
    ),
    PpoWorkload(name="R2", title="W2 with a policy worker over gRPC", policy_workers=1, **_W2),
    PpoWorkload(name="G2", title="Pong on a GPU, 8 x 128 and minibatch 256 for each core, 4 epochs", **_G2),
    PpoWorkload(
        name="L",
        title="W1 from the start of the process to 475",
        goal=475.0,
        compile="background",
        warm_seconds=1.0,
        trial_seconds=2.0,
        **_W1,
    ),
    PpoWorkload(name="M1", title="CartPole without velocities, LSTM, as W1", recurrent="lstm", **_M1),
    PpoWorkload(name="M1G", title="M1 with a GRU", recurrent="gru", **_M1),
    ReplayWorkload(
        name="S1",
        title="SAC, HalfCheetah, minibatch 256, an update an env step",
        algorithm="sac",
        trainer_threads=2,
        env_id="HalfCheetah-v5",
        num_envs=1,
        num_steps=16,
        minibatch_size=256,
        updates_per_env_step=1.0,
        learning_rate=3e-4,
        discount=0.99,
    ),
    ReplayWorkload(
        name="D1",
        title="DQN, CartPole, minibatch 64, an update for two env steps",
        algorithm="dqn",
        double=False,
        trainer_threads=2,
        env_id="CartPole-v1",
        num_envs=8,
        num_steps=16,
        minibatch_size=64,
        updates_per_env_step=0.5,
        learning_rate=5e-4,
        discount=0.99,
    ),
    ReplayWorkload(
        name="D2",
        title="DQN, Pong, minibatch 32, an update for four env steps",
        algorithm="dqn",
        double=False,
        trainer_threads=2,
        env_id="ALE/Pong-v5",
        network="cnn",
        num_envs=8,
        num_steps=16,
        minibatch_size=32,
        updates_per_env_step=0.25,
        capacity=10_000,
        learning_rate=1e-4,
        discount=0.99,
        window_seconds=24.0,
        trial_seconds=8.0,
    ),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
"""By name, in the order of the table."""
REPLAY_WORKLOADS: Mapping[str, ReplayWorkload] = {
    workload.name: workload for workload in _ALL if isinstance(workload, ReplayWorkload)
}
"""Those of algorithms that draw from a store."""
