"""Environments with rewards, ends and observations that a test knows or controls."""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.envs.place import EnvironmentPlace
from rlsrl.testing.waiting import DEADLINE_SECONDS


def at_any_rank(make: Callable[[], gymnasium.Env[Any, Any]]) -> Callable[[int], gymnasium.Env[Any, Any]]:
    """Return ``make`` as vector environments call it, for environments that do not depend on their rank."""
    return lambda _: make()


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One scripted episode."""

    rewards: tuple[float, ...]
    """The reward of each step. Their number is the episode's length."""
    end: Literal["terminated", "truncated", "both"] = "terminated"
    """What the last step reports."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """``info`` of the last step."""


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Plays ``episodes`` repeatedly, in order. An observation is (episodes begun - 1, steps of this episode)."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        *,
        action_space: spaces.Space[Any] | None = None,
        as_dict: bool = False,
        reuse_arrays: bool = False,
    ) -> None:
        """Follow ``episodes``.

        Args:
            episodes: The script.
            action_space: By default two discrete actions. Actions have no effect; ``actions`` records them.
            as_dict: Observe ``{"episode": [1], "step": [1]}`` instead of ``[2]``.
            reuse_arrays: Return the same array each time, overwritten, as some simulators do.
        """
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.observation_space = (
            spaces.Dict({"episode": _unbounded(1), "step": _unbounded(1)}) if as_dict else _unbounded(2)
        )
        self.actions: list[Any] = []
        """All actions."""
        self.seeds: list[int | None] = []
        """The seeds of all resets."""
        self.closed = False
        self._episodes = tuple(episodes)
        self._as_dict = as_dict
        self._reuse_arrays = reuse_arrays
        self._observation: NDArray[np.float32] = np.zeros(2, np.float32)
        self._begun = 0
        self._taken = 0

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode of the script."""
        super().reset(seed=seed, options=options)
        self.seeds.append(seed)
        self._begun += 1
        self._taken = 0
        return self._observe(), {}

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Follow the script; refuse a step beyond an episode's end."""
        episode = self._episodes[(self._begun - 1) % len(self._episodes)]
        if self._begun == 0 or self._taken == len(episode.rewards):
            raise RuntimeError("step without reset")
        self.actions.append(action)
        reward = episode.rewards[self._taken]
        self._taken += 1
        last = self._taken == len(episode.rewards)
        terminated, truncated = last and episode.end != "truncated", last and episode.end != "terminated"
        return self._observe(), reward, terminated, truncated, dict(episode.info) if last else {}

    @override
    def close(self) -> None:
        """Record the call."""
        self.closed = True

    def _observe(self) -> Any:
        if not self._reuse_arrays:
            self._observation = np.zeros(2, np.float32)
        self._observation[:] = self._begun - 1, self._taken
        if not self._as_dict:
            return self._observation
        return {"episode": self._observation[:1], "step": self._observation[1:]}


def _unbounded(size: int) -> spaces.Box[Any]:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


class PhaseEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Episodes of ``LENGTH`` steps with a reward of 1 a step. Their last ``info`` compares the process's environments.

    ``in_step``: the share of the other environments that are as far in their episodes, to a step. ``is_success``: True
    for every other episode of an environment. ``word``: a text.
    """

    LENGTH: ClassVar[int] = 16
    _all: ClassVar[list[PhaseEnv]] = []
    """Those of this process that are not closed."""

    def __init__(self) -> None:
        self.observation_space = _unbounded(1)
        self.action_space = spaces.Discrete(2)
        self.taken = 0
        """Steps of this episode."""
        self._succeeds = False
        self._all.append(self)

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self.taken = 0
        return np.zeros(1, np.float32), {}

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take a step, whatever the action."""
        self.taken += 1
        observation = np.full(1, self.taken / self.LENGTH, np.float32)
        if self.taken < self.LENGTH:
            return observation, 1.0, False, False, {}
        self._succeeds = not self._succeeds
        others = [each for each in self._all if each is not self]
        in_step = sum((self.taken - each.taken) % self.LENGTH <= 1 for each in others)
        info = {"is_success": self._succeeds, "in_step": in_step / max(len(others), 1), "word": "done"}
        return observation, 1.0, True, False, info

    @override
    def close(self) -> None:
        """Leave the comparison."""
        if self in self._all:
            self._all.remove(self)


class TogetherEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Episodes of ``LENGTH`` steps. No step ends before all environments of its group have begun one.

    A group whose environments step one after the other fails, by the time-out of a barrier.
    """

    LENGTH: ClassVar[int] = 4
    _barriers: ClassVar[dict[str, threading.Barrier]] = {}
    """By group."""

    def __init__(self, group: str, number: int) -> None:
        """``group``: a name that no other test uses. ``number``: how many environments of the group are stepped."""
        self.observation_space = _unbounded(4)
        self.action_space = spaces.Discrete(2)
        self._barrier = self._barriers.setdefault(group, threading.Barrier(number))
        self._taken = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode, without the others."""
        super().reset(seed=seed, options=options)
        self._taken = 0
        return np.zeros(4, np.float32), {}

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take a step, whatever the action."""
        self._barrier.wait(DEADLINE_SECONDS)
        self._taken += 1
        return np.zeros(4, np.float32), 1.0, self._taken == self.LENGTH, False, {}


class GatedEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Episodes of 8 steps with a return of 0, and of 8 once the file ``gate`` exists.

    A run with a mean return as its goal goes on until the test creates the file, and ends soon after. An observation is
    the elapsed share of the episode and a random number.
    """

    LENGTH = 8

    def __init__(
        self, gate: str, step_seconds: float = 0.0, *, has_vectors: bool = False, render_mode: str | None = None
    ) -> None:
        """A step takes at least ``step_seconds``. ``has_vectors``: actions are vectors of floats."""
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self.observation_space = _unbounded(2)
        self.action_space: spaces.Space[Any] = spaces.Box(-3.0, 1.0, (2,)) if has_vectors else spaces.Discrete(2)
        self._gate = Path(gate)
        self._step_seconds = step_seconds
        self._is_open = False
        self._taken = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode; check the gate."""
        super().reset(seed=seed, options=options)
        self._taken = 0
        self._is_open = self._is_open or self._gate.exists()
        return self._observe(), {}

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Advance the episode; actions have no effect."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._taken += 1
        is_over = self._taken == self.LENGTH
        return self._observe(), float(self._is_open), is_over, False, {"is_open": self._is_open} if is_over else {}

    @override
    def render(self) -> NDArray[np.uint8]:
        """Return a picture that becomes lighter with each step."""
        return np.full((32, 32, 3), 255 * self._taken // self.LENGTH, np.uint8)

    def _observe(self) -> NDArray[np.float32]:
        return np.array([self._taken / self.LENGTH, self.np_random.standard_normal()], np.float32)


class PlacedEnv(GatedEnv):
    """A ``GatedEnv`` that writes its place and arguments into the file ``record``: one JSON object a line.

    One line when it is made, and one with the seed of its first reset. The last ``info`` of an episode has the numbers.
    """

    def __init__(self, gate: str, record: str, place: EnvironmentPlace, *, level: str = "", port: int = 0) -> None:
        super().__init__(gate)
        self._record = Path(record)
        self._place = place
        self._was_reset = False
        self._write(call="make", level=level, port=port)

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode; write the first seed."""
        if not self._was_reset:
            self._was_reset = True
            self._write(call="reset", first_seed=seed)
        return super().reset(seed=seed, options=options)

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Advance the episode."""
        *result, info = super().step(action)
        numbers = {"rank": self._place.rank, "num_environments": self._place.num_environments}
        return (*result, {**info, **numbers} if info else info)  # type: ignore[return-value]

    def _write(self, **more: Any) -> None:
        with self._record.open("a") as record:
            record.write(f"{json.dumps({**asdict(self._place), 'pid': os.getpid(), **more})}\n")


class PrintingEnv(GatedEnv):
    """A ``GatedEnv`` that prints numbered lines when it is made."""

    def __init__(self, gate: str, lines: int) -> None:
        """Print the lines 1 to ``lines``."""
        super().__init__(gate)
        for number in range(1, lines + 1):
            print(f"printed line {number} of {lines}")


class FaultyEnv(GatedEnv):
    """A ``GatedEnv``. The fourth of each four in a process has one fault in ``step`` if the file ``fault`` exists.

    It removes the file before.
    """

    _numbers = itertools.count()

    def __init__(
        self, gate: str, fault: str, kind: Literal["raises", "nan"] = "raises", *, step_seconds: float = 0.0
    ) -> None:
        """Raise, or give a reward of NaN, once the file ``fault`` exists."""
        super().__init__(gate, step_seconds)
        self._is_faulty = next(self._numbers) % 4 == 3
        self._fault = Path(fault)
        self._kind = kind

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Advance the episode, perhaps with a fault."""
        has_fault = self._is_faulty and self._fault.exists()
        if has_fault:
            self._fault.unlink()
        if has_fault and self._kind == "raises":
            raise ConnectionError("the simulator hung up")
        observation, reward, *others = super().step(action)
        return observation, float("nan") if has_fault else reward, *others  # type: ignore[return-value]


