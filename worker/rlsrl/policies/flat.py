"""A network's parameters as one flat vector: the form in which they are trained, sent and stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn

from rlsrl.data.specs import digest
from rlsrl.runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Where each parameter stands in the flat vector: one after the other, in the network's own order."""

    shapes: Mapping[str, tuple[int, ...]]
    """Parameter shapes by name, in order."""

    @classmethod
    def of(cls, network: nn.Module) -> Self:
        """The layout of a network.

        Raises:
            ConfigurationError: it has something that one trained float32 vector cannot hold; the text names it.
        """
        for name, parameter in network.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigurationError(
                    f"network parameter {name!r} is {parameter.dtype}; all have to be torch.float32"
                )
            if not parameter.requires_grad:
                raise ConfigurationError(
                    f"network parameter {name!r} has requires_grad=False; make what is not trained a buffer with "
                    "register_buffer(..., persistent=False)"
                )
        persistent = set(network.state_dict(keep_vars=True)) - {name for name, _ in _all_parameters(network)}
        if persistent:
            raise ConfigurationError(
                f"network buffers {sorted(persistent)} would not travel with the parameters; a constant is registered "
                "with persistent=False, and running statistics (BatchNorm) are not supported: use LayerNorm"
            )
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        if not shapes:
            raise ConfigurationError("the network has no parameters to train")
        return cls(shapes=shapes)

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter, in order."""
        return [math.prod(shape) for shape in self.shapes.values()]

    @property
    def offsets(self) -> dict[str, int]:
        """Where each parameter begins."""
        return dict(zip(self.shapes, accumulate(self.sizes, initial=0), strict=False))

    @property
    def num_parameters(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    @property
    def digest(self) -> str:
        """Equal for networks that read a flat vector alike (``Parameters.layout``)."""
        return digest([[name, list(shape)] for name, shape in self.shapes.items()])

    def below(self, module: str) -> Self:
        """The layout of the module of that name, where all parameters are below it: the places are the same.

        Raises:
            ValueError: some parameter is elsewhere.
        """
        prefix = f"{module}."
        if other := [name for name in self.shapes if not name.startswith(prefix)]:
            raise ValueError(f"parameters {other} are not below {module!r}")
        return type(self)(shapes={name.removeprefix(prefix): shape for name, shape in self.shapes.items()})

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of the vector, one a parameter, in order; gradients flow back into the vector."""
        return [
            part.view(shape) for part, shape in zip(torch.split(vector, self.sizes), self.shapes.values(), strict=True)
        ]

    def flatten(self, network: nn.Module) -> Tensor:
        """A new flat vector with a copy of the network's parameters."""
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in network.named_parameters()])


def _all_parameters(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every name of every parameter: one that is shared has several."""
    return list(network.named_parameters(remove_duplicate=False))
