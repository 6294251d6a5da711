"""``spec.policy``: the network and what it sees."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsrl.api.model import INTEGRAL, Arguments, Model
from rlsrl.api.spec.scalars import Attribute

HiddenSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65_536), INTEGRAL], ...], Field(strict=False, min_length=1, max_length=16)
]
"""Units of each hidden layer."""
RecurrentKind = Literal["gru", "lstm"]
StateSize = Annotated[int, Field(ge=1, le=1_048_576), INTEGRAL]
"""Numbers of an array of a recurrent state, for one environment."""
Initialization = Literal["orthogonal", "uniform"]
"""Orthogonal weights and zero biases, or PyTorch's default: uniform within 1 / sqrt(inputs)."""
VALUE_OPTIONS = ("dueling", "quantiles")
"""The fields of built-in networks that only algorithms use which learn the values of actions."""


class Mlp(Model):
    """A multi-layer perceptron for each output of the network: policy and value, or the values of actions."""

    hidden_sizes: HiddenSizes = (64, 64)
    """Units of each hidden layer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """The activation function of the hidden layers."""
    layer_norm: bool = False
    """Whether the hidden layers are normalised before their activation function (Ba et al. 2016)."""
    share_layers: bool = False
    """Whether all outputs share the hidden layers, and have only a last layer each. With ``recurrent`` they always
    do."""
    initialization: Initialization = "orthogonal"
    """The first weights: ``orthogonal`` (gain sqrt(2), and 0.01 before the policy) with zero biases, or ``uniform``
    within 1 / sqrt(inputs), PyTorch's default."""
    dueling: bool = False
    """For algorithms that learn the values of actions: whether these are the sum of the observation's value and of each
    action's advantage, each by layers of its own (Wang et al. 2016)."""
    quantiles: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Quantiles of each action's return that such a network learns (Dabney et al. 2018). 1: its value alone."""


class Cnn(Model):
    """The convolutional network of Mnih et al. (2015): all outputs share three convolutions and a dense layer. For one
    image, ``[channels, height, width]`` of uint8, of at least 36 x 36 pixels."""

    hidden_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 512
    """Units of the dense layer."""
    initialization: Initialization = "orthogonal"
    """The first weights: ``orthogonal`` with zero biases, or ``uniform`` within 1 / sqrt(inputs), PyTorch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of the convolutions and the dense layer. ``bfloat16`` is faster on processors with ``amx_bf16``
    (x86) and on AMD's with ``avx512_bf16``; it is slower on Intel's with ``avx512_bf16`` alone and on all others.
    Weights, logits, values and losses stay float32."""
    dueling: bool = False
    """For algorithms that learn the values of actions: whether these are the sum of the observation's value and of each
    action's advantage (Wang et al. 2016)."""
    quantiles: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Quantiles of each action's return that such a network learns (Dabney et al. 2018). 1: its value alone."""


class ImpalaCnn(Model):
    """The residual convolutional network of IMPALA (Espeholt et al. 2018): all outputs share it. For one image,
    ``[channels, height, width]`` of uint8, of at least 8 x 8 pixels. An Atari image takes six times
    the multiplications of a ``cnn``."""

    channels: HiddenSizes = (16, 32, 32)
    """Channels of each section: a convolution, pooling to half the size, and two residual blocks."""
    hidden_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 256
    """Units of the dense layer."""
    initialization: Initialization = "orthogonal"
    """The first weights: ``orthogonal`` with zero biases, or ``uniform`` within 1 / sqrt(inputs), PyTorch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of the convolutions and the dense layer, as that of ``cnn``."""
    dueling: bool = False
    """For algorithms that learn the values of actions: whether these are the sum of the observation's value and of each
    action's advantage (Wang et al. 2016)."""
    quantiles: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Quantiles of each action's return that such a network learns (Dabney et al. 2018). 1: its value alone."""


class Recurrent(Model):
    """A recurrent layer between the network's hidden layers and its outputs. Its state carries what the policy has
    observed in an episode."""

    kind: RecurrentKind = "gru"
    """``gru``: gated recurrent units (Cho et al. 2014). ``lstm``: long short-term memory (Hochreiter and Schmidhuber
    1997)."""
    size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 64
    """Units of the layer."""

    @property
    def state_sizes(self) -> dict[str, int]:
        """The sizes of the layer's state, by name."""
        return dict.fromkeys(("hidden", "cell") if self.kind == "lstm" else ("hidden",), self.size)


class CustomNetwork(Model):
    """A network of your own."""

    factory: Attribute
    """A callable that gets the environment's spaces and returns the network."""
    kwargs: Arguments = Field(default_factory=dict)
    """Further arguments for the factory: any JSON of at most 32768 characters, together with ``environment.kwargs``."""
    state: Annotated[dict[str, StateSize], Field(max_length=16)] = Field(default_factory=dict)
    """How many numbers each array of the network's recurrent state has, by name: ``{hidden: 64}``. By default the
    network has no state."""


class Network(Model):
    """The policy's network: a built-in kind, or your own."""

    exactly_one: ClassVar[tuple[str, ...]] = ("mlp", "cnn", "impala_cnn", "custom")

    mlp: Mlp | None = None
    cnn: Cnn | None = None
    impala_cnn: ImpalaCnn | None = None
    custom: CustomNetwork | None = None
    """A network of your own, given by its factory."""
    recurrent: Recurrent | None = None
    """A recurrent layer behind ``mlp``, ``cnn`` or ``impalaCnn``. By default the policy depends on the present
    observation alone."""

    @property
    def takes_an_image(self) -> bool:
        """Whether a built-in network is convolutional."""
        return self.cnn is not None or self.impala_cnn is not None

    @property
    def state_sizes(self) -> dict[str, int]:
        """The sizes of the recurrent state of one environment, by name; empty for a network without."""
        if self.custom is not None:
            return dict(self.custom.state)
        return {} if self.recurrent is None else self.recurrent.state_sizes


class PolicySpec(Model):
    """The mapping from observations to actions."""

    network: Network = Network(mlp=Mlp())
    """The network that is trained."""
    normalize_observations: bool = False
    """Whether the network sees observations normalised to mean 0 and standard deviation 1 and clipped to [-10, 10]. The
    statistics cover all transitions trained on, with replay all that were stored, and are part of each version. Only
    for float observations."""
