"""The torch-free form of an actor: which layers of the flat parameter vector it consists of. numpy only.

A trainer exports its actor network once as an ``ExportedActor`` and publishes it beside the weights. Actors, policy
workers and evaluators evaluate it with a few matrix products (``numpy_policy``). At these sizes that is several times
faster than torch, and needs no import of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.spec import Recurrent, RecurrentKind
from rlsrl.data.specs import ActionPart, ArraySpec, PartKind, state_specs

SMALLEST = np.finfo(np.float32).tiny
"""Lower bound of draws and probabilities: they can be exactly 0, and their logarithm must be finite."""
MASKED_LOGIT = -1e9
"""The logit of an illegal action: beside any other its probability is exactly 0, and its entropy is not NaN."""

LOG_STD_RANGE = (-20.0, 2.0)
"""Range of the logarithms of deviations that a network computes, as in the reference implementations of soft
actor-critic."""

Activation = Literal["identity", "tanh", "relu"]
Floats = NDArray[np.float32]


class LayoutMismatch(ValueError):
    """The weights belong to another network than the actor; the text names both layouts."""


def _relu(values: Floats, out: Floats) -> None:
    np.maximum(values, 0, out=out)


ACTIVATIONS: Mapping[Activation, Callable[..., Any] | None] = {"identity": None, "tanh": np.tanh, "relu": _relu}
"""The in-place function of each activation; None for the identity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLayer:
    """``activation(norm(W x + b))``, with W [out_size, in_size] row by row and b [out_size] in the flat vector.

    With ``means_of`` the vector has so many times as many rows and biases: each output is the mean of that many in a
    row, as the value of an action is of its quantiles.
    """

    name: str
    """The layer's name in its network, for error texts."""
    weight_offset: int
    bias_offset: int
    in_size: int
    out_size: int
    activation: Activation
    norm_offset: int | None = None
    """Place of the layer normalisation's gain [out_size] in the flat vector, with its shift [out_size] behind it; None:
    outputs go to the activation as they are."""
    means_of: int = 1

    @property
    def num_rows(self) -> int:
        """Rows and biases in the flat vector."""
        return self.out_size * self.means_of

    @property
    def end(self) -> int:
        """One past the last place of the flat vector that the layer reads."""
        norm_end = 0 if self.norm_offset is None else self.norm_offset + 2 * self.out_size
        return max(self.weight_offset + self.num_rows * self.in_size, self.bias_offset + self.num_rows, norm_end)

    def fault(self, num_parameters: int) -> str | None:
        """Return what is wrong with the layer in a vector of that length, or None."""
        places = (self.weight_offset, self.bias_offset, self.norm_offset or 0, self.out_size, self.means_of - 1)
        if min(places) < 0 or self.end > num_parameters:
            return f"layer {self.name!r} reads outside the {num_parameters} parameters"
        if self.activation not in ACTIVATIONS:
            return f"layer {self.name!r}: activation {self.activation!r} is not one of {[*ACTIVATIONS]}"
        return None

    @property
    def macs(self) -> int:
        """Multiply-adds for one observation."""
        return self.in_size * self.out_size


