"""Decides whether a run stands still, and says what its workers wait for. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlsrl.api.role_names import ACTOR, EVALUATOR, TRAINER
from rlsrl.runtime.activity import COMPILER
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.ledger import PageRecord
from rlsrl.workers.long_calls import WorkerCall
from rlsrl.workers.status import ExperimentInfo, Member, MemberReport, Stall, is_stale, paused_roles

STALL_SECONDS = 60.0
"""Time without a step after which a run stands still if no actor and no trainer works."""
WORK_SECONDS = 600.0
"""The same time while one of them works: a rollout or a training step may take long."""
MAX_REASONS = 5
"""Most reasons in a text."""


class StepClock:
    """When a run last took a step: an environment step that counts, or a training step."""

    def __init__(self, now: float) -> None:
        self._counts: dict[tuple[str, int], float] = {}
        self._last_at = now
        self._interval = 0.0
        self._trained_at: float | None = None
        self._training_interval = 0.0

    def note(self, role: str, index: int, report: MemberReport, page: PageRecord | None, now: float) -> None:
        """Note a worker's heartbeat. Its first count, or a smaller one after a rollback, is no step.

        Actors count the transitions of full slots on their ledger pages, and trainer rank 0 the training steps.
        """
        count: float | None = None
        if role == ACTOR and page is not None:
            count = page.counters["produced"]
        elif (role, index) == (TRAINER, 0):
            count = report.stats.get("train_steps")
        if count is None:
            return
        before = self._counts.get((role, index))
        self._counts[role, index] = count
        if before is not None and count > before:
            self._interval, self._last_at = now - self._last_at, now
            if role == TRAINER:
                self._training_interval = 0.0 if self._trained_at is None else now - self._trained_at
                self._trained_at = now

    def rest(self, now: float) -> None:
        """Restart the clock: until now the run was not meant to take steps."""
        self._last_at = now

    def overdue_seconds(self, now: float, allowed: float, *, gathers: bool = True) -> float | None:
        """Return the time since the last step if it is above ``allowed`` and twice the last interval, else None.

        Where each step takes minutes, minutes are no stall. A run that no longer gathers takes training steps only:
        then their interval counts, too.
        """
        idle = now - self._last_at
        interval = self._interval if gathers else max(self._interval, self._training_interval)
        return idle if idle > max(allowed, 2 * interval) else None


def judge(
    members: Sequence[Member],
    calls: Sequence[WorkerCall],
    clock: StepClock,
    now: float,
    *,
    experiment: ExperimentInfo,
    capacity: Mapping[str, int],
) -> Stall | None:
    """Return the stall of the run, or None.

    After the end, before a trainer has joined, and while all actors or a worker of another role are paused, the run
    need not take steps: then the clock starts anew. Evaluators hold up no run.

    Args:
        members: the newest worker of each index, present or gone.
        calls: the environment calls that last long.
        clock: when the run last took a step.
        now: the time, in seconds on the clock of ``heard_at``.
        experiment: tells whether the run is complete, and how often workers send heartbeats.
        capacity: how many workers the experiment asks for, by role. Workers beyond are gone for good.
    """
    workers = [each for each in members if each.role != EVALUATOR and each.index < capacity.get(each.role, 0)]
    if experiment.done or _is_paused(workers) or not any(each.role == TRAINER for each in workers):
        clock.rest(now)
        return None
    calls = [each for each in calls if each.role != EVALUATOR]
    answering, silent = list[Member](), list[Member]()
    for each in workers:
        answers = each.present and not is_stale(each, now, experiment.heartbeat_seconds)
        (answering if answers else silent).append(each)
    stuck = {(each.role, each.index) for each in calls if each.call.seconds > STALL_SECONDS}
    works = any(_works(each) and (each.role, each.index) not in stuck for each in answering)
    trainers = [each for each in answering if each.role == TRAINER]
    gathers = not trainers or not all(each.report.needs_no_more_samples for each in trainers)
    seconds = clock.overdue_seconds(now, WORK_SECONDS if works else STALL_SECONDS, gathers=gathers)
    if seconds is None:
        return None
    longest = [f"{calls[0]}{_and_more(calls[1:])}"] if calls else []
    reasons = [*longest, *_silences(silent, now), *_waits(answering, now)]
    return Stall(seconds=seconds, reasons=tuple(reasons[:MAX_REASONS]))


def _is_paused(workers: Sequence[Member]) -> bool:
    """Return whether paused workers may keep the run from taking steps. A paused actor hands its credits to others."""
    present = [each for each in workers if each.present]
    others_paused = any(each.report.state is WorkerState.PAUSED for each in present if each.role != ACTOR)
    return others_paused or ACTOR in paused_roles(present)


def _works(member: Member) -> bool:
    is_paused = member.report.state is WorkerState.PAUSED
    return not is_paused and member.role in (ACTOR, TRAINER) and member.waits_for in ("", COMPILER)


def _silences(silent: Sequence[Member], now: float) -> Iterator[str]:
    """Yield a text for each role of which a worker does not answer: the one that has been silent longest."""
    for role in sorted({member.role for member in silent}):
        first, *more = sorted((each for each in silent if each.role == role), key=lambda each: each.heard_at)
        yield f"{_named(first)} has not answered for {now - first.heard_at:.0f} s{_and_more(more)}"


def _waits(members: Sequence[Member], now: float) -> Iterator[str]:
    """Yield a text for each role and each reason to wait, trainers first: the worker that has waited longest."""
    waiting = [member for member in members if member.waits_for]
    groups = sorted({(each.role, each.waits_for) for each in waiting}, key=lambda group: (group[0] != TRAINER, group))
    for group in groups:
        of_group = (each for each in waiting if (each.role, each.waits_for) == group)
        first, *more = sorted(of_group, key=lambda each: each.waiting_since)
        yield f"{_named(first)} has waited for {group[1]} for {now - first.waiting_since:.0f} s{_and_more(more)}"


def _named(member: Member) -> str:
    return f"{member.role}-{member.index}"


def _and_more(more: Sequence[object]) -> str:
    return f" and {len(more)} more" if more else ""
