"""An experiment in numbers: counts of workers and environments, sizes in bytes, seconds of its environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlsrl.api.role_configs import HEARTBEAT_SECONDS
from rlsrl.api.role_names import ACTOR, BUFFER, COORDINATOR, POLICY, TRAINER
from rlsrl.api.spec import ExperimentSpec, UpdateWork
from rlsrl.data.inference import InferenceLayout
from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ArraySpec, EnvSpec, state_specs
from rlsrl.policies.effort import NetworkEffort

MIB = 1 << 20
AGREEMENTS = 4
"""Collective calls of a training step beside one per minibatch: two agreements and the sums of statistics."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpeed:
    """The time of one step of one environment, its share of the resets included."""

    step_seconds: float
    """Seconds on a processor."""
    wait_seconds: float = 0.0
    """Seconds without a processor, for example in a sleep or while a remote simulator computes."""
    transition_share: float = 1.0
    """Share of the steps that are transitions. The other steps only reset."""

    def __post_init__(self) -> None:
        if self.step_seconds < 0 or self.wait_seconds < 0 or not 0 < self.transition_share <= 1:
            raise ValueError(f"{self}: times must be 0 or above, and transition_share must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The processors and links that the workers run on."""

    cores: float | None = None
    """Cores of the one machine that all workers share. None: each worker is a pod with a core of its own."""
    bandwidth: float = float("inf")
    """Bytes a second of a worker's network link, in each direction."""
    hop_seconds: float = 0.0
    """One-way latency of the network."""

    @property
    def shares_memory(self) -> bool:
        """Whether samples and weights may go through shared memory."""
        return self.cores is not None


@dataclass(frozen=True, kw_only=True)
class ReplayWorkload:
    """How an algorithm that replays trains on what is gathered."""

    updates_per_env_step: float
    """Minibatches for each transition, of all actors."""
    updates_per_step: int
    """Minibatches of a training step."""
    most_updates_behind: int
    """Minibatches by which a trainer may be behind its actors."""
    row_bytes: float
    """Bytes of a drawn transition."""
    by_priority: bool = False
    """Whether rows are drawn by priority."""
    steps_per_row: int = 1
    """Steps of a row: a recurrent network draws whole rollouts."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One experiment as the model sees it."""

    environment: EnvironmentSpeed
    network: NetworkEffort
    hardware: Hardware
    shared_memory: bool
    """Whether samples and weights go through shared memory."""
    actor_lanes: Sequence[int]
    """Environments of each actor."""
    ring_size: int = 1
    """Groups of each actor's environments. Each group fills its own slots."""
    environment_threads: bool = False
    """Whether an actor steps each environment in its own thread, so that their waits overlap."""
    rollout_length: int
    """T, the steps of a slot."""
    batch_lanes: int
    """Environments of one batch, over all ranks. With replay, where training steps draw their rows: all environments,
    whose rollouts and the training steps that these call for count as a batch."""
    minibatch_size: int
    """Transitions of one minibatch, over all ranks."""
    update_work: UpdateWork
    """What a minibatch computes."""
    epochs: int
    """Without effect with replay."""
    replay: ReplayWorkload | None = None
    max_policy_lag: int
    num_trainers: int = 1
    threads: int = 1
    """Threads of each trainer."""
    compiled: bool = False
    """Whether training steps are compiled."""
    shares_microbatches: bool = False
    """Whether a second thread of the trainer computes a part of the microbatches while another core is idle."""
    num_policy_workers: int = 0
    """0: actors evaluate the network themselves."""
    max_batch_size: int = 1024
    """Most environments that a policy worker evaluates together."""
    num_buffer_workers: int = 0
    """0: actors post to the trainers."""
    num_evaluators: int = 0
    """Each plays all the time. One that plays a fixed version once is left out."""
    lane_bytes: float
    """Bytes of one lane of a slot."""
    request_bytes: float
    """Bytes of one environment in a request to a policy worker."""
    answer_bytes: float
    """Bytes of one environment in an answer."""
    heartbeats_a_second: float = 1.0 / HEARTBEAT_SECONDS
    """Of each worker."""

    @property
    def num_actors(self) -> int:
        """Number of actors that have environments."""
        return len(self.actor_lanes)

    @property
    def num_lanes(self) -> int:
        """Number of environments of all actors."""
        return sum(self.actor_lanes)

    @property
    def rank_lanes(self) -> int:
        """Lanes of one rank's part of a batch."""
        return self.batch_lanes // self.num_trainers

    @property
    def rank_transitions(self) -> int:
        """Steps in one rank's part of a batch, including those that only reset."""
        return self.rank_lanes * self.rollout_length

    @property
    def batch_transitions(self) -> float:
        """Transitions in a batch."""
        return self.batch_lanes * self.rollout_length * self.environment.transition_share

    @property
    def num_minibatches(self) -> float:
        """Optimizer steps for one batch."""
        if self.replay is not None:
            return self.replay.updates_per_env_step * self.batch_transitions
        return max(1, self.epochs * self.batch_lanes * self.rollout_length // self.minibatch_size)

    @property
    def num_train_steps(self) -> float:
        """Training steps for one batch: a mean with replay, else 1."""
        return 1.0 if self.replay is None else self.num_minibatches / self.replay.updates_per_step

    @property
    def rank_rows(self) -> float:
        """Rows of all minibatches of one batch, on one rank."""
        if self.replay is not None:
            return self.num_minibatches * self.minibatch_size / self.num_trainers
        return self.epochs * self.rank_transitions

    @property
    def num_collective_calls(self) -> float:
        """Collective calls for one batch; 0 with one rank."""
        return self.num_minibatches + AGREEMENTS * self.num_train_steps if self.num_trainers > 1 else 0.0

    @property
    def group_lanes(self) -> float:
        """Environments of one slot, the mean over actors."""
        return self.num_lanes / (self.num_actors * self.ring_size)

    @property
    def request_lanes(self) -> float:
        """Environments of one request to a policy worker: those of a group, or one that has a thread."""
        return 1.0 if self.environment_threads else self.group_lanes

    @property
    def requests_a_step(self) -> float:
        """Requests to policy workers for one step of one slot."""
        return self.group_lanes / self.request_lanes

    @property
    def batch_slots(self) -> float:
        """Slots of one batch."""
        return self.batch_lanes / self.group_lanes

    @property
    def granted_share(self) -> float:
        """Share of the environments that the outstanding credits cover.

        Each rank grants credits for 1 + ``max_policy_lag`` of its batches. All ranks grant in the same order, so that
        without buffer workers they grant to the same actors. With replay each rank has actors of its own, and grants as
        much as training may be behind beyond a training step.
        """
        if self.replay is not None:
            ahead = self.replay.most_updates_behind - self.replay.updates_per_step
            return 1.0 if self.max_policy_lag == 0 else min(1.0, ahead / self._most_minibatches)
        batch = self.batch_lanes if self.num_buffer_workers else self.rank_lanes
        return min(1.0, (1 + self.max_policy_lag) * batch / self.num_lanes)

    @property
    def batches_a_slot(self) -> int:
        """Batches that one slot belongs to: several if it is wider than a rank's part of a batch."""
        return 1 if self.replay is not None else math.ceil(self.group_lanes / self.rank_lanes)

    @property
    def batches_in_flight(self) -> float:
        """Batches that are gathered or trained on at a time: the weights of a slot are recent enough for its last.

        With replay as much as training may be behind.
        """
        if self.replay is not None:
            takes_turns = self.max_policy_lag == 0
            return 1.0 if takes_turns else max(1.0, self.replay.most_updates_behind / self._most_minibatches)
        return max(1, 2 + self.max_policy_lag - self.batches_a_slot)

    @property
    def _most_minibatches(self) -> float:
        """With replay: optimizer steps for one batch in which no step only resets."""
        assert self.replay is not None
        return self.replay.updates_per_env_step * self.batch_lanes * self.rollout_length

    @property
    def workers_by_role(self) -> dict[str, int]:
        """Workers of each role that moves samples or weights; 0 for a role that the workload does not have."""
        return {
            ACTOR: self.num_actors,
            POLICY: self.num_policy_workers,
            BUFFER: self.num_buffer_workers,
            TRAINER: self.num_trainers,
            COORDINATOR: 1,
        }

    @property
    def num_workers(self) -> int:
        """Number of workers that send heartbeats."""
        return (
            self.num_actors
            + self.num_policy_workers
            + self.num_buffer_workers
            + self.num_trainers
            + self.num_evaluators
        )

    @property
    def num_watchers(self) -> int:
        """Number of workers that act in training and so need every version."""
        return self.num_policy_workers or self.num_actors

    @property
    def versions_a_batch(self) -> float:
        """Versions handed out for each batch.

        While one version is handed out another waits, so that of 1 + lag versions two are handed out. With replay a
        version that no slot's credit asks for may be skipped.
        """
        if self.replay is not None:
            return min(self.num_train_steps, self.batch_slots)
        return min(1.0, 2.0 / (1 + self.max_policy_lag))

    @property
    def transfer_messages(self) -> int:
        """gRPC messages that carry one version."""
        return -(-self.network.weight_bytes // MIB)


def workload_of(
    spec: ExperimentSpec,
    env_spec: EnvSpec,
    *,
    environment: EnvironmentSpeed,
    network: NetworkEffort,
    hardware: Hardware,
) -> Workload:
    """Return the experiment in numbers."""
    ring_size, num_steps = spec.actors.ring_size, spec.actors.rollout_length
    lanes = max(spec.actors.rollout_environments)
    state = state_specs(spec.policy.network.state_sizes)
    layout = rollout_layout(
        env_spec,
        num_steps=num_steps,
        num_lanes=lanes,
        state=state,
        discounted_return=spec.algorithm.chosen.normalize_rewards,
        episode_info=spec.environment.episode_info,
    )
    inference = InferenceLayout.of(env_spec, state)
    answer = ArraySpec(shape=(inference.distribution_size,), dtype="float32")
    state_bytes = sum(array.nbytes for array in state.values())
    policy_workers, buffer_workers, evaluators = spec.policy_workers, spec.buffer_workers, spec.evaluators
    compiled = _is_compiled(spec)
    return Workload(
        environment=environment,
        network=network,
        hardware=hardware,
        shared_memory=hardware.shares_memory and spec.transport == "auto",
        actor_lanes=spec.actors.spread.counts,
        ring_size=ring_size,
        environment_threads=spec.actors.vectorization == "threads",
        rollout_length=num_steps,
        batch_lanes=spec.batch_environments,
        minibatch_size=spec.algorithm.chosen.minibatch_rows,
        update_work=spec.algorithm.chosen.update_work,
        epochs=spec.algorithm.chosen.passes,
        replay=_replay(spec, env_spec),
        max_policy_lag=spec.pacing.max_policy_lag,
        num_trainers=spec.trainers.replicas,
        threads=_threads(spec, hardware),
        compiled=compiled,
        shares_microbatches=compiled and hardware.shares_memory and _shares_microbatches(spec, env_spec),
        num_policy_workers=0 if policy_workers is None else policy_workers.replicas,
        max_batch_size=1 if policy_workers is None else policy_workers.max_batch_size,
        num_buffer_workers=0 if buffer_workers is None else buffer_workers.replicas,
        num_evaluators=0 if evaluators is None or evaluators.parameters else evaluators.replicas,
        lane_bytes=layout.nbytes / lanes,
        request_bytes=float(sum(array.nbytes for array in inference.observation.values()) + state_bytes),
        answer_bytes=float(answer.nbytes + state_bytes),
    )


def _replay(spec: ExperimentSpec, env_spec: EnvSpec) -> ReplayWorkload | None:
    settings, ratio = spec.algorithm.chosen.draws_from, spec.pacing.train_steps_per_env_step
    if settings is None or ratio is None:
        return None
    frames = sum(array.nbytes for array in env_spec.observation.values())
    return ReplayWorkload(
        updates_per_env_step=ratio,
        updates_per_step=spec.updates_per_train_step,
        most_updates_behind=spec.train_steps_behind,
        row_bytes=2.0 * frames + env_spec.action.array.nbytes,
        by_priority=settings.priorities is not None,
        steps_per_row=spec.actors.rollout_length if spec.policy.network.state_sizes else 1,
    )


def _threads(spec: ExperimentSpec, hardware: Hardware) -> int:
    """Return a trainer's threads: those asked for, and at most one for each core of a machine."""
    asked = spec.trainers.threads
    return asked if hardware.cores is None else min(asked, max(1, int(hardware.cores)))


def _is_compiled(spec: ExperimentSpec) -> bool:
    """Return whether training steps are compiled once the run is under way."""
    if spec.trainers.compile == "background":
        return spec.pacing.max_policy_lag > 0
    return spec.trainers.compile == "upfront"


def _shares_microbatches(spec: ExperimentSpec, env_spec: EnvSpec) -> bool:
    """Return whether the one rank splits its minibatches, as ``rlsrl.algorithms.gradients.microbatches`` does."""
    from rlsrl.algorithms.gradients import MICROBATCH_ELEMENTS  # imports torch, which `rlsrl run` can do without

    elements = sum(math.prod(array.shape) for array in env_spec.observation.values())
    return spec.trainers.replicas == 1 and spec.algorithm.chosen.minibatch_rows * elements > MICROBATCH_ELEMENTS
