"""Environments that step in bulk write the same transitions as single environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from rlsrl.data.random_slots import random_actions
from rlsrl.data.slots import rollout_layout
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.native import NativeVectorEnv, make_native
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.testing.environments import EchoEnv, Episode, ScriptedEnv, at_any_rank

Arrays = dict[str, NDArray[Any]]
CARTPOLE = EnvironmentSource(id="CartPole-v1")
SHORT = EnvironmentSource(id="CartPole-v1", kwargs={"max_episode_steps": 17})


def slot_for(envs: VectorEnv, num_steps: int) -> Arrays:
    """Return a slot full of garbage, so that fields which are not written show."""
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    arrays = layout.view(bytearray(b"\x2a" * layout.nbytes))
    for name in ("mask", "terminated", "truncated"):
        arrays[name].fill(False)
    return arrays


def filled(envs: VectorEnv, *, num_steps: int = 50, num_slots: int = 4) -> list[Arrays]:
    """Return slots filled with random actions, the same for every environment kind."""
    rng, slots = np.random.default_rng(0), []
    for _ in range(num_slots):
        arrays = slot_for(envs, num_steps)
        envs.begin(arrays)
        for step in range(num_steps):
            actions = arrays["action"][step]
            actions[...] = random_actions(envs.spec.action, actions.shape, rng)
            envs.step(arrays, step, actions)
        slots.append(arrays)
    envs.close()
    return slots


def looped(make: Callable[[], gymnasium.Env[Any, Any]], number: int, seed: int = 3) -> LoopVectorEnv:
    return LoopVectorEnv(at_any_rank(make), seeds=range(seed, seed + number))


def in_bulk(make: Callable[[], gymnasium.Env[Any, Any]], number: int, seed: int = 3) -> NativeVectorEnv:
    """Return Gymnasium's own loop in place of a vectorised form. Environment i has the seed ``seed + i``."""
    return NativeVectorEnv(lambda: SyncVectorEnv([make] * number, copy=False), seed=seed)


def assert_equal(slots: list[Arrays], expected: list[Arrays]) -> None:
    for arrays, others in zip(slots, expected, strict=True):
        for name, array in others.items():
            if not name.startswith(("version_", "behavior_")):
                np.testing.assert_array_equal(arrays[name], array, name)


def scripted(**options: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
    episodes = [Episode(rewards=(1.0, 2.5)), Episode(rewards=(1.0,) * 7, end="truncated"), Episode(rewards=(-2.0,))]
    return lambda: ScriptedEnv(episodes, **options)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: make_environment(SHORT), id="cartpole"),
        pytest.param(
            lambda: make_environment(EnvironmentSource(id="Pendulum-v1", kwargs={"max_episode_steps": 17})),
            id="pendulum: continuous",
        ),
        pytest.param(
            lambda: make_environment(EnvironmentSource(id="Taxi-v4", max_episode_steps=17)), id="taxi: categories"
        ),
        pytest.param(
            lambda: make_environment(EnvironmentSource(id="Blackjack-v1", max_episode_steps=2)), id="blackjack: tuple"
        ),
        *(pytest.param(lambda kind=kind: TimeLimit(EchoEnv(kind), 5), id=f"echo: {kind}") for kind in EchoEnv.SPACES),
        pytest.param(scripted(), id="scripted"),
        pytest.param(scripted(as_dict=True), id="dict"),
        pytest.param(scripted(action_space=spaces.Discrete(3, start=5)), id="actions from 5"),
        pytest.param(scripted(action_space=spaces.Box(-1, 1, (2, 2), np.float64)), id="boxes of actions"),
    ],
)
def test_what_a_vector_environment_gives_is_written_as_a_loop_writes_it(make: Any) -> None:
    slots, expected = filled(in_bulk(make, 3)), filled(looped(make, 3))
    assert_equal(slots, expected)
    assert any(arrays["truncated"].any() for arrays in expected)


def test_one_environment_in_bulk_is_one_by_itself_to_the_bit() -> None:
    for source in (CARTPOLE, SHORT):
        slots = filled(make_native(source, 1, seed=11), num_steps=300)
        assert_equal(slots, filled(looped(lambda source=source: make_environment(source), 1, seed=11), num_steps=300))


