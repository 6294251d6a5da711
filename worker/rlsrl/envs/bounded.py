"""Gymnasium wrappers that give an environment actions within [-1, 1], for policies that draw vectors within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorActionWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.api.spec import VectorActions
from rlsrl.runtime.errors import ConfigurationError

Scale = Callable[[NDArray[Any]], NDArray[Any]]
"""From actions within [-1, 1], [..., *shape], to actions within the bounds of a Box."""


class BoundedActions(gymnasium.ActionWrapper[Any, Any, Any]):
    """Scales the actions of one environment from [-1, 1] to the bounds of its Box."""

    def __init__(self, env: gymnasium.Env[Any, Any], vectors: VectorActions) -> None:
        """Take actions that are drawn as ``vectors`` says.

        Raises:
            ConfigurationError: a bound of the environment's Box is infinite.
        """
        super().__init__(env)
        self.vectors = vectors
        """How the actions are drawn."""
        self.action_space, self._scale = scaled(env, env.action_space)

    @override
    def action(self, action: Any) -> Any:
        """Return the environment's action."""
        return self._scale(action)


class BoundedVectorActions(VectorActionWrapper[Any, Any, Any, Any]):
    """Scales the actions of environments that step in bulk, [N, *shape], as ``BoundedActions`` does."""

    def __init__(self, envs: gymnasium.vector.VectorEnv[Any, Any, Any], vectors: VectorActions) -> None:
        """Take actions that are drawn as ``vectors`` says.

        Raises:
            ConfigurationError: a bound of the environments' Box is infinite.
        """
        super().__init__(envs)
        self.vectors = vectors
        """How the actions are drawn."""
        self.single_action_space, self._scale = scaled(envs, envs.single_action_space)
        self.action_space = batch_space(self.single_action_space, envs.num_envs)

    @override
    def actions(self, actions: Any) -> Any:
        """Return the environments' actions."""
        return self._scale(actions)


def are_vectors(space: gymnasium.Space[Any]) -> bool:
    """Return whether the actions of a space are vectors of floats."""
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def scaled(env: object, space: gymnasium.Space[Any]) -> tuple[spaces.Box, Scale]:
    """Return the Box within [-1, 1] that takes the place of ``space``, and the function from its actions to those of
    ``space``.

    Raises:
        ConfigurationError: a bound of ``space`` is infinite; the text begins with ``env``.
    """
    assert isinstance(space, spaces.Box), "the caller scales no other actions"
    if not space.is_bounded():
        raise ConfigurationError(
            f"{env}: the algorithm draws actions within bounds, and {space} has none for each entry; give the "
            "environment's Box finite bounds"
        )
    low, high, dtype = space.low, space.high, space.dtype
    centre, half = (low / 2 + high / 2), (high / 2 - low / 2)

    def scale(actions: NDArray[Any]) -> NDArray[Any]:
        # Rounding may lead beyond a bound.
        batch: NDArray[Any] = np.clip(centre + half * actions, low, high, dtype=dtype)
        return batch

    return spaces.Box(-1.0, 1.0, space.shape, np.float32), scale
