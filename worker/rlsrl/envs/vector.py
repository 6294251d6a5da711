"""Stepping several environments in lockstep, straight into the arrays of a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.info_keys import EPISODE_CONTINUES
from rlsrl.envs.spaces import action_decoder, observation_keys, spec_of
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

_DECORRELATION = 0xDEC0
"""Sets the numbers that decorrelate apart from those that the environment draws of the same seed."""


Call = Callable[..., Any]
"""An environment's ``step`` or ``reset``."""


class EnvironmentFailed(RuntimeError):
    """An environment raised; the text names its rank, the cause is what it raised."""


class VectorEnv(Protocol):
    """N environments that write into slots (see ``rlsrl.data.slots``) and never stop between them.

    Autoreset is NEXT_STEP and carries over slots: an episode that ends with a slot's last step is reset by the first
    step of the next one.
    """

    @property
    def spec(self) -> EnvSpec:
        """What each environment gives and takes."""

    @property
    def num_envs(self) -> int:
        """N: lanes of the slots to be filled."""

    def begin(self, arrays: Arrays) -> None:
        """Start on a slot: write frame 0, the newest observation of each environment, and clear what steps fill.

        The first slot's frame 0 is each environment's seeded reset. The slot before need not have been filled to its
        end, nor exist any more.
        """

    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        """Take step ``step`` of the slot with ``actions`` [N, ...].

        Writes ``reward``, ``terminated``, ``truncated``, ``mask``, ``episode_return`` and ``episode_length`` of
        ``step``, and the frame ``step + 1``. Steps of a slot come in order, after ``begin``.

        Raises:
            EnvironmentFailed: an environment raised.
        """

    def close(self) -> None:
        """Close the environments."""


def common_spec(specs: Sequence[EnvSpec], first_rank: int) -> EnvSpec:
    """What environments, from that rank on, all give and take.

    Raises:
        ConfigurationError: they differ.
    """
    first, *others = specs
    for rank, other in enumerate(others, start=first_rank + 1):
        if other != first:
            raise ConfigurationError(f"environments differ: rank {first_rank} has {first}, rank {rank} {other}")
    return first


