from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlsrl.data.random_slots import empty_slot
from rlsrl.data.specs import ActionPart, ArraySpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import (
    CategoricalHead,
    DenseLayer,
    ExportedActor,
    GaussianHead,
    JointHead,
    RecurrentLayer,
)
from rlsrl.policies.numpy_policy import DenseStack, DenseWeights, NumpyActor
from rlsrl.testing.rollouts import discrete_env_spec

FIRST = DenseLayer(name="a", weight_offset=2, bias_offset=14, in_size=4, out_size=3, activation="relu")
GRU = RecurrentLayer(kind="gru", name="c", in_size=4, size=3, weight_ih=0, weight_hh=36, bias_ih=63, bias_hh=72)
LAST = DenseLayer(name="b", weight_offset=20, bias_offset=0, in_size=3, out_size=2, activation="identity")
EXPORTED = ExportedActor(
    layout="0123",
    num_parameters=26,
    observation={
        "observation/z": ArraySpec(shape=(3,), dtype="float32"),
        "observation/a": ArraySpec(shape=(), dtype="int32"),
    },
    layers=(FIRST, LAST),
    head=CategoricalHead(num_actions=2),
)


def test_json_round_trip_keeps_the_order_of_observations() -> None:
    again = ExportedActor.from_json(json.loads(json.dumps(EXPORTED.to_json(), sort_keys=True)))
    assert again == EXPORTED
    assert list(again.observation) == ["observation/z", "observation/a"]


def test_evaluates_the_layers_at_their_offsets() -> None:
    vector = np.random.default_rng(0).standard_normal(26).astype(np.float32)
    z = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
    a = np.arange(6, dtype=np.int32)
    weights = DenseWeights(EXPORTED)
    stack = DenseStack(weights, num_lanes=6)
    weights.load(Parameters(version=Version(1, 0), vector=vector, layout="0123"))
    out = np.empty((2, 6), np.float32)
    stack.forward([z.T, a[np.newaxis]], out)
    features = np.concatenate([z, a[:, np.newaxis]], axis=1)
    hidden = np.maximum(features @ vector[2:14].reshape(3, 4).T + vector[14:17], 0)
    np.testing.assert_allclose(out.T, hidden @ vector[20:26].reshape(2, 3).T + vector[0:2], rtol=1e-5, atol=1e-6)


def test_a_gaussian_head_adds_the_deviations_that_stand_in_the_vector() -> None:
    gaussian = replace(EXPORTED, head=GaussianHead(num_dimensions=2, log_std_offset=18))
    assert ExportedActor.from_json(json.loads(json.dumps(gaussian.to_json()))) == gaussian
    vector = np.random.default_rng(0).standard_normal(26).astype(np.float32)
    parameters = Parameters(version=Version(1, 0), vector=vector, layout="0123")
    frames = [np.ones((3, 6), np.float32), np.arange(6, dtype=np.int32)[np.newaxis]]
    outputs = {}
    for name, each in {"means": EXPORTED, "both": gaussian}.items():
        weights = DenseWeights(each)
        weights.load(parameters)
        stack = DenseStack(weights, num_lanes=6)
        outputs[name] = np.full((each.head.distribution_size, 6), np.nan, np.float32)
        stack.forward(frames, outputs[name])
    assert np.array_equal(outputs["both"][:2], outputs["means"])
    assert np.array_equal(outputs["both"][2:], np.tile(vector[18:20, np.newaxis], 6))


def test_a_joint_head_puts_deviations_behind_the_means_of_their_part() -> None:
    parts = (ActionPart(kind="gaussian", num_outputs=1), ActionPart(kind="bernoulli", num_outputs=1))
    joint = replace(EXPORTED, head=JointHead(parts=parts, log_std_offset=18))
    assert ExportedActor.from_json(json.loads(json.dumps(joint.to_json()))) == joint
    vector = np.random.default_rng(0).standard_normal(26).astype(np.float32)
    frames = [np.ones((3, 6), np.float32), np.arange(6, dtype=np.int32)[np.newaxis]]
    outputs = {}
    for name, each in {"outputs": EXPORTED, "joint": joint}.items():
        weights = DenseWeights(each)
        weights.load(Parameters(version=Version(1, 0), vector=vector, layout="0123"))
        outputs[name] = np.full((each.head.distribution_size, 6), np.nan, np.float32)
        DenseStack(weights, num_lanes=6).forward(frames, outputs[name])
    assert np.array_equal(outputs["joint"][[0, 2]], outputs["outputs"])
    assert np.array_equal(outputs["joint"][1], np.full(6, vector[18]))


