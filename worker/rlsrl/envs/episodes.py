"""Writes what episodes report at their ends: return, length and chosen values of ``info``."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

import numpy as np
import structlog

from rlsrl.data.episodes import info_field
from rlsrl.data.specs import Arrays
from rlsrl.envs.info_keys import EPISODE_CONTINUES, RECORDED
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

    Recorder = gymnasium.wrappers.RecordEpisodeStatistics[Any, Any]

PATIENCE_EPISODES = 10
"""Episodes without a key after which the log says that the key is missing."""
_SHOWN_KEYS = 32
"""Keys of ``info`` that the log names."""
_MAX_CHARACTERS = 100
"""Of a refused value."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_log = structlog.stdlib.get_logger(__name__)


class EpisodeReports:
    """The reports of the episodes of one worker's environments. Any thread may use it."""

    def __init__(self, keys: Sequence[str] = (), *, log: structlog.stdlib.BoundLogger = _log) -> None:
        """Report ``info[key]`` for each of ``keys``. ``log`` says, once, which of them no episode had."""
        self.keys = tuple(keys)
        """Keys of ``info`` that episodes report."""
        self._fields = {key: info_field(key) for key in keys}
        self._log = log
        self._lock = threading.Lock()
        self._unseen = set(keys)
        """Keys that no episode has had. Empty once the log has named them."""
        self._num_episodes = 0
        """Episodes while keys were unseen."""

    def of(self, rank: int, env: gymnasium.Env[Any, Any] | None = None) -> EnvironmentReports:
        """Return the reports of the environment of that rank; ``env`` is None if it steps in bulk."""
        return EnvironmentReports(self, rank, None if env is None else _recorder_of(env))

    def write_info(self, arrays: Arrays, step: int, lane: int, info: Mapping[str, Any], rank: int) -> None:
        """Write the chosen values of an episode's last ``info``.

        Raises:
            ConfigurationError: a value is not a number.
        """
        for key, field in self._fields.items():
            arrays[field][step, lane] = _number(key, info[key], rank) if key in info else math.nan
        if self._unseen:
            self._look_for_unseen(info)

    def _look_for_unseen(self, info: Mapping[str, Any]) -> None:
        with self._lock:
            self._unseen.difference_update(info)
            self._num_episodes += 1
            if not self._unseen or self._num_episodes < PATIENCE_EPISODES:
                return
            missing, self._unseen = sorted(self._unseen), set()
        found = sorted(map(str, info))[:_SHOWN_KEYS]
        self._log.warning("episode_info_missing", keys=missing, found=found, episodes=PATIENCE_EPISODES)


class EnvironmentReports:
    """Writes the reports of one environment's episodes into slots.

    The statistics of Gymnasium's ``RecordEpisodeStatistics`` replace the return and the length that rlsrl counts: the
    wrapper may be inside others that change rewards, or that end an episode with each lost life.
    """

    def __init__(self, shared: EpisodeReports, rank: int, recorder: Recorder | None) -> None:
        """``recorder`` is the ``RecordEpisodeStatistics`` around the environment, if there is one."""
        self._shared = shared
        self._rank = rank
        self._recorder = recorder

    def goes_on(self, info: Mapping[str, Any], *, terminated: bool) -> bool:
        """Return whether an episode has ended for training only, so that none is reported.

        A wrapper of rlsrl says so in ``info``. With other wrappers around a recorder, the recorder decides: it records
        whole episodes. (A time limit around it truncates; then the episode is over.)
        """
        return EPISODE_CONTINUES in info or (self._recorder is not None and terminated and RECORDED not in info)

    def is_over(self) -> bool:
        """Return whether the episode that went on is over after all: the reset before this call began another.

        Then an outer wrapper ends episodes by itself. From now on they are reported without the recorder.
        """
        if self._recorder is None or self._recorder.episode_lengths:
            return False
        self._recorder = None
        return True

    def write(self, arrays: Arrays, step: int, lane: int, info: Mapping[str, Any], total: float, length: int) -> None:
        """Write the report of an episode that ended in ``step``.

        Args:
            arrays: The slot.
            step: The step of the slot.
            lane: The environment's lane.
            info: ``info`` of the environment's last step.
            total: The sum of the episode's rewards.
            length: Its steps.

        Raises:
            ConfigurationError: a chosen value of ``info`` is not a number.
        """
        recorded = _recorded(info)
        arrays["episode_return"][step, lane], arrays["episode_length"][step, lane] = recorded or (total, length)
        self._shared.write_info(arrays, step, lane, info, self._rank)


def _recorder_of(env: gymnasium.Env[Any, Any]) -> Recorder | None:
    """Return the wrapper that records the environment's episodes under ``RECORDED``, or None."""
    import gymnasium

    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        if isinstance(inner, gymnasium.wrappers.RecordEpisodeStatistics):
            return inner
        inner = inner.env
    return None


def info_of_lane(info: Mapping[str, Any], lane: int) -> dict[str, Any]:
    """Return one environment's part of the ``info`` of a vector environment.

    Gymnasium's vectors have an array under each key, and under ``_key`` which environments have the key.
    """
    masks = {name for name in info if name.startswith("_") and name[1:] in info}
    return {
        key: _value_of_lane(value, lane)
        for key, value in info.items()
        if key not in masks and (f"_{key}" not in masks or info[f"_{key}"][lane])
    }


def _value_of_lane(value: Any, lane: int) -> Any:
    if isinstance(value, Mapping):
        return info_of_lane(value, lane)
    return value[lane] if isinstance(value, np.ndarray | list | tuple) else value


def _recorded(info: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the return and the length that a ``RecordEpisodeStatistics`` recorded, or None."""
    if (statistics := info.get(RECORDED)) is None:
        return None
    if not isinstance(statistics, Mapping) or not statistics.keys() >= {"r", "l"}:
        return None  # a key of the environment's own
    return float(statistics["r"]), int(statistics["l"])


def _number(key: str, value: Any, rank: int) -> float:
    """Return the value as a number; NaN if it is not finite, or too large for 32 bits.

    Raises:
        ConfigurationError: the value is not a number.
    """
    is_scalar = isinstance(value, SupportsFloat) and not isinstance(value, str | bytes)
    try:
        number = float(value) if is_scalar and not np.shape(cast("Any", value)) else None
    except OverflowError:
        return math.nan
    except (TypeError, ValueError):
        number = None
    if number is None:
        shown = shorten(repr(value), _MAX_CHARACTERS, placeholder="...")
        raise ConfigurationError(
            f"environment.episodeInfo: info[{key!r}] of environment rank {rank} is {shown}, of type "
            f"{type(value).__name__}; allowed are numbers and booleans. Correct the environment, or remove the key"
        )
    return number if abs(number) <= _MAX_FLOAT32 else math.nan
