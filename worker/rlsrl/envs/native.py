"""Environments that step in bulk: by the vectorised form that their id is registered with at Gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.episodes import EpisodeReports, info_of_lane
from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_in_bulk
from rlsrl.envs.faults import EnvironmentFaults, NonFiniteValue, SlotGuard, is_finite, named, not_made
from rlsrl.envs.lane_environments import WAIT_SECONDS
from rlsrl.envs.place import INSPECTION
from rlsrl.envs.spaces import action_batcher, observation_keys, spec_of_spaces
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.envs.vector import VectorEnv
from rlsrl.runtime.call_board import CallBoard, CallEntry, close_entry, on_board, private_entry
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError

if TYPE_CHECKING:
    import gymnasium

_FIELD = "actors.vectorization: native"
_OTHERS = "use loop or threads"
_MADE_AGAIN = 0xDEC1
"""Second word of the seed of a vector that is made again."""


def make_native(
    source: EnvironmentSource,
    num_envs: int,
    *,
    seed: int,
    first_rank: int = 0,
    faults: EnvironmentFaults | None = None,
    board: CallBoard | None = None,
    reports: EpisodeReports | None = None,
) -> NativeVectorEnv:
    """Return ``num_envs`` environments of ``source`` that step in bulk. The caller closes them.

    The place of ``source``, if it has one, is that of all of them.

    Raises:
        ConfigurationError: the id has no vectorised form, that form has other spaces than a single environment, or its
            autoreset is not NEXT_STEP.
        EnvironmentFailed: the environment's own code raised another error.
    """

    def make() -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        envs = make_in_bulk(source, num_envs)
        if envs is None:
            raise ConfigurationError(
                f"{_FIELD}: {source} is registered without a vectorised form (vector_entry_point); {_OTHERS}"
            )
        return envs

    calls = private_entry() if board is None else board.open_entry(first_rank, span=num_envs)
    alone = source if source.place is None else replace(source, place=INSPECTION)
    single = on_board(calls, 0, "make", environment_spec, alone)
    native = NativeVectorEnv(make, seed=seed, first_rank=first_rank, faults=faults, calls=calls, reports=reports)
    if native.spec != single:
        native.close()
        raise ConfigurationError(
            f"{_FIELD}: the vectorised form of {source} has the spec {native.spec}, but the policy is made for that of "
            f"a single environment, {single}; {_OTHERS}"
        )
    return native


class NativeVectorEnv(VectorEnv):
    """Writes the steps of a ``gymnasium.vector.VectorEnv`` into slots.

    Slots use Gymnasium's autoreset NEXT_STEP: the step after an episode's end is its reset, and not a transition.
    A vector environment takes one seed, from which all its environments draw. So its episodes differ from those of a
    loop, unless there is only one environment.

    It cannot reset one of its environments. After a step that is not finite, the next step resets all of them; the
    episodes of the others end as truncated. A step that raises is no transition of any of them: all are made again.
    """

    def __init__(
        self,
        make: Callable[[], gymnasium.vector.VectorEnv[Any, Any, Any]],
        *,
        seed: int,
        first_rank: int = 0,
        faults: EnvironmentFaults | None = None,
        calls: CallEntry | None = None,
        reports: EpisodeReports | None = None,
    ) -> None:
        """Step what ``make`` returns. ``seed`` seeds the first reset.

        Errors name environment ranks, which begin at ``first_rank``. ``faults`` counts the environments'
        faults; None: they are logged only. ``calls`` shows the calls to the call watch, of all environments at once;
        None: no call watch runs. ``close`` closes it.
        ``reports`` chooses what episodes report; None: return and length.

        Raises:
            ConfigurationError: the autoreset is not NEXT_STEP, or a space is not supported.
            EnvironmentFailed: ``make`` raised another error.
        """
        self._make = make
        self._num_made_again = 0
        self._seed = seed
        self._calls = private_entry() if calls is None else calls
        try:
            envs = on_board(self._calls, 0, "make", make)
        except ConfigurationError:
            raise
        except USERS_ERRORS as error:
            raise not_made(named(range(first_rank, first_rank + 1)), error) from error
        self._envs: gymnasium.vector.VectorEnv[Any, Any, Any] | None = envs
        """None while they are made again, and after ``close``."""
        self.num_envs = envs.num_envs
        self._ranks = range(first_rank, first_rank + envs.num_envs)
        try:
            self.spec = _checked_spec(envs)
        except BaseException:
            self.close()
            raise
        self._faults = faults or EnvironmentFaults()
        all_reports = reports or EpisodeReports()
        self._chooses_info = bool(all_reports.keys)
        self._reports = [all_reports.of(rank) for rank in self._ranks]
        self._guard = SlotGuard(self.spec, self.num_envs)
        self._resets_all = False
        """Whether the next step resets all environments."""
        self._keys = tuple(
            (name, keys, self._guard.frame_zeros[name])
            for name, keys in observation_keys(envs.single_observation_space).items()
        )
        self._batch = action_batcher(envs.single_action_space)
        self._frame: Any = None
        """The newest observations; None before the first reset."""
        self._ended: NDArray[np.bool_] = np.zeros(envs.num_envs, np.bool_)
        """For each environment: whether its next step only resets."""
        self._returns: NDArray[np.float64] = np.zeros(envs.num_envs)
        self._lengths: NDArray[np.int32] = np.zeros(envs.num_envs, np.int32)

    @override
    def begin(self, arrays: Arrays) -> None:
        is_first = self._frame is None
        if is_first:
            try:
                self._frame = self._reset(seed=self._seed)
            except USERS_ERRORS as error:
                self._make_again(0, error)
        for name in ("reward", "episode_return", "episode_length"):
            arrays[name].fill(0)
        if not self._write_frame(arrays, 0) and is_first:
            self._check_resets(arrays, 0)
        self._guard.begin(arrays)

    @override
    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        if self._resets_all:
            self._reset_all(arrays, step)
            return
        assert self._envs is not None, "open"
        try:
            self._frame, rewards, terminated, truncated, info = on_board(
                self._calls, 0, "step", self._envs.step, self._batch(actions)
            )
        except USERS_ERRORS as error:
            self._recover(arrays, step, error)
            return
        taken = ~self._ended
        arrays["mask"][step] = taken
        np.copyto(arrays["reward"][step], rewards, where=taken, casting="unsafe")
        np.logical_and(terminated, taken, out=arrays["terminated"][step])
        np.logical_and(truncated, taken, out=arrays["truncated"][step])
        np.add(self._returns, rewards, out=self._returns, where=taken)
        self._lengths += taken
        np.logical_or(arrays["terminated"][step], arrays["truncated"][step], out=self._ended)
        if self._ended.any():
            self._write_ends(arrays, step, info)
        is_frame_finite = self._write_frame(arrays, step + 1)
        if not (is_frame_finite and is_finite(arrays["reward"][step], self._guard.reward_zeros)):
            self._repair(arrays, step)
        elif self._faults.num_in_a_row and taken.any():
            self._faults.finite()

    def _repair(self, arrays: Arrays, step: int) -> None:
        """Discard what is not finite, and truncate the episodes of all other environments."""
        found, mask = self._guard.find(arrays, step), arrays["mask"][step]
        lengths = np.where(self._ended, arrays["episode_length"][step], self._lengths)
        others = [lane for lane in range(self.num_envs) if lane not in found and mask[lane]]
        if others:
            self._faults.finite()
        for lane in others:
            if not self._ended[lane]:
                arrays["truncated"][step, lane] = True
                self._faults.reset_with_vector()
        self._resets_all = True
        for lane, (key, value) in found.items():
            length = int(lengths[lane]) if mask[lane] else 0
            self._guard.discard(arrays, step, lane)
            self._guard.stand_in(arrays, step + 1, lane)
            self._faults.non_finite(self._found(lane, length, key, value))

    def _reset_all(self, arrays: Arrays, step: int) -> None:
        """Reset all environments: a step that is no transition of any of them."""
        for name in ("mask", "terminated", "truncated"):
            arrays[name][step] = False
        try:
            self._frame = self._reset()
            self._begin_episodes()
        except USERS_ERRORS as error:
            self._make_again(0, error)
        self._write_first_frame(arrays, step)

    def _recover(self, arrays: Arrays, step: int, error: BaseException) -> None:
        """Make all environments again. The step that raised ``error`` becomes the reset of new episodes of all."""
        taken = ~self._ended
        arrays["mask"][step] = taken
        arrays["terminated"][step] = arrays["truncated"][step] = False
        for lane in range(self.num_envs):
            self._guard.discard(arrays, step, lane)
        for _ in range(int(taken.sum()) - 1):  # which of them raised is unknown: one has the error
            self._faults.reset_with_vector()
        self._make_again(int(self._lengths.max()) + 1 if taken.any() else 0, error)
        self._write_first_frame(arrays, step)

    def _make_again(self, step: int, error: BaseException) -> None:
        """Close the environments, of which one raised ``error`` in that step of its episode, and make others.

        Raises:
            EnvironmentFailed: they have failed more often than their budget allows.
            ConfigurationError: the new environments have other spaces.
        """
        while True:
            self._faults.error(self._ranks, step, error)
            if isinstance(error, EnvironmentUnreachable):
                error.wait(WAIT_SECONDS)
            try:
                self._frame = self._replace()
            except ConfigurationError:
                raise
            except USERS_ERRORS as next_error:
                step, error = 0, next_error
                continue
            self._begin_episodes()
            return

    def _replace(self) -> Any:
        """Make the environments again, and return their first observations."""
        failed, self._envs = self._envs, None
        if failed is not None:
            with suppress(Exception, SystemExit):  # they have failed already
                on_board(self._calls, 0, "close", failed.close)
        self._envs = on_board(self._calls, 0, "make", self._make)
        if (spec := _checked_spec(self._envs)) != self.spec:
            raise ConfigurationError(f"{named(self._ranks)} had {self.spec}; made again, they have {spec}")
        self._num_made_again += 1
        rng = np.random.default_rng((self._seed, _MADE_AGAIN, self._num_made_again))
        return self._reset(seed=int(rng.integers(2**31)))

    def _reset(self, **options: Any) -> Any:
        assert self._envs is not None, "open"
        frame, _ = on_board(self._calls, 0, "reset", self._envs.reset, **options)
        return frame

    def _begin_episodes(self) -> None:
        self._resets_all = False
        for values in (self._ended, self._returns, self._lengths):
            values[:] = 0
        for lane in range(self.num_envs):
            self._guard.has_frame(lane)

    def _write_first_frame(self, arrays: Arrays, step: int) -> None:
        """Write the first observations of all episodes behind ``step``."""
        if not self._write_frame(arrays, step + 1):
            self._check_resets(arrays, step + 1)

    def _check_resets(self, arrays: Arrays, frame: int) -> None:
        """Find first observations that are not finite. Then the next step resets all environments again."""
        for lane in range(self.num_envs):
            if (found := self._guard.find_in_frame(arrays, frame, lane)) is not None:
                self._resets_all = True
                self._guard.stand_in(arrays, frame, lane)
                self._faults.non_finite(self._found(lane, 0, *found))

    def _found(self, lane: int, step: int, key: str, value: float) -> NonFiniteValue:
        return NonFiniteValue(rank=self._ranks[lane], step=step, key=key, value=value)

    def _write_ends(self, arrays: Arrays, step: int, info: Any) -> None:
        for name, so_far in (("episode_return", self._returns), ("episode_length", self._lengths)):
            np.copyto(arrays[name][step], so_far, where=self._ended, casting="same_kind")
            so_far[self._ended] = 0
        if not (info or self._chooses_info):
            return
        for lane in np.flatnonzero(self._ended).tolist():
            total, length = arrays["episode_return"][step, lane], arrays["episode_length"][step, lane]
            self._reports[lane].write(arrays, step, lane, info_of_lane(info, lane), total, length)

    def _write_frame(self, arrays: Arrays, frame: int) -> bool:
        """Write the newest observations, and return whether they are finite."""
        finite = True
        for name, keys, zeros in self._keys:
            values = self._frame
            for key in keys:
                values = values[key]
            arrays[name][frame] = values
            if zeros is not None and not is_finite(arrays[name][frame], zeros):
                finite = False
        return finite

    @override
    def close(self) -> None:
        envs, self._envs = self._envs, None
        try:
            if envs is not None:
                on_board(self._calls, 0, "close", envs.close)
        finally:
            close_entry(self._calls)


def _checked_spec(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> EnvSpec:
    """Return the spec of a single environment.

    Raises:
        ConfigurationError: the autoreset is not NEXT_STEP, or a space is not supported.
    """
    from gymnasium.vector import AutoresetMode

    from rlsrl.envs.bounded import BoundedVectorActions

    if (mode := envs.metadata.get("autoreset_mode")) != AutoresetMode.NEXT_STEP:
        raise ConfigurationError(
            f"{_FIELD}: {envs} has the autoreset_mode {getattr(mode, 'value', mode)!r}; NextStep is needed; {_OTHERS}"
        )
    spec = spec_of_spaces(envs.single_observation_space, envs.single_action_space)
    if isinstance(envs, BoundedVectorActions):
        return replace(spec, action=replace(spec.action, vectors=envs.vectors))
    return spec
