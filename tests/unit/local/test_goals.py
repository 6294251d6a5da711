from __future__ import annotations

from typing import Any

import pytest

from rlsrl.api.spec import Stop
from rlsrl.local.goals import Goal, goals, seconds_left, time_left


def test_goals_are_the_stop_conditions_that_are_set() -> None:
    stop = Stop(return_mean=-15.0, env_steps=10, train_steps=20, wall_seconds=30.0)
    assert goals(stop, {"return_mean": -21.0, "env_steps": 5}, 6.0) == [
        Goal(label="return", target=-15.0, current=-21.0),
        Goal(label="env steps", target=10.0, current=5.0),
        Goal(label="train steps", target=20.0, current=None),
        Goal(label="seconds", target=30.0, current=6.0, per_second=1.0),
    ]


@pytest.mark.parametrize(
    ("target", "current", "fraction"),
    [(10, 5, 0.5), (10, None, 0.0), (10, 20, 1.0), (10, -5, 0.0), (-15, -21, 0.0), (-15, -14, 1.0), (0, 0, 1.0)],
)
def test_progress_of_a_goal(target: float, current: float | None, fraction: float) -> None:
    assert Goal(label="x", target=target, current=current).fraction == fraction


@pytest.mark.parametrize(
    ("stop", "totals", "left"),
    [
        ({"env_steps": 1000}, {"env_steps": 400, "env_steps_per_second": 50}, 12.0),
        ({"train_steps": 10}, {"env_steps": 400, "train_steps": 4, "env_steps_per_second": 50}, 12.0),
        ({"wall_seconds": 60}, {"train_seconds": 45}, 15.0),
        ({"wall_seconds": 60}, {}, 40.0),
        ({"env_steps": 1000, "wall_seconds": 30}, {"env_steps": 400, "env_steps_per_second": 50}, 10.0),
        ({"env_steps": 1000}, {"env_steps": 1200, "env_steps_per_second": 50}, 0.0),
        ({"env_steps": 1000}, {"env_steps": 400, "env_steps_per_second": 0}, None),
        ({"env_steps": 1000}, {"env_steps": 400, "env_steps_per_second": "fast"}, None),
        ({"train_steps": 10}, {"env_steps": 400, "train_steps": 0, "env_steps_per_second": 50}, None),
        ({"return_mean": 475}, {"return_mean": 400, "env_steps": 400, "env_steps_per_second": 50}, None),
    ],
)
def test_the_time_to_the_first_condition_at_the_present_speed(
    stop: dict[str, Any], totals: dict[str, Any], left: float | None
) -> None:
    assert seconds_left(goals(Stop(**stop), totals, 20.0)) == left


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (0, "about 0 s left"),
        (89, "about 89 s left"),
        (91, "about 2 min left"),
        (5_399, "about 1 h 30 min left"),
        (200_000, "about 55 h 33 min left"),
    ],
)
def test_the_time_left_as_text(left: int, text: str) -> None:
    goal = Goal(label="env steps", target=float(left), current=0.0, per_second=1.0)
    assert time_left([goal]) == text
    assert time_left([Goal(label="return", target=1.0, current=0.0), goal]) == f"at most {text}"
    assert not time_left([Goal(label="return", target=1.0, current=0.0)])
