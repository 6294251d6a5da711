"""What each part of an experiment could carry if nothing else limited it: the bottleneck law, beside the simulation.

In a closed network no station does more than one over its demand (Denning and Buzen 1978, "The operational analysis of
queueing network models"): a role whose workers compute D seconds a transition, spread over n of them, lets at most
n / D transitions a second through, and a link of bandwidth B that carries b bytes for each at most B / b. The least of
these ceilings says what saturates first; the simulation says how near to it the experiment comes, since it also waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlsrl.sizing.costs import Costs
from rlsrl.sizing.traffic import Rates, traffic
from rlsrl.sizing.work import Work
from rlsrl.sizing.workload import Workload

Part = Literal["actors", "policy workers", "buffer workers", "trainers", "coordinator", "machine", "network"]
ROLES: dict[str, Part] = {
    "actor": "actors",
    "policy": "policy workers",
    "buffer": "buffer workers",
    "trainer": "trainers",
    "coordinator": "coordinator",
}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """One part's."""

    part: Part
    env_steps_a_second: float
    """Infinite where the part has nothing to do with it."""
    role: str
    """Whose it is; of a network, whose link is meant. Of a machine: all."""


def ceilings(workload: Workload, costs: Costs) -> list[Ceiling]:
    """All of them, the lowest first."""
    work = Work(workload=workload, costs=costs)
    seconds = _seconds_a_batch(work)
    found = [
        Ceiling(part=ROLES[role], role=role, env_steps_a_second=_rate(workload, spent))
        for role, spent in seconds.items()
    ]
    if (cores := workload.place.cores) is not None:
        found.append(Ceiling(part="machine", role="all", env_steps_a_second=_rate(workload, _total(work) / cores)))
    else:
        found += _links(workload)
    return sorted(found, key=lambda ceiling: ceiling.env_steps_a_second)


def _rate(workload: Workload, seconds: float) -> float:
    return workload.batch_transitions / seconds if seconds else float("inf")


def _slots(workload: Workload) -> float:
    """Of one batch."""
    return workload.batch_lanes / workload.group_lanes


def _seconds_a_batch(work: Work) -> dict[str, float]:
    """For how long one worker of each role is occupied by a batch."""
    workload, lanes = work.workload, work.workload.group_lanes
    slots = _slots(workload)
    occupied = {"actor": slots / workload.num_actors * _filling(work)}
    if workload.num_policy_workers:
        occupied["policy"] = slots / workload.num_policy_workers * workload.rollout_length * _answering(work)
    if buffers := workload.num_buffer_workers:
        occupied["buffer"] = slots / buffers * work.relaying(lanes, workload.num_actors / buffers)
    occupied["trainer"] = _training(work)
    occupied["coordinator"] = _distributing(work)
    return occupied


def _filling(work: Work) -> float:
    """An actor's slot, its waits included."""
    workload, lanes = work.workload, work.workload.group_lanes
    step = work.asking_step(lanes) if workload.num_policy_workers else work.acting_step(lanes)
    return workload.rollout_length * (step + work.waiting_step(lanes)) + work.posting(lanes)


def _answering(work: Work) -> float:
    """A policy worker's part in a step of one slot, when all of its actors' requests wait for it at once."""
    workload, lanes = work.workload, work.workload.group_lanes
    asking = workload.num_actors * workload.ring_size / workload.num_policy_workers
    together = max(1.0, min(asking, workload.max_batch_size / lanes))
    return work.evaluating(together, together * lanes) / together


def _training(work: Work) -> float:
    workload = work.workload
    producers = workload.num_buffer_workers or workload.num_actors
    received = _slots(workload) / workload.num_trainers * work.receiving(workload.group_lanes, producers)
    return received + work.training() + work.reducing() + work.publishing()


def _distributing(work: Work) -> float:
    """Of one batch. While one version is handed out another waits, so that of 1 + lag versions two are handed out."""
    return work.distributing(work.workload.num_watchers) / work.attention() * _versions_a_batch(work.workload)


def _versions_a_batch(workload: Workload) -> float:
    return min(1.0, 2.0 / (1 + workload.max_policy_lag))


def _total(work: Work) -> float:
    """Seconds that all workers compute for one batch."""
    workload, lanes = work.workload, work.workload.group_lanes
    step = work.asking_step(lanes) if workload.num_policy_workers else work.acting_step(lanes)
    total = _slots(workload) * (workload.rollout_length * step + work.posting(lanes))
    counts = {"policy": workload.num_policy_workers, "buffer": workload.num_buffer_workers}
    counts |= {"trainer": workload.num_trainers, "coordinator": 1}
    seconds = _seconds_a_batch(work)
    return total + sum(count * seconds[role] for role, count in counts.items() if count)


def _links(workload: Workload) -> list[Ceiling]:
    """The fuller direction of each role's links; an actor's own is never the first to be full."""
    found = traffic(workload, Rates(slots=_slots(workload), versions=_versions_a_batch(workload)))
    return [
        Ceiling(
            part="network",
            role=role,
            env_steps_a_second=_rate(workload, max(each.bytes_in, each.bytes_out) / workload.place.bandwidth),
        )
        for role, each in found.items()
        if role != "actor"
    ]
