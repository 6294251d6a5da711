"""Changes that may make an experiment faster or cheaper. Pure: ``rlsrl.sizing.forecast`` tries each change out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlsrl.api.spec import Actors, ExperimentSpec
from rlsrl.sizing.ceilings import Ceiling
from rlsrl.sizing.demands import Part

LEAST_GAIN = 0.05
"""Smallest gain of speed for which a change is advised."""
MOST_LOSS = 0.02
"""Largest loss of speed with which fewer workers are advised."""
NEAR = 0.75
"""A part limits the experiment if the experiment reaches this share of the part's ceiling."""


@dataclass(frozen=True, kw_only=True)
class SpecChange:
    """A change of the spec, as options of ``--set``."""

    overrides: tuple[str, ...]
    note: str = ""
    """Another effect of the change."""
    saves: bool = False
    """Whether the change needs fewer workers. It is then advised if it costs no speed."""

    @property
    def options(self) -> str:
        """Return the options of the command line."""
        return " ".join(f"--set {override}" for override in self.overrides)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change and its estimated speed."""

    change: SpecChange
    env_steps_a_second: float


def changes(spec: ExperimentSpec) -> list[SpecChange]:
    """Return the changes to try on this experiment. The spec's own rules may refuse some of them."""
    return [*_actors(spec), *_messages(spec), *_policy_workers(spec), *_samples(spec), *_trainers(spec), *_lag(spec)]


def is_advised(tried: Tried, env_steps_a_second: float) -> bool:
    """Return whether a change is advised, compared with the experiment's own speed."""
    if tried.change.saves:
        return tried.env_steps_a_second >= (1 - MOST_LOSS) * env_steps_a_second
    return tried.env_steps_a_second >= (1 + LEAST_GAIN) * env_steps_a_second


def limiting(env_steps_a_second: float, lowest: Ceiling) -> Part | None:
    """Return the part that limits the experiment, or None if no part is near its ceiling."""
    return lowest.part if env_steps_a_second >= NEAR * lowest.env_steps_a_second else None


REMEDIES: dict[Part | None, str] = {
    None: "more work in flight: a pacing.maxPolicyLag of 1, more environments, a ringSize of 2 with policy workers",
    "actors": "more actors; more environments for each, where their steps are short; faster environments",
    "policy workers": "larger messages (more environments for each actor, a ringSize of 2 and not 4), then another "
    "policy worker; no policy workers where the network is small",
    "buffer workers": "larger rollouts, then another buffer worker",
    "trainers": "fewer epochs or larger minibatches where learning allows it, with replay a lower "
    "pacing.trainStepsPerEnvStep; trainers.threads where cores are idle; more ranks where a minibatch takes far longer "
    "than a millisecond; larger rollouts and buffer workers where receiving slots takes most of the time",
    "coordinator": "policy workers, so that only they need weights; larger batches, so that there are fewer versions; "
    "fewer actors with more environments each",
    "machine": "more cores, or a cluster; no policy workers where the network is small; fewer evaluators, or fewer "
    "actors where the trainer needs more processor time",
    "network": "more bandwidth; larger batches, so that weights travel less often; observations of fewer bytes",
}
"""Remedies for the part that saturates, in the order in which to try them. None: no part saturates, and workers wait
for each other, for credits or for weights."""


def _actors(spec: ExperimentSpec) -> Iterator[SpecChange]:
    replicas = spec.actors.replicas
    yield SpecChange(overrides=(f"actors.replicas={2 * replicas}",), note=_batch_note(spec))
    if replicas > 1 and spec.actors.environments is not None:
        yield SpecChange(overrides=(f"actors.replicas={replicas // 2}",), saves=True)


def _batch_note(spec: ExperimentSpec) -> str:
    return _larger_batches(spec) if spec.actors.environments is None else ""


