"""The interface between an environment and its policy: spaces, action mask and how vectors are drawn.

Each stored version contains it, so that its policy acts where the environment is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.spec import VectorActions
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.codec import CodecError, decode_space, encode_space
from rlsrl.envs.spaces import OBSERVATION, Keys, action_decoder, action_spec, observation_keys, spec_of_spaces
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium import spaces

    from rlsrl.envs.bounded import Scale


@dataclass(frozen=True, kw_only=True)
class EnvironmentInterface:
    """What a policy knows of an environment."""

    observation_space: gymnasium.Space[Any]
    """With all wrappers of the experiment: stacked frames, the action mask."""
    action_space: gymnasium.Space[Any]
    """The environment's own. Actions that the policy draws within [-1, 1] are scaled to it."""
    action_mask: str | None = None
    """The observation's key of the action mask; None: all actions are always legal."""
    vector_actions: VectorActions = "gaussian"
    """How vectors of floats are drawn; ``gaussian`` also for other actions."""

    def __post_init__(self) -> None:
        _ = self.spec  # raises if a space is not supported

    @classmethod
    def of(cls, env: gymnasium.Env[Any, Any]) -> Self:
        """Return the interface of ``env``, from its spaces and its outermost wrapper.

        Raises:
            ConfigurationError: a space is missing or not supported; the text names it and the spaces that are.
        """
        from rlsrl.envs.bounded import BoundedActions
        from rlsrl.envs.wrappers import ActionMask

        for name in ("observation_space", "action_space"):
            if getattr(env, name, None) is None:
                raise ConfigurationError(f"{type(env).__name__} has no {name}; set it in its constructor")
        if isinstance(env, BoundedActions):
            action_space, vectors = env.env.action_space, env.vectors
        else:
            action_space, vectors = env.action_space, "gaussian"
        return cls(
            observation_space=env.observation_space,
            action_space=action_space,
            action_mask=env.key if isinstance(env, ActionMask) else None,
            vector_actions=vectors,
        )

    @cached_property
    def spec(self) -> EnvSpec:
        """The spec of the environment's arrays."""
        spec = spec_of_spaces(self.observation_space, self.action_space)
        if self.action_mask is not None:
            return replace(spec, action=replace(spec.action, mask=f"{OBSERVATION}/{self.action_mask}"))
        if self.vector_actions != "gaussian":
            return replace(spec, action=replace(action_spec(self._scaling[0]), vectors=self.vector_actions))
        return spec

    def arrays(self, observation: Any) -> Arrays:
        """Return an observation as arrays by path, in the dtypes of ``spec``.

        Raises:
            ValueError: the observation is not of the space; the text names the path.
        """
        arrays = {}
        for path, keys in self._keys.items():
            value, spec = observation, self.spec.observation[path]
            for key in keys:
                try:
                    value = value[key]
                except (LookupError, TypeError) as error:
                    raise ValueError(f"the observation has no {path}; it is of {self.observation_space}") from error
            if np.shape(value) != spec.shape:
                raise ValueError(f"{path} has the shape {np.shape(value)}; expected {spec.shape}")
            arrays[path] = np.asarray(value).astype(spec.dtype)
        return arrays

    def actions(self, chosen: NDArray[Any]) -> Sequence[Any]:
        """Return the actions of ``action_space`` for those that a policy has chosen, [N, ...]."""
        if self.vector_actions == "gaussian":
            return self._decode(chosen)
        scale = self._scaling[1]
        return [scale(action) for action in self._decode(chosen)]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back."""
        return {
            "observation_space": encode_space(self.observation_space),
            "action_space": encode_space(self.action_space),
            "action_mask": self.action_mask,
            "vector_actions": self.vector_actions,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            CodecError: the value is not an interface.
            ConfigurationError: a space is not supported.
        """
        try:
            mask, vectors = value["action_mask"], value["vector_actions"]
            observation, action = value["observation_space"], value["action_space"]
        except (KeyError, TypeError) as error:
            raise CodecError(f"{str(value)[:200]} is not an environment's interface: {error!r}") from error
        if vectors not in get_args(VectorActions):
            raise CodecError(f"vector_actions is {vectors!r}; allowed: {', '.join(get_args(VectorActions))}")
        return cls(
            observation_space=decode_space(observation),
            action_space=decode_space(action),
            action_mask=None if mask is None else str(mask),
            vector_actions=vectors,
        )

    @cached_property
    def _keys(self) -> Mapping[str, Keys]:
        return observation_keys(self.observation_space)

    @cached_property
    def _scaling(self) -> tuple[spaces.Box, Scale]:
        """The Box within [-1, 1], and the function from its actions to those of ``action_space``."""
        from rlsrl.envs.bounded import scaled

        return scaled("environment", self.action_space)

    @cached_property
    def _decode(self) -> Callable[[NDArray[Any]], Sequence[Any]]:
        is_scaled = self.vector_actions != "gaussian"
        return action_decoder(self._scaling[0] if is_scaled else self.action_space)
