"""Encoders of parts of an observation, which join in dense layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsrl.api.spec import (
    CnnLayers,
    DenseLayers,
    ImpalaLayers,
    KeyEncoder,
    Mlp,
    Network,
    NetworkOutputs,
    Recurrent,
    RecurrentKind,
)
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.cnn import CnnEncoder
from rlsrl.policies.export import check_export
from rlsrl.policies.exported import DenseLayer, ExportedActor, ExportedEncoder, LayoutMismatch
from rlsrl.policies.impala import ImpalaEncoder
from rlsrl.policies.mlp_shapes import mlp_shapes
from rlsrl.policies.networks import unrolled
from rlsrl.policies.normalization import mean_of, variance_of
from rlsrl.policies.shared import MlpEncoder
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import continuous_env_spec, discrete_action
from rlsrl.workers.build.common import torch_policy

FLOATS = ArraySpec(shape=(3,), dtype="float32")
OBSERVATION = {
    "observation/arm/joints": ArraySpec(shape=(2, 2), dtype="float32"),
    "observation/arm/touches": ArraySpec(shape=(5,), dtype="int8"),
    "observation/armour": FLOATS,
    "observation/camera": ArraySpec(shape=(3, 36, 40), dtype="uint8"),
    "observation/goal": ArraySpec(shape=(), dtype="int64", categories=((2, 4),)),
}
WITHOUT_CAMERA = {path: spec for path, spec in OBSERVATION.items() if path != "observation/camera"}
ARM = KeyEncoder(key="arm", mlp=DenseLayers(hidden_sizes=(6, 5), activation="relu", layer_norm=True))
GOAL = KeyEncoder(key="goal", mlp=DenseLayers(hidden_sizes=(3,)))
CAMERA = KeyEncoder(key="camera", cnn=CnnLayers(hidden_size=7))
RESIDUAL = KeyEncoder(key="camera", impala_cnn=ImpalaLayers(channels=(4, 4), hidden_size=7))


def at_key(encoder: KeyEncoder, key: str) -> KeyEncoder:
    return encoder.model_copy(update={"key": key})


def env_spec_of(observation: Mapping[str, ArraySpec], action: ActionSpec | None = None) -> EnvSpec:
    return EnvSpec(observation=observation, action=action or discrete_action(3))


def network_of(*encoders: KeyEncoder, recurrent: Recurrent | None = None, **options: Any) -> Network:
    return Network(mlp=Mlp(hidden_sizes=(9, 8), **options), encoders=encoders, recurrent=recurrent)


def policy_of(network: Network, env_spec: EnvSpec, outputs: NetworkOutputs = "policyAndValue") -> TorchPolicy:
    return torch_policy(network, env_spec, outputs=outputs, seed=1)


def random_arrays(env_spec: EnvSpec, *leading: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for path, spec in env_spec.observation.items():
        low, high = (spec.categories[0][0], sum(spec.categories[0])) if spec.categories else (0, 100)
        drawn = rng.integers(low, high, (*leading, *spec.shape)) if spec.dtype != "float32" else None
        arrays[path] = (rng.standard_normal((*leading, *spec.shape)) if drawn is None else drawn).astype(spec.dtype)
    return arrays


def tensors_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {path: torch.from_numpy(array) for path, array in arrays.items()}


def random_parameters(policy: TorchPolicy, **statistics: Any) -> Parameters:
    vector = 0.5 * np.random.default_rng(1).standard_normal(policy.layout.num_parameters)
    return replace(policy.parameters(Version(0, 0)), vector=vector.astype(np.float32), statistics=statistics)


@pytest.mark.parametrize("camera", [CAMERA, RESIDUAL])
def test_outputs_of_encoders_join_in_the_place_of_their_arrays(camera: KeyEncoder) -> None:
    env_spec = env_spec_of(OBSERVATION)
    policy = policy_of(network_of(camera, ARM), env_spec)
    observation = tensors_of(random_arrays(env_spec, 4))
    encoder: Any = policy.network.get_submodule("encoder")
    arm, _, image, _ = encoder.parts
    assert isinstance(arm, MlpEncoder)
    assert isinstance(image, CnnEncoder if camera is CAMERA else ImpalaEncoder)

    with torch.no_grad():
        of_arm = torch.cat([observation[path].flatten(1).float() for path in arm.specs], 1)
        for layer in arm.layers:
            of_arm = layer(of_arm)
        one_hot = (observation["observation/goal"].unsqueeze(1) == torch.arange(2, 6)).float()
        of_image = image({"observation/camera": observation["observation/camera"]})
        features = torch.cat([of_arm, observation["observation/armour"], of_image, one_hot], 1)
        assert features.shape == (4, 5 + 3 + 7 + 4)
        expected, found = encoder.layers(features), encoder(observation)

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("order", [*itertools.permutations([ARM, CAMERA, GOAL])])
def test_the_order_of_the_encoders_does_not_matter(order: Sequence[KeyEncoder]) -> None:
    """A document that passed through an API server or an editor may list them differently."""
    env_spec = env_spec_of(OBSERVATION)
    first, other = (policy_of(network_of(*each), env_spec) for each in ((ARM, CAMERA, GOAL), order))
    assert [*first.layout.shapes.items()] == [*other.layout.shapes.items()]
    np.testing.assert_array_equal(first.parameters(Version(0, 0)).vector, other.parameters(Version(0, 0)).vector)


def test_a_key_is_no_beginning_of_another() -> None:
    """``arm`` leads to ``arm/joints``, and not to ``armour``."""
    encoder: Any = policy_of(network_of(ARM), env_spec_of(WITHOUT_CAMERA)).network.get_submodule("encoder")
    assert [*encoder.parts[0].specs] == ["observation/arm/joints", "observation/arm/touches"]


DENSE = {
    "discrete": env_spec_of(WITHOUT_CAMERA),
    "continuous": env_spec_of(WITHOUT_CAMERA, continuous_env_spec().action),
    "masked": env_spec_of(
        {**WITHOUT_CAMERA, "observation/legal": ArraySpec(shape=(3,), dtype="int8")},
        replace(discrete_action(3), mask="observation/legal"),
    ),
}
ENCODERS = {
    "of one": (GOAL,),
    "of all": (GOAL, ARM, KeyEncoder(key="armour", mlp=DenseLayers(hidden_sizes=(2,)))),
    "of a nested one": (ARM, KeyEncoder(key="goal", mlp=DenseLayers(hidden_sizes=(4, 2), activation="tanh"))),
}


@pytest.mark.parametrize("kind", [None, "gru", "lstm"])
@pytest.mark.parametrize("encoders", ENCODERS)
@pytest.mark.parametrize("name", DENSE)
def test_dense_encoders_act_without_torch(name: str, encoders: str, kind: RecurrentKind | None) -> None:
    recurrent = None if kind is None else Recurrent(kind=kind, size=5)
    network = network_of(*ENCODERS[encoders], recurrent=recurrent, layer_norm=True)
    assert network.acts_without_torch
    policy = policy_of(network, DENSE[name])
    exported = policy.export()
    assert exported is not None
    path = "observation/arm/joints"
    statistics = {mean_of(path): np.full((2, 2), 0.5), variance_of(path): np.full((2, 2), 4.0)}
    for parameters in (random_parameters(policy), random_parameters(policy, **statistics)):
        check_export(policy, exported, parameters)
    assert ExportedActor.from_json(exported.to_json()) == exported
    assert [*mlp_shapes(DENSE[name], network).items()] == [*policy.layout.shapes.items()]
    with pytest.raises(LayoutMismatch):
        check_export(policy, replace(exported, layout="other"), random_parameters(policy))


@pytest.mark.parametrize("options", [{}, {"dueling": True, "quantiles": 3}])
def test_values_of_actions_are_exported_behind_encoders(options: dict[str, Any]) -> None:
    policy = policy_of(network_of(GOAL, **options), DENSE["masked"], "actionValues")
    exported = policy.export()
    assert exported is not None
    check_export(policy, exported, random_parameters(policy))
    assert [*mlp_shapes(DENSE["masked"], network_of(GOAL, **options), outputs="actionValues").items()] == [
        *policy.layout.shapes.items()
    ]


def test_convolutional_encoders_act_with_torch() -> None:
    network = network_of(CAMERA, ARM)
    assert not network.acts_without_torch
    assert network.num_images == 1
    assert policy_of(network, env_spec_of(OBSERVATION)).export() is None


@pytest.mark.parametrize("camera", [CAMERA, RESIDUAL])
def test_images_in_the_preferred_layout_give_the_same(camera: KeyEncoder) -> None:
    env_spec = env_spec_of(OBSERVATION)
    policy = policy_of(network_of(camera), env_spec)
    observation = tensors_of(random_arrays(env_spec, 2))
    arranged = policy.pure.to_preferred_layout(observation)
    assert arranged["observation/camera"].is_contiguous(memory_format=torch.channels_last)
    vector = torch.from_numpy(random_parameters(policy).vector)
    with torch.no_grad():
        found, expected = policy.pure(vector, arranged), policy.pure(vector, observation)
    for name, array in expected.items():
        torch.testing.assert_close(found[name], array, rtol=1e-4, atol=1e-5)


def test_a_recurrent_layer_follows_the_join() -> None:
    env_spec = env_spec_of(OBSERVATION)
    policy = policy_of(network_of(CAMERA, GOAL, recurrent=Recurrent(size=5)), env_spec)
    policy.load(random_parameters(policy))
    frames = random_arrays(env_spec, 4, 2)
    is_first = torch.tensor([[True, True], [False, True], [False, False], [True, False]])
    with torch.no_grad():
        heads, states = unrolled(policy.network, tensors_of(frames), {"hidden": torch.zeros(2, 5)}, is_first)
    state = {"hidden": np.zeros((2, 5), np.float32)}
    for step, first in enumerate(is_first.numpy()):
        state["hidden"][first] = 0.0
        (result,) = policy.predict(
            [RolloutRequest(observation={path: array[step] for path, array in frames.items()}, state=state)]
        )
        state = {name: array.copy() for name, array in result.state.items()}
        np.testing.assert_allclose(result.distribution, heads["policy"][step], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state["hidden"], states["hidden"][step], rtol=1e-4, atol=1e-5)


def test_first_weights_of_encoders_are_those_of_the_network() -> None:
    env_spec = env_spec_of(OBSERVATION)
    for initialization, has_biases in (("orthogonal", False), ("uniform", True)):
        policy = policy_of(network_of(CAMERA, ARM, initialization=initialization), env_spec)
        biases = [each for name, each in policy.network.named_parameters() if name.endswith("0.bias")]
        assert len(biases) == 3
        assert all((float(bias.detach().abs().max()) > 0) == has_biases for bias in biases)


@pytest.mark.parametrize(
    ("observation", "encoders", "words"),
    [
        (OBSERVATION, [at_key(CAMERA, "cameras")], ["encoders: 'cameras' is no key", "did you mean 'camera'?"]),
        (OBSERVATION, [GOAL, at_key(ARM, "arms")], ["'arms'", "'arm/joints'", "did you mean 'arm'?"]),
        (OBSERVATION, [at_key(ARM, "/arm/")], ["did you mean 'arm'?"]),
        (OBSERVATION, [at_key(ARM, "observation/arm")], ["did you mean 'arm'?"]),
        (OBSERVATION, [at_key(GOAL, "zzz")], ["that the network gets: 'arm/joints', 'arm/touches', 'armour'"]),
        ({"observation": FLOATS}, [GOAL], ["encoders: 'goal'", "which is one array: use mlp"]),
        (OBSERVATION, [GOAL, at_key(CAMERA, "arm")], ["encoders: 'arm': cnn needs one uint8 image", "arm/joints"]),
        (OBSERVATION, [at_key(RESIDUAL, "goal")], ["encoders: 'goal': impalaCnn needs one uint8 image"]),
        ({f"observation/{each}": FLOATS for each in ("a/x", "a-b", "a/b")}, [at_key(ARM, "a")], ["'a' stands for"]),
        ({f"observation/{each}": FLOATS for each in range(300)}, [GOAL], ["'11' and 288 more"]),
    ],
)
def test_a_key_that_does_not_fit_is_refused(
    observation: Mapping[str, ArraySpec], encoders: list[KeyEncoder], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        policy_of(network_of(*encoders), env_spec_of(observation))
    for each in words:
        assert each in str(caught.value)


def test_a_tuple_has_places_for_keys_and_a_squashed_policy_joins_them() -> None:
    env_spec = env_spec_of(
        {"observation/0": FLOATS, "observation/1": ArraySpec(shape=(2,), dtype="float32")},
        replace(continuous_env_spec().action, vectors="squashed"),
    )
    policy = policy_of(network_of(at_key(GOAL, "0")), env_spec, "policy")
    exported = policy.export()
    assert exported is not None
    assert [encoder.paths for encoder in exported.encoders] == [("observation/0",)]
    check_export(policy, exported, random_parameters(policy))


def test_the_order_of_the_document_does_not_matter() -> None:
    first, other = (network_of(*each) for each in ((ARM, CAMERA, GOAL), (GOAL, ARM, CAMERA)))
    assert first == other


def test_a_mask_has_no_encoder() -> None:
    """The mask is no input of the network."""
    with pytest.raises(ConfigurationError, match=r"encoders: 'legal' is no key that the network gets"):
        policy_of(network_of(KeyEncoder(key="legal", mlp=DenseLayers())), DENSE["masked"])


def test_a_convolutional_network_for_several_arrays_names_the_encoders() -> None:
    with pytest.raises(ConfigurationError, match=r"network.cnn needs one uint8 .*network.encoders, beside"):
        policy_of(Network.model_validate({"cnn": {}}), env_spec_of(OBSERVATION))


LAYER = DenseLayer(name="a", weight_offset=0, bias_offset=0, in_size=3, out_size=3, activation="tanh")


@pytest.mark.parametrize(
    ("paths", "layers", "fault"),
    [
        (["observation/armour"], [replace(LAYER, in_size=2)], "takes 2 inputs and would get 3"),
        (["observation/armour"], [replace(LAYER, weight_offset=10_000)], "reads outside"),
        (["observation/arm/touches", "observation/arm/joints"], [LAYER], "do not follow each other"),
        (["observation/armour", "observation/other"], [LAYER], "do not follow each other"),
        (["observation/other"], [LAYER], "take no arrays"),
        ([], [LAYER], "take no arrays"),
        (["observation/goal"], [replace(LAYER, in_size=4)], "two encoders take the same arrays"),
    ],
)
def test_an_exported_encoder_that_does_not_fit_is_refused(
    paths: Sequence[str], layers: Sequence[DenseLayer], fault: str
) -> None:
    """Actors get exported actors from the parameter store: a damaged one must not read other memory."""
    exported = policy_of(network_of(GOAL), DENSE["discrete"]).export()
    assert exported is not None
    other = ExportedEncoder(paths=tuple(paths), layers=tuple(layers))
    with pytest.raises(ValueError, match=fault):
        replace(exported, encoders=(*exported.encoders, other))
