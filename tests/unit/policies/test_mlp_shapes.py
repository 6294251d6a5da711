"""The shapes of ``mlp`` without torch are those of the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from rlsrl.api.spec import Mlp, Network, NetworkOutputs, Recurrent
from rlsrl.data.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec
from rlsrl.parameters.layout import layout_digest
from rlsrl.policies.build import build_network
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.mlp_shapes import mlp_shapes
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic, MlpPolicy
from rlsrl.workers.build.common import torch_policy

FLOATS = {"observation": ArraySpec(shape=(3, 2), dtype="float32")}
DISCRETE = ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=4)
CONTINUOUS = ActionSpec(
    kind="continuous", array=ArraySpec(shape=(2,), dtype="float32"), low=(-1.0, -1.0), high=(1.0, 1.0)
)
JOINT = ActionSpec(
    kind="joint",
    array=ArraySpec(shape=(4,), dtype="float32"),
    joint=(ActionPart(kind="categorical", num_outputs=3), ActionPart(kind="gaussian", num_outputs=3)),
)
MASK = "observation/mask"
SPECS = {
    "discrete": EnvSpec(observation=FLOATS, action=DISCRETE),
    "continuous": EnvSpec(observation=FLOATS, action=CONTINUOUS),
    "squashed": EnvSpec(observation=FLOATS, action=replace(CONTINUOUS, vectors="squashed")),
    "clipped": EnvSpec(observation=FLOATS, action=replace(CONTINUOUS, vectors="clipped")),
    "joint": EnvSpec(observation=FLOATS, action=JOINT),
    "categories": EnvSpec(
        observation={"observation": ArraySpec(shape=(1,), dtype="int64", categories=((0, 9),))}, action=DISCRETE
    ),
    "masked": EnvSpec(
        observation={"observation/state": FLOATS["observation"], MASK: ArraySpec(shape=(4,), dtype="int8")},
        action=ActionSpec(kind="discrete", array=DISCRETE.array, num_actions=4, mask=MASK),
    ),
}
FACTORIES = {"policy": MlpPolicy, "policyAndValue": MlpActorCritic, "actionValues": MlpActionValues}
CASES = [
    (name, outputs)
    for name, spec in SPECS.items()
    for outputs in FACTORIES
    if outputs != "actionValues" or spec.action.kind == "discrete"
]


@pytest.mark.parametrize(("name", "outputs"), CASES)
@pytest.mark.parametrize("hidden_sizes", [(16,), (16, 8, 4)])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"dueling": True}, {"quantiles": 5}, {"dueling": True, "quantiles": 5}], ids=str
)
def test_the_shapes_are_those_of_the_network(
    name: str, outputs: NetworkOutputs, hidden_sizes: tuple[int, ...], layer_norm: bool, options: dict[str, Any]
) -> None:
    env_spec = SPECS[name]
    options = options if outputs == "actionValues" else {}
    factory, kwargs = FACTORIES[outputs], {"hidden_sizes": hidden_sizes, **options}
    network = build_network(factory, env_spec, {**kwargs, "layer_norm": layer_norm}, seed=1, outputs=outputs)
    layout = FlatLayout.of(network)

    mlp = Mlp(hidden_sizes=hidden_sizes, layer_norm=layer_norm, **options)
    shapes = mlp_shapes(env_spec, Network(mlp=mlp), outputs=outputs)

    assert list(shapes.items()) == list(layout.shapes.items()), "in the same order"
    assert layout_digest(shapes) == layout.digest


@pytest.mark.parametrize(("name", "outputs"), CASES)
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm", None])
def test_the_shapes_of_outputs_that_share_layers_are_their_own(
    name: str, outputs: NetworkOutputs, layer_norm: bool, kind: Literal["gru", "lstm"] | None
) -> None:
    options = {"dueling": True, "quantiles": 3} if outputs == "actionValues" else {}
    recurrent = None if kind is None else Recurrent(kind=kind, size=5)
    mlp = Mlp(hidden_sizes=(7, 3), layer_norm=layer_norm, share_layers=kind is None, **options)
    network = Network(mlp=mlp, recurrent=recurrent)
    policy = torch_policy(network, SPECS[name], outputs=outputs, seed=1)

    shapes = mlp_shapes(SPECS[name], network, outputs=outputs)

    assert list(shapes.items()) == list(policy.layout.shapes.items()), "in the same order"
