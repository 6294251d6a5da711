"""What one batch demands of each worker and each link. Ceilings and the estimate are both made of these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rlsrl.api.role_names import ACTOR, BUFFER, COORDINATOR, POLICY, TRAINER
from rlsrl.sizing.traffic import Rates, traffic
from rlsrl.sizing.work import Work
from rlsrl.sizing.workload import Workload

Part = Literal["actors", "policy workers", "buffer workers", "trainers", "coordinator", "machine", "network"]
ROLES: dict[str, Part] = {
    ACTOR: "actors",
    POLICY: "policy workers",
    BUFFER: "buffer workers",
    TRAINER: "trainers",
    COORDINATOR: "coordinator",
}


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The time that one batch takes of each worker of a role, or of each of its links."""

    part: Part
    role: str
    workers: int
    computing: float
    """Seconds in which the worker computes, if it has its cores to itself."""
    waiting: float = 0.0
    """Seconds that the worker waits for something else than a core."""
    cores: float = 1.0
    """Cores on which the worker computes at a time, the mean."""
    shares_microbatches: bool = False
    """Whether a second thread of the worker computes a part of the microbatches while another core is idle."""

    @property
    def core_seconds(self) -> float:
        """Seconds of all cores on which the role's workers compute."""
        return self.workers * self.cores * self.computing

    @property
    def seconds(self) -> float:
        """Seconds of a worker that has cores of its own."""
        return self.computing + self.waiting


def demands(work: Work) -> list[Demand]:
    """Return the demands of all workers, and of the network's links where each worker is a pod."""
    workload, lanes = work.workload, work.workload.group_lanes
    found = [_actor(work)]
    if policy_workers := workload.num_policy_workers:
        seconds = workload.batch_slots / policy_workers * workload.rollout_length * _answering(work)
        found.append(_demand("policy", policy_workers, seconds))
    if buffers := workload.num_buffer_workers:
        seconds = workload.batch_slots / buffers * work.relaying(lanes, workload.num_actors / buffers)
        found.append(_demand("buffer", buffers, seconds))
    seconds = _training(work)
    training = _demand("trainer", workload.num_trainers, seconds, waiting=work.awaiting_ranks())
    cores = 1 + (workload.threads - 1) * work.minibatches() / seconds if seconds else 1.0
    found.append(replace(training, cores=cores, shares_microbatches=workload.shares_microbatches))
    distributing = work.distributing(workload.num_watchers) / work.attention() * workload.versions_a_batch
    found.append(_demand("coordinator", 1, distributing))
    return found + ([] if workload.hardware.shares_memory else _links(work))


def slot_seconds(work: Work) -> tuple[float, float]:
    """Return the seconds that an actor computes and waits for one slot."""
    computing, waiting = _step(work)
    steps = work.workload.rollout_length
    return steps * computing + work.posting(work.workload.group_lanes) + _loading(work), steps * waiting


def _demand(role: str, workers: int, computing: float, *, waiting: float = 0.0) -> Demand:
    return Demand(part=ROLES[role], role=role, workers=workers, computing=computing, waiting=waiting)


def _actor(work: Work) -> Demand:
    workload = work.workload
    slots = workload.batch_slots / workload.num_actors
    computing, waiting = slot_seconds(work)
    idle = (1 / workload.granted_share - 1) * (computing + waiting)
    return _demand("actor", workload.num_actors, slots * computing, waiting=slots * (waiting + idle))


def _step(work: Work) -> tuple[float, float]:
    """Return the seconds that an actor computes and waits for one step of one slot."""
    workload, lanes = work.workload, work.workload.group_lanes
    if workload.environment_threads:
        return _step_in_threads(work)
    if workload.num_policy_workers:
        # An actor steps one group after the other; a group's next step also needs the answer to its request.
        computing, waiting = work.asking_step(lanes), work.waiting_step(lanes)
        between = computing + waiting + 2 * work.hop_seconds
        return computing, max(waiting, (between + _answer(work, between)) / workload.ring_size - computing)
    return work.acting_step(lanes), work.waiting_step(lanes)


def _step_in_threads(work: Work) -> tuple[float, float]:
    """Return what ``_step`` returns, for environments that each have a thread.

    The threads wait together, but wake up and compute one after the other: one of them has the interpreter. Passing it
    on takes a processor, as computing does.
    """
    workload, lanes = work.workload, work.workload.group_lanes
    one, waiting = work.acting_step(1), work.waiting_step(1)
    if workload.num_policy_workers:
        one = work.asking_step(1)
        between = one + waiting + 2 * work.hop_seconds
        waiting += 2 * work.hop_seconds + _answer(work, between)
    waking = (lanes - 1) * work.costs.wake_seconds if workload.environment.wait_seconds else 0.0
    computing = lanes * one + waking
    return computing, max(0.0, one + waiting - computing)


def _answer(work: Work, between: float) -> float:
    """Return the seconds from the arrival of a request at a policy worker to its answer.

    Requests arrive by chance, ``between`` seconds after the answer before, and are evaluated with those that they meet:
    mean value analysis of one station, with the number of the others as in Schweitzer (1979).
    """
    workload, lanes = work.workload, work.workload.request_lanes
    alone = work.evaluating(1, lanes)
    each = work.evaluating(2, 2 * lanes) - alone
    others = max(0.0, _requests_under_way(workload) - 1)
    # The root of: answer = alone + each * others * answer / (between + answer).
    excess = alone + each * others - between
    return (excess + math.sqrt(excess**2 + 4 * alone * between)) / 2


def _loading(work: Work) -> float:
    """Return an actor's seconds for the weights of one slot."""
    return 0.0 if work.workload.num_policy_workers else work.loading() / work.workload.ring_size


def _answering(work: Work) -> float:
    """Return a policy worker's seconds for a step of one slot, when all requests of its actors wait at once."""
    workload, lanes = work.workload, work.workload.request_lanes
    together = max(1.0, min(_requests_under_way(workload), workload.max_batch_size / lanes))
    return workload.requests_a_step * work.evaluating(together, together * lanes) / together


def _requests_under_way(workload: Workload) -> float:
    """Return the requests that one policy worker has at most."""
    return workload.num_actors * workload.ring_size * workload.requests_a_step / workload.num_policy_workers


def _training(work: Work) -> float:
    workload = work.workload
    producers = workload.num_buffer_workers or workload.num_actors
    received = workload.batch_slots / workload.num_trainers * work.receiving(workload.group_lanes, producers)
    return received + work.training() + work.reducing() + work.publishing()


def _links(work: Work) -> list[Demand]:
    """Return the fuller direction of each role's links. An actor's own link is never the first to be full."""
    workload = work.workload
    found = traffic(workload, Rates(slots=workload.batch_slots, versions=workload.versions_a_batch))
    return [
        Demand(
            part="network",
            role=role,
            workers=1,
            computing=0.0,
            waiting=max(one.bytes_in, one.bytes_out) / workload.hardware.bandwidth,
        )
        for role, one in found.items()
        if role != "actor"
    ]
