import json
import math

import numpy as np
import pytest

from rlsrl.workers.progress import SKIP_WINDOW, Progress, SkipWindow, StopConditions, episode_returns

NEVER = StopConditions(return_mean=None, episodes=3, env_steps=None, train_steps=None, wall_seconds=None)


def progress(*batches: list[float], episodes: int = 3) -> Progress:
    """After a batch for each list of returns."""
    made = Progress(episodes=episodes)
    for returns in batches:
        made.add(returns=returns, num_transitions=10, seconds=0.5, minibatches=4, skipped=1)
    return made


def stop(**conditions: float | None) -> StopConditions:
    return StopConditions(**{**vars(NEVER), **conditions})


def test_steps_and_episodes_are_counted() -> None:
    made = progress([1.0], [3.0, 5.0])
    assert (made.env_steps, made.train_steps, made.num_episodes, made.train_seconds) == (20, 2, 3, 1.0)
    assert made.return_mean == 3.0


def test_returns_are_those_of_episodes_reported_by_transitions() -> None:
    shape = (2, 3)
    arrays = {
        "mask": np.ones(shape, np.bool_),
        "episode_length": np.zeros(shape, np.int32),
        "episode_return": np.zeros(shape, np.float32),
    }
    arrays["episode_length"][[0, 1, 1], [1, 0, 2]] = 7
    arrays["episode_return"][[0, 1, 1], [1, 0, 2]] = 1.0, 2.0, 3.0
    assert episode_returns(arrays) == [1.0, 2.0, 3.0]
    arrays["mask"][1, 0] = False
    assert episode_returns(arrays) == [1.0, 3.0]


def test_the_mean_is_over_the_last_episodes_only() -> None:
    assert progress([100.0], [1.0, 2.0, 3.0]).return_mean == 2.0


def test_before_the_first_episode_end_there_is_no_mean() -> None:
    made = progress([])
    assert made.return_mean is None
    assert made.stop_reason(stop(return_mean=-1e9)) is None


def test_the_mean_return_is_judged_once_the_window_is_full() -> None:
    goal = stop(return_mean=2.0)
    assert progress([5.0, 5.0]).stop_reason(goal) is None
    assert progress([5.0, 5.0], [5.0]).stop_reason(goal) == "returnMean"
    assert progress([1.9, 1.9, 1.9]).stop_reason(goal) is None


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({}, None),
        ({"env_steps": 20}, "envSteps"),
        ({"env_steps": 21}, None),
        ({"train_steps": 2}, "trainSteps"),
        ({"train_steps": 3}, None),
        ({"wall_seconds": 1.0}, "wallSeconds"),
        ({"wall_seconds": 1.1}, None),
        ({"return_mean": 4.0}, "returnMean"),
        ({"return_mean": 4.0, "env_steps": 1}, "returnMean"),
        ({"train_steps": 99, "wall_seconds": 0.1}, "wallSeconds"),
    ],
)
def test_training_ends_at_the_first_condition_that_holds(conditions: dict[str, float], reason: str | None) -> None:
    assert progress([4.0, 4.0], [4.0]).stop_reason(stop(**conditions)) == reason


def test_progress_resumes_from_saved_json() -> None:
    made = progress([1.0], [2.0, 3.0])
    resumed = progress([50.0])
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert resumed.state_dict() == made.state_dict()
    for each in (made, resumed):
        each.add(returns=[6.0], num_transitions=1, seconds=1.0, minibatches=4, skipped=0)
    assert resumed.state_dict() == made.state_dict()
    assert resumed.return_mean == pytest.approx(11.0 / 3)


def test_a_state_of_an_older_version_lacks_the_newer_counts() -> None:
    state = progress([1.0]).state_dict()
    for name in ("minibatches", "minibatches_skipped", "non_finite_returns"):
        del state[name]
    resumed = progress([math.nan])
    resumed.load_state_dict(state)
    assert (resumed.minibatches, resumed.minibatches_skipped, resumed.non_finite_returns) == (0, 0, 0)


def test_returns_that_are_not_finite_are_counted_and_in_no_mean() -> None:
    made = progress([math.nan, 2.0], [math.inf, 4.0, -math.inf])
    assert (made.return_mean, made.num_episodes, made.non_finite_returns) == (3.0, 5, 3)
    assert progress([math.nan]).return_mean is None
    json.dumps(progress([math.nan]).state_dict(), allow_nan=False)
    assert progress([1.7e308, 1.7e308]).return_mean is None, "the sum overflows"
    assert made.stop_reason(stop(return_mean=1.0)) is None, "three finite returns are needed"


@pytest.mark.parametrize(
    ("taken", "at_end", "failed"),
    [
        ([], True, None),
        ([False] * 199, False, None),
        ([False] * 199, True, "199 of the last 199"),
        ([False] * 200, False, "200 of the last 200"),
        ([False] * 100 + [True] * 100, True, None),
        ([False] * 101 + [True] * 99, False, "101 of the last 200"),
        ([False] * 500 + [True] * 100, False, None),
        ([True] * 500 + [False] * 101, False, "101 of the last 200"),
        ([True, False], True, None),
        ([False], True, "1 of the last 1"),
    ],
)
def test_more_than_half_of_the_last_minibatches_skipped_is_a_failure(
    taken: list[bool], at_end: bool, failed: str | None
) -> None:
    window = SkipWindow()
    for first in range(0, len(taken), 7):
        window.add(taken[first : first + 7])
    found = window.failure(at_end=at_end)
    assert SKIP_WINDOW == 200
    assert found is None if failed is None else (found or "").startswith(f"{failed} minibatches were skipped")


def test_a_window_of_minibatches_continues_from_saved_json() -> None:
    window = SkipWindow()
    window.add([False] * 101 + [True] * 98)
    assert window.failure(at_end=False) is None
    resumed = SkipWindow(json.loads(json.dumps(window.taken)))
    resumed.add([True])
    assert (resumed.failure(at_end=False) or "").startswith("101 of the last 200")


def test_a_window_that_was_larger_keeps_its_newest_episodes() -> None:
    made = progress([1.0, 2.0, 3.0, 4.0], episodes=4)
    resumed = Progress(episodes=2)
    resumed.load_state_dict(made.state_dict())
    assert resumed.return_mean == 3.5