class HangingEnv(GatedEnv):
    """A ``GatedEnv``. The fourth of each four in a process hangs once the file ``hang`` exists, by default for an hour.

    It removes the file before.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        gate: str,
        hang: str,
        method: Literal["step", "reset", "make"] = "step",
        *,
        holds_lock: bool = False,
        step_seconds: float = 0.0,
        seconds: float = 3600.0,
    ) -> None:
        """Hang in ``method`` for ``seconds``, with or without the interpreter lock; ``make`` is this call."""
        super().__init__(gate, step_seconds)
        self._hangs = next(self._numbers) % 4 == 3
        self._hang = Path(hang)
        self._method = method
        self._holds_lock = holds_lock
        self._seconds = seconds
        self._perhaps_hang("make")

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode, perhaps much later."""
        self._perhaps_hang("reset")
        return super().reset(seed=seed, options=options)

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Advance the episode, perhaps much later."""
        self._perhaps_hang("step")
        return super().step(action)

    def _perhaps_hang(self, method: str) -> None:
        if not self._hangs or method != self._method or not self._hang.exists():
            return
        self._hang.unlink()
        if self._holds_lock:
            ctypes.PyDLL(None).sleep(round(self._seconds))
        else:
            time.sleep(self._seconds)


class MaskedEnv(gymnasium.Env[Any, np.int64]):
    """At each step some random actions are illegal. An illegal action raises an error.

    The reward is 1 for the last legal action, else 0. An episode has 8 steps, and its final observation allows no
    action. An observation is nested: the legal actions as floats, and the step. The mask is in the observation, or with
    ``in_info`` in ``info``.
    """

    LENGTH = 8

    def __init__(self, num_actions: int = 4, *, in_info: bool = False) -> None:
        self.action_space = spaces.Discrete(num_actions)
        parts: dict[str, spaces.Space[Any]] = {
            "state": spaces.Dict({"legal": _unbounded(num_actions), "step": _unbounded(1)})
        }
        if not in_info:
            parts["action_mask"] = spaces.Box(0, 1, (num_actions,), np.int8)
        self.observation_space = spaces.Dict(parts)
        self.legal: NDArray[np.int8] = np.zeros(num_actions, np.int8)
        """The mask; a test may change it between two steps."""
        self._in_info = in_info
        self._taken = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self._taken = 0
        self._draw()
        return self._observe(), self._info()

    @override
    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Refuse the action if it is illegal."""
        if not self.legal[action]:
            raise RuntimeError(f"action {action} is illegal, legal are {np.flatnonzero(self.legal)}")
        reward = float(action == np.flatnonzero(self.legal)[-1])
        self._taken += 1
        self._draw()
        return self._observe(), reward, self._taken == self.LENGTH, False, self._info()

    def _draw(self) -> None:
        self.legal = self.np_random.integers(0, 2, self.legal.size, np.int8)
        self.legal[self.np_random.integers(self.legal.size)] = 1
        if self._taken == self.LENGTH:
            self.legal[:] = 0

    def _observe(self) -> dict[str, Any]:
        state = {"legal": self.legal.astype(np.float32), "step": np.array([self._taken], np.float32)}
        return {"state": state} | ({} if self._in_info else {"action_mask": self.legal.copy()})

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.legal.copy()} if self._in_info else {}


