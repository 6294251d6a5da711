"""Environments that are stepped together, straight into the arrays of a slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.check import first_observation, unusable_observation, unusable_step
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.faults import EnvironmentFaults, NonFiniteValue, SlotGuard, is_finite
from rlsrl.envs.lane_environments import EnvCall, LaneEnvironments
from rlsrl.envs.spaces import action_decoder, observation_keys
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.runtime.call_board import IDLE, LANE, NUM_CALLS, CallBoard, on_board, private_entry
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError

if TYPE_CHECKING:
    import gymnasium

_DECORRELATION = 0xDEC0
"""Second word of the seed that decorrelation draws from: the environment uses the same first word."""
_MADE_AGAIN = 0xDEC1
"""Second word of the seed of an environment that is made again."""
_LARGEST_RETURN = float(np.finfo(np.float32).max) / 2
"""A reward that turns one smaller return into another is finite as a float32."""


class VectorEnv(Protocol):
    """N environments that write into slots (see ``rlsrl.data.slots``). Episodes continue from slot to slot.

    Autoreset is NEXT_STEP, across slots as well: if an episode ends with a slot's last step, the first step of the next
    slot resets it.
    """

    spec: EnvSpec
    """The spec of each environment."""
    num_envs: int
    """N: the number of environments, which is the number of lanes of each slot."""

    def begin(self, arrays: Arrays) -> None:
        """Start on a slot: write frame 0, the newest observation of each environment, and clear the fields of steps.

        The first call resets each environment with its seed. The slot before may be unfilled, or freed already.
        """

    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        """Take step ``step`` of the slot with ``actions`` [N, ...].

        Writes ``reward``, ``terminated``, ``truncated``, ``mask``, ``episode_return`` and ``episode_length`` of
        ``step``, and the frame ``step + 1``. Where an episode is reported, also its ``episode_info/...``. Steps of a
        slot come in order, after ``begin``.

        All of it is finite. Where an environment gives what is not, its step is no transition (``mask`` is False), the
        step before is truncated, and the frame after it is the first of a new episode (``faults.SlotGuard``). The
        return of the episode that a fault has cut is not reported. The same holds for a step that raises or returns
        what does not fit; such an environment is closed and made again.

        Raises:
            ConfigurationError: an environment that was made again has other spaces than before, or a chosen value of
                ``info`` is not a number.
            EnvironmentFailed: an environment failed more often than its budget allows.
            EnvironmentFault: too many values in a row are not finite.
            WaitAbandoned: an environment's server is away, and the environments are no longer wanted.
        """

    def close(self) -> None:
        """Close the environments."""


class LoopVectorEnv(VectorEnv):
    """Steps its environments in a plain loop: the least work per step for fast environments without a bulk form."""

    _are_small = True
    """Whether all returns are below ``_LARGEST_RETURN``."""

    def __init__(
        self,
        make: Callable[[int], gymnasium.Env[Any, Any]],
        *,
        seeds: Sequence[int],
        first_rank: int = 0,
        max_decorrelation_steps: int = 0,
        wrap_call: Callable[[EnvCall], EnvCall] = lambda call: call,
        faults: EnvironmentFaults | None = None,
        board: CallBoard | None = None,
        reports: EpisodeReports | None = None,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make one environment per seed. Environments whose server is away are waited for.

        Args:
            make: Makes the environment with that environment rank.
            seeds: The seed of each environment's first reset. Later resets continue its random stream.
            first_rank: The environment rank of the first environment. Errors name environment ranks.
            max_decorrelation_steps: Upper bound of the random steps that each environment takes before the first slot,
                so that episodes of equal length do not end together. Random steps are not transitions, but they count
                in the return and length of their episode.
            wrap_call: Returns the substitute of an ``EnvCall``. Not for the first making of each environment.
            faults: Counts the environments' faults; None: they are logged only.
            board: Shows the environments' calls to the call watch; None: no call watch runs.
            reports: Chooses what episodes report; None: return and length.
            still_wanted: Asked while an environment's server is away: False abandons the wait.

        Raises:
            ConfigurationError: a space is not supported, or the environments have different spaces.
            EnvironmentFailed: ``make`` raised another error.
            WaitAbandoned: an environment's server is away, and the environments are no longer wanted.
        """
        if not seeds:
            raise ConfigurationError("a vector environment needs at least one seed")
        self._faults = faults or EnvironmentFaults()
        self._calls = private_entry() if board is None else board.open_entry(first_rank)
        self._wrap_call = wrap_call
        self.num_envs = len(seeds)
        self._seeds = tuple(seeds)
        self._first_rank = first_rank
        self._max_decorrelation_steps = max_decorrelation_steps
        self._num_made_again = 0
        self._envs = LaneEnvironments(
            make, self.num_envs, first_rank=first_rank, calls=self._calls, wrap_call=wrap_call, faults=self._faults,
            still_wanted=still_wanted,
        )  # fmt: skip
        self.spec = self._envs.spec
        self._all_reports = reports or EpisodeReports()
        lanes = range(self.num_envs)
        self._reports = [self._all_reports.of(first_rank + lane, self._envs[lane]) for lane in lanes]
        self._guard = SlotGuard(self.spec, self.num_envs)
        self._keys = _written_arrays(self._envs[0], self._guard)
        self._decode = action_decoder(self._envs[0].action_space)
        # Bound methods and plain lists: `step` touches them once per environment and step.
        self._steps = [wrap_call(self._envs[lane].step) for lane in lanes]
        self._observations: list[Any] = []
        self._ended = [False] * len(seeds)
        self._returns = [0.0] * len(seeds)
        self._lengths = [0] * len(seeds)

    @override
    def begin(self, arrays: Arrays) -> None:
        is_first = not self._observations
        if is_first:
            self._observations = [self._start(lane, seed) for lane, seed in enumerate(self._seeds)]
        for name in ("reward", "terminated", "truncated", "episode_return", "episode_length"):
            arrays[name].fill(0)
        arrays["mask"].fill(True)
        if not self._write_frame(arrays, 0) and is_first:
            for lane in range(self.num_envs):
                self._check_reset(arrays, 0, lane)
        self._guard.begin(arrays)

    @override
    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        """Take one step. It writes flags only where an episode ends: ``begin`` cleared the others."""
        rewards, decoded = arrays["reward"][step], self._decode(actions)
        observations, ended, returns, lengths = self._observations, self._ended, self._returns, self._lengths
        calls, reports = self._calls, self._reports
        ended_with = 0.0  # the norm of the returns with which episodes end
        calls[NUM_CALLS] += 1
        for lane, (env_step, action) in enumerate(zip(self._steps, decoded, strict=True)):
            calls[LANE] = lane
            result: Any = ...
            try:
                if ended[lane]:
                    ended[lane] = False
                    arrays["mask"][step, lane] = False
                    observations[lane] = self._reset(lane)
                    self._guard.has_frame(lane)
                    if lengths[lane] and reports[lane].is_over():
                        returns[lane], lengths[lane] = 0.0, 0
                    continue
                result = env_step(action)
                observations[lane], reward, terminated, truncated, info = result
                rewards[lane] = reward
                returns[lane] += float(reward)
                lengths[lane] += 1
                if terminated or truncated:
                    ended[lane] = True
                    arrays["terminated"][step, lane] = terminated
                    arrays["truncated"][step, lane] = truncated
                    if not reports[lane].goes_on(info, terminated=terminated):
                        reports[lane].write(arrays, step, lane, info, returns[lane], lengths[lane])
                        ended_with = math.hypot(ended_with, returns[lane])
                        returns[lane], lengths[lane] = 0.0, 0
            except ConfigurationError:
                raise
            except USERS_ERRORS as error:
                calls[LANE] = IDLE
                reason = error if result is ... else unusable_step(self._envs[lane], result, error)
                self._recover(arrays, step, lane, lengths[lane] + 1, reason)
        calls[LANE] = IDLE
        is_frame_finite = self._write_frame(arrays, step + 1)
        # A reward that is not finite makes a return so. This takes a seventh of the time of ``is_finite``.
        were_small, self._are_small = self._are_small, math.hypot(ended_with, *returns) < _LARGEST_RETURN
        if not (is_frame_finite and were_small and self._are_small):
            self._repair(arrays, step)
        elif self._faults.num_in_a_row and arrays["mask"][step].any():
            self._faults.finite()

    def _write_frame(self, arrays: Arrays, frame: int) -> bool:
        """Write the newest observations, and return whether they are finite."""
        while True:
            lane, finite = 0, True
            try:
                for name, keys, zeros in self._keys:
                    row = arrays[name][frame]
                    for lane, observation in enumerate(self._observations):
                        for key in keys:
                            observation = observation[key]  # noqa: PLW2901 - down nested Dicts and Tuples
                        row[lane] = observation
                    if zeros is not None and not is_finite(row, zeros):
                        finite = False
                return finite
            except (ValueError, TypeError, LookupError) as error:
                source = "step" if self._lengths[lane] or self._ended[lane] else "reset"
                reason = unusable_observation(self._envs[lane], self._observations[lane], source, error)
                length = int(arrays["episode_length"][frame - 1, lane]) if frame else 0
                self._recover(arrays, frame - 1, lane, length or self._lengths[lane], reason)

    def _recover(self, arrays: Arrays, step: int, lane: int, length: int, error: BaseException) -> None:
        """Make an environment again. Its step becomes the reset of a new episode; the caller writes the next frame.

        Args:
            arrays: The slot.
            step: The step of the slot in which it failed; -1 for a reset before the slot.
            lane: Its lane.
            length: Steps of its episode until then, the failed one included.
            error: What it raised, or why its result cannot be used.
        """
        is_step = step >= 0 and bool(arrays["mask"][step, lane])
        if step >= 0:
            self._guard.discard(arrays, step, lane)
        self._observations[lane] = self._make_again(lane, length if is_step else 0, error)

    def _repair(self, arrays: Arrays, step: int) -> None:
        """Reset the lanes whose step or reset was not finite, and write their lane of the slot again."""
        guard, mask = self._guard, arrays["mask"][step]
        found = guard.find(arrays, step)
        if any(mask[lane] for lane in range(self.num_envs) if lane not in found):
            self._faults.finite()
        for lane, (key, value) in found.items():
            if not mask[lane]:
                continue  # it was a reset
            length = int(arrays["episode_length"][step, lane]) or self._lengths[lane]
            guard.discard(arrays, step, lane)
            self._faults.non_finite(self._found(lane, length, key, value))
            try:
                self._observations[lane] = self._reset(lane)
            except USERS_ERRORS as error:
                self._observations[lane] = self._make_again(lane, 0, error)
            self._ended[lane], self._returns[lane], self._lengths[lane] = False, 0.0, 0
        self._write_frame(arrays, step + 1)
        for lane in found:
            self._check_reset(arrays, step + 1, lane)

    def _check_reset(self, arrays: Arrays, frame: int, lane: int) -> None:
        """Check the first observation of an episode, in ``frame``. If it is not finite, the next step resets again."""
        if (found := self._guard.find_in_frame(arrays, frame, lane)) is not None:
            self._guard.stand_in(arrays, frame, lane)
            self._ended[lane] = True
            self._faults.non_finite(self._found(lane, 0, *found))

    def _found(self, lane: int, step: int, key: str, value: float) -> NonFiniteValue:
        return NonFiniteValue(rank=self._first_rank + lane, step=step, key=key, value=value)

    def _reset(self, lane: int, **options: Any) -> Any:
        """Reset the environment and return its observation."""
        env = self._envs[lane]
        return first_observation(env, on_board(self._calls, lane, "reset", self._wrap_call(env.reset), **options))

    def _start(self, lane: int, seed: int) -> Any:
        """Reset with the seed, take the decorrelation steps, and return the first observation."""
        try:
            observation = self._reset(lane, seed=seed)
            return self._decorrelated(lane, seed, observation) if self._max_decorrelation_steps else observation
        except USERS_ERRORS as error:
            return self._make_again(lane, 0, error)

    def _make_again(self, lane: int, step: int, error: BaseException) -> Any:
        """Close the environment that raised ``error`` in that step of its episode, and make another in its place.

        Return the first observation of the new one, after a reset with a seed of its own. If the environment's server
        is away, wait for it: the wait is no further fault, however often the server fails meanwhile.

        Raises:
            EnvironmentFailed: the environment has failed more often than its budget allows.
            ConfigurationError: the new environment has other spaces.
            WaitAbandoned: the server is away, and the environments are no longer wanted.
        """
        has_waited = False
        while True:
            if not (has_waited and isinstance(error, EnvironmentUnreachable)):
                self._faults.error(self._envs.ranks(lane), step, error)
            if isinstance(error, EnvironmentUnreachable):
                self._envs.await_server(lane, error)
                has_waited = True
            try:
                observation = self._replace(lane)
            except ConfigurationError:
                raise
            except USERS_ERRORS as next_error:
                step, error = 0, next_error
                continue
            self._ended[lane] = False
            self._returns[lane], self._lengths[lane] = 0.0, 0
            self._guard.has_frame(lane)
            return observation

    def _replace(self, lane: int) -> Any:
        env = self._envs.replace(lane)
        self._steps[lane] = self._wrap_call(env.step)
        self._reports[lane] = self._all_reports.of(self._first_rank + lane, env)
        self._num_made_again += 1
        rng = np.random.default_rng((self._seeds[lane], _MADE_AGAIN, self._num_made_again))
        return self._reset(lane, seed=int(rng.integers(2**31)))

    def _decorrelated(self, lane: int, seed: int, observation: Any) -> Any:
        from rlsrl.envs.wrappers import random_action

        env, rng = self._envs[lane], np.random.default_rng((seed, _DECORRELATION))
        env.action_space.seed(int(rng.integers(2**31)))
        for _ in range(int(rng.integers(self._max_decorrelation_steps + 1))):
            self._calls[NUM_CALLS] += 1
            self._calls[LANE] = lane
            result = self._steps[lane](random_action(env, observation))
            self._calls[LANE] = IDLE
            try:
                observation, reward, terminated, truncated, info = result
                self._returns[lane] += float(reward)
            except (TypeError, ValueError) as error:
                reason = unusable_step(env, result, error)
                raise reason from (None if reason is error else error)
            self._lengths[lane] += 1
            if terminated or truncated:
                goes_on = self._reports[lane].goes_on(info, terminated=terminated)
                observation = self._reset(lane)
                if not goes_on or self._reports[lane].is_over():
                    self._returns[lane], self._lengths[lane] = 0.0, 0
        if not math.isfinite(self._returns[lane]):
            observation = self._reset(lane)
            self._returns[lane], self._lengths[lane] = 0.0, 0
        return observation

    @override
    def close(self) -> None:
        """Close every environment, even if one fails, then raise the failure. Idempotent."""
        self._envs.close()


def _written_arrays(env: gymnasium.Env[Any, Any], guard: SlotGuard) -> tuple[tuple[str, Any, Any], ...]:
    """Return each array of a frame: its name, the keys to its place in an observation, and its guard's zeros."""
    return tuple(
        (name, keys, guard.frame_zeros[name]) for name, keys in observation_keys(env.observation_space).items()
    )
