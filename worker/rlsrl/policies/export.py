"""From a torch network to a torch-free program, and the proof that both compute the same."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rlsrl.data.inference import RolloutRequest
from rlsrl.data.specs import Arrays, ArraySpec
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import Policy
from rlsrl.policies.exported import (
    MASKED_LOGIT,
    Activation,
    CategoricalHead,
    DenseLayer,
    ExportedActor,
    GaussianHead,
)
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.numpy_policy import NumpyPolicy

CHECK_LANES = 64
"""Random observations on which a program is compared with its network."""
CHECK_TOLERANCE = 1e-5
"""Largest difference allowed, relative to the largest output."""


class ExportMismatch(RuntimeError):
    """A program does not compute what its network does: actors would act on another policy than is trained."""


def dense_program(
    tower: nn.Sequential,
    name: str,
    layout: FlatLayout,
    observation: Mapping[str, ArraySpec],
    *,
    log_std: str | None = None,
) -> ExportedActor:
    """The program of a tower of ``nn.Linear`` with ``nn.Tanh`` or ``nn.ReLU`` between, that gives logits or means.

    ``name`` is the tower's name in its network (``"actor"``): with it the parameters are found in ``layout``. The
    tower takes the observation arrays flattened, cast to float32 and concatenated in the order given. ``log_std`` is
    the name of the parameter that holds the logarithms of the deviations, for a tower that gives means; None for one
    that gives logits.

    Raises:
        ValueError: the tower has another kind of module, or one out of place; or there is no such ``log_std``.
    """
    layers: list[DenseLayer] = []
    pending: tuple[str, nn.Linear] | None = None
    for index, module in tower.named_children():
        if isinstance(module, nn.Linear) and pending is None:
            pending = (f"{name}.{index}", module)
        elif pending is not None and (activation := _activation(module)) is not None:
            layers.append(_dense_layer(*pending, activation, layout))
            pending = None
        else:
            raise ValueError(f"{name}.{index} is {module}: a program is nn.Linear with nn.Tanh or nn.ReLU between")
    if pending is None:
        raise ValueError(f"{name} has to end with the nn.Linear that gives the logits or means")
    layers.append(_dense_layer(*pending, "identity", layout))
    return ExportedActor(
        layout=layout.digest,
        num_parameters=layout.num_parameters,
        observation=dict(observation),
        layers=tuple(layers),
        head=_head(layers[-1].out_size, log_std, layout),
    )


def _head(num_outputs: int, log_std: str | None, layout: FlatLayout) -> CategoricalHead | GaussianHead:
    if log_std is None:
        return CategoricalHead(num_actions=num_outputs)
    if layout.shapes.get(log_std) != (num_outputs,):
        raise ValueError(f"{log_std} is no parameter of shape {(num_outputs,)}: a deviation for each mean")
    return GaussianHead(num_dimensions=num_outputs, log_std_offset=layout.offsets[log_std])


def _activation(module: nn.Module) -> Activation | None:
    if isinstance(module, nn.Tanh):
        return "tanh"
    return "relu" if isinstance(module, nn.ReLU) else None


def _dense_layer(name: str, module: nn.Linear, activation: Activation, layout: FlatLayout) -> DenseLayer:
    if f"{name}.bias" not in layout.shapes:
        raise ValueError(f"{name} has no bias; layers of a program have one")
    return DenseLayer(
        name=name,
        weight_offset=layout.offsets[f"{name}.weight"],
        bias_offset=layout.offsets[f"{name}.bias"],
        in_size=module.in_features,
        out_size=module.out_features,
        activation=activation,
    )


def check_export(policy: Policy, program: ExportedActor, parameters: Parameters) -> None:
    """Compare policy and program on random observations, both with these weights. A trainer does so at its start.

    Raises:
        ExportMismatch: some output differs by more than 1e-5 of the largest.
    """
    policy.load(parameters)
    observation, mask = _random_observation(program.observation), _random_mask(program)
    request = RolloutRequest(observation={**observation, **mask})
    exported = NumpyPolicy(program)
    exported.load(parameters)
    (of_network,), (of_program,) = (each.predict([request]) for each in (policy, exported))
    expected, found = of_network.distribution, of_program.distribution
    # What is illegal in both is equal, and would be the largest output by far.
    legal = (expected != MASKED_LOGIT) | (found != MASKED_LOGIT)
    expected, found = np.where(legal, expected, 0.0), np.where(legal, found, 0.0)
    largest = float(np.abs(expected).max())
    difference = float(np.abs(found - expected).max())
    if not difference <= CHECK_TOLERANCE * largest:
        raise ExportMismatch(
            f"the exported actor's outputs differ from the network's by up to {difference:.3g} where the largest is "
            f"{largest:.3g}; does the network's export_actor() leave something of its forward() out?"
        )


def _random_observation(specs: Mapping[str, ArraySpec]) -> Arrays:
    rng = np.random.default_rng(0)
    return {path: _random_array(rng, spec) for path, spec in specs.items()}


def _random_mask(program: ExportedActor) -> Arrays:
    """Under the mask's path, if there is one: at least one legal choice a lane."""
    head = program.head
    if head.mask is None:
        return {}
    mask = np.random.default_rng(1).integers(0, 2, (CHECK_LANES, head.num_outputs)).astype(np.int8)
    mask[:, 0] |= ~mask.any(axis=1)
    return {head.mask: mask}


def _random_array(rng: np.random.Generator, spec: ArraySpec) -> NDArray[np.generic]:
    shape, dtype = (CHECK_LANES, *spec.shape), np.dtype(spec.dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
