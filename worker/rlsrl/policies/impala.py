"""The residual convolutional network of IMPALA (Espeholt et al. 2018, figure 3, right)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from rlsrl.data.specs import EnvSpec
from rlsrl.policies.cnn import image_norm, image_of
from rlsrl.policies.networks import Observation, orthogonal

SMALLEST_IMAGE = 8
"""The least height and width: with three sections the last has one place then."""
RESIDUAL_GAIN = 0.1
"""Of the convolution that ends a residual block. With sqrt(2) six blocks would make the first values ten times as
large."""


class ResidualBlock(nn.Module):
    """Two convolutions whose result is added to the input."""

    def __init__(self, channels: int, *, layer_norm: bool) -> None:
        """Keep the number of channels, and height and width. ``layer_norm``: normalise the inputs of activations."""
        super().__init__()
        self.first_norm, self.second_norm = (image_norm(channels) if layer_norm else nn.Identity() for _ in range(2))
        self.first = orthogonal(nn.Conv2d(channels, channels, 3, padding=1), math.sqrt(2))
        self.second = orthogonal(nn.Conv2d(channels, channels, 3, padding=1), RESIDUAL_GAIN)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H, W]."""
        between: Tensor = self.first(functional.relu(self.first_norm(inputs)))
        added: Tensor = self.second(functional.relu(self.second_norm(between)))
        return inputs + added


class ImpalaEncoder(nn.Module):
    """Sections of a convolution, pooling to half the size, and two residual blocks; then a dense layer.

    Takes one image, [C, H, W] uint8 (stacked frames are its channels), and scales it to [0, 1]. Orthogonal weights
    (gain sqrt(2), and ``RESIDUAL_GAIN``) and zero biases. With ``precision="bfloat16"`` all computes in bfloat16
    (autocast: the weights stay float32). ``layer_norm`` normalises the inputs of all activations, of each image.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        channels: Sequence[int] = (16, 32, 32),
        hidden_size: int = 256,
        layer_norm: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
        at: str = "policy.network.impalaCnn",
    ) -> None:
        """Fit the image of ``env_spec``. ``at`` is the field of the spec, for errors.

        Raises:
            ConfigurationError: the observation is not one uint8 image of at least 8 x 8 pixels.
        """
        super().__init__()
        self._path, num_inputs, height, width = image_of(env_spec, at, smallest=SMALLEST_IMAGE)
        self._in_bfloat16 = precision == "bfloat16"
        self.num_features = hidden_size
        sections: list[nn.Module] = []
        for num_outputs in channels:
            sections += [
                orthogonal(nn.Conv2d(num_inputs, num_outputs, 3, padding=1), math.sqrt(2)),
                nn.MaxPool2d(3, stride=2, padding=1),
                ResidualBlock(num_outputs, layer_norm=layer_norm),
                ResidualBlock(num_outputs, layer_norm=layer_norm),
            ]
            num_inputs, height, width = num_outputs, -(-height // 2), -(-width // 2)
        self.body = nn.Sequential(
            *sections,
            *([image_norm(num_inputs)] if layer_norm else []),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(num_inputs * height * width, hidden_size), math.sqrt(2)),
            *([nn.LayerNorm(hidden_size)] if layer_norm else []),
            nn.ReLU(),
        )

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Return the body's outputs, [N, num_features] float32."""
        # As NatureCnn: channels last in memory, and a division in place of the copy that the cast has made.
        dtype = torch.bfloat16 if self._in_bfloat16 else torch.float32
        image = observation[self._path].to(dtype, memory_format=torch.channels_last).div_(255.0)
        with torch.autocast(image.device.type, torch.bfloat16, enabled=self._in_bfloat16):
            features: Tensor = self.body(image)
        return features.float()

    def to_preferred_layout(self, observation: Observation) -> Observation:
        """Return the image with its channels last in memory."""
        return {**observation, self._path: observation[self._path].contiguous(memory_format=torch.channels_last)}
