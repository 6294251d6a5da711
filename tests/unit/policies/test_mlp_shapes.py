"""The shapes of ``mlp`` without torch are those of the network."""

from __future__ import annotations

import pytest

from rlsrl.data.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec
from rlsrl.policies.build import build_network
from rlsrl.policies.exported import layout_digest
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.mlp_shapes import mlp_shapes
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic

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
    "joint": EnvSpec(observation=FLOATS, action=JOINT),
    "categories": EnvSpec(
        observation={"observation": ArraySpec(shape=(1,), dtype="int64", categories=((0, 9),))}, action=DISCRETE
    ),
    "masked": EnvSpec(
        observation={"observation/state": FLOATS["observation"], MASK: ArraySpec(shape=(4,), dtype="int8")},
        action=ActionSpec(kind="discrete", array=DISCRETE.array, num_actions=4, mask=MASK),
    ),
}


CASES = [(name, has_values) for name, spec in SPECS.items() for has_values in (False, spec.action.kind == "discrete")]


@pytest.mark.parametrize(("name", "has_values"), sorted(set(CASES)))
@pytest.mark.parametrize("hidden_sizes", [(16,), (16, 8, 4)])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_the_shapes_are_those_of_the_network(
    name: str, has_values: bool, hidden_sizes: tuple[int, ...], layer_norm: bool
) -> None:
    env_spec = SPECS[name]
    factory, kwargs = MlpActionValues if has_values else MlpActorCritic, {"hidden_sizes": hidden_sizes}
    network = build_network(factory, env_spec, {**kwargs, "layer_norm": layer_norm}, seed=1, has_values=has_values)
    layout = FlatLayout.of(network)

    shapes = mlp_shapes(env_spec, hidden_sizes, has_values=has_values, layer_norm=layer_norm)

    assert list(shapes.items()) == list(layout.shapes.items()), "in the same order"
    assert layout_digest(shapes) == layout.digest