def test_every_transition_is_one_that_a_single_environment_makes() -> None:
    """From each frame a single environment steps to the next frame. Steps after an end are not transitions."""
    slots = filled(make_native(SHORT, 16, seed=2))
    cartpole = make_environment(EnvironmentSource(id="CartPole-v1", kwargs={"max_episode_steps": 10**9}))
    cartpole.reset()
    lengths = np.zeros(16, int)
    after_end = np.zeros(16, bool)
    num_ends = {"terminated": 0, "truncated": 0}
    for arrays in slots:
        for step in range(len(arrays["mask"])):
            np.testing.assert_array_equal(arrays["mask"][step], ~after_end)
            for lane in range(16):
                flags = {name: bool(arrays[name][step, lane]) for name in num_ends}
                frame, following = arrays["observation"][step : step + 2, lane]
                reported = arrays["episode_return"][step, lane], arrays["episode_length"][step, lane]
                if after_end[lane]:
                    assert not any(flags.values())
                    assert arrays["reward"][step, lane] == 0
                    assert (np.abs(following) <= 0.05).all(), "where episodes begin"
                    assert reported == (0, 0)
                    lengths[lane], after_end[lane] = 0, False
                    continue
                cast("Any", cartpole.unwrapped).state = frame.astype(np.float64)
                cast("Any", cartpole.unwrapped).steps_beyond_terminated = None
                goes_to, reward, terminated, _, _ = cartpole.step(int(arrays["action"][step, lane]))
                np.testing.assert_allclose(following, goes_to, rtol=1e-5, atol=1e-6)
                lengths[lane] += 1
                assert (arrays["reward"][step, lane], flags["terminated"]) == (reward, terminated)
                assert flags["truncated"] == (lengths[lane] == 17)
                after_end[lane] = any(flags.values())
                assert reported == ((lengths[lane], lengths[lane]) if after_end[lane] else (0, 0))
                for name, flag in flags.items():
                    num_ends[name] += flag
    assert min(num_ends.values()) > 5
    cartpole.close()


def test_environments_begin_at_different_places_by_the_seed() -> None:
    frames = [filled(make_native(CARTPOLE, 8, seed=seed), num_slots=1)[0]["observation"][0] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(frames[0], frames[1])
    assert len(np.unique(np.concatenate([frames[0], frames[2]]), axis=0)) == 16


def test_an_end_with_the_slots_last_step_is_reset_by_the_next_slots_first() -> None:
    envs = in_bulk(scripted(), 1)
    first, second = slot_for(envs, 2), slot_for(envs, 2)
    for arrays in (first, second):
        envs.begin(arrays)
        for step in range(2):
            envs.step(arrays, step, np.zeros(1, np.int64))
        first["observation"].fill(np.nan)  # its memory belongs to the trainer by now
    assert first["terminated"][:, 0].tolist() == [False, True]
    assert second["mask"][:, 0].tolist() == [False, True]
    assert second["observation"][:, 0].tolist() == [[0, 2], [1, 0], [1, 1]]


class Rude(SyncVectorEnv):
    """Returns garbage where a step only resets."""

    def step(self, actions: Any) -> Any:
        resets = self._autoreset_envs.copy()
        frame, reward, terminated, truncated, info = super().step(actions)
        return frame, np.where(resets, np.nan, reward), terminated | resets, truncated | resets, info


def test_what_a_step_that_only_resets_says_beside_its_frame_counts_nowhere() -> None:
    rude = NativeVectorEnv(lambda: Rude([scripted()] * 2), seed=3)
    assert_equal(filled(rude), filled(looped(scripted(), 2)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (EnvironmentSource(id="Acrobot-v1"), "'Acrobot-v1' is registered without a vectorised form"),
        (EnvironmentSource(id="CartPole-v1", kwargs={"wheels": 3}), "unexpected keyword argument 'wheels'"),
        (EnvironmentSource(id="CartPole-v9"), "did you mean 'CartPole-v"),
    ],
)
def test_what_cannot_be_stepped_in_bulk_is_refused_by_name(source: EnvironmentSource, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_native(source, 2, seed=0)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_another_way_to_reset_is_refused(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([scripted()], autoreset_mode=mode)
    with pytest.raises(ConfigurationError, match=rf"autoreset_mode '{mode.value}'; NextStep is needed; use loop"):
        NativeVectorEnv(lambda: envs, seed=0)
    assert envs.closed


@contextmanager
def registered(**options: Any) -> Iterator[EnvironmentSource]:
    gymnasium.register("Test/Bulk-v0", **options)
    try:
        yield EnvironmentSource(id="Test/Bulk-v0")
    finally:
        del gymnasium.registry["Test/Bulk-v0"]


def test_another_observation_in_bulk_than_by_itself_is_refused_and_closed() -> None:
    made: list[SyncVectorEnv] = []

    def make_bulk(num_envs: int) -> SyncVectorEnv:
        made.append(SyncVectorEnv([scripted(as_dict=True)] * num_envs))
        return made[-1]

    with (
        registered(entry_point=scripted(), vector_entry_point=make_bulk) as source,
        pytest.raises(
            ConfigurationError, match=r"vectorised form .* has the spec .*single environment.*use loop or threads"
        ),
    ):
        make_native(source, 2, seed=0)
    assert made[0].closed


def test_a_failure_names_the_ranks() -> None:
    faults = EnvironmentFaults(error_budget=0)
    envs = NativeVectorEnv(lambda: SyncVectorEnv([scripted()] * 2), seed=0, first_rank=40, faults=faults)
    arrays = slot_for(envs, 3)
    with pytest.raises(
        EnvironmentFailed, match="ranks 40 to 41, which step in bulk, raised RuntimeError: step without reset"
    ) as caught:
        envs.step(arrays, 0, np.zeros(2, np.int64))
    assert caught.value.__cause__ is not None
    envs.close()