class LoopVectorEnv:
    """A plain loop: the least work a step where environments are fast and cannot step themselves in bulk."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        *,
        seeds: Sequence[int],
        first_rank: int = 0,
        max_decorrelation_steps: int = 0,
        around: Callable[[Call], Call] = lambda call: call,
    ) -> None:
        """Make one environment a seed.

        Args:
            make: Makes one environment.
            seeds: The seed of each environment's first reset; later resets go on from there.
            first_rank: The rank of the first environment in the whole fleet; errors name ranks.
            max_decorrelation_steps: Each environment takes a random number of random steps, up to this one, before the
                first slot, so that episodes of equal length do not all end together. They are no transitions, but
                count in the return and length of the episode that they begin.
            around: What an environment's ``step`` and ``reset`` are called through: gets the method, gives what is
                called in its place.

        Raises:
            ConfigurationError: a space is not supported, or the environments differ in their spaces.
        """
        if not seeds:
            raise ConfigurationError("a vector environment holds at least one environment")
        self._around = around
        self._seeds = tuple(seeds)
        self._first_rank = first_rank
        self._max_decorrelation_steps = max_decorrelation_steps
        self._envs: list[gymnasium.Env[Any, Any]] = []
        try:
            for _ in seeds:
                self._envs.append(make())
            self._spec = common_spec([spec_of(env) for env in self._envs], first_rank)
        except BaseException:
            self.close()
            raise
        self._keys = tuple(observation_keys(self._envs[0].observation_space).items())
        self._decode = action_decoder(self._envs[0].action_space)
        # Bound methods and plain lists: what the loop below touches once an environment and step.
        self._steps = [around(env.step) for env in self._envs]
        self._observations: list[Any] = []
        self._ended = [False] * len(seeds)
        self._returns = [0.0] * len(seeds)
        self._lengths = [0] * len(seeds)

    @property
    def spec(self) -> EnvSpec:
        """What each environment gives and takes."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """N: lanes of the slots to be filled."""
        return len(self._envs)

    def begin(self, arrays: Arrays) -> None:
        """See ``VectorEnv``; the first call resets every environment with its seed."""
        if not self._observations:
            self._observations = [self._start(lane, seed) for lane, seed in enumerate(self._seeds)]
        for name in ("reward", "terminated", "truncated", "episode_return", "episode_length"):
            arrays[name].fill(0)
        arrays["mask"].fill(True)
        self._write_frame(arrays, 0)

    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        """See ``VectorEnv``. Flags are written only where an episode ends: ``begin`` cleared them."""
        rewards, decoded = arrays["reward"][step], self._decode(actions)
        observations, ended, returns, lengths = self._observations, self._ended, self._returns, self._lengths
        lane = 0
        try:
            for lane, (env_step, action) in enumerate(zip(self._steps, decoded, strict=True)):
                if ended[lane]:
                    ended[lane] = False
                    arrays["mask"][step, lane] = False
                    observations[lane], _ = self._reset(lane)
                    continue
                observations[lane], reward, terminated, truncated, info = env_step(action)
                rewards[lane] = reward
                returns[lane] += float(reward)
                lengths[lane] += 1
                if terminated or truncated:
                    ended[lane] = True
                    arrays["terminated"][step, lane] = terminated
                    arrays["truncated"][step, lane] = truncated
                    if EPISODE_CONTINUES in info:
                        continue
                    arrays["episode_return"][step, lane] = returns[lane]
                    arrays["episode_length"][step, lane] = lengths[lane]
                    returns[lane] = 0.0
                    lengths[lane] = 0
        except Exception as error:
            raise self._failure(lane, error) from error
        self._write_frame(arrays, step + 1)

    def _write_frame(self, arrays: Arrays, frame: int) -> None:
        lane = 0
        try:
            for name, keys in self._keys:
                row = arrays[name][frame]
                for lane, observation in enumerate(self._observations):
                    for key in keys:
                        observation = observation[key]  # noqa: PLW2901 - down a nested Dict
                    row[lane] = observation
        except (ValueError, TypeError, KeyError) as error:
            raise self._failure(lane, error) from error

    def _reset(self, lane: int, **options: Any) -> Any:
        return self._around(self._envs[lane].reset)(**options)

    def _start(self, lane: int, seed: int) -> Any:
        """The seeded reset and what goes before the first slot; the observation to begin with."""
        try:
            observation, _ = self._reset(lane, seed=seed)
            return self._decorrelated(lane, seed, observation) if self._max_decorrelation_steps else observation
        except Exception as error:
            raise self._failure(lane, error) from error

    def _decorrelated(self, lane: int, seed: int, observation: Any) -> Any:
        env, rng = self._envs[lane], np.random.default_rng((seed, _DECORRELATION))
        env.action_space.seed(int(rng.integers(2**31)))
        for _ in range(int(rng.integers(self._max_decorrelation_steps + 1))):
            observation, reward, terminated, truncated, info = self._steps[lane](self._random_action(env, observation))
            self._returns[lane] += float(reward)
            self._lengths[lane] += 1
            if terminated or truncated:
                observation, _ = self._reset(lane)
                if EPISODE_CONTINUES not in info:
                    self._returns[lane], self._lengths[lane] = 0.0, 0
        return observation

    def _random_action(self, env: gymnasium.Env[Any, Any], observation: Any) -> Any:
        if (path := self._spec.action.mask) is None:
            return env.action_space.sample()
        mask: Any = observation
        for key in dict(self._keys)[path]:
            mask = mask[key]
        return env.action_space.sample(mask=np.asarray(mask, np.int8))

    def _failure(self, lane: int, error: Exception) -> EnvironmentFailed:
        rank = self._first_rank + lane
        return EnvironmentFailed(f"environment rank {rank} raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close every environment, also if some fail to; a failure is raised at the end. Idempotent."""
        envs, self._envs = self._envs, []
        with ExitStack() as stack:
            for env in envs:
                stack.callback(env.close)
