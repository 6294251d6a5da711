"""When a run stands still, and which reasons it gives for it."""

from __future__ import annotations

import pytest

from rlsrl.runtime.call_board import CallName, EnvironmentCall
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.ledger import PageRecord
from rlsrl.workers.long_calls import WorkerCall
from rlsrl.workers.stalls import STALL_SECONDS, WORK_SECONDS, StepClock, judge
from rlsrl.workers.status import NO_MORE_SAMPLES, ExperimentInfo, Member, MemberReport, Stall

EXPERIMENT = ExperimentInfo(name="e", run_uid="u", heartbeat_seconds=1.0, endpoints={}, done=False)
CAPACITY = {"actor": 2, "buffer": 1, "trainer": 2, "evaluator": 1}


def worker(
    role: str,
    index: int = 0,
    waits_for: str = "",
    *,
    since: float = 0.0,
    heard_at: float = 1e9,
    state: WorkerState = WorkerState.RUNNING,
    present: bool = True,
    report: MemberReport | None = None,
) -> Member:
    """A worker that still answers at any time, unless ``heard_at`` says otherwise."""
    return Member(
        role=role,
        index=index,
        incarnation=0,
        attempt=1,
        instance="i",
        pid=1,
        host="h",
        endpoints={},
        report=report or MemberReport(state=state),
        heard_at=heard_at,
        present=present,
        waits_for=waits_for,
        waiting_since=since,
    )


def hanging(role: str = "actor", index: int = 0, *, seconds: float, name: CallName = "step") -> WorkerCall:
    call = EnvironmentCall(first_rank=3, num_environments=1, name=name, seconds=seconds)
    return WorkerCall(role=role, index=index, call=call)


WAITING = [worker("trainer", 0, "batch"), worker("actor", 0, "credit"), worker("actor", 1, "credit", since=5.0)]
TRAINER = worker("trainer", 0, "batch")
HANGS = [TRAINER, worker("actor", 0), worker("actor", 1, "credit")]
IN_CALL = "environment rank 3 has been in step for 61 s (actor-0)"
TRAINER_WAITS = "trainer-0 has waited for batch for 61 s"


def stalled(
    members: list[Member],
    now: float,
    calls: list[WorkerCall] | None = None,
    *,
    clock: StepClock | None = None,
    done: bool = False,
) -> Stall | None:
    experiment = ExperimentInfo(name="e", run_uid="u", heartbeat_seconds=1.0, endpoints={}, done=done)
    return judge(members, calls or [], clock or StepClock(0.0), now, experiment=experiment, capacity=CAPACITY)


def test_a_run_in_which_everybody_waits_stands_still_after_a_minute() -> None:
    assert stalled(WAITING, STALL_SECONDS) is None
    assert stalled(WAITING, 61.0) == Stall(
        seconds=61.0, reasons=(TRAINER_WAITS, "actor-0 has waited for credit for 61 s and 1 more")
    )


def test_a_run_whose_environments_are_not_made_stands_still_after_a_minute() -> None:
    """Trainers make an environment, too, to learn its spaces."""
    making = [worker("trainer", 0, "environment", state=WorkerState.CONFIGURING)]
    making += [worker("actor", index, state=WorkerState.CONFIGURING) for index in range(2)]
    calls = [hanging(index=index, seconds=61.0, name="make") for index in range(2)]
    stall = stalled(making, 61.0, calls)
    assert stall is not None
    call, *waits = stall.reasons
    assert call == "environment rank 3 has been in make for 61 s (actor-0) and 1 more"
    assert waits == ["trainer-0 has waited for environment for 61 s"]


@pytest.mark.parametrize(
    ("members", "calls"),
    [
        pytest.param(HANGS, [], id="an actor fills a long rollout"),
        pytest.param(HANGS, [hanging(seconds=59.0)], id="its steps are slow"),
        pytest.param([worker("trainer"), worker("actor", 0, "credit")], [], id="a trainer takes a long step"),
        pytest.param([worker("trainer", 0, "compiler"), worker("actor", 0, "credit")], [], id="a step is compiled"),
    ],
)
def test_a_run_in_which_somebody_works_has_more_time(members: list[Member], calls: list[WorkerCall]) -> None:
    assert stalled(members, WORK_SECONDS, calls) is None
    assert stalled(members, WORK_SECONDS + 1, calls) is not None


def test_an_actor_in_an_endless_call_does_not_work_and_is_named_first() -> None:
    found = stalled(HANGS, 61.0, [hanging(seconds=61.0)])
    assert found is not None
    assert found.reasons == (IN_CALL, TRAINER_WAITS, "actor-1 has waited for credit for 61 s")
    found = stalled(HANGS, 61.0, [hanging(seconds=61.0), hanging(seconds=60.0), hanging(seconds=60.0)])
    assert found is not None
    assert found.reasons[:2] == (f"{IN_CALL} and 2 more", TRAINER_WAITS)


