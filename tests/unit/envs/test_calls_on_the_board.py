"""Every call of an environment is on the call board while it lasts, also its making and its closing: by rank and name,
from each kind of vector."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from rlsrl.data.slots import rollout_layout
from rlsrl.envs.native import NativeVectorEnv
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.call_board import BOARD_BYTES, CallBoard
from rlsrl.testing.environments import at_any_rank
from rlsrl.testing.waiting import DEADLINE_SECONDS

Seen = tuple[str, int, int]
"""Name, first rank and number of environments of a call."""


class Looking(gymnasium.Env[Any, Any]):
    """Looks at the board within its calls. Every third step ends an episode; the fifth reward of each is NaN."""

    def __init__(self, board: CallBoard, seen: list[Seen], marks: list[object]) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.board, self.seen, self.marks = board, seen, marks
        self.steps = 0
        self.look("make")

    def look(self, name: str) -> None:
        calls = [call for call in self.board.calls() if call.name == name]
        self.seen += [(call.name, call.first_rank, call.num_environments) for call in calls]
        self.marks += [(call.entry, call.mark) for call in calls]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.look("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.look("step")
        self.steps += 1
        return np.zeros(2, np.float32), np.nan if self.steps == 5 else 1.0, self.steps % 3 == 0, False, {}

    def close(self) -> None:
        self.look("close")


@pytest.fixture
def board() -> CallBoard:
    return CallBoard(mmap.mmap(-1, BOARD_BYTES))


@pytest.fixture
def seen() -> list[Seen]:
    return []


@pytest.fixture
def marks() -> list[object]:
    return []


@pytest.fixture
def make(board: CallBoard, seen: list[Seen], marks: list[object]) -> Callable[[], Looking]:
    return lambda: Looking(board, seen, marks)


def fill(envs: VectorEnv, *, num_steps: int = 7) -> None:
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    arrays = layout.view(bytearray(layout.nbytes))
    envs.begin(arrays)
    for step in range(num_steps):
        envs.step(arrays, step, np.zeros(envs.num_envs, np.int64))


def test_the_loop_shows_one_environment_at_a_time(
    board: CallBoard, seen: list[Seen], marks: list[object], make: Callable[[], Looking]
) -> None:
    envs = LoopVectorEnv(at_any_rank(make), seeds=range(2), first_rank=40, max_decorrelation_steps=2, board=board)
    fill(envs)
    assert set(seen) == {(name, rank, 1) for name in ("make", "reset", "step") for rank in (40, 41)}
    assert len(marks) == len(set(marks)), "two calls in a row never look alike"
    assert list(board.calls()) == []
    envs.close()
    assert sorted(seen[-2:]) == [("close", 40, 1), ("close", 41, 1)]
    assert list(board.calls()) == []
    assert board.open_entry(0) is not None
    assert list(board.calls()) == []


def test_calls_in_bulk_show_all_environments(board: CallBoard, seen: list[Seen], make: Callable[[], Looking]) -> None:
    calls = board.open_entry(8, span=3)
    envs = NativeVectorEnv(lambda: SyncVectorEnv([make] * 3), seed=1, first_rank=8, calls=calls)
    assert set(seen) == {("make", 8, 3)}
    fill(envs)
    assert ("reset", 8, 3) in seen
    assert ("step", 8, 3) in seen
    assert list(board.calls()) == []
    envs.close()
    assert ("close", 8, 3) in seen
    assert {found[1:] for found in seen} == {(8, 3)}


def test_each_thread_shows_its_environment(board: CallBoard, seen: list[Seen], make: Callable[[], Looking]) -> None:
    envs = EnvironmentThreads(at_any_rank(make), seeds=range(3), first_rank=5, board=board)
    envs.begin(lambda _, env: fill(env))
    assert envs.wait(lambda: envs.num_done == 1, DEADLINE_SECONDS)
    assert {("make", 5, 1), ("reset", 5, 1), ("step", 6, 1), ("step", 7, 1)} <= set(seen)
    assert list(board.calls()) == []
    envs.close()
    assert ("close", 7, 1) in seen


@pytest.mark.parametrize("vectorization", ["loop", "bulk"])
def test_an_environment_that_is_made_again_is_on_the_board_while_it_is_closed_and_made(
    board: CallBoard, seen: list[Seen], make: Callable[[], Looking], vectorization: str
) -> None:
    made: list[Looking] = []

    def breaks_once() -> Looking:
        env = make()
        if not made:
            setattr(env, "step", lambda *_: 1 / 0)  # noqa: B010 - not a method of the class
        made.append(env)
        return env

    envs: VectorEnv = (
        LoopVectorEnv(at_any_rank(breaks_once), seeds=[0], first_rank=8, board=board)
        if vectorization == "loop"
        else NativeVectorEnv(
            lambda: SyncVectorEnv([breaks_once]), seed=0, first_rank=8, calls=board.open_entry(8, span=1)
        )
    )
    del seen[:]
    fill(envs, num_steps=1)
    assert [name for name, *_ in seen if name != "reset"] == ["close", "make"]
    assert {found[1:] for found in seen} == {(8, 1)}
    envs.close()


@pytest.mark.parametrize("method", ["step", "reset"])
def test_a_call_that_raises_is_over(board: CallBoard, make: Callable[[], Looking], method: str) -> None:
    def broken() -> Looking:
        env = make()
        setattr(env, method, lambda *_, **__: 1 / 0)
        return env

    envs = LoopVectorEnv(at_any_rank(broken), seeds=[0], board=board)
    with pytest.raises(RuntimeError, match="raised ZeroDivisionError"):
        fill(envs)
    assert list(board.calls()) == []
