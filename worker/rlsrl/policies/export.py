"""Exports a torch network's actor to its torch-free form, and checks that both compute the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rlsrl.api.spec import RecurrentKind
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.specs import ActionSpec, Arrays, ArraySpec
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exploration import UNIFORM
from rlsrl.policies.exported import (
    MASKED_LOGIT,
    NUM_GATES,
    Activation,
    CategoricalHead,
    ClippedHead,
    DenseLayer,
    ExportedActor,
    ExportedEncoder,
    GaussianHead,
    Head,
    JointHead,
    RecurrentLayer,
    SquashedHead,
)
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.numpy_policy import NORM_EPSILON, NumpyPolicy

CHECK_LANES = 64
"""Random observations on which an exported actor is compared with its network."""
CHECK_TOLERANCE = 1e-4
"""Largest difference allowed, relative to the largest output. Rounding differs, too, since torch and numpy add up in
different orders: by 1.1e-5 for the 27,648 pixels of CarRacing on a processor without AVX-512."""


class NetworkPolicy(Protocol):
    """A policy that evaluates a network."""

    def load(self, parameters: Parameters) -> None:
        """Evaluate with these weights: see ``Policy.load``."""

    def network_output(self, requests: Sequence[RolloutRequest]) -> tuple[NDArray[np.float32], Arrays]:
        """Return what the network says of actions, [N, A], for all lanes of the requests, and their next states."""


class ExportMismatch(RuntimeError):
    """An exported actor computes other outputs than its network: actors would act by another policy than is trained."""


def export_dense(
    tower: nn.Sequential,
    name: str,
    layout: FlatLayout,
    observation: Mapping[str, ArraySpec],
    *,
    log_std: str | None = None,
    action: ActionSpec | None = None,
    is_values: bool = False,
    quantiles: int = 1,
) -> ExportedActor:
    """Export a tower of ``nn.Linear`` with ``nn.Tanh`` or ``nn.ReLU`` between, whose outputs are logits and means.

    An ``nn.LayerNorm`` of a layer's outputs may stand before the activation.

    ``name`` is the tower's name in its network (``"actor"``), by which ``layout`` names the parameters. The tower takes
    the observation arrays as ``networks.FlattenObservation`` gives them, in the given order. ``log_std`` is the name of
    the parameter with the logarithms of the deviations if there are means among the outputs; None if all are logits.
    Joint actions and bounded vectors need ``action``, the environment's: the tanh of outputs is the mean of ``clipped``
    vectors. ``is_values``: the outputs are the values of discrete actions,
    or so many ``quantiles`` of each action's, one action after the other.

    Raises:
        ValueError: the tower has a module of another kind or in another place, or ``log_std`` does not exist.
    """
    hidden, last = _dense_layers(tower, name, layout)
    if last is None:
        raise ValueError(f"{name} must end with the nn.Linear whose outputs are the logits or means")
    last_layer = _dense_layer(*last, _last_activation(action), layout, means_of=quantiles)
    head = _head(last_layer.out_size, log_std, layout, action, is_values=is_values)
    return _actor((*hidden, last_layer), head, layout, observation)


def export_recurrent(
    hidden: nn.Sequential,
    kind: RecurrentKind,
    last: nn.Linear,
    *,
    names: tuple[str, str, str],
    layout: FlatLayout,
    observation: Mapping[str, ArraySpec],
    encoders: Sequence[ExportedEncoder] = (),
    log_std: str | None = None,
    action: ActionSpec | None = None,
    is_values: bool = False,
    quantiles: int = 1,
) -> ExportedActor:
    """Export hidden layers, a recurrent layer with the parameters of ``nn.GRUCell`` or ``nn.LSTMCell``, and a last one.

    ``hidden`` consists of layers as those of ``export_dense``, each with its activation; it may be empty. ``names`` are
    those of the three in their network. ``encoders`` are those before them (``export_encoder``). The other arguments
    are those of ``export_dense``.

    Raises:
        ValueError: a module of another kind or in another place, a missing parameter, or ``log_std`` does not exist.
    """
    of_hidden, name, of_last = names
    parameters = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    if missing := [each for each in parameters if f"{name}.{each}" not in layout.shapes]:
        raise ValueError(f"{name} has no {missing}; a recurrent layer has {parameters}")
    num_rows, in_size = layout.shapes[f"{name}.weight_ih"]
    recurrent = RecurrentLayer(
        kind=kind,
        name=name,
        in_size=in_size,
        size=num_rows // NUM_GATES[kind],
        **{each: layout.offsets[f"{name}.{each}"] for each in parameters},
    )
    return export_shared(
        hidden,
        last,
        names=(of_hidden, of_last),
        layout=layout,
        observation=observation,
        encoders=encoders,
        log_std=log_std,
        action=action,
        is_values=is_values,
        quantiles=quantiles,
        recurrent=recurrent,
    )


def export_encoder(
    hidden: nn.Sequential, name: str, layout: FlatLayout, observation: Mapping[str, ArraySpec]
) -> ExportedEncoder:
    """Export the layers, of that name in their network, that some arrays of the observation have for themselves.

    They are as those of ``export_recurrent``.

    Raises:
        ValueError: a module of another kind or in another place.
    """
    return ExportedEncoder(paths=tuple(observation), layers=tuple(_hidden_layers(hidden, name, layout)))


def export_shared(
    hidden: nn.Sequential,
    last: nn.Linear,
    *,
    names: tuple[str, str],
    layout: FlatLayout,
    observation: Mapping[str, ArraySpec],
    encoders: Sequence[ExportedEncoder] = (),
    log_std: str | None = None,
    action: ActionSpec | None = None,
    is_values: bool = False,
    quantiles: int = 1,
    recurrent: RecurrentLayer | None = None,
) -> ExportedActor:
    """Export hidden layers, as those of ``export_recurrent``, and a last one on them.

    ``names`` are those of the two in their network. ``recurrent`` stands between them. The other arguments are those of
    ``export_dense``.

    Raises:
        ValueError: a module of another kind or in another place, or ``log_std`` does not exist.
    """
    of_hidden, of_last = names
    layers = _hidden_layers(hidden, of_hidden, layout)
    between = () if recurrent is None else (recurrent,)
    last_layer = _dense_layer(of_last, last, _last_activation(action), layout, means_of=quantiles)
    head = _head(last_layer.out_size, log_std, layout, action, is_values=is_values)
    return _actor((*layers, *between, last_layer), head, layout, observation, encoders)


def _actor(
    layers: tuple[DenseLayer | RecurrentLayer, ...],
    head: Head,
    layout: FlatLayout,
    observation: Mapping[str, ArraySpec],
    encoders: Sequence[ExportedEncoder] = (),
) -> ExportedActor:
    return ExportedActor(
        layout=layout.digest,
        num_parameters=layout.num_parameters,
        observation=dict(observation),
        encoders=tuple(encoders),
        layers=layers,
        head=head,
    )


def _hidden_layers(hidden: nn.Sequential, name: str, layout: FlatLayout) -> list[DenseLayer]:
    layers, dangling = _dense_layers(hidden, name, layout)
    if dangling is not None:
        raise ValueError(f"{name} must end with an activation")
    return layers


def _dense_layers(
    tower: nn.Sequential, name: str, layout: FlatLayout
) -> tuple[list[DenseLayer], tuple[str, nn.Linear] | None]:
    """Return the layers of a tower that have an activation, and the one behind them that has none, if there is one."""
    layers: list[DenseLayer] = []
    pending: tuple[str, nn.Linear] | None = None
    norm: str | None = None
    for index, module in tower.named_children():
        if isinstance(module, nn.Linear) and pending is None:
            pending = (f"{name}.{index}", module)
        elif isinstance(module, nn.LayerNorm) and pending is not None and norm is None:
            norm = f"{name}.{index}"
            _check_norm(norm, module, pending[1].out_features)
        elif pending is not None and (activation := _activation(module)) is not None:
            layers.append(_dense_layer(*pending, activation, layout, norm))
            pending = norm = None
        else:
            raise ValueError(
                f"{name}.{index} is {module}; export takes nn.Linear with nn.Tanh or nn.ReLU between, and nn.LayerNorm "
                "before these"
            )
    if norm is not None:
        raise ValueError(f"{norm} is an nn.LayerNorm; {name} must end with an nn.Linear or an activation")
    return layers, pending


def _last_activation(action: ActionSpec | None) -> Activation:
    is_clipped = action is not None and any(part.kind == "clipped" for part in action.parts)
    return "tanh" if is_clipped else "identity"


def _check_norm(name: str, module: nn.LayerNorm, size: int) -> None:
    has_parameters = isinstance(module.weight, nn.Parameter) and isinstance(module.bias, nn.Parameter)
    if module.normalized_shape != (size,) or module.eps != NORM_EPSILON or not has_parameters:
        raise ValueError(f"{name} is {module}; an exported nn.LayerNorm has size {size}, eps {NORM_EPSILON} and a bias")


def _head(
    num_outputs: int, log_std: str | None, layout: FlatLayout, action: ActionSpec | None, *, is_values: bool
) -> Head:
    if is_values:
        return CategoricalHead(num_actions=num_outputs, is_values=True)
    joint = None if action is None or action.kind != "joint" else action
    num_means = num_outputs if joint is None else joint.num_constant_deviations
    if log_std is not None and layout.shapes.get(log_std) != (num_means,):
        raise ValueError(f"{log_std} is not a parameter of shape {(num_means,)}, one deviation per mean")
    offset = 0 if log_std is None else layout.offsets[log_std]
    if joint is not None:
        return JointHead(parts=joint.parts, log_std_offset=offset)
    if action is not None and action.kind == "continuous" and action.vectors != "gaussian":
        head = SquashedHead if action.vectors == "squashed" else ClippedHead
        return head(num_dimensions=action.num_outputs)
    if log_std is None:
        return CategoricalHead(num_actions=num_outputs)
    return GaussianHead(num_dimensions=num_outputs, log_std_offset=offset)


def _activation(module: nn.Module) -> Activation | None:
    if isinstance(module, nn.Tanh):
        return "tanh"
    return "relu" if isinstance(module, nn.ReLU) else None


def _dense_layer(
    name: str,
    module: nn.Linear,
    activation: Activation,
    layout: FlatLayout,
    norm: str | None = None,
    *,
    means_of: int = 1,
) -> DenseLayer:
    if f"{name}.bias" not in layout.shapes:
        raise ValueError(f"{name} has no bias; an exported layer needs one")
    return DenseLayer(
        name=name,
        weight_offset=layout.offsets[f"{name}.weight"],
        bias_offset=layout.offsets[f"{name}.bias"],
        in_size=module.in_features,
        out_size=module.out_features // means_of,
        means_of=means_of,
        activation=activation,
        norm_offset=None if norm is None else layout.offsets[f"{norm}.weight"],
    )


def check_export(policy: NetworkPolicy, exported: ExportedActor, parameters: Parameters) -> None:
    """Compare a policy with its exported actor on random observations and states. A trainer does so at its start.

    Values of actions are compared but for their mean: which action is chosen depends on their differences alone.

    Raises:
        ExportMismatch: an output differs by more than ``CHECK_TOLERANCE`` of the largest.
    """
    # Uniform actions, which a version may ask for, are no output of the network.
    statistics = {name: array for name, array in parameters.statistics.items() if name != UNIFORM}
    parameters = replace(parameters, statistics=statistics)
    policy.load(parameters)
    observation, mask = _random_observation(exported.observation), _random_mask(exported)
    states = _random_observation(exported.state)
    request = RolloutRequest(observation={**observation, **mask}, state=states)
    head = replace(exported.head, is_values=False) if isinstance(exported.head, CategoricalHead) else exported.head
    numpy_policy = NumpyPolicy(replace(exported, head=head))
    numpy_policy.load(parameters)
    (by_export,) = numpy_policy.predict([request])
    expected, state = policy.network_output([request])
    found = by_export.distribution[:, : expected.shape[1]]  # deviations of the version are no outputs of the network
    # The logits of illegal actions are equal in both. Without this they would be the largest outputs by far.
    legal = (expected != MASKED_LOGIT) | (found != MASKED_LOGIT)
    expected, found = np.where(legal, expected, 0.0), np.where(legal, found, 0.0)
    largest = float(np.abs(expected).max())  # of the values themselves: so large is their rounding
    if head != exported.head:
        expected, found = (_without_mean(values, legal) for values in (expected, found))
    _check_close("outputs", found, expected, largest)
    for name, array in state.items():
        _check_close(f"state {name!r}", by_export.state[name], array, float(np.abs(array).max()))


def _check_close(what: str, found: NDArray[np.float32], expected: NDArray[np.float32], largest: float) -> None:
    difference = float(np.abs(found - expected).max())
    if not difference <= CHECK_TOLERANCE * largest:
        raise ExportMismatch(
            f"the exported actor's {what} differ from the network's by up to {difference:.3g}; the largest is "
            f"{largest:.3g}. Check that the network's export_actor() covers all of its forward()"
        )


def _without_mean(values: NDArray[np.float32], legal: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the values, [N, A], without the mean of those of legal actions; 0 for others."""
    mean = values.sum(axis=1, keepdims=True) / np.maximum(legal.sum(axis=1, keepdims=True), 1)
    centred: NDArray[np.float32] = np.where(legal, values - mean, np.float32(0.0))
    return centred


def _random_observation(specs: Mapping[str, ArraySpec]) -> Arrays:
    rng = np.random.default_rng(0)
    return {path: _random_array(rng, spec) for path, spec in specs.items()}


def _random_mask(exported: ExportedActor) -> Arrays:
    """Return a mask with at least one legal action per lane, by its path; {} if the actor has no mask."""
    head = exported.head
    if head.mask is None:
        return {}
    mask = np.random.default_rng(1).integers(0, 2, (CHECK_LANES, head.num_outputs)).astype(np.int8)
    mask[:, 0] |= ~mask.any(axis=1)
    return {head.mask: mask}


def _random_array(rng: np.random.Generator, spec: ArraySpec) -> NDArray[np.generic]:
    shape, dtype = (CHECK_LANES, *spec.shape), np.dtype(spec.dtype)
    if spec.categories:
        first, number = np.array(spec.categories).T
        return rng.integers(first, first + number, (CHECK_LANES, spec.size)).astype(dtype).reshape(shape)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