@pytest.mark.parametrize("present", [True, False])
def test_a_silent_worker_does_not_work_and_is_named(present: bool) -> None:
    """As one whose call holds the interpreter lock; later its lease expires."""
    found = stalled([TRAINER, worker("actor", 0, heard_at=10.0, present=present)], 61.0)
    assert found is not None
    assert found.reasons == ("actor-0 has not answered for 51 s", TRAINER_WAITS)


def test_evaluators_and_workers_beyond_the_capacity_hold_nothing_up() -> None:
    others = [worker("evaluator"), worker("actor", 2, heard_at=1.0, present=False)]
    found = stalled([*WAITING, *others], 61.0, [hanging("evaluator", seconds=60.0)])
    assert found == stalled(WAITING, 61.0)


@pytest.mark.parametrize(
    ("members", "done"),
    [
        pytest.param([worker("trainer", 0, "batch", state=WorkerState.PAUSED)], False, id="paused"),
        pytest.param([TRAINER, worker("actor", 0, state=WorkerState.PAUSED)], False, id="all actors are paused"),
        pytest.param([*WAITING, worker("buffer", 0, state=WorkerState.PAUSED)], False, id="a buffer worker is paused"),
        pytest.param([], False, id="no trainer has joined"),
        pytest.param(WAITING, True, id="finished"),
    ],
)
def test_a_run_that_need_not_take_steps_does_not_stand_still(members: list[Member], done: bool) -> None:
    clock = StepClock(0.0)
    assert stalled(members, 1000.0, clock=clock, done=done) is None
    assert stalled(WAITING, 1000.0 + STALL_SECONDS, clock=clock) is None, "it has a minute for its next step"
    assert stalled(WAITING, 1001.0 + STALL_SECONDS, clock=clock) is not None


def test_one_paused_actor_hides_no_stall() -> None:
    """Others have its credits."""
    members = [TRAINER, worker("actor", 0, state=WorkerState.PAUSED), worker("actor", 1, "credit")]
    assert stalled(members, 61.0) is not None


def note(clock: StepClock, now: float, *, trained: float | None = None, produced: int | None = None) -> None:
    if trained is not None:
        clock.note("trainer", 0, MemberReport(stats={"train_steps": trained}), None, now)
    if produced is not None:
        page = PageRecord(role="actor", index=1).count(produced=produced)
        clock.note("actor", 1, MemberReport(), page, now)


def test_training_steps_and_full_slots_are_steps() -> None:
    clock = StepClock(0.0)
    note(clock, 1.0, trained=5, produced=100)
    assert clock.overdue_seconds(10.0, 5.0) == 10.0, "a first count is no step"
    note(clock, 20.0, trained=6)
    assert clock.overdue_seconds(61.0, 5.0) == 41.0
    note(clock, 30.0, produced=228)
    assert clock.overdue_seconds(61.0, 5.0) == 31.0
    note(clock, 40.0, trained=6, produced=228)
    note(clock, 41.0, trained=2)
    assert clock.overdue_seconds(61.0, 5.0) == 31.0, "neither equal counts nor a rollback are steps"
    note(clock, 50.0, trained=3)
    assert clock.overdue_seconds(61.0, 5.0) is None, "less than twice the last interval"


def test_rare_steps_are_no_stall() -> None:
    clock = StepClock(0.0)
    for minute in range(4):
        note(clock, 300.0 * minute, trained=minute)
    assert stalled(WAITING, 900.0 + 600.0, clock=clock) is None
    assert stalled(WAITING, 900.0 + 601.0, clock=clock) is not None


def test_a_run_that_needs_no_more_samples_takes_training_steps_only() -> None:
    clock = StepClock(0.0)
    for number in range(1000):
        note(clock, float(number), produced=number)
        if number % 400 == 0:
            note(clock, float(number), trained=number)
    last, idle = worker("trainer", report=MemberReport(stats={NO_MORE_SAMPLES: 1.0})), 700.0
    assert stalled([worker("trainer"), worker("actor", 0, "credit")], 999.0 + idle, clock=clock) is not None
    assert stalled([last, worker("actor", 0, "the end of training")], 999.0 + idle, clock=clock) is None
    assert stalled([last, worker("actor", 0, "the end of training")], 999.0 + 801.0, clock=clock) is not None
    other = worker("trainer", 1)
    assert stalled([last, other, worker("actor", 0, "credit")], 999.0 + idle, clock=clock) is not None, "one needs some"
