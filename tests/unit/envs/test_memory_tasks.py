"""Environments that need memory."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlsrl.envs.memory_tasks import DelayedCue, cartpole_without_velocities


@pytest.mark.parametrize("delay", [1, 20])
def test_a_cue_is_shown_once_and_asked_for_after_the_delay(delay: int) -> None:
    env, cues = DelayedCue(delay=delay), set()
    for seed in range(8):
        observation, _ = env.reset(seed=seed)
        cue = int(np.argmax(observation))
        cues.add(cue)
        assert observation.sum() == 1.0
        for step in range(1, delay + 1):
            observation, reward, terminated, truncated, info = env.step(np.int64(1 - cue))
            assert observation.tolist() == [0.0, 0.0, float(step == delay)]
            assert (reward, terminated, truncated, info) == (0.0, False, False, {})
        answer = cue if seed % 2 else 1 - cue
        _, reward, terminated, truncated, info = env.step(np.int64(answer))
        assert (reward, terminated, truncated) == (float(seed % 2), True, False)
        assert info == {"is_success": reward}
    assert cues == {0, 1}


def test_a_delay_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="delay is 0; allowed: integer >= 1"):
        DelayedCue(delay=0)


def test_cartpole_shows_positions_alone() -> None:
    env = cartpole_without_velocities()
    observation, _ = env.reset(seed=1)
    assert observation.shape == (2,)
    inner = env.unwrapped
    np.testing.assert_allclose(observation, np.array(inner.state)[[0, 2]], rtol=1e-6)  # type: ignore[attr-defined]
    assert env.observation_space.contains(observation)


def test_they_keep_gymnasiums_rules() -> None:
    check_env(DelayedCue())
