"""Environments that step in bulk, by the vectorisation that they are registered with at Gymnasium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_in_bulk
from rlsrl.envs.spaces import action_batcher, observation_keys, spec_of_spaces
from rlsrl.envs.vector import EnvironmentFailed
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

_FIELD = "actors.vectorization: native"
_OTHERS = "allowed are loop and threads"


def make_native(source: EnvironmentSource, num_envs: int, *, seed: int, first_rank: int = 0) -> NativeVectorEnv:
    """So many environments of ``source`` that step in bulk, to be closed by the caller.

    Raises:
        ConfigurationError: they have no vectorisation of their own, or one that gives or takes something else than a
            single environment does, or that does not reset with the next step.
    """
    single = environment_spec(source)
    envs = make_in_bulk(source, num_envs)
    if envs is None:
        raise ConfigurationError(
            f"{_FIELD}: {source} is registered without a vectorisation of its own (vector_entry_point); {_OTHERS}"
        )
    try:
        native = NativeVectorEnv(envs, seed=seed, first_rank=first_rank)
        if native.spec != single:
            raise ConfigurationError(
                f"{_FIELD}: {source} gives and takes {native.spec} in bulk, and {single} by itself, which is what the "
                f"policy is made for; {_OTHERS}"
            )
        return native
    except BaseException:
        envs.close()
        raise


class NativeVectorEnv:
    """Writes what a ``gymnasium.vector.VectorEnv`` gives into slots: see ``rlsrl.envs.vector.VectorEnv``.

    Gymnasium's autoreset NEXT_STEP is that of slots: what an ended environment gives in the next step is its reset, and
    no transition. One seed is all that a vector environment takes; the environments draw from it together, so that
    they are other episodes than a loop's, but where there is one environment.
    """

    def __init__(self, envs: gymnasium.vector.VectorEnv[Any, Any, Any], *, seed: int, first_rank: int = 0) -> None:
        """Step ``envs``, which ``close`` closes; ``seed`` is of their first reset, errors name ranks.

        Raises:
            ConfigurationError: they do not reset with the next step, or a space is not supported.
        """
        from gymnasium.vector import AutoresetMode

        if (mode := envs.metadata.get("autoreset_mode")) != AutoresetMode.NEXT_STEP:
            raise ConfigurationError(
                f"{_FIELD}: the vectorisation of {envs} has the autoreset_mode {getattr(mode, 'value', mode)!r}, "
                f"where NextStep is needed; {_OTHERS}"
            )
        self._envs = envs
        self._seed = seed
        self._first_rank = first_rank
        self._spec = spec_of_spaces(envs.single_observation_space, envs.single_action_space)
        self._keys = tuple(observation_keys(envs.single_observation_space).items())
        self._batch = action_batcher(envs.single_action_space)
        self._frame: Any = None
        """The newest observations; None before the first reset."""
        self._ended: NDArray[np.bool_] = np.zeros(envs.num_envs, np.bool_)
        """Whose next step only resets."""
        self._returns: NDArray[np.float64] = np.zeros(envs.num_envs)
        self._lengths: NDArray[np.int32] = np.zeros(envs.num_envs, np.int32)

    @property
    def spec(self) -> EnvSpec:
        """What each environment gives and takes."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """N: lanes of the slots to be filled."""
        return len(self._ended)

    def begin(self, arrays: Arrays) -> None:
        """See ``VectorEnv``; the first call resets with the seed."""
        if self._frame is None:
            try:
                self._frame, _ = self._envs.reset(seed=self._seed)
            except Exception as error:
                raise self._failure(error) from error
        for name in ("reward", "episode_return", "episode_length"):
            arrays[name].fill(0)
        self._write_frame(arrays, 0)

    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        """See ``VectorEnv``."""
        try:
            self._frame, rewards, terminated, truncated, _ = self._envs.step(self._batch(actions))
        except Exception as error:
            raise self._failure(error) from error
        taken = ~self._ended
        arrays["mask"][step] = taken
        np.copyto(arrays["reward"][step], rewards, where=taken, casting="unsafe")
        np.logical_and(terminated, taken, out=arrays["terminated"][step])
        np.logical_and(truncated, taken, out=arrays["truncated"][step])
        np.add(self._returns, rewards, out=self._returns, where=taken)
        self._lengths += taken
        np.logical_or(arrays["terminated"][step], arrays["truncated"][step], out=self._ended)
        if self._ended.any():
            self._write_ends(arrays, step)
        self._write_frame(arrays, step + 1)

    def _write_ends(self, arrays: Arrays, step: int) -> None:
        for name, so_far in (("episode_return", self._returns), ("episode_length", self._lengths)):
            np.copyto(arrays[name][step], so_far, where=self._ended, casting="same_kind")
            so_far[self._ended] = 0

    def _write_frame(self, arrays: Arrays, frame: int) -> None:
        for name, keys in self._keys:
            values = self._frame
            for key in keys:
                values = values[key]
            arrays[name][frame] = values

    def _failure(self, error: Exception) -> EnvironmentFailed:
        ranks = f"{self._first_rank} to {self._first_rank + self.num_envs - 1}"
        return EnvironmentFailed(f"environment ranks {ranks}, stepped in bulk, raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the environments. Idempotent."""
        self._envs.close()
