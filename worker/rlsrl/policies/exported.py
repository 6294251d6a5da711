"""The torch-free form of an actor: dense layers over the flat parameter vector. numpy only.

A trainer exports its actor network once as an ``ExportedActor`` and sends it along with the weights; an actor evaluates
it with a few matrix products, several times faster than torch at these sizes and without importing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import Slot
from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.normalization import Standardization
from rlsrl.policies.sampling import make_sampler

MASKED_LOGIT = -1e9
"""The logit of a choice that is illegal: its probability is exactly 0 beside any other's, its entropy no NaN."""

Activation = Literal["identity", "tanh", "relu"]
Floats = NDArray[np.float32]


class LayoutMismatch(ValueError):
    """The weights are of another network than the program; the text names both layouts."""


def _relu(values: Floats, out: Floats) -> None:
    np.maximum(values, 0, out=out)


ACTIVATIONS: Mapping[Activation, Callable[..., Any] | None] = {"identity": None, "tanh": np.tanh, "relu": _relu}
"""What each activation does, in place; None: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLayer:
    """``activation(W x + b)``, with W [out_size, in_size] row by row and b [out_size] in the flat vector."""

    name: str
    """The network's own name of the layer, for error texts."""
    weight_offset: int
    bias_offset: int
    in_size: int
    out_size: int
    activation: Activation

    @property
    def end(self) -> int:
        """One past the last place of the flat vector that the layer reads."""
        return max(self.weight_offset + self.out_size * self.in_size, self.bias_offset + self.out_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalHead:
    """The last layer's outputs are the logits of ``num_actions`` choices."""

    kind: Literal["categorical"] = "categorical"
    num_actions: int
    mask: str | None = None
    """Path of the observation array [num_actions] that is 0 for choices that are illegal; None: all are legal."""

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
        """A vector has no illegal choices."""

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
        """Where the logarithms of the deviations stand in the flat vector."""
        return slice(self.log_std_offset, self.log_std_offset + self.num_dimensions)


Head = CategoricalHead | GaussianHead
HEADS: Mapping[str, type[Head]] = {"categorical": CategoricalHead, "gaussian": GaussianHead}
"""Heads by kind."""


@dataclass(frozen=True, kw_only=True)
class ExportedActor:
    """How to compute the parameters of the action distribution from an observation and the flat vector."""

    layout: str
    """Digest of the parameter layout that the offsets refer to (``Parameters.layout``)."""
    num_parameters: int
    """Length of the flat vector."""
    observation: Mapping[str, ArraySpec]
    """Observation arrays by path, without a mask. Each is flattened, standardised if the version has statistics of it,
    and cast to float32; then they are concatenated in this order."""
    layers: tuple[DenseLayer, ...]
    """From input to output; each takes what the one before gives."""
    head: Head
    """What the last layer's outputs mean."""

    def __post_init__(self) -> None:
        size = sum(_size(spec) for spec in self.observation.values())
        for layer in self.layers:
            if layer.in_size != size:
                raise ValueError(f"layer {layer.name!r} takes {layer.in_size} inputs and would get {size}")
            if min(layer.weight_offset, layer.bias_offset, layer.out_size) < 0 or layer.end > self.num_parameters:
                raise ValueError(f"layer {layer.name!r} reads outside the {self.num_parameters} parameters")
            if layer.activation not in ACTIVATIONS:
                raise ValueError(
                    f"layer {layer.name!r}: activation {layer.activation!r} is not one of {[*ACTIVATIONS]}"
                )
            size = layer.out_size
        if not self.layers or size != self.head.num_outputs:
            raise ValueError(f"the layers give {size} outputs; the {self.head.kind} head takes {self.head.num_outputs}")
        if isinstance(self.head, GaussianHead) and not 0 <= self.head.log_std.start <= self.head.log_std.stop <= (
            self.num_parameters
        ):
            raise ValueError(f"the gaussian head reads outside the {self.num_parameters} parameters")

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back."""
        return {
            "layout": self.layout,
            "num_parameters": self.num_parameters,
            "observation": [[path, spec.to_json()] for path, spec in self.observation.items()],
            "layers": [{name: getattr(layer, name) for name in DenseLayer.__slots__} for layer in self.layers],
            "head": {name: getattr(self.head, name) for name in self.head.__slots__},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: the value is not a program, or its layers do not fit together.
        """
        kind = value["head"]["kind"]
        if kind not in HEADS:
            raise ValueError(f"head {kind!r} is not one of {[*HEADS]}")
        return cls(
            layout=str(value["layout"]),
            num_parameters=int(value["num_parameters"]),
            observation={str(path): ArraySpec.from_json(spec) for path, spec in value["observation"]},
            layers=tuple(DenseLayer(**layer) for layer in value["layers"]),
            head=HEADS[kind](**value["head"]),
        )


def _size(spec: ArraySpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64))


