"""What throughput is measured on: the same environments, networks, minibatches and epochs for everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ATARI = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One line of the table."""

    name: str
    title: str
    env_id: str
    num_envs: int
    num_steps: int
    """Of each environment in an iteration."""
    minibatch_size: int
    epochs: int
    learning_rate: float = 1e-3
    discount: float = 0.98
    gae_lambda: float = 0.9
    entropy_coefficient: float = 0.0
    clip_range: float = 0.2
    network: Literal["mlp", "cnn"] = "mlp"
    """Two towers 64 x 64 tanh, or the network of Mnih et al. (2015)."""
    normalize: bool = False
    """Observations and rewards, by running statistics."""
    step_seconds: float = 0.0
    """How much longer than its computation each environment's step takes."""
    native: bool = False
    """Whether everybody uses the environment's own vectorisation."""
    actors: int = 1
    policy_workers: int = 0
    window_seconds: float = 15.0
    """How long everybody is measured, after ``warm_seconds`` of training."""
    warm_seconds: float = 5.0

    def experiment(self) -> dict[str, Any]:
        """It as an RLExperiment that does not end by itself."""
        algorithm = {
            "learningRate": self.learning_rate,
            "discount": self.discount,
            "gaeLambda": self.gae_lambda,
            "entropyCoefficient": self.entropy_coefficient,
            "clipRange": self.clip_range,
            "clipValueLoss": False,
            "epochs": self.epochs,
            "minibatchSize": self.minibatch_size,
            "normalizeRewards": self.normalize,
        }
        network: dict[str, Any] = {"mlp": {"hiddenSizes": [64, 64], "activation": "tanh"}}
        if self.network == "cnn":
            network = {"cnn": {"precision": "bfloat16"}}
            algorithm["rewardClip"] = 1
        spec = {
            "seed": 1,
            "environment": self._environment(),
            "policy": {"network": network, "normalizeObservations": self.normalize},
            "algorithm": {"ppo": algorithm},
            "actors": {"replicas": self.actors, "environments": self.num_envs, "rolloutLength": self.num_steps},
            "policyWorkers": {"replicas": self.policy_workers},
            "trainers": {"compile": "upfront"},
            "pacing": {"maxPolicyLag": 1},
            "stop": {"wallSeconds": 3600},
        }
        return {
            "apiVersion": "rlsrl.dev/v1alpha1",
            "kind": "RLExperiment",
            "metadata": {"name": f"bench-{self.name.lower()}"},
            "spec": spec,
        }

    def _environment(self) -> dict[str, Any]:
        if self.step_seconds:
            return {"factory": "environments:slow_cartpole", "kwargs": {"seconds": self.step_seconds}}
        if self.network == "cnn":
            return {"id": self.env_id, "kwargs": ATARI, "atari": {}, "frameStack": 4}
        return {"id": self.env_id}

    def peer_arguments(self) -> list[str]:
        """What the peers' programs are told, apart from how they use the machine."""
        options = {
            "env-id": self.env_id,
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
            "total-steps": 1_000_000_000,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*words, "--no-anneal", "--normalize" if self.normalize else "--no-normalize"]


_CARTPOLE = {"env_id": "CartPole-v1"}
_PONG = {
    "env_id": "ALE/Pong-v5",
    "network": "cnn",
    "learning_rate": 2.5e-4,
    "discount": 0.99,
    "gae_lambda": 0.95,
    "entropy_coefficient": 0.01,
    "clip_range": 0.1,
    "window_seconds": 40.0,
    "warm_seconds": 10.0,
}
_W1: dict[str, Any] = {**_CARTPOLE, "num_envs": 8, "num_steps": 128, "minibatch_size": 256, "epochs": 4}
_B1: dict[str, Any] = {**_CARTPOLE, "num_envs": 64, "num_steps": 64, "minibatch_size": 1024, "epochs": 1}
_W2: dict[str, Any] = {**_PONG, "num_envs": 8, "num_steps": 128, "minibatch_size": 256, "epochs": 4}
_B2: dict[str, Any] = {**_PONG, "num_envs": 16, "num_steps": 64, "minibatch_size": 512, "epochs": 1}
_W4: dict[str, Any] = {**_CARTPOLE, "num_steps": 32, "minibatch_size": 256, "epochs": 4, "step_seconds": 0.005}
WORKLOADS = {
    each.name: each
    for each in (
        Workload(name="W1", title="CartPole, 8 x 128, minibatch 256, 4 epochs", **_W1),
        Workload(name="B1", title="CartPole, 64 x 64, minibatch 1024, 1 epoch", **_B1),
        Workload(name="B1N", title="B1, natively vectorised for everybody", native=True, **_B1),
        Workload(name="W2", title="Pong, 8 x 128, minibatch 256, 4 epochs", actors=2, **_W2),
        Workload(name="B2", title="Pong, 16 x 64, minibatch 512, 1 epoch", actors=2, **_B2),
        Workload(
            name="W3",
            title="HalfCheetah, 8 x 256, minibatch 512, 4 epochs",
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
        Workload(name="W4-16", title="CartPole that sleeps 5 ms a step, 16 x 32", num_envs=16, **_W4),
        Workload(name="W4-64", title="CartPole that sleeps 5 ms a step, 64 x 32", num_envs=64, **_W4),
        Workload(name="R1", title="W1 with a policy worker over gRPC", policy_workers=1, **_W1),
        Workload(name="RB1", title="B1 with a policy worker over gRPC", policy_workers=1, **_B1),
        Workload(name="R2", title="W2 with a policy worker over gRPC", policy_workers=1, actors=2, **_W2),
    )
}
