import json

import numpy as np
import pytest

from rlsrl.workers.progress import Progress, StopConditions

NEVER = StopConditions(return_mean=None, episodes=3, env_steps=None, train_steps=None, wall_seconds=None)


def batch(*returns: float, truncated: float | None = None) -> dict[str, np.ndarray]:
    """A batch of one step, with a lane for each return of an episode that ends there; NaN where none ends."""
    values = np.array([[*returns, *([] if truncated is None else [truncated])]], np.float64)
    ended = ~np.isnan(values)
    by_truncation = np.zeros_like(ended)
    by_truncation[0, -1] = truncated is not None
    return {
        "terminated": ended & ~by_truncation,
        "truncated": ended & by_truncation,
        "mask": np.ones_like(ended),
        "episode_return": values,
        "episode_length": np.where(ended, 5, 0),
    }


def progress(*batches: dict[str, np.ndarray], episodes: int = 3) -> Progress:
    made = Progress(episodes=episodes)
    for each in batches:
        made.add(each, num_transitions=10, seconds=0.5)
    return made


def stop(**conditions: float | None) -> StopConditions:
    return StopConditions(**{**vars(NEVER), **conditions})


def test_it_counts() -> None:
    made = progress(batch(1.0, np.nan), batch(3.0, 5.0))
    assert (made.env_steps, made.train_steps, made.num_episodes, made.train_seconds) == (20, 2, 3, 1.0)
    assert made.return_mean == 3.0


def test_episodes_end_by_termination_and_by_truncation() -> None:
    assert progress(batch(1.0, truncated=7.0)).return_mean == 4.0


def test_what_is_masked_ends_no_episode() -> None:
    resetting = batch(1.0, 100.0)
    resetting["mask"][0, 1] = False
    assert progress(resetting).return_mean == 1.0


def test_the_mean_is_over_the_last_episodes_only() -> None:
    assert progress(batch(100.0), batch(1.0, 2.0, 3.0)).return_mean == 2.0


def test_before_an_episode_has_ended_there_is_no_mean() -> None:
    made = progress(batch(np.nan))
    assert made.return_mean is None
    assert made.stop_reason(stop(return_mean=-1e9)) is None


def test_the_mean_return_is_judged_once_the_window_is_full() -> None:
    goal = stop(return_mean=2.0)
    assert progress(batch(5.0, 5.0)).stop_reason(goal) is None
    assert progress(batch(5.0, 5.0), batch(5.0)).stop_reason(goal) == "returnMean"
    assert progress(batch(1.9, 1.9, 1.9)).stop_reason(goal) is None


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
    assert progress(batch(4.0, 4.0), batch(4.0)).stop_reason(stop(**conditions)) == reason


def test_it_goes_on_from_a_saved_state_as_json() -> None:
    made = progress(batch(1.0), batch(2.0, 3.0))
    resumed = progress(batch(50.0))
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert resumed.state_dict() == made.state_dict()
    for each in (made, resumed):
        each.add(batch(6.0), num_transitions=1, seconds=1.0)
    assert resumed.state_dict() == made.state_dict()
    assert resumed.return_mean == pytest.approx(11.0 / 3)


def test_a_window_that_was_larger_keeps_its_newest_episodes() -> None:
    made = progress(batch(1.0, 2.0, 3.0, 4.0), episodes=4)
    resumed = Progress(episodes=2)
    resumed.load_state_dict(made.state_dict())
    assert resumed.return_mean == 3.5