NUM_GATES: Mapping[RecurrentKind, int] = {"gru": 3, "lstm": 4}
"""Rows of a recurrent layer's weights for each of its units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayer:
    """A recurrent layer with the parameters of ``nn.GRUCell`` or ``nn.LSTMCell``, row by row in the flat vector.

    ``weight_ih`` [gates * size, in_size], ``weight_hh`` [gates * size, size], ``bias_ih`` and ``bias_hh`` [gates *
    size] begin at the places of these names. Its output is its state ``hidden``.
    """

    kind: RecurrentKind
    name: str
    """The layer's name in its network, for error texts."""
    in_size: int
    size: int
    weight_ih: int
    weight_hh: int
    bias_ih: int
    bias_hh: int

    @property
    def num_rows(self) -> int:
        """Rows of the weights, and biases of each kind."""
        return NUM_GATES[self.kind] * self.size

    @property
    def out_size(self) -> int:
        """Its outputs."""
        return self.size

    @property
    def end(self) -> int:
        """One past the last place of the flat vector that the layer reads."""
        return max(
            self.weight_ih + self.num_rows * self.in_size,
            self.weight_hh + self.num_rows * self.size,
            max(self.bias_ih, self.bias_hh) + self.num_rows,
        )

    @property
    def macs(self) -> int:
        """Multiply-adds for one observation."""
        return self.num_rows * (self.in_size + self.size)

    @property
    def state(self) -> dict[str, ArraySpec]:
        """The layer's state by name, per lane."""
        return state_specs(Recurrent(kind=self.kind, size=self.size).state_sizes)

    def fault(self, num_parameters: int) -> str | None:
        """Return what is wrong with the layer in a vector of that length, or None."""
        if self.kind not in NUM_GATES:
            return f"layer {self.name!r}: kind {self.kind!r} is not one of {[*NUM_GATES]}"
        places = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.size - 1)
        if min(places) < 0 or self.end > num_parameters:
            return f"layer {self.name!r} reads outside the {num_parameters} parameters"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedEncoder:
    """Dense layers over some of the observation's arrays alone."""

    paths: tuple[str, ...]
    """The arrays, in the order of the observation."""
    layers: tuple[DenseLayer, ...]
    """From input to output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalHead:
    """The last layer's outputs are the logits of ``num_actions`` choices, or their values."""

    kind: Literal["categorical"] = "categorical"
    num_actions: int
    mask: str | None = None
    """Path of the observation array [num_actions] that is 0 for illegal choices; None: all choices are legal."""
    is_values: bool = False
    """Whether the outputs are values, which become logits by ``epsilon_greedy``."""

    @property
    def parts(self) -> tuple[ActionPart, ...]:
        """The action's one part."""
        return (ActionPart(kind="categorical", num_outputs=self.num_actions),)

    @property
    def num_outputs(self) -> int:
        """Outputs the last layer must have."""
        return self.num_actions

    @property
    def distribution_size(self) -> int:
        """Parameters of the distribution: the outputs."""
        return self.num_actions


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianHead:
    """The last layer's outputs are the mean of a vector of ``num_dimensions``; its deviation is a parameter of its own.

    The logarithm of each entry's standard deviation stands in the flat vector, and is the same for all observations.
    """

    kind: Literal["gaussian"] = "gaussian"
    num_dimensions: int
    log_std_offset: int

    @property
    def mask(self) -> None:
        """None: a vector has no illegal choices."""

    @property
    def parts(self) -> tuple[ActionPart, ...]:
        """The action's one part."""
        return (ActionPart(kind="gaussian", num_outputs=self.num_dimensions),)

    @property
    def num_outputs(self) -> int:
        """Outputs the last layer must have."""
        return self.num_dimensions

    @property
    def distribution_size(self) -> int:
        """Parameters of the distribution: means, then logarithms of the deviations."""
        return 2 * self.num_dimensions

    @property
    def log_std(self) -> slice:
        """The slice of the flat vector that holds the logarithms of the deviations."""
        return slice(self.log_std_offset, self.log_std_offset + self.num_dimensions)


