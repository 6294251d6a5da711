import json
import math

import pytest

from rlsrl.data.episodes import EndedEpisodes
from rlsrl.workers.progress import SKIP_WINDOW, Progress, SkipWindow, StopConditions

NEVER = StopConditions(return_mean=None, episodes=3, env_steps=None, train_steps=None, wall_seconds=None)


def progress(*batches: list[float], episodes: int = 3) -> Progress:
    """After a batch for each list of returns."""
    made = Progress(episodes=episodes)
    for returns in batches:
        made.gathered(EndedEpisodes(returns=returns), env_steps=10)
        made.trained(seconds=0.5, minibatches=4, skipped=1)
    return made


def stop(**conditions: float | None) -> StopConditions:
    return StopConditions(**{**vars(NEVER), **conditions})


def test_steps_and_episodes_are_counted() -> None:
    made = progress([1.0], [3.0, 5.0])
    assert (made.env_steps, made.train_steps, made.num_episodes, made.train_seconds) == (20, 2, 3, 1.0)
    assert made.return_mean == 3.0


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
        each.gathered(EndedEpisodes(returns=[6.0]), env_steps=1)
        each.trained(seconds=1.0, minibatches=4, skipped=0)
    assert resumed.state_dict() == made.state_dict()
    assert resumed.return_mean == pytest.approx(11.0 / 3)


def test_a_state_of_an_older_version_lacks_the_newer_counts() -> None:
    state = progress([1.0]).state_dict()
    for name in ("minibatches", "minibatches_skipped", "non_finite_returns", "lengths", "info", "info_counts"):
        del state[name]
    resumed = with_info(*INFO)
    resumed.load_state_dict(state)
    assert (resumed.length_mean, resumed.episode_info) == (None, {})
    assert (resumed.minibatches, resumed.minibatches_skipped, resumed.non_finite_returns) == (0, 0, 0)


def test_returns_that_are_not_finite_are_counted_and_in_no_mean() -> None:
    made = progress([math.nan, 2.0], [math.inf, 4.0, -math.inf])
    assert (made.return_mean, made.num_episodes, made.non_finite_returns) == (3.0, 5, 3)
    assert progress([math.nan]).return_mean is None
    json.dumps(progress([math.nan]).state_dict(), allow_nan=False)
    assert progress([1.7e308, 1.7e308]).return_mean is None, "the sum overflows"
    assert made.stop_reason(stop(return_mean=1.0)) is None, "three finite returns are needed"


def with_info(*episodes: EndedEpisodes) -> Progress:
    """After a batch for each of ``episodes``, with means over two episodes."""
    made = Progress(episodes=2)
    for each in episodes:
        made.gathered(each, env_steps=10)
        made.trained(seconds=0.5, minibatches=4, skipped=0)
    return made


INFO = (
    EndedEpisodes(returns=[1.0, 1.0], lengths=[10, 20], info={"won": [1.0, 0.0], "never": []}),
    EndedEpisodes(returns=[1.0], lengths=[30], info={"won": [0.0], "never": []}),
    EndedEpisodes(returns=[math.nan], lengths=[50], info={"won": [], "never": []}),
)


def test_lengths_and_values_of_info_have_means_over_the_last_episodes_with_one() -> None:
    made = with_info(*INFO)
    assert made.length_mean == 40.0
    assert made.episode_info == {"won": {"mean": 0.0, "count": 3}, "never": {"mean": None, "count": 0}}
    assert with_info(INFO[0]).episode_info["won"] == {"mean": 0.5, "count": 2}
    assert (with_info().length_mean, with_info().episode_info) == (None, {})


def test_lengths_and_values_of_info_resume_from_saved_json() -> None:
    made, resumed = with_info(*INFO[:2]), with_info(INFO[2])
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict(), allow_nan=False)))
    for each in (made, resumed):
        each.gathered(INFO[0], env_steps=1)
        each.trained(seconds=1.0, minibatches=4, skipped=0)
    assert resumed.state_dict() == made.state_dict()
    assert (resumed.length_mean, resumed.episode_info["won"]) == (15.0, {"mean": 0.5, "count": 5})


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
