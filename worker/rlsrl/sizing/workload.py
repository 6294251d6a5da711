"""What an experiment asks of its workers, in numbers: counts, sizes in bytes, seconds of its environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsrl.api.resolve import HEARTBEAT_SECONDS, SLOTS_PER_GROUP
from rlsrl.api.spec import ExperimentSpec
from rlsrl.data.inference import InferenceLayout
from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.policies.effort import NetworkEffort

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpeed:
    """How long one step of one environment takes, a share of the resets included."""

    step_seconds: float
    """On a processor."""
    wait_seconds: float = 0.0
    """Without one: a simulator elsewhere, a sleep."""
    transition_share: float = 1.0
    """Steps that are transitions; the others only reset."""

    def __post_init__(self) -> None:
        if self.step_seconds < 0 or self.wait_seconds < 0 or not 0 < self.transition_share <= 1:
            raise ValueError(f"{self} has a negative time, or a share that is not above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the workers run on."""

    cores: float | None = None
    """Cores of the one machine that all workers share; None: each worker has a core of its own, as pods have."""
    bandwidth: float = float("inf")
    """Bytes a second of a worker's network link, each way."""
    hop_seconds: float = 0.0
    """One way of a message through the network, beside what the processes at its ends take."""

    @property
    def shares_memory(self) -> bool:
        """Whether samples and weights may go through shared memory."""
        return self.cores is not None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One experiment as the model sees it."""

    environment: EnvironmentSpeed
    network: NetworkEffort
    place: Place
    shared_memory: bool
    """Whether samples and weights do go through shared memory."""
    actor_lanes: Sequence[int]
    """Environments of each actor."""
    ring_size: int = 1
    """Groups that each actor's environments are divided into; each fills slots of its own."""
    rollout_length: int
    """T: steps of a slot."""
    batch_lanes: int
    """Environments of one batch, over all ranks."""
    minibatch_size: int
    """Over all ranks."""
    epochs: int
    max_policy_lag: int
    num_trainers: int = 1
    num_policy_workers: int = 0
    """0: actors act by themselves."""
    max_batch_size: int = 1024
    """Environments that a policy worker evaluates together at most."""
    num_buffer_workers: int = 0
    """0: actors post to the trainers."""
    slots_per_group: int = SLOTS_PER_GROUP
    """Of each rank's, for each group of an actor's ring."""
    lane_bytes: float
    """A slot's, a lane."""
    request_bytes: float
    """Of a request to a policy worker, an environment."""
    answer_bytes: float
    heartbeats_a_second: float = 1.0 / HEARTBEAT_SECONDS
    """Of each worker."""

    @property
    def num_actors(self) -> int:
        """Actors that have environments."""
        return len(self.actor_lanes)

    @property
    def num_lanes(self) -> int:
        """Environments of all actors."""
        return sum(self.actor_lanes)

    @property
    def rank_lanes(self) -> int:
        """Lanes of one rank's part of a batch."""
        return self.batch_lanes // self.num_trainers

    @property
    def rank_transitions(self) -> int:
        """Steps in one rank's part of a batch, those that only reset included."""
        return self.rank_lanes * self.rollout_length

    @property
    def batch_transitions(self) -> float:
        """Transitions in a batch."""
        return self.batch_lanes * self.rollout_length * self.environment.transition_share

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps of one training step."""
        return self.epochs * self.batch_lanes * self.rollout_length // self.minibatch_size

    @property
    def group_lanes(self) -> float:
        """Environments of one slot, the mean over actors."""
        return self.num_lanes / (self.num_actors * self.ring_size)

    @property
    def num_workers(self) -> int:
        """Workers that send heartbeats."""
        return self.num_actors + self.num_policy_workers + self.num_buffer_workers + self.num_trainers

    @property
    def num_watchers(self) -> int:
        """Workers that act, and so need every version."""
        return self.num_policy_workers or self.num_actors

    @property
    def transfer_messages(self) -> int:
        """gRPC messages that carry one version."""
        return -(-self.network.weight_bytes // MIB)


def workload_of(
    spec: ExperimentSpec, env_spec: EnvSpec, *, environment: EnvironmentSpeed, network: NetworkEffort, place: Place
) -> Workload:
    """The experiment in numbers."""
    ring_size, num_steps = spec.actors.ring_size, spec.actors.rollout_length
    lanes = max(spec.actors.rollout_environments)
    layout = rollout_layout(
        env_spec,
        num_steps=num_steps,
        num_lanes=lanes,
        discounted_return=spec.algorithm.chosen.normalize_rewards,
    )
    inference = InferenceLayout.of(env_spec)
    answer = ArraySpec(shape=(inference.distribution_size,), dtype="float32")
    policy_workers, buffer_workers = spec.policy_workers, spec.buffer_workers
    return Workload(
        environment=environment,
        network=network,
        place=place,
        shared_memory=place.shares_memory and spec.transport == "auto",
        actor_lanes=spec.actors.spread.counts,
        ring_size=ring_size,
        rollout_length=num_steps,
        batch_lanes=spec.batch_environments,
        minibatch_size=spec.algorithm.chosen.minibatch_size,
        epochs=spec.algorithm.chosen.epochs,
        max_policy_lag=spec.pacing.max_policy_lag,
        num_trainers=spec.trainers.replicas,
        num_policy_workers=0 if policy_workers is None else policy_workers.replicas,
        max_batch_size=1 if policy_workers is None else policy_workers.max_batch_size,
        num_buffer_workers=0 if buffer_workers is None else buffer_workers.replicas,
        lane_bytes=layout.nbytes / lanes,
        request_bytes=float(sum(array.nbytes for array in inference.observation.values())),
        answer_bytes=float(answer.nbytes),
    )