@dataclass(frozen=True, kw_only=True, slots=True)
class SquashedHead:
    """The last layer's outputs are the means of a vector of ``num_dimensions``, then the logarithms of its deviations,
    before the tanh is taken."""

    kind: Literal["squashed"] = "squashed"
    num_dimensions: int

    @property
    def mask(self) -> None:
        """None: a vector has no illegal choices."""

    @property
    def parts(self) -> tuple[ActionPart, ...]:
        """The action's one part."""
        return (ActionPart(kind="squashed", num_outputs=self.num_dimensions),)

    @property
    def num_outputs(self) -> int:
        """Outputs the last layer must have."""
        return 2 * self.num_dimensions

    @property
    def distribution_size(self) -> int:
        """Parameters of the distribution: the outputs."""
        return 2 * self.num_dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedHead:
    """The last layer's outputs, within [-1, 1], are the means of a vector of ``num_dimensions``.

    All entries have one deviation, which is a statistic of the version (``exploration``).
    """

    kind: Literal["clipped"] = "clipped"
    num_dimensions: int

    @property
    def mask(self) -> None:
        """None: a vector has no illegal choices."""

    @property
    def parts(self) -> tuple[ActionPart, ...]:
        """The action's one part."""
        return (ActionPart(kind="clipped", num_outputs=self.num_dimensions),)

    @property
    def num_outputs(self) -> int:
        """Outputs the last layer must have."""
        return self.num_dimensions

    @property
    def distribution_size(self) -> int:
        """Parameters of the distribution: means, then logarithms of the deviations."""
        return 2 * self.num_dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class JointHead:
    """The last layer's outputs are the logits and means of several parts, one part after the other.

    The logarithms of the deviations of all means follow each other in the flat vector, the same for all observations.
    """

    kind: Literal["joint"] = "joint"
    parts: tuple[ActionPart, ...]
    log_std_offset: int = 0
    """Place of the first deviation in the flat vector; without means it is not used."""
    mask: str | None = None
    """Path of the observation array [num_outputs] that is 0 for illegal choices; None: all choices are legal, or a part
    is not categorical."""

    @property
    def num_outputs(self) -> int:
        """Outputs the last layer must have."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def distribution_size(self) -> int:
        """Parameters of the distribution: those of its parts, one part after the other."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def log_std(self) -> slice:
        """The slice of the flat vector that holds the logarithms of the deviations."""
        return slice(self.log_std_offset, self.log_std_offset + sum(part.num_deviations for part in self.parts))


Head = CategoricalHead | GaussianHead | SquashedHead | ClippedHead | JointHead
HEADS: Mapping[str, type[Head]] = {
    "categorical": CategoricalHead,
    "gaussian": GaussianHead,
    "squashed": SquashedHead,
    "clipped": ClippedHead,
    "joint": JointHead,
}
"""Heads by kind."""


