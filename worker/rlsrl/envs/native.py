"""Environments that step in bulk: by the vectorised form that their id is registered with at Gymnasium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import Arrays
from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_in_bulk
from rlsrl.envs.spaces import action_batcher, observation_keys, spec_of_spaces
from rlsrl.envs.vector import EnvironmentFailed, VectorEnv
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

_FIELD = "actors.vectorization: native"
_OTHERS = "use loop or threads"


def make_native(source: EnvironmentSource, num_envs: int, *, seed: int, first_rank: int = 0) -> NativeVectorEnv:
    """Return ``num_envs`` environments of ``source`` that step in bulk. The caller closes them.

    Raises:
        ConfigurationError: the id has no vectorised form, that form has other spaces than a single environment, or its
            autoreset is not NEXT_STEP.
    """
    single = environment_spec(source)
    envs = make_in_bulk(source, num_envs)
    if envs is None:
        raise ConfigurationError(
            f"{_FIELD}: {source} is registered without a vectorised form (vector_entry_point); {_OTHERS}"
        )
    try:
        native = NativeVectorEnv(envs, seed=seed, first_rank=first_rank)
        if native.spec != single:
            raise ConfigurationError(
                f"{_FIELD}: the vectorised form of {source} has the spec {native.spec}, but the policy is made for "
                f"that of a single environment, {single}; {_OTHERS}"
            )
        return native
    except BaseException:
        envs.close()
        raise


class NativeVectorEnv(VectorEnv):
    """Writes the steps of a ``gymnasium.vector.VectorEnv`` into slots.

    Slots use Gymnasium's autoreset NEXT_STEP: the step after an episode's end is its reset, and not a transition.
    A vector environment takes one seed, from which all its environments draw. So its episodes differ from those of a
    loop, unless there is only one environment.
    """

    def __init__(self, envs: gymnasium.vector.VectorEnv[Any, Any, Any], *, seed: int, first_rank: int = 0) -> None:
        """Step ``envs``, which ``close`` closes. ``seed`` seeds the first reset; errors name ranks.

        Raises:
            ConfigurationError: the autoreset is not NEXT_STEP, or a space is not supported.
        """
        from gymnasium.vector import AutoresetMode

        if (mode := envs.metadata.get("autoreset_mode")) != AutoresetMode.NEXT_STEP:
            raise ConfigurationError(
                f"{_FIELD}: {envs} has the autoreset_mode {getattr(mode, 'value', mode)!r}; NextStep is needed; "
                f"{_OTHERS}"
            )
        self.num_envs = envs.num_envs
        self._envs = envs
        self._seed = seed
        self._first_rank = first_rank
        self.spec = spec_of_spaces(envs.single_observation_space, envs.single_action_space)
        self._keys = tuple(observation_keys(envs.single_observation_space).items())
        self._batch = action_batcher(envs.single_action_space)
        self._frame: Any = None
        """The newest observations; None before the first reset."""
        self._ended: NDArray[np.bool_] = np.zeros(envs.num_envs, np.bool_)
        """For each environment: whether its next step only resets."""
        self._returns: NDArray[np.float64] = np.zeros(envs.num_envs)
        self._lengths: NDArray[np.int32] = np.zeros(envs.num_envs, np.int32)

    @override
    def begin(self, arrays: Arrays) -> None:
        if self._frame is None:
            try:
                self._frame, _ = self._envs.reset(seed=self._seed)
            except Exception as error:
                raise self._failure(error) from error
        for name in ("reward", "episode_return", "episode_length"):
            arrays[name].fill(0)
        self._write_frame(arrays, 0)

    @override
    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
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
        return EnvironmentFailed(
            f"environment ranks {ranks}, which step in bulk, raised {type(error).__name__}: {error}"
        )

    @override
    def close(self) -> None:
        self._envs.close()
