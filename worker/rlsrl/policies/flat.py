"""A network's parameters as one flat vector, in which they are trained, sent and stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn

from rlsrl.parameters.layout import layout_digest
from rlsrl.runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The place of each parameter in the flat vector. Parameters follow each other in the network's order."""

    shapes: Mapping[str, tuple[int, ...]]
    """Parameter shapes by name, in order."""

    @classmethod
    def of(cls, network: nn.Module) -> Self:
        """Return the layout of a network.

        Raises:
            ConfigurationError: one trained float32 vector cannot hold a parameter or buffer; the text names it.
        """
        for name, parameter in network.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigurationError(
                    f"network parameter {name!r} is {parameter.dtype}; all parameters must be torch.float32"
                )
            if not parameter.requires_grad:
                raise ConfigurationError(
                    f"network parameter {name!r} has requires_grad=False; make it a buffer with "
                    "register_buffer(..., persistent=False)"
                )
        every_name = (name for name, _ in network.named_parameters(remove_duplicate=False))  # shared ones have several
        persistent = set(network.state_dict(keep_vars=True)).difference(every_name)
        if persistent:
            raise ConfigurationError(
                f"network buffers {sorted(persistent)} are not sent with the parameters; register constants with "
                "persistent=False. Running statistics (BatchNorm) are not supported: use LayerNorm"
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
        """The offset of each parameter, by name."""
        return dict(zip(self.shapes, accumulate(self.sizes, initial=0), strict=False))

    @property
    def num_parameters(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    @property
    def digest(self) -> str:
        """A short hash, equal for networks that read a flat vector in the same way (``Parameters.layout``)."""
        return layout_digest(self.shapes)

    def below(self, module: str) -> Self:
        """Return the layout of the module of that name, which holds all parameters: their places stay the same.

        Raises:
            ValueError: another module holds a parameter, too.
        """
        prefix = f"{module}."
        if others := [name for name in self.shapes if not name.startswith(prefix)]:
            raise ValueError(f"parameters {others} are not below {module!r}")
        return type(self)(shapes={name.removeprefix(prefix): shape for name, shape in self.shapes.items()})

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of the vector, one per parameter, in order. Gradients flow into the vector."""
        return [
            part.view(shape) for part, shape in zip(torch.split(vector, self.sizes), self.shapes.values(), strict=True)
        ]

    def flatten(self, network: nn.Module) -> Tensor:
        """Return a new flat vector with a copy of the network's parameters."""
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in network.named_parameters()])