@dataclass(frozen=True, kw_only=True)
class ExportedActor:
    """How to compute the parameters of the action distribution from an observation and the flat vector."""

    layout: str
    """Digest of the parameter layout that the offsets refer to (``Parameters.layout``)."""
    num_parameters: int
    """Length of the flat vector."""
    observation: Mapping[str, ArraySpec]
    """Observation arrays by path, without a mask. Each array is flattened, standardised if the version has statistics
    for it, and cast to float32; categories become one-hot. Then all are concatenated in this order."""
    encoders: tuple[ExportedEncoder, ...] = ()
    """Their outputs stand in the place of the arrays that they take."""
    layers: tuple[DenseLayer | RecurrentLayer, ...]
    """From input to output; each layer takes the outputs of the one before. At most one is recurrent, not the last."""
    head: Head
    """What the last layer's outputs mean."""

    def __post_init__(self) -> None:
        size = sum(self._check(part.layers, self._num_inputs(part.paths)) for part in self.parts)
        size = self._check(self.layers, size)
        if not self.layers or size != self.head.num_outputs:
            raise ValueError(f"the layers give {size} outputs; the {self.head.kind} head takes {self.head.num_outputs}")
        recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        if len(recurrent) > 1 or self.layers[-1] in recurrent:
            raise ValueError(f"layers {[layer.name for layer in recurrent]}: one may be recurrent, and not the last")
        if isinstance(self.head, GaussianHead | JointHead):
            log_std = self.head.log_std
            if not 0 <= log_std.start <= log_std.stop <= self.num_parameters:
                raise ValueError(f"the {self.head.kind} head reads outside the {self.num_parameters} parameters")

    def _check(self, layers: Sequence[DenseLayer | RecurrentLayer], size: int) -> int:
        """Return the number of outputs of layers that get ``size`` inputs."""
        for layer in layers:
            if layer.in_size != size:
                raise ValueError(f"layer {layer.name!r} takes {layer.in_size} inputs and would get {size}")
            if (fault := layer.fault(self.num_parameters)) is not None:
                raise ValueError(fault)
            size = layer.out_size
        return size

    def _num_inputs(self, paths: Sequence[str]) -> int:
        return sum(self.observation[path].num_features for path in paths)

    @cached_property
    def parts(self) -> tuple[ExportedEncoder, ...]:
        """What the first of ``layers`` takes, in order: encoders, and each other array as one without layers.

        Raises:
            ValueError: an encoder takes no arrays of its own, or such as do not follow each other in the observation.
        """
        by_path = {encoder.paths[:1]: encoder for encoder in self.encoders}
        parts, paths, place = [], tuple(self.observation), 0
        while place < len(paths):
            first = paths[place : place + 1]
            part = by_path.pop(first, ExportedEncoder(paths=first, layers=()))
            end = place + len(part.paths)
            if paths[place:end] != part.paths:
                raise ValueError(f"an encoder takes {[*part.paths]}, which do not follow each other in the observation")
            parts.append(part)
            place = end
        if by_path:
            raise ValueError(f"encoders of {[*by_path]} take no arrays of {[*self.observation]}")
        if len({encoder.paths[:1] for encoder in self.encoders}) < len(self.encoders):
            raise ValueError("two encoders take the same arrays")
        return tuple(parts)

    @property
    def all_layers(self) -> tuple[DenseLayer | RecurrentLayer, ...]:
        """Those of the encoders, then ``layers``."""
        return (*(layer for part in self.parts for layer in part.layers), *self.layers)

    @property
    def recurrent(self) -> RecurrentLayer | None:
        """The recurrent layer, if there is one."""
        return next((layer for layer in self.layers if isinstance(layer, RecurrentLayer)), None)

    @property
    def state(self) -> dict[str, ArraySpec]:
        """The recurrent state by name, per lane; empty without a recurrent layer."""
        return {} if self.recurrent is None else self.recurrent.state

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back."""
        return {
            "layout": self.layout,
            "num_parameters": self.num_parameters,
            "observation": [[path, spec.to_json()] for path, spec in self.observation.items()],
            **({"encoders": [_encoder_to_json(each) for each in self.encoders]} if self.encoders else {}),
            "layers": [*map(_fields_of, self.layers)],
            "head": _head_to_json(self.head),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: the value is not an exported actor, or its layers do not fit together.
        """
        return cls(
            layout=str(value["layout"]),
            num_parameters=int(value["num_parameters"]),
            observation={str(path): ArraySpec.from_json(spec) for path, spec in value["observation"]},
            encoders=tuple(
                ExportedEncoder(paths=tuple(each["paths"]), layers=tuple(DenseLayer(**one) for one in each["layers"]))
                for each in value.get("encoders", ())
            ),
            layers=tuple(RecurrentLayer(**each) if "kind" in each else DenseLayer(**each) for each in value["layers"]),
            head=_head_from_json(value["head"]),
        )


def _fields_of(part: DenseLayer | RecurrentLayer | Head) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__slots__}


def _encoder_to_json(encoder: ExportedEncoder) -> dict[str, Any]:
    return {"paths": [*encoder.paths], "layers": [*map(_fields_of, encoder.layers)]}


def _head_to_json(head: Head) -> dict[str, Any]:
    fields = _fields_of(head)
    if isinstance(head, JointHead):
        fields["parts"] = [[part.kind, part.num_outputs] for part in head.parts]
    return fields


def _head_from_json(value: Mapping[str, Any]) -> Head:
    kind = value["kind"]
    if kind not in HEADS:
        raise ValueError(f"head {kind!r} is not one of {[*HEADS]}")
    if kind != "joint":
        return HEADS[kind](**value)
    for part, _ in value["parts"]:
        if part not in get_args(PartKind):
            raise ValueError(f"part {part!r} is not one of {[*get_args(PartKind)]}")
    return JointHead(**{**value, "parts": tuple(ActionPart(kind=part, num_outputs=n) for part, n in value["parts"])})
