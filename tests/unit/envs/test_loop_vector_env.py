"""The loop writes episode ends, resets and frames across slots, and names the environment that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from rlsrl.data.slots import rollout_layout
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.envs.wrappers import ActionMask
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.testing.environments import EchoEnv, Episode, MaskedEnv, ScriptedEnv, at_any_rank


def slot_for(envs: LoopVectorEnv, num_steps: int) -> dict[str, NDArray[Any]]:
    """Return a slot full of garbage, so that fields which are not written show."""
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    arrays = layout.view(bytearray(b"\x2a" * layout.nbytes))
    arrays["mask"].fill(False)  # any other byte reads as True, and most entries must become True
    return arrays


def fill(envs: LoopVectorEnv, arrays: dict[str, NDArray[Any]], *, upto: int | None = None) -> None:
    envs.begin(arrays)
    for step in range(len(arrays["reward"]) if upto is None else upto):
        envs.step(arrays, step, np.zeros(envs.num_envs, np.int64))


def column(arrays: dict[str, NDArray[Any]], name: str, lane: int = 0) -> list[Any]:
    return arrays[name][:, lane].tolist()


@pytest.mark.parametrize(
    ("name", "types"),
    [("Taxi-v4", {"observation": "int64"}), ("Blackjack-v1", {f"observation/{place}": "int64" for place in range(3)})],
)
def test_categories_travel_as_the_environments_own_integers(name: str, types: dict[str, str]) -> None:
    envs = LoopVectorEnv(lambda _: make_environment(EnvironmentSource(id=name)), seeds=[3])
    arrays = slot_for(envs, 20)
    fill(envs, arrays)
    alone = make_environment(EnvironmentSource(id=name))
    observation, _ = alone.reset(seed=3)
    assert {path: arrays[path].dtype.name for path in envs.spec.observation} == types
    for step in range(20):
        found = [int(arrays[path][step, 0]) for path in types]
        assert found == list(np.atleast_1d(np.array(observation)))
        if step and (arrays["terminated"][step - 1, 0] or arrays["truncated"][step - 1, 0]):
            observation, _ = alone.reset()
        else:
            observation = alone.step(0)[0]


@pytest.fixture
def made() -> list[ScriptedEnv]:
    return []


def scripted(made: list[ScriptedEnv], *scripts: Sequence[Episode], **options: Any) -> LoopVectorEnv:
    waiting = iter(scripts)

    def make() -> ScriptedEnv:
        made.append(ScriptedEnv(next(waiting), **options))
        return made[-1]

    return LoopVectorEnv(at_any_rank(make), seeds=range(10, 10 + len(scripts)), first_rank=40, faults=strict())


def strict() -> EnvironmentFaults:
    """Return what fails at the first error of an environment."""
    return EnvironmentFaults(error_budget=0)


@pytest.mark.parametrize(
    ("end", "terminated", "truncated"),
    [("terminated", True, False), ("truncated", False, True), ("both", True, True)],
)
def test_an_end_is_written_as_it_was_and_the_step_after_it_only_resets(
    made: list[ScriptedEnv], end: Any, terminated: bool, truncated: bool
) -> None:
    envs = scripted(made, [Episode(rewards=(1.0, 2.5), end=end)])
    arrays = slot_for(envs, 5)
    fill(envs, arrays)
    # Steps: 1st, 2nd and last of the episode, reset, 1st, 2nd and last.
    assert column(arrays, "reward") == [1, 2.5, 0, 1, 2.5]
    assert column(arrays, "mask") == [True, True, False, True, True]
    assert column(arrays, "terminated") == [False, terminated, False, False, terminated]
    assert column(arrays, "truncated") == [False, truncated, False, False, truncated]
    assert column(arrays, "episode_return") == [0, 3.5, 0, 0, 3.5]
    assert column(arrays, "episode_length") == [0, 2, 0, 0, 2]
    # Frame 2 is the final observation of the first episode, frame 3 the first of the second.
    assert column(arrays, "observation") == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert len(made[0].actions) == 4


def test_an_episode_and_its_return_carry_over_slots(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1, 2, 4, 8, 16))])
    first, second = slot_for(envs, 3), slot_for(envs, 3)
    fill(envs, first)
    first["observation"].fill(np.nan)  # its memory belongs to the trainer by now
    fill(envs, second)
    assert column(second, "observation") == [[0, 3], [0, 4], [0, 5], [1, 0]]
    assert column(second, "reward") == [8, 16, 0]
    assert column(second, "episode_return") == [0, 31, 0]
    assert column(second, "episode_length") == [0, 5, 0]


def test_an_episode_that_ends_with_the_slot_is_reset_by_the_next_slots_first_step(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1, 1))])
    first, second = slot_for(envs, 2), slot_for(envs, 2)
    fill(envs, first)
    assert column(first, "observation") == [[0, 0], [0, 1], [0, 2]]
    assert column(first, "terminated") == [False, True]
    fill(envs, second)
    assert column(second, "observation") == [[0, 2], [1, 0], [1, 1]]
    assert column(second, "mask") == [False, True]
    assert column(second, "reward") == [0, 1]
    assert column(second, "terminated") == [False, False]


def test_a_slot_abandoned_half_way_leaves_no_gap_in_the_next(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1, 2, 4, 8, 16))])
    fill(envs, slot_for(envs, 4), upto=2)
    arrays = slot_for(envs, 3)
    fill(envs, arrays)
    assert column(arrays, "observation") == [[0, 2], [0, 3], [0, 4], [0, 5]]
    assert column(arrays, "episode_return") == [0, 0, 31]


def test_lanes_end_independently(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1,) * 2)], [Episode(rewards=(1,) * 3, end="truncated")])
    arrays = slot_for(envs, 4)
    fill(envs, arrays)
    assert [column(arrays, "mask", lane) for lane in (0, 1)] == [[True, True, False, True], [True, True, True, False]]
    assert [column(arrays, "terminated", lane) for lane in (0, 1)] == [[False, True, False, False], [False] * 4]
    assert [column(arrays, "truncated", lane) for lane in (0, 1)] == [[False] * 4, [False, False, True, False]]


@pytest.mark.parametrize("reuse_arrays", [False, True])
def test_dict_observations_are_written_by_path(made: list[ScriptedEnv], reuse_arrays: bool) -> None:
    envs = scripted(made, [Episode(rewards=(1, 1))], as_dict=True, reuse_arrays=reuse_arrays)
    first, second = slot_for(envs, 3), slot_for(envs, 1)
    fill(envs, first)
    assert first["observation/episode"][:, 0, 0].tolist() == [0, 0, 0, 1]
    assert first["observation/step"][:, 0, 0].tolist() == [0, 1, 2, 0]
    fill(envs, second)
    assert second["observation/step"][:, 0, 0].tolist() == [0, 1]


def test_each_environment_is_seeded_once_and_later_resets_go_on_from_there(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1,))], [Episode(rewards=(1,))])
    for _ in range(2):
        fill(envs, slot_for(envs, 2))
    assert [env.seeds for env in made] == [[10, None, None], [11, None, None]]


def test_continuous_actions_are_clipped(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1, 1))], action_space=spaces.Box(-1, 1, (2,), np.float32))
    arrays = slot_for(envs, 1)
    envs.begin(arrays)
    envs.step(arrays, 0, np.array([[-3, 0.5]], np.float32))
    assert made[0].actions[0].tolist() == [-1, 0.5]


def test_it_gives_what_gymnasiums_own_next_step_loop_gives() -> None:
    seeds, num_steps = [3, 4, 5], 200
    source = EnvironmentSource(id="CartPole-v1", kwargs={"max_episode_steps": 17})
    envs = LoopVectorEnv(lambda _: make_environment(source), seeds=seeds)
    reference = gymnasium.vector.SyncVectorEnv([lambda: make_environment(source)] * len(seeds))
    actions = np.random.default_rng(0).integers(2, size=(num_steps, len(seeds)))
    arrays = slot_for(envs, num_steps)
    envs.begin(arrays)
    frame, _ = reference.reset(seed=seeds)
    np.testing.assert_array_equal(arrays["observation"][0], frame)
    for step in range(num_steps):
        envs.step(arrays, step, actions[step])
        frame, reward, terminated, truncated, _ = reference.step(actions[step])
        np.testing.assert_array_equal(arrays["observation"][step + 1], frame)
        np.testing.assert_array_equal(arrays["reward"][step], reward)
        np.testing.assert_array_equal(arrays["terminated"][step], terminated)
        np.testing.assert_array_equal(arrays["truncated"][step], truncated)
    assert arrays["terminated"].any()
    assert arrays["truncated"].any()
    ends = arrays["terminated"] | arrays["truncated"]
    np.testing.assert_array_equal(arrays["mask"][1:], ~ends[:-1])
    reference.close()
    envs.close()


def test_a_failing_environment_is_named_by_its_rank(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1,) * 9)], [Episode(rewards=(1,) * 9)])
    arrays = slot_for(envs, 2)
    envs.begin(arrays)
    made[1]._taken = 9
    with pytest.raises(EnvironmentFailed, match="rank 41 raised RuntimeError: step without reset") as caught:
        envs.step(arrays, 0, np.zeros(2, np.int64))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failing_reset_is_named_by_its_rank(made: list[ScriptedEnv], monkeypatch: pytest.MonkeyPatch) -> None:
    envs = scripted(made, [Episode(rewards=(1,))], [Episode(rewards=(1,))])
    monkeypatch.setattr(made[1], "reset", lambda seed=None: 1 / 0)
    with pytest.raises(EnvironmentFailed, match=r"rank 41 .*ZeroDivisionError"):
        envs.begin(slot_for(envs, 1))


def test_an_observation_of_another_shape_is_named_by_its_rank(made: list[ScriptedEnv]) -> None:
    envs = scripted(made, [Episode(rewards=(1,) * 9)], [Episode(rewards=(1,) * 9)])
    arrays = slot_for(envs, 1)
    made[1]._observe = lambda: np.zeros(3)  # type: ignore[method-assign]
    says = r"rank 41 breaks Gymnasium's contract: reset\(\) returned float64\[3\] .* its space has float32\[2\]"
    with pytest.raises(EnvironmentFailed, match=says):
        envs.begin(arrays)


def test_environments_that_differ_are_refused_and_closed(made: list[ScriptedEnv]) -> None:
    def make() -> ScriptedEnv:
        made.append(ScriptedEnv([Episode(rewards=(1,))], as_dict=len(made) == 1))
        return made[-1]

    with pytest.raises(ConfigurationError, match=r"rank 7 has .*rank 8 "):
        LoopVectorEnv(at_any_rank(make), seeds=[0, 1], first_rank=7)
    assert [env.closed for env in made] == [True, True]


def test_no_environment_is_left_open_when_a_later_one_cannot_be_made(made: list[ScriptedEnv]) -> None:
    def make(_: int) -> ScriptedEnv:
        if made:
            raise ConnectionError("the simulator is full")
        made.append(ScriptedEnv([Episode(rewards=(1,))]))
        return made[-1]

    with pytest.raises(EnvironmentFailed, match=r"rank 1 cannot be made: it raised ConnectionError: .* full") as caught:
        LoopVectorEnv(make, seeds=[0, 1])
    assert caught.value.traceback.splitlines()[1].endswith("in make"), "the user's code, without its callers"
    assert [env.closed for env in made] == [True]


def test_closing_closes_all_also_after_a_failure(made: list[ScriptedEnv], monkeypatch: pytest.MonkeyPatch) -> None:
    envs = scripted(made, *([[Episode(rewards=(1,))]] * 3))
    monkeypatch.setattr(made[1], "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        envs.close()
    assert [made[0].closed, made[2].closed] == [True, True]
    envs.close()


def test_zero_environments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        LoopVectorEnv(lambda _: ScriptedEnv([]), seeds=[])


def decorrelated(max_steps: int, num_envs: int = 32) -> dict[str, NDArray[Any]]:
    """Return the first slot of environments whose episodes all have five steps of reward 1."""
    script = [Episode(rewards=(1.0,) * 5, end="terminated")] * 9
    envs = LoopVectorEnv(lambda _: ScriptedEnv(script), seeds=range(num_envs), max_decorrelation_steps=max_steps)
    arrays = slot_for(envs, 12)
    fill(envs, arrays)
    return arrays


def test_decorrelated_environments_end_their_episodes_at_different_times() -> None:
    assert decorrelated(0)["terminated"].any(axis=1).tolist() == [step in (4, 10) for step in range(12)]
    arrays = decorrelated(7)
    first_ends = np.argmax(arrays["terminated"], axis=0)
    assert set(first_ends.tolist()) == {0, 1, 2, 3, 4}, "slots begin at every place of an episode"
    # Only whole episodes are reported, and none that ended before the slot.
    assert set(arrays["episode_return"].ravel().tolist()) == {0.0, 5.0}
    assert set(arrays["episode_length"].ravel().tolist()) == {0, 5}
    np.testing.assert_array_equal(arrays["observation"], decorrelated(7)["observation"], "equal seeds, equal starts")


def test_masked_environments_are_decorrelated_by_legal_actions() -> None:
    def make() -> ActionMask:
        return ActionMask(MaskedEnv(3), "action_mask")

    envs = LoopVectorEnv(at_any_rank(make), seeds=range(16), max_decorrelation_steps=50, faults=strict())
    envs.begin(slot_for(envs, 1))  # it raises on an illegal action
    envs.close()


def test_a_tuple_that_is_too_short_is_named_with_the_environments_rank() -> None:
    class Short(EchoEnv):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return (observation[:1], *rest)

    envs = LoopVectorEnv(lambda _: Short("parts"), seeds=[1, 2], first_rank=7, faults=strict())
    arrays = slot_for(envs, 2)
    envs.begin(arrays)
    arrays["action"][0] = 0
    says = r"environment rank 7 .*: step\(\) returned a tuple of 1; the space is a Tuple of 2"
    with pytest.raises(EnvironmentFailed, match=says):
        envs.step(arrays, 0, arrays["action"][0])
