import pytest

from rlsrl.runtime.clock import SystemClock
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.testing.clock import ManualClock


def test_by_steps() -> None:
    control = FrequencyControl(steps=3, clock=ManualClock())
    assert [control.check() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_by_many_steps_at_once() -> None:
    control = FrequencyControl(steps=10, clock=ManualClock())
    assert [control.check(4), control.check(4), control.check(40), control.check(9), control.check(1)] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_by_seconds() -> None:
    clock = ManualClock()
    control = FrequencyControl(seconds=10, clock=clock)
    assert not control.check()
    clock.advance(9.9)
    assert not control.check()
    clock.advance(0.1)
    assert control.check()
    assert not control.check()
    clock.advance(25)
    assert control.check()
    assert not control.check(), "an interval that was missed is not made up for"


@pytest.mark.parametrize("step_seconds", [0.001, 0.02, 0.3])
def test_work_is_due_more_often_at_first(step_seconds: float) -> None:
    clock = ManualClock()
    control = FrequencyControl(seconds=1.0, least=50, clock=clock)
    clock.advance(1000.0)  # what passes before the first check does not count
    due = []
    while len(due) < 50 or clock.monotonic() - due[0] < 200.0:
        if control.check():
            due.append(clock.monotonic())
        clock.advance(step_seconds)
    assert due[0] == 1000.0
    assert due[49] - due[0] == pytest.approx(49 * step_seconds), "each of the first checks"
    assert due[-1] - due[-2] == pytest.approx(1.0, abs=0.3), "later as otherwise"
    assert len(due) < 600


def test_the_first_due_limit_restarts_both() -> None:
    clock = ManualClock()
    control = FrequencyControl(seconds=10, steps=3, clock=clock)
    clock.advance(9)
    assert [control.check(), control.check(), control.check()] == [False, False, True]
    clock.advance(9)
    assert [control.check(), control.check()] == [False, False]
    clock.advance(1)
    assert control.check()
    assert [control.check(), control.check(), control.check()] == [False, False, True]


def test_without_limits_it_is_never_due() -> None:
    clock = ManualClock()
    control = FrequencyControl(clock=clock)
    clock.advance(1e9)
    assert not control.check(10**9)


@pytest.mark.parametrize(("seconds", "steps"), [(0, None), (-1, None), (float("nan"), None), (None, 0), (None, -3)])
def test_invalid_limits_are_refused(seconds: float | None, steps: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        FrequencyControl(seconds=seconds, steps=steps, clock=ManualClock())


def test_the_system_clock_is_the_default() -> None:
    assert FrequencyControl(seconds=1e-9).check()
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.time() > 1_600_000_000
