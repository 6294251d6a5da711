"""The convolutional network of Mnih et al. (2015), "Human-level control through deep reinforcement learning"."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.data.specs import EnvSpec
from rlsrl.policies.distributions import constant_deviations, policy_head
from rlsrl.policies.networks import (
    ACTION_VALUES_HEAD,
    POLICY_HEAD,
    VALUE_HEAD,
    Heads,
    Observation,
    action_values,
    num_choices,
    orthogonal,
)
from rlsrl.runtime.errors import ConfigurationError

SMALLEST_IMAGE = 36
"""The least height and width: the last convolution has one output place then."""


class NatureCnn(nn.Module):
    """Convolutions 32 x 8 / 4, 64 x 4 / 2 and 64 x 3 / 1, then a dense layer.

    Takes one image, [C, H, W] uint8 (stacked frames are its channels), and scales it to [0, 1]. Orthogonal weights
    (gain sqrt(2)) and zero biases, as CleanRL's ``ppo_atari.py``.

    With ``precision="bfloat16"`` they compute in bfloat16 (autocast: their weights stay float32). ``layer_norm``
    normalises each image's outputs of each layer before their activation.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_size: int = 512,
        layer_norm: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
        at: str = "policy.network.cnn",
    ) -> None:
        """Fit the image and the actions of ``env_spec``. ``at`` is the field of the spec, for errors.

        Raises:
            ConfigurationError: the observation is not one uint8 image of at least 36 x 36 pixels.
        """
        super().__init__()
        self._path, channels, height, width = image_of(env_spec, at, smallest=SMALLEST_IMAGE)
        self._in_bfloat16, self._has_norms = precision == "bfloat16", layer_norm
        self.num_features = hidden_size
        root = math.sqrt(2)
        norms = [image_norm(number) if layer_norm else None for number in (32, 64, 64)]
        modules = (
            orthogonal(nn.Conv2d(channels, 32, 8, stride=4), root),
            norms[0],
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), root),
            norms[1],
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3), root),
            norms[2],
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * _places(height) * _places(width), hidden_size), root),
            nn.LayerNorm(hidden_size) if layer_norm else None,
            nn.ReLU(),
        )
        self.body = nn.Sequential(*(module for module in modules if module is not None))

    def features(self, observation: Observation) -> Tensor:
        """Return the body's outputs, [N, hidden_size] float32."""
        image = self._image(observation, torch.bfloat16 if self._in_bfloat16 else torch.float32)
        with torch.autocast(image.device.type, torch.bfloat16, enabled=self._in_bfloat16):
            features: Tensor = self.body(image)
        return features.float()

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the image with its channels last in memory: reading it takes a fifth of the time."""
        return {**observation, self._path: observation[self._path].contiguous(memory_format=torch.channels_last)}

    def _image(self, observation: Observation, dtype: torch.dtype) -> Tensor:
        # Convolutions on a CPU are about twice as fast with the channels last in memory. The division is in place: the
        # cast from uint8 has copied the image. Both types hold every uint8 exactly, so only the quotient is rounded.
        return observation[self._path].to(dtype, memory_format=torch.channels_last).div_(255.0)


class CnnEncoder(NatureCnn):
    """The body as the encoder of a recurrent network."""

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Return the body's outputs, [N, num_features]."""
        return self.features(observation)


class CnnHeads(NatureCnn, ABC):
    """Heads on one body. They compute in float32 from its features."""

    @abstractmethod
    def of_actions(self, features: Tensor) -> Tensor:
        """Return the head that is needed to act, [N, A], for features [N, hidden_size]."""

    def prepared_actor(self) -> Callable[[Observation], Tensor]:
        """Return the actor. In bfloat16 it casts the body's weights once: autocast would cast them at each call."""
        body, dtype = self.body, torch.float32
        if self._in_bfloat16:
            body, dtype = copy.deepcopy(self.body), torch.bfloat16
            for layer in body:
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    layer.bfloat16()
        if not (self._in_bfloat16 and self._has_norms):
            return lambda observation: self.of_actions(body(self._image(observation, dtype)).float())

        def act(observation: Observation) -> Tensor:
            image = self._image(observation, dtype)
            with torch.autocast(image.device.type, dtype):  # it decides how norms are computed
                features: Tensor = body(image)
            return self.of_actions(features.float())

        return act


