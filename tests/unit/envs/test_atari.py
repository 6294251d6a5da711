"""Atari games in the wrappers that an experiment names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ArraySpec
from rlsrl.envs.factory import AtariOptions, EnvironmentSource, environment_spec, make_environment
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.runtime.errors import ConfigurationError

OPTIONS = {"frame_skip": 4, "screen_size": 84, "noop_max": 0, "terminal_on_life_loss": False}
ONE_FRAME = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}


def game(name: str = "ALE/Pong-v5", *, frame_stack: int | None = 4, **options: Any) -> EnvironmentSource:
    kwargs = ONE_FRAME if "/" in name else {}
    atari = AtariOptions(**{**OPTIONS, **options})
    return EnvironmentSource(id=name, kwargs=kwargs, atari=atari, frame_stack=frame_stack)


def test_a_game_gives_stacks_of_small_grey_frames() -> None:
    spec = environment_spec(game())
    assert spec.observation == {"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")}
    assert spec.action.num_actions == 6
    assert environment_spec(game(frame_stack=None, screen_size=42)).observation["observation"].shape == (42, 42)


def test_a_stack_is_the_last_observations_oldest_first_and_begins_with_the_first_repeated() -> None:
    stacked, single = make_environment(game(noop_max=30)), make_environment(game(frame_stack=None, noop_max=30))
    frames = [single.reset(seed=3)[0]] * 4
    assert np.array_equal(stacked.reset(seed=3)[0], frames)
    for action in [2, 3, 2, 5, 1, 0]:
        frames.append(single.step(action)[0])
        assert np.array_equal(stacked.step(action)[0], frames[-4:])
    assert not np.array_equal(frames[-1], frames[-4]), "something moves"
    stacked.close()
    single.close()


def test_each_action_is_repeated_for_the_frames_skipped() -> None:
    for frame_skip in (1, 4):
        env = make_environment(game(frame_skip=frame_skip))
        _, info = env.reset(seed=0)
        before = info["frame_number"]
        _, _, _, _, info = env.step(0)
        assert info["frame_number"] - before == frame_skip
        env.close()


def test_a_game_begins_with_a_random_number_of_idle_frames() -> None:
    env = make_environment(game(noop_max=30))
    starts = {env.reset(seed=seed)[1]["episode_frame_number"] for seed in range(8)}
    assert len(starts) > 3
    assert all(1 <= start <= 30 for start in starts)
    env.close()


def test_lives_end_episodes_and_returns_are_those_of_whole_games() -> None:
    source = game("BreakoutNoFrameskip-v4", terminal_on_life_loss=True, frame_stack=None)
    envs = LoopVectorEnv(lambda _: make_environment(source), seeds=[0])
    layout = rollout_layout(envs.spec, num_steps=400, num_lanes=1)
    arrays = layout.view(bytearray(layout.nbytes))
    envs.begin(arrays)
    rng = np.random.default_rng(0)
    for step in range(400):
        # The ball has to be served after each life.
        action = 1 if step % 10 == 0 else rng.integers(2, 4)
        envs.step(arrays, step, np.array([action]))
    (games,) = np.nonzero(arrays["episode_length"][:, 0])
    first = slice(0, games[0] + 1)
    assert arrays["terminated"][first].sum() == 5, "lives of a game of Breakout"
    assert arrays["episode_return"][games[0], 0] == arrays["reward"][first].sum() > 0
    assert arrays["episode_length"][games[0], 0] == arrays["mask"][first].sum()
    envs.close()


def test_a_limit_counts_actions() -> None:
    source = EnvironmentSource(id="PongNoFrameskip-v4", atari=AtariOptions(**OPTIONS), max_episode_steps=5)
    env = make_environment(source)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    env.close()


def test_a_limit_truncates_what_has_none_of_its_own() -> None:
    env = make_environment(EnvironmentSource(id="Pendulum-v1", max_episode_steps=3))
    env.reset(seed=0)
    assert [env.step(env.action_space.sample())[3] for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (EnvironmentSource(id="ALE/Pong-v5", atari=AtariOptions(**OPTIONS)), r"set kwargs: \{frameskip: 1\}"),
        (EnvironmentSource(id="CartPole-v1", atari=AtariOptions(**OPTIONS)), "is not an Atari game"),
    ],
)
def test_what_cannot_be_preprocessed_is_named_with_its_cure(source: EnvironmentSource, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make_environment(source)


@pytest.mark.parametrize("missing", ["ale_py", "cv2"])
def test_a_missing_package_is_named_with_its_cure(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from rlsrl.envs.factory import AtariOptions, EnvironmentSource, make_environment\n"
        "from rlsrl.runtime.errors import ConfigurationError\n"
        f"source = EnvironmentSource(id='PongNoFrameskip-v4', atari=AtariOptions(**{OPTIONS}))\n"
        "try: make_environment(source)\n"
        "except ConfigurationError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert f"needs the package {missing!r}, which is not installed; run: pip install 'rlsrl[atari]'" in done.stdout


def test_an_environment_that_its_wrappers_do_not_fit_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def close(env: gymnasium.Env[Any, Any]) -> None:
        closed.append(env)

    monkeypatch.setattr(gymnasium.Wrapper, "close", close)
    with pytest.raises(ConfigurationError):
        make_environment(EnvironmentSource(id="Pendulum-v1", action_mask="mask"))
    assert closed