def test_a_part_of_another_kind_is_refused() -> None:
    value = replace(EXPORTED, head=JointHead(parts=(ActionPart(kind="bernoulli", num_outputs=2),))).to_json()
    value["head"]["parts"][0][0] = "beta"
    with pytest.raises(ValueError, match="part 'beta' is not one of"):
        ExportedActor.from_json(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (replace(FIRST, in_size=5), LAST)}, "'a' takes 5 inputs and would get 4"),
        ({"layers": (FIRST, replace(LAST, in_size=4))}, "'b' takes 4 inputs and would get 3"),
        ({"layers": (FIRST, replace(LAST, weight_offset=21))}, "'b' reads outside the 26 parameters"),
        ({"layers": (replace(FIRST, bias_offset=-1), LAST)}, "'a' reads outside"),
        ({"layers": (replace(FIRST, activation="gelu"), LAST)}, "'gelu' is not one of"),
        ({"layers": (FIRST,)}, "give 3 outputs; the categorical head takes 2"),
        ({"layers": (replace(GRU, weight_ih=-1), LAST)}, "'c' reads outside the 26 parameters"),
        ({"layers": (GRU, LAST)}, "'c' reads outside the 26 parameters"),
        ({"layers": (replace(GRU, kind="rnn"), LAST), "num_parameters": 99}, "'c': kind 'rnn' is not one of"),
        ({"layers": (GRU, replace(GRU, in_size=3), LAST), "num_parameters": 99}, "one may be recurrent, and not the"),
        ({"layers": (FIRST, replace(GRU, in_size=3, size=2)), "num_parameters": 99}, "one may be recurrent, and not"),
        ({"layers": ()}, "head takes 2"),
        ({"head": CategoricalHead(num_actions=3)}, "give 2 outputs; the categorical head takes 3"),
        ({"head": GaussianHead(num_dimensions=3, log_std_offset=0)}, "give 2 outputs; the gaussian head takes 3"),
        ({"head": GaussianHead(num_dimensions=2, log_std_offset=25)}, "gaussian head reads outside the 26 parameters"),
        ({"head": GaussianHead(num_dimensions=2, log_std_offset=-1)}, "gaussian head reads outside"),
        ({"head": JointHead(parts=(ActionPart(kind="bernoulli", num_outputs=3),))}, "give 2 outputs; the joint head"),
        (
            {"head": JointHead(parts=(ActionPart(kind="gaussian", num_outputs=2),), log_std_offset=25)},
            "joint head reads outside the 26 parameters",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(EXPORTED, **change)


@pytest.mark.parametrize("missing", ["layout", "layers", "head", "observation"])
def test_json_that_is_not_an_exported_actor_is_refused(missing: str) -> None:
    value = EXPORTED.to_json()
    del value[missing]
    with pytest.raises(KeyError):
        ExportedActor.from_json(value)


def test_a_head_of_another_kind_is_refused() -> None:
    value = EXPORTED.to_json()
    value["head"] = {"kind": "quantile", "num_actions": 2}
    with pytest.raises(ValueError, match="quantile"):
        ExportedActor.from_json(value)


def test_acting_needs_weights() -> None:
    actor = NumpyActor(EXPORTED, num_steps=2, num_lanes=1, rng=np.random.default_rng(0))
    with pytest.raises(RuntimeError, match="load"):
        actor.begin(empty_slot(discrete_env_spec(), num_steps=2, num_lanes=1))


def test_weights_are_copied_not_shared() -> None:
    vector = np.ones(26, np.float32)
    weights = DenseWeights(EXPORTED)
    weights.load(Parameters(version=Version(1, 1), vector=vector, layout="0123"))
    vector[:] = np.nan
    assert all(np.isfinite(layer).all() for layer in weights.layers)


def test_acting_by_an_exported_actor_imports_no_torch() -> None:
    code = (
        "import sys, rlsrl.policies.numpy_policy, rlsrl.workers.actor, rlsrl.workers.policy\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