class NatureCnnPolicy(CnnHeads):
    """Logits and means of actions on the body; gain 0.01 before them.

    The deviations of ``gaussian`` actions are parameters that do not depend on the observation, those of ``squashed``
    ones outputs like the means. They start at 1.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_size: int = 512,
        layer_norm: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        """Fit the image and the actions of ``env_spec``: see ``NatureCnn``."""
        super().__init__(env_spec, hidden_size=hidden_size, layer_norm=layer_norm, precision=precision)
        self._action = env_spec.action
        self.actor = orthogonal(nn.Linear(hidden_size, self._action.num_layer_outputs), 0.01)
        self.log_std = constant_deviations(self._action)

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return ``policy`` [N, A]."""
        return {POLICY_HEAD: self.of_actions(self.features(observation))}

    @override
    def of_actions(self, features: Tensor) -> Tensor:
        return policy_head(self._action, self.actor(features), self.log_std)


class NatureCnnActorCritic(NatureCnnPolicy):
    """Policy and value on the body; gain 1 before the value."""

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_size: int = 512,
        layer_norm: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        """Fit the image and the actions of ``env_spec``: see ``NatureCnn``."""
        super().__init__(env_spec, hidden_size=hidden_size, layer_norm=layer_norm, precision=precision)
        self.critic = orthogonal(nn.Linear(hidden_size, 1), 1.0)

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return ``policy`` [N, A] and ``value`` [N]."""
        features = self.features(observation)
        return {POLICY_HEAD: self.of_actions(features), VALUE_HEAD: self.critic(features).squeeze(-1)}


class NatureCnnActionValues(CnnHeads):
    """The value of each action on the body; gain 1 before the values. Options as of ``MlpActionValues``."""

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        hidden_size: int = 512,
        layer_norm: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
        dueling: bool = False,
        quantiles: int = 1,
    ) -> None:
        """Fit the image and the discrete actions of ``env_spec``: see ``NatureCnn``.

        Raises:
            ConfigurationError: the actions are not discrete.
        """
        num_actions = num_choices(env_spec)
        super().__init__(env_spec, hidden_size=hidden_size, layer_norm=layer_norm, precision=precision)
        self._quantiles = quantiles
        self.q = orthogonal(nn.Linear(hidden_size, num_actions * quantiles), 1.0)
        self.value = orthogonal(nn.Linear(hidden_size, quantiles), 1.0) if dueling else None

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return the values of actions, ``q`` [N, A], and their ``quantiles`` [N, A, K] if there are several."""
        return self._heads(self.features(observation))

    @override
    def of_actions(self, features: Tensor) -> Tensor:
        return self._heads(features)[ACTION_VALUES_HEAD]

    def _heads(self, features: Tensor) -> Heads:
        value = None if self.value is None else self.value(features)
        return action_values(self.q(features), value, quantiles=self._quantiles)


def image_norm(channels: int) -> nn.GroupNorm:
    """Return a layer normalisation of images, [N, C, H, W]: each over all its channels and places (Ba et al. 2016).

    Gain and bias are of channels.
    """
    return nn.GroupNorm(1, channels)


def image_of(env_spec: EnvSpec, at: str, *, smallest: int) -> tuple[str, int, int, int]:
    """Return (path, channels, height, width) of the observation's one image.

    Raises:
        ConfigurationError: it is not one uint8 image of at least ``smallest`` pixels in height and width. The error
            names the field ``at``.
    """
    described = ", ".join(f"{path} {spec.dtype}{list(spec.shape)}" for path, spec in env_spec.observation.items())
    if len(env_spec.observation) == 1:
        ((path, spec),) = env_spec.observation.items()
        if spec.dtype == "uint8" and len(spec.shape) == 3 and min(spec.shape[1:]) >= smallest:
            return path, *spec.shape
    advice = "environment.frameStack stacks images [height, width] as channels"
    if len(env_spec.observation) > 1:
        advice = "policy.network.encoders, beside mlp, has a cnn or impalaCnn for one key each"
    raise ConfigurationError(
        f"{at} needs one uint8 image [channels, height, width] of at least {smallest} x {smallest} pixels, and gets "
        f"{described}. {advice}"
    )


def _places(size: int) -> int:
    """Return the output places of the three convolutions along an axis of ``size`` pixels."""
    return ((size - 8) // 4 + 1 - 4) // 2 + 1 - 2