class PictureAndWord(gymnasium.Env[dict[str, Any], np.int64]):
    """A picture shows a bar on one side, and a word asks for that side or for the other one: neither tells alone.

    The reward is 1 for the side that is asked for, else 0. An episode has 8 steps, each with another picture and word.
    ``sound`` is noise.
    """

    LENGTH = 8
    SIZE = 36

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Dict(
            {
                "picture": spaces.Box(0, 255, (1, self.SIZE, self.SIZE), np.uint8),
                "sound": _unbounded(2),
                "word": spaces.Discrete(2),
            }
        )
        self._right = 0
        self._taken = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self._taken = 0
        return self._observe(), {}

    @override
    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Show the next picture."""
        reward = float(action == self._right)
        self._taken += 1
        return self._observe(), reward, self._taken == self.LENGTH, False, {}

    def _observe(self) -> dict[str, Any]:
        side, other = self.np_random.integers(0, 2, 2)
        self._right = int(side ^ other)
        picture = self.np_random.integers(0, 64, (1, self.SIZE, self.SIZE), np.uint8)
        begin = self.np_random.integers(0, self.SIZE // 2 - 6) + side * (self.SIZE // 2)
        picture[:, :, begin : begin + 6] += 128
        return {"picture": picture, "sound": self.np_random.standard_normal(2, np.float32), "word": other}


class EchoEnv(gymnasium.Env[Any, Any]):
    """Pays for the action that equals the observation: each observation is a random action. An episode has 8 steps.

    The reward is the mean over the action's parts: the share of equal integers, or for a box 1 - |difference| / width,
    where an infinite width counts as 4.
    With ``masked``, ``info`` has masks of a MultiDiscrete, and an illegal action raises an error.
    """

    LENGTH = 8
    SPACES: ClassVar[dict[str, spaces.Space[Any]]] = {
        "choices": spaces.MultiDiscrete([3, 4], start=[0, -1]),
        "flags": spaces.MultiBinary(3),
        "box": spaces.Box(np.array([-1.0, -np.inf, 2.0]), np.array([3.0, np.inf, np.inf]), dtype=np.float64),
        "parts": spaces.Tuple((
            spaces.Discrete(3, start=1),
            spaces.Tuple((spaces.Box(-1.0, 3.0, (2,), np.float64), spaces.MultiBinary(2))),
        )),
    }  # fmt: skip

    def __init__(self, kind: str = "choices", *, masked: bool = False) -> None:
        """``kind`` is a key of ``SPACES``."""
        self.action_space = copy.deepcopy(self.SPACES[kind])
        self.observation_space = copy.deepcopy(self.SPACES[kind])
        self._masked = masked
        self._target: Any = None
        self._legal: tuple[NDArray[np.int8], ...] = ()
        self._taken = 0

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self.observation_space.seed(seed)
        self._taken = 0
        self._draw()
        return self._target, self._info()

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Refuse an action outside the space, and an illegal one."""
        if not self.action_space.contains(action):
            raise RuntimeError(f"action {action!r} is not in {self.action_space}")
        for choice, legal in zip(self._choices(action), self._legal, strict=True):
            if not legal[choice]:
                raise RuntimeError(f"action {action} is illegal, legal are {self._legal}")
        reward = float(np.mean(list(_closeness(self.action_space, action, self._target))))
        self._taken += 1
        self._draw()
        return self._target, reward, self._taken == self.LENGTH, False, self._info()

    def _draw(self) -> None:
        self._target = self.observation_space.sample()
        if self._masked:
            sizes = self.action_space.nvec.tolist()  # type: ignore[attr-defined]  # masks are of a MultiDiscrete
            self._legal = tuple(self.np_random.integers(0, 2, size, np.int8) for size in sizes)
            for choice, legal in zip(self._choices(self._target), self._legal, strict=True):
                legal[choice] = 1

    def _choices(self, action: Any) -> Any:
        """Return the action's choices from 0; nothing without masks."""
        return action - self.action_space.start if self._masked else ()  # type: ignore[attr-defined]  # as above

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._legal} if self._masked else {}


def _closeness(space: spaces.Space[Any], action: Any, target: Any) -> Iterator[float]:
    if isinstance(space, spaces.Tuple):
        for part, of_action, of_target in zip(space.spaces, action, target, strict=True):
            yield from _closeness(part, of_action, of_target)
    elif isinstance(space, spaces.Box):
        width = space.high - space.low
        yield float(1.0 - np.mean(np.abs(action - target) / np.where(np.isfinite(width), width, 4.0)))
    else:
        yield float(np.mean(np.asarray(action) == target))


class ShadesEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Each frame is a shade of grey: 20 after a reset, and 30 more after each of the 6 steps, whose reward is 1.5."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, render_mode: str | None = None, *, hides: bool = False, size: int = 37) -> None:
        """``hides`` leaves out the attribute ``render_mode``. Frames are ``size`` high; with 0 each step raises."""
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.render_mode = None if hides else render_mode
        self._size = size
        self._taken = 0

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self._taken = 0
        return np.zeros(4, np.float32), {}

    @override
    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take a step, whatever the action."""
        if not self._size:
            raise ValueError("the arm is stuck")
        self._taken += 1
        return np.zeros(4, np.float32), 1.5, self._taken == 6, False, {}

    @override
    def render(self) -> Any:
        """Return the frame, [height, 48, 3]."""
        return np.full((self._size or 16, 48, 3), 20 + 30 * self._taken, np.uint8)
