"""``spec.policy``: the network and what it sees."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rlsrl.api.model import INTEGRAL, Arguments, Model, yaml_name
from rlsrl.api.rules import CrossFieldRule, Fault
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


class DenseLayers(Model):
    """Dense layers, each followed by its activation function."""

    hidden_sizes: HiddenSizes = (64, 64)
    """Units of each hidden layer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """The activation function of the hidden layers."""
    layer_norm: bool = False
    """Whether the hidden layers are normalised before their activation function (Ba et al. 2016)."""


class Mlp(DenseLayers):
    """A multi-layer perceptron for each output of the network: policy and value, or the values of actions."""

    share_layers: bool = False
    """Whether all outputs share the hidden layers, and have only a last layer each. With ``recurrent`` or ``encoders``
    they always do."""
    initialization: Initialization = "orthogonal"
    """The first weights: ``orthogonal`` (gain sqrt(2), and 0.01 before the policy) with zero biases, or ``uniform``
    within 1 / sqrt(inputs), PyTorch's default."""
    dueling: bool = False
    """For algorithms that learn the values of actions: whether these are the sum of the observation's value and of each
    action's advantage, each by layers of its own (Wang et al. 2016), or by a last layer where layers are shared."""
    quantiles: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Quantiles of each action's return that such a network learns (Dabney et al. 2018). 1: its value alone."""


class CnnLayers(Model):
    """Three convolutions and a dense layer (Mnih et al. 2015). For one image, ``[channels, height, width]`` of uint8,
    of at least 36 x 36 pixels."""

    hidden_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 512
    """Units of the dense layer."""
    layer_norm: bool = False
    """Whether the outputs of the convolutions, of each image over all its channels and places, and those of the dense
    layer are normalised before their activation function (Ba et al. 2016)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of the convolutions and the dense layer. ``bfloat16`` is faster on processors with ``amx_bf16``
    (x86) and on AMD's with ``avx512_bf16``; it is slower on Intel's with ``avx512_bf16`` alone and on all others.
    Weights, logits, values and losses stay float32."""


class Cnn(CnnLayers):
    """The convolutional network of Mnih et al. (2015): all outputs share three convolutions and a dense layer. For one
    image, ``[channels, height, width]`` of uint8, of at least 36 x 36 pixels."""

    initialization: Initialization = "orthogonal"
    """The first weights: ``orthogonal`` with zero biases, or ``uniform`` within 1 / sqrt(inputs), PyTorch's default."""
    dueling: bool = False
    """For algorithms that learn the values of actions: whether these are the sum of the observation's value and of each
    action's advantage (Wang et al. 2016)."""
    quantiles: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Quantiles of each action's return that such a network learns (Dabney et al. 2018). 1: its value alone."""


class ImpalaLayers(Model):
    """Sections of convolutions with residual blocks, and a dense layer (Espeholt et al. 2018). For one image,
    ``[channels, height, width]`` of uint8, of at least 8 x 8 pixels."""

    channels: HiddenSizes = (16, 32, 32)
    """Channels of each section: a convolution, pooling to half the size, and two residual blocks."""
    hidden_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 256
    """Units of the dense layer."""
    layer_norm: bool = False
    """Whether the inputs of all activation functions are normalised, of each image over all its channels and places (Ba
    et al. 2016)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of the convolutions and the dense layer, as that of ``cnn``."""


class ImpalaCnn(ImpalaLayers):
    """The residual convolutional network of IMPALA (Espeholt et al. 2018): all outputs share it. For one image,
    ``[channels, height, width]`` of uint8, of at least 8 x 8 pixels. An Atari image takes six times
    the multiplications of a ``cnn``."""

    initialization: Initialization = "orthogonal"
    """The first weights: ``orthogonal`` with zero biases, or ``uniform`` within 1 / sqrt(inputs), PyTorch's default."""
    dueling: bool = False
    """For algorithms that learn the values of actions: whether these are the sum of the observation's value and of each
    action's advantage (Wang et al. 2016)."""
    quantiles: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Quantiles of each action's return that such a network learns (Dabney et al. 2018). 1: its value alone."""


class KeyEncoder(Model):
    """Layers of its own for a part of the observation."""

    exactly_one: ClassVar[tuple[str, ...]] = ("mlp", "cnn", "impala_cnn")

    key: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=256, examples=["camera"])]
    """The key of a Dict observation, or the place in a Tuple, from ``"0"``. Slashes lead further into nested ones:
    ``arm/camera``. A key of a nested Dict or Tuple stands for all its arrays."""
    mlp: DenseLayers | None = None
    cnn: CnnLayers | None = None
    impala_cnn: ImpalaLayers | None = None


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


def _encoders_have_an_mlp(network: Network) -> Fault | None:
    if not network.encoders or network.mlp is not None:
        return None
    return Fault(f"join in mlp, and the network is {yaml_name(network.member)}", "unset, or with mlp")


def _keys_are_apart(network: Network) -> Fault | None:
    keys = [encoder.key for encoder in network.encoders]
    for place, key in enumerate(keys):
        for other in keys[:place]:
            if f"{key}/".startswith(f"{other}/") or f"{other}/".startswith(f"{key}/"):
                return Fault(f"the keys {other!r} and {key!r} have arrays in common", "at most one encoder an array")
    return None


def _by_key(encoders: tuple[KeyEncoder, ...]) -> tuple[KeyEncoder, ...]:
    return tuple(sorted(encoders, key=lambda encoder: encoder.key))


class Network(Model):
    """The policy's network: a built-in kind, or your own."""

    exactly_one: ClassVar[tuple[str, ...]] = ("mlp", "cnn", "impala_cnn", "custom")
    rules: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            at="encoders",
            check=_encoders_have_an_mlp,
            cel="!has(self.encoders) || size(self.encoders) == 0 || has(self.mlp)",
            message="must be unset without mlp, in which encoders join",
        ),
        CrossFieldRule(
            at="encoders",
            check=_keys_are_apart,
            cel="!has(self.encoders)"
            " || self.encoders.all(a, self.encoders.exists_one(b, (a.key + '/').startsWith(b.key + '/')))",
            message="at most one for each array of the observation",
        ),
    )

    mlp: Mlp | None = None
    cnn: Cnn | None = None
    impala_cnn: ImpalaCnn | None = None
    custom: CustomNetwork | None = None
    """A network of your own, given by its factory."""
    encoders: Annotated[
        tuple[KeyEncoder, ...],
        Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-list-key": "key"}),
        AfterValidator(_by_key),
    ] = ()
    """Layers of their own for parts of a Dict or Tuple observation, such as an image beside numbers. ``mlp`` takes
    their outputs and all other arrays. By default it takes all arrays as they are. The order of the list has no
    meaning."""
    recurrent: Recurrent | None = None
    """A recurrent layer behind ``mlp``, ``cnn`` or ``impalaCnn``. By default the policy depends on the present
    observation alone."""

    @property
    def num_images(self) -> int:
        """The images that a built-in network takes by convolutional layers."""
        return (self.member in ("cnn", "impala_cnn")) + sum(encoder.mlp is None for encoder in self.encoders)

    @property
    def acts_without_torch(self) -> bool:
        """Whether workers evaluate the network without torch: all its layers are dense, but for a recurrent one."""
        return self.mlp is not None and not self.num_images

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
