"""The reports of episodes in a batch, and the names of their statistics."""

from __future__ import annotations

import numpy as np

from rlsrl.data.episodes import (
    EndedEpisodes,
    finite_mean,
    info_field,
    info_keys,
    info_scalars,
    info_statistics,
    info_texts,
)
from rlsrl.data.slots import rollout_layout
from rlsrl.testing.rollouts import discrete_env_spec

KEYS = ("is_success", "lap/seconds")


def batch() -> dict[str, np.ndarray]:
    """Return two steps of three lanes in which three episodes end, full of garbage elsewhere."""
    layout = rollout_layout(discrete_env_spec(), num_steps=2, num_lanes=3, episode_info=KEYS)
    arrays = layout.view(bytearray(b"\x2a" * layout.nbytes))
    arrays["mask"].fill(True)
    arrays["episode_length"].fill(0)
    ends = [0, 1, 1], [1, 0, 2]
    arrays["episode_length"][ends] = 7, 8, 9
    arrays["episode_return"][ends] = 1.0, 2.0, 3.0
    arrays["episode_info/is_success"][ends] = 1.0, np.nan, 0.0
    arrays["episode_info/lap/seconds"][ends] = np.nan
    return arrays


def test_a_layout_has_a_field_for_each_key_once() -> None:
    layout = rollout_layout(discrete_env_spec(), num_steps=2, num_lanes=3, episode_info=(*KEYS, *KEYS))
    assert info_keys(layout.fields) == list(KEYS)
    assert layout.shape(info_field("lap/seconds")) == (2, 3)
    assert info_keys(rollout_layout(discrete_env_spec(), num_steps=2, num_lanes=3).fields) == []


def test_episodes_are_those_reported_by_transitions() -> None:
    arrays = batch()
    info = {"is_success": [1.0, 0.0], "lap/seconds": []}
    assert EndedEpisodes.of(arrays) == EndedEpisodes(returns=[1.0, 2.0, 3.0], lengths=[7, 8, 9], info=info)
    arrays["mask"][0, 1] = False
    ended = EndedEpisodes.of(arrays)
    assert (ended.returns, ended.lengths, ended.info["is_success"]) == ([2.0, 3.0], [8, 9], [0.0])


def test_the_parts_of_all_ranks_are_joined_in_their_order() -> None:
    second = EndedEpisodes(returns=[4.0], lengths=[2], info={key: [5.0] for key in KEYS})
    joined = EndedEpisodes.joined([EndedEpisodes.of(batch()), second])
    assert (joined.returns, joined.lengths) == ([1.0, 2.0, 3.0, 4.0], [7, 8, 9, 2])
    assert joined.info == {"is_success": [1.0, 0.0, 5.0], "lap/seconds": [5.0]}


def test_a_mean_is_finite_or_none() -> None:
    assert finite_mean([1, 2]) == 1.5
    assert finite_mean([]) is None
    assert finite_mean([1.7e308, 1.7e308]) is None


def test_statistics_are_read_back_from_the_learning_curve() -> None:
    statistics = {"lap/seconds": {"mean": None, "count": 0}, "count": {"mean": 2.5, "count": 3}}
    scalars = info_scalars(statistics)
    assert scalars == {
        "episode_info/lap/seconds/count": 0.0,
        "episode_info/count/mean": 2.5,
        "episode_info/count/count": 3.0,
    }
    assert info_statistics({"env_steps": 1.0, **scalars}) == statistics
    assert info_texts(statistics) == ["lap/seconds - in 0 episodes", "count 2.5 in 3 episodes"]
