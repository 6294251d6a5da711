from __future__ import annotations

import pytest

from rlsrl.algorithms.schedules import LinearSchedule, value_at


@pytest.mark.parametrize(
    ("env_steps", "value"), [(0, 0.3), (1, 0.2998), (250, 0.25), (1000, 0.1), (1001, 0.1), (10**12, 0.1)]
)
def test_a_line_from_start_to_end_and_flat_from_there(env_steps: int, value: float) -> None:
    assert value_at(LinearSchedule(start=0.3, end=0.1, env_steps=1000), env_steps) == pytest.approx(value, rel=1e-12)


def test_start_and_end_are_met_exactly() -> None:
    schedule = LinearSchedule(start=0.1, end=0.7, env_steps=3)
    assert (schedule.at(0), schedule.at(3), schedule.at(4)) == (0.1, 0.7, 0.7)


def test_a_number_is_a_constant() -> None:
    assert [value_at(3e-4, env_steps) for env_steps in (0, 10**9)] == [3e-4, 3e-4]