def _larger_batches(spec: ExperimentSpec) -> str:
    """Return the note of more environments; without replay all environments are a batch by default."""
    grows = spec.trainers.batch_environments is None and spec.algorithm.chosen.draws_from is None
    return "makes batches larger, too" if grows else ""


def _messages(spec: ExperimentSpec) -> Iterator[SpecChange]:
    actors = spec.actors
    field, count = _environments(actors)
    replays = spec.algorithm.chosen.draws_from is not None
    yield SpecChange(overrides=(f"actors.{field}={2 * count}",), note=_larger_batches(spec))
    note = "" if replays else "makes batches larger, too"
    yield SpecChange(overrides=(f"actors.rolloutLength={2 * actors.rollout_length}",), note=note)
    if spec.policy_workers is not None and actors.ring_size == 1 and actors.vectorization != "threads":
        yield SpecChange(overrides=("actors.ringSize=2",))
    if actors.ring_size > 2:
        yield SpecChange(overrides=("actors.ringSize=2",), saves=True)


def _environments(actors: Actors) -> tuple[str, int]:
    """Return the field that sets the number of environments, and its value."""
    if actors.environments is not None:
        return "environments", actors.environments
    assert actors.environments_per_actor is not None, "validation leaves exactly one"
    return "environmentsPerActor", actors.environments_per_actor


def _policy_workers(spec: ExperimentSpec) -> Iterator[SpecChange]:
    if spec.policy_workers is None:
        groups = () if spec.actors.vectorization == "threads" else ("actors.ringSize=2",)
        yield SpecChange(
            overrides=("policyWorkers.replicas=1", *groups),
            note="evaluates many requests at a time",
        )
        return
    replicas = spec.policy_workers.replicas
    yield SpecChange(overrides=(f"policyWorkers.replicas={replicas + 1}",))
    if replicas > 1:
        yield SpecChange(overrides=(f"policyWorkers.replicas={replicas - 1}",), saves=True)
    yield SpecChange(overrides=("policyWorkers=null", "actors.ringSize=1"), note="actors evaluate the network")


def _samples(spec: ExperimentSpec) -> Iterator[SpecChange]:
    replicas = 0 if spec.buffer_workers is None else spec.buffer_workers.replicas
    num_actors = spec.actors.spread.num_workers
    more = next((count for count in range(max(2 * replicas, 1), num_actors) if num_actors % count == 0), None)
    if more is not None:
        yield SpecChange(overrides=(f"bufferWorkers.replicas={more}",))
    if replicas:
        yield SpecChange(overrides=("bufferWorkers=null",), saves=True)


def _trainers(spec: ExperimentSpec) -> Iterator[SpecChange]:
    replicas, algorithm, ratio = spec.trainers.replicas, spec.algorithm, spec.pacing.train_steps_per_env_step
    more: tuple[str, ...] = (f"trainers.replicas={2 * replicas}",)
    if ratio is not None and (num_actors := spec.actors.replicas) % (2 * replicas):
        more += (f"actors.replicas={num_actors + 2 * replicas - num_actors % (2 * replicas)}",)
    yield SpecChange(overrides=more)
    threads = 2 * spec.trainers.threads
    yield SpecChange(overrides=(f"trainers.threads={threads}",), note=f"needs {threads} cores for each trainer")
    if replicas % 2 == 0:
        yield SpecChange(overrides=(f"trainers.replicas={replicas // 2}",), saves=True)
    if ratio is not None:
        yield SpecChange(overrides=(f"pacing.trainStepsPerEnvStep={ratio / 2:g}",), note="changes learning")
        return
    field = ".".join(("algorithm", algorithm.name, *algorithm.chosen.minibatch_size_path))
    yield SpecChange(overrides=(f"{field}={2 * algorithm.chosen.minibatch_rows}",), note="changes learning")


def _lag(spec: ExperimentSpec) -> Iterator[SpecChange]:
    if spec.pacing.max_policy_lag == 0:
        yield SpecChange(overrides=("pacing.maxPolicyLag=1",), note="gathers while training, with weights one step old")