class DenseWeights:
    """A program's weights, and the statistics that its observations are normalised with. One thread uses them."""

    def __init__(self, program: ExportedActor) -> None:
        self.program = program
        self.version: Version | None = None
        """What is loaded; None before."""
        self.layers: Sequence[Floats] = [
            np.zeros((layer.out_size, layer.in_size + 1), np.float32) for layer in program.layers
        ]
        """[W, b] of each layer, [out_size, in_size + 1]; the same arrays whatever is loaded."""
        head = program.head
        self.log_std: Floats = np.zeros((head.distribution_size - head.num_outputs, 1), np.float32)
        """Of a Gaussian head, [A, 1]; the same array whatever is loaded."""
        self.standardizations: Sequence[Standardization | None] = [None] * len(program.observation)
        """Of each observation, for [features, N]; None: it is not normalised."""

    def load(self, parameters: Parameters) -> None:
        """Evaluate with these from now on.

        Raises:
            LayoutMismatch: they are of another network.
        """
        program, vector = self.program, parameters.vector
        if parameters.layout != program.layout or vector.size != program.num_parameters:
            raise LayoutMismatch(
                f"weights of layout {parameters.layout} ({vector.size} values) do not fit the program's "
                f"{program.layout} ({program.num_parameters})"
            )
        for layer, weight in zip(program.layers, self.layers, strict=True):
            begin, size = layer.weight_offset, layer.out_size * layer.in_size
            weight[:, :-1] = vector[begin : begin + size].reshape(layer.out_size, layer.in_size)
            weight[:, -1] = vector[layer.bias_offset : layer.bias_offset + layer.out_size]
        if isinstance(program.head, GaussianHead):
            self.log_std[:, 0] = vector[program.head.log_std]
        found = [Standardization.of(parameters.statistics, path) for path in program.observation]
        self.standardizations = [each and each.as_column() for each in found]
        self.version = parameters.version


class DenseStack:
    """Evaluates a program for N lanes at a time, with whatever is loaded. One thread uses it.

    Everything is feature-major, [features, N], and a constant row of ones behind each layer's inputs carries the bias:
    a layer is then one matrix product straight into the next layer's contiguous input, with no transposed weights and
    no addition.
    """

    def __init__(self, weights: DenseWeights, num_lanes: int, *, product: Callable[..., Any] = np.dot) -> None:
        """Evaluate with ``weights``; ``product`` is of two matrices, into ``out``."""
        program = weights.program
        self._product = product
        self._loaded = weights
        inputs = [np.ones((layer.in_size + 1, num_lanes), np.float32) for layer in program.layers]
        ends = np.cumsum([_size(spec) for spec in program.observation.values()])
        self._observation: list[Floats] = np.split(inputs[0][:-1], ends[:-1])
        """The rows of each observation path."""
        activations = [ACTIVATIONS[layer.activation] for layer in program.layers]
        outputs = [following[:-1] for following in inputs[1:]]
        *hidden, self._last = zip(weights.layers, inputs, [*outputs, None], activations, strict=True)
        self._hidden = hidden
        self._num_outputs = program.head.num_outputs
        self._log_std = weights.log_std

    def forward(self, observation: Sequence[NDArray[Any]], out: Floats, mask: NDArray[Any] | None = None) -> None:
        """Write the parameters of the action distribution, [A, N], for observations [features, N] by path in order.

        ``mask`` [A, N] is that of the head's path, if it has one.
        """
        standardizations, product = self._loaded.standardizations, self._product
        for rows, standardization, values in zip(self._observation, standardizations, observation, strict=True):
            if standardization is None:
                rows[...] = values
            else:
                standardization.apply(values, out=rows)
        for weight, inputs, outputs, activate in self._hidden:
            product(weight, inputs, out=outputs)
            if activate is not None:
                activate(outputs, out=outputs)
        weight, inputs, _, activate = self._last
        outputs = out[: self._num_outputs]
        product(weight, inputs, out=outputs)
        if activate is not None:
            activate(outputs, out=outputs)
        out[self._num_outputs :] = self._log_std
        if mask is not None:
            np.copyto(out, MASKED_LOGIT, where=mask == 0)


class NumpyActor:
    """Acts by evaluating a program: ``policies.acting.RolloutActor`` without torch."""

    def __init__(
        self,
        program: ExportedActor,
        *,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        greedy: bool = False,
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``.

        ``greedy``: take the most probable action, as evaluation does.
        """
        self._program = program
        self._weights = DenseWeights(program)
        self._stack = DenseStack(self._weights, num_lanes)
        self._sampler = make_sampler(
            program.head.kind,
            program.head.num_outputs,
            num_steps=num_steps,
            num_lanes=num_lanes,
            rng=rng,
            greedy=greedy,
        )
        self._distributions = list(self._sampler.parameters)

    def load(self, parameters: Parameters) -> None:
        """Act with these weights from the next step on.

        Raises:
            LayoutMismatch: they are of another network.
        """
        self._weights.load(parameters)

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps."""
        if self._weights.version is None:
            raise RuntimeError("load() comes before begin()")
        arrays = slot.arrays
        self._frames = [feature_major(arrays[path]) for path in self._program.observation]
        mask = self._program.head.mask
        self._masks = [None] * len(arrays["mask"]) if mask is None else list(feature_major(arrays[mask]))
        self._actions = arrays["action"]
        self._log_probs = arrays["behavior_log_prob"]
        self._attempts, self._steps = arrays["version_attempt"], arrays["version_step"]
        self._sampler.begin()

    def act(self, step: int) -> NDArray[Any]:
        """Choose the actions of that step; without a mask it allocates no array data."""
        self._attempts[step], self._steps[step] = self._weights.version  # type: ignore[misc]  # begin() has checked
        self._stack.forward([frames[step] for frames in self._frames], self._distributions[step], self._masks[step])
        actions: NDArray[Any] = self._actions[step]
        self._sampler.choose(step, actions)
        return actions

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps."""
        self._sampler.log_probs(self._actions, self._log_probs)


def feature_major(frames: NDArray[Any]) -> NDArray[Any]:
    """[T+1, N, ...] as a view [T+1, features, N]."""
    return frames.reshape(*frames.shape[:2], -1).transpose(0, 2, 1)
