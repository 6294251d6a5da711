import pytest

from rlsrl.testing.clock import ManualClock


def test_only_advance_moves_the_clock() -> None:
    clock = ManualClock(monotonic=5.0, time=1000.0)
    assert (clock.monotonic(), clock.time()) == (5.0, 1000.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.time()) == (7.5, 1002.5)


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        ManualClock().advance(-1)
