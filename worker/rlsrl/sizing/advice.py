"""What could be changed of an experiment to make it faster, or cheaper. Pure: whoever asks tries each change out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlsrl.api.spec import Actors, ExperimentSpec
from rlsrl.sizing.ceilings import Ceiling, Part

WORTH = 0.05
"""A change that brings less is not worth a line."""
SPARED = 0.02
"""What fewer workers may cost and still be advised."""
NEAR = 0.75
"""Of its ceiling: a part that is nearer is what limits."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the spec, as ``--set`` takes it."""

    overrides: tuple[str, ...]
    note: str = ""
    """What else it means."""
    spares: bool = False
    """Whether it takes less of something: it is advised if it costs no speed."""

    @property
    def options(self) -> str:
        """As on the command line."""
        return " ".join(f"--set {override}" for override in self.overrides)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change, and what the model says of it."""

    change: Change
    env_steps_a_second: float


def changes(spec: ExperimentSpec) -> list[Change]:
    """What is worth trying of this experiment. Some may not be allowed: the spec's own rules say so."""
    return [*_actors(spec), *_messages(spec), *_policy_workers(spec), *_samples(spec), *_trainers(spec), *_lag(spec)]


def is_advised(tried: Tried, env_steps_a_second: float) -> bool:
    """Whether a change pays, against the experiment as it is."""
    if tried.change.spares:
        return tried.env_steps_a_second >= (1 - SPARED) * env_steps_a_second
    return tried.env_steps_a_second >= (1 + WORTH) * env_steps_a_second


def limiting(env_steps_a_second: float, lowest: Ceiling) -> Part | None:
    """What keeps the experiment from being faster; None if nothing is used up."""
    return lowest.part if env_steps_a_second >= NEAR * lowest.env_steps_a_second else None


REMEDIES: dict[Part | None, str] = {
    None: "more on its way at a time: a pacing.maxPolicyLag of 1, more environments, a ringSize of 2 with policy "
    "workers",
    "actors": "more actors; more environments for each, where their steps are short; faster environments",
    "policy workers": "larger messages (more environments for each actor, a ringSize of 2 and not 4), then another "
    "policy worker; without policy workers where the network is small",
    "buffer workers": "larger rollouts, then another buffer worker",
    "trainers": "fewer epochs or larger minibatches where learning allows it; more ranks where a minibatch takes far "
    "longer than a millisecond; larger rollouts and buffer workers where slots are what takes the time",
    "coordinator": "policy workers, so that they alone need weights; larger batches, so that there are fewer versions; "
    "fewer actors with more environments each",
    "machine": "more cores, or a cluster; without policy workers where the network is small; fewer actors where the "
    "trainer is what is short of time",
    "network": "more bandwidth; larger batches, so that weights travel less often; observations of fewer bytes",
}
"""What helps where a part saturates, in the order in which to try it. None: nothing does, workers wait for each other,
for credits or for weights."""


def _actors(spec: ExperimentSpec) -> Iterator[Change]:
    replicas = spec.actors.replicas
    yield Change(overrides=(f"actors.replicas={2 * replicas}",), note=_batch_note(spec))
    if replicas > 1 and spec.actors.environments is not None:
        yield Change(overrides=(f"actors.replicas={replicas // 2}",), spares=True)


def _batch_note(spec: ExperimentSpec) -> str:
    grows = spec.actors.environments is None and spec.trainers.batch_environments is None
    return "makes batches larger, too" if grows else ""


def _messages(spec: ExperimentSpec) -> Iterator[Change]:
    actors = spec.actors
    field, count = _environments(actors)
    note = "" if spec.trainers.batch_environments is not None else "makes batches larger, too"
    yield Change(overrides=(f"actors.{field}={2 * count}",), note=note)
    yield Change(overrides=(f"actors.rolloutLength={2 * actors.rollout_length}",), note="makes batches larger, too")
    if spec.policy_workers is not None and actors.ring_size == 1:
        yield Change(overrides=("actors.ringSize=2",))
    if actors.ring_size > 2:
        yield Change(overrides=("actors.ringSize=2",), spares=True)


def _environments(actors: Actors) -> tuple[str, int]:
    """The field that says how many environments there are."""
    if actors.environments is not None:
        return "environments", actors.environments
    assert actors.environments_per_actor is not None, "validation leaves exactly one"
    return "environmentsPerActor", actors.environments_per_actor


def _policy_workers(spec: ExperimentSpec) -> Iterator[Change]:
    if spec.policy_workers is None:
        yield Change(
            overrides=("policyWorkers.replicas=1", "actors.ringSize=2"), note="evaluates many actors at a time"
        )
        return
    replicas = spec.policy_workers.replicas
    yield Change(overrides=(f"policyWorkers.replicas={replicas + 1}",))
    if replicas > 1:
        yield Change(overrides=(f"policyWorkers.replicas={replicas - 1}",), spares=True)
    yield Change(overrides=("policyWorkers=null", "actors.ringSize=1"), note="actors act by themselves")


def _samples(spec: ExperimentSpec) -> Iterator[Change]:
    replicas = 0 if spec.buffer_workers is None else spec.buffer_workers.replicas
    num_actors = spec.actors.spread.num_workers
    more = next((each for each in range(max(2 * replicas, 1), num_actors) if num_actors % each == 0), None)
    if more is not None:
        yield Change(overrides=(f"bufferWorkers.replicas={more}",))
    if replicas:
        yield Change(overrides=("bufferWorkers=null",), spares=True)


def _trainers(spec: ExperimentSpec) -> Iterator[Change]:
    replicas = spec.trainers.replicas
    yield Change(overrides=(f"trainers.replicas={2 * replicas}",))
    if replicas % 2 == 0:
        yield Change(overrides=(f"trainers.replicas={replicas // 2}",), spares=True)
    minibatch = 2 * spec.algorithm.chosen.minibatch_size
    yield Change(overrides=(f"algorithm.ppo.minibatchSize={minibatch}",), note="changes how it learns")


def _lag(spec: ExperimentSpec) -> Iterator[Change]:
    if spec.pacing.max_policy_lag == 0:
        yield Change(overrides=("pacing.maxPolicyLag=1",), note="gathers while it trains, with weights one step old")
