"""The built-in networks that a spec describes: residual convolutions, shared layers, first weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlsrl.api.spec import Cnn, DenseLayers, ImpalaCnn, KeyEncoder, Mlp, Network, NetworkOutputs, Recurrent
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import CnnEncoder
from rlsrl.policies.export import check_export
from rlsrl.policies.factories import built_in
from rlsrl.policies.impala import ImpalaEncoder
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import continuous_env_spec, discrete_action, discrete_env_spec, masked_env_spec
from rlsrl.workers.build.common import torch_policy

ALL_OUTPUTS: tuple[NetworkOutputs, ...] = ("policy", "policyAndValue", "actionValues")
FRAMES = EnvSpec(observation={"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")}, action=discrete_action(6))
SMALLEST = EnvSpec(observation={"observation": ArraySpec(shape=(1, 36, 36), dtype="uint8")}, action=discrete_action(3))
SMALL = EnvSpec(observation={"observation": ArraySpec(shape=(3, 11, 8), dtype="uint8")}, action=discrete_action(3))


def policy_of(network: Network, env_spec: EnvSpec, outputs: NetworkOutputs = "policyAndValue") -> TorchPolicy:
    return torch_policy(network, env_spec, outputs=outputs, seed=1)


def image(env_spec: EnvSpec, number: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (number, *env_spec.observation["observation"].shape), generator=generator).byte()


def features_by_functions(encoder: ImpalaEncoder, frames: Tensor) -> Tensor:
    """Return the encoder's outputs by functions of torch alone, with its parameters in their order."""
    parameters = iter(encoder.parameters())

    def convolved(array: Tensor) -> Tensor:
        return functional.conv2d(array, next(parameters), next(parameters), padding=1)

    array = frames.double().float() / 255
    for _ in range(3):
        array = functional.max_pool2d(convolved(array), 3, stride=2, padding=1)
        for _ in range(2):
            array = array + convolved(functional.relu(convolved(functional.relu(array))))
    array = functional.relu(array).flatten(1)
    array = functional.relu(functional.linear(array, next(parameters), next(parameters)))
    assert next(parameters, None) is None
    return array


@pytest.mark.parametrize("env_spec", [FRAMES, SMALL], ids=["84 x 84", "11 x 8"])
def test_the_residual_network_is_the_papers(env_spec: EnvSpec) -> None:
    torch.manual_seed(0)
    encoder = ImpalaEncoder(env_spec)
    frames = image(env_spec)
    with torch.no_grad():
        found, expected = encoder({"observation": frames}), features_by_functions(encoder, frames)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.shape == (3, 256)
    if env_spec is FRAMES:
        assert sum(parameter.numel() for parameter in encoder.parameters()) == 1_089_232


def test_the_residual_network_computes_in_bfloat16_to_its_precision() -> None:
    torch.manual_seed(0)
    exact = ImpalaEncoder(SMALL)
    fast = ImpalaEncoder(SMALL, precision="bfloat16")
    fast.load_state_dict(exact.state_dict())
    with torch.no_grad():
        found, expected = (each({"observation": image(SMALL)}) for each in (fast, exact))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_first_values_of_the_residual_network_are_of_the_size_of_one(seed: int) -> None:
    """With six blocks that each double the variance they are 12 to 23 on these frames."""
    policy = torch_policy(Network(impala_cnn=ImpalaCnn()), FRAMES, outputs="policyAndValue", seed=seed)
    vector = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())
    with torch.no_grad():
        heads = policy.pure(vector, {"observation": image(FRAMES, 8)})
    assert float(heads["value"].abs().mean()) < 5
    assert float((heads["policy"] - heads["policy"].mean(dim=-1, keepdim=True)).abs().max()) < 0.2


def _normed(array: Tensor) -> Tensor:
    """Return each image with mean 0 and variance 1 over all that it has."""
    return functional.layer_norm(array, array.shape[1:])


def test_layer_norm_of_the_cnn_is_over_each_image() -> None:
    torch.manual_seed(0)
    encoder = CnnEncoder(SMALLEST, hidden_size=8, layer_norm=True)
    frames = image(SMALLEST)
    weights = [each for each in encoder.parameters() if each.dim() > 1]
    array = frames / 255
    for weight, stride in zip(weights, (4, 2, 1), strict=False):
        array = functional.relu(_normed(functional.conv2d(array, weight, stride=stride)))
    expected = functional.relu(_normed(functional.linear(array.flatten(1), weights[-1])))
    torch.testing.assert_close(encoder({"observation": frames}), expected, rtol=1e-4, atol=1e-5)
    alone = encoder({"observation": frames[:1]})
    torch.testing.assert_close(alone, expected[:1], rtol=1e-4, atol=1e-5)


def test_layer_norm_of_the_residual_network_is_before_each_activation() -> None:
    torch.manual_seed(0)
    encoder = ImpalaEncoder(SMALL, channels=(4,), hidden_size=8, layer_norm=True)
    frames = image(SMALL)
    weights = iter([each for each in encoder.parameters() if each.dim() > 1])

    def convolved(array: Tensor) -> Tensor:
        return functional.conv2d(array, next(weights), padding=1)

    array = functional.max_pool2d(convolved(frames / 255), 3, stride=2, padding=1)
    for _ in range(2):
        array = array + convolved(functional.relu(_normed(convolved(functional.relu(_normed(array))))))
    array = functional.relu(_normed(array)).flatten(1)
    expected = functional.relu(_normed(functional.linear(array, next(weights))))
    torch.testing.assert_close(encoder({"observation": frames}), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_cnn_with_norms_acts_by_the_bits_that_it_trains(precision: Any) -> None:
    policy = policy_of(Network(cnn=Cnn(hidden_size=8, layer_norm=True, precision=precision)), SMALLEST)
    frames = image(SMALLEST)
    policy.load(policy.parameters(Version(0, 0)))
    (result,) = policy.predict([RolloutRequest(observation={"observation": frames.numpy()})])
    with torch.no_grad():
        expected = policy.network({"observation": frames})["policy"]
    np.testing.assert_array_equal(result.distribution, expected.numpy())


def test_errors_name_the_field_of_a_built_in_network() -> None:
    joint = EnvSpec(observation={"observation": ArraySpec(shape=(2,), dtype="float32")}, action=discrete_action(3))
    network = Network(mlp=Mlp(hidden_sizes=(4,), initialization="uniform"))
    with pytest.raises(ConfigurationError, match=r"the network of policy.network.mlp returned .*'q'"):
        _build(network, joint)


def test_a_smaller_image_is_refused() -> None:
    spec = EnvSpec(observation={"observation": ArraySpec(shape=(3, 7, 90), dtype="uint8")}, action=discrete_action(3))
    with pytest.raises(ConfigurationError, match=r"policy.network.impalaCnn needs one uint8 image .* at least 8 x 8"):
        policy_of(Network(impala_cnn=ImpalaCnn()), spec)


def test_images_in_the_preferred_layout_give_the_same() -> None:
    policy = policy_of(Network(impala_cnn=ImpalaCnn(channels=(4, 8))), SMALL)
    observation = {"observation": image(SMALL)}
    arranged = policy.pure.to_preferred_layout(observation)
    assert arranged["observation"].is_contiguous(memory_format=torch.channels_last)
    vector = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())
    with torch.no_grad():
        found, expected = policy.pure(vector, arranged), policy.pure(vector, observation)
    for name, array in expected.items():
        torch.testing.assert_close(found[name], array, rtol=1e-5, atol=1e-6)


def _build(network: Network, env_spec: EnvSpec) -> None:
    build_network(built_in(network, "policy"), env_spec, {}, seed=0, outputs="actionValues")


KINDS: dict[str, tuple[Any, EnvSpec]] = {
    "mlp": (lambda **options: Network(mlp=Mlp(hidden_sizes=(9, 7), **options)), discrete_env_spec()),
    "shared mlp": (
        lambda **options: Network(mlp=Mlp(hidden_sizes=(9, 7), share_layers=True, **options)),
        discrete_env_spec(),
    ),
    "cnn": (
        lambda **options: Network(cnn=Cnn(hidden_size=8, **options)),
        SMALLEST,
    ),
    "impalaCnn": (lambda **options: Network(impala_cnn=ImpalaCnn(channels=(4, 4), hidden_size=8, **options)), SMALL),
    "cnn with norms": (
        lambda **options: Network(cnn=Cnn(hidden_size=8, layer_norm=True, **options)),
        SMALLEST,
    ),
    "impalaCnn with norms": (
        lambda **options: Network(impala_cnn=ImpalaCnn(channels=(4,), hidden_size=8, layer_norm=True, **options)),
        SMALL,
    ),
    "mlp on encoders": (
        lambda **options: Network(
            mlp=Mlp(hidden_sizes=(9,), **options),
            encoders=(KeyEncoder(key="x", mlp=DenseLayers(hidden_sizes=(6,))),),
        ),
        replace(
            discrete_env_spec(),
            observation={f"observation/{key}": ArraySpec(shape=(3,), dtype="float32") for key in "xy"},
        ),
    ),
    "recurrent mlp": (
        lambda **options: Network(mlp=Mlp(hidden_sizes=(9,), **options), recurrent=Recurrent(size=5)),
        discrete_env_spec(),
    ),
    "recurrent impalaCnn": (
        lambda **options: Network(
            impala_cnn=ImpalaCnn(channels=(4,), hidden_size=8, **options), recurrent=Recurrent(kind="lstm", size=5)
        ),
        SMALL,
    ),
}


@pytest.mark.parametrize("outputs", ALL_OUTPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_every_output(kind: str, outputs: NetworkOutputs) -> None:
    make, env_spec = KINDS[kind]
    options = {"dueling": True, "quantiles": 3} if outputs == "actionValues" else {}
    policy = policy_of(make(**options), env_spec, outputs)
    policy.load(policy.parameters(Version(0, 0)))
    observation = {path: np.zeros((2, *spec.shape), spec.dtype) for path, spec in env_spec.observation.items()}
    state = {name: np.zeros((2, *spec.shape), np.float32) for name, spec in policy.state.items()}
    (result,) = policy.predict([RolloutRequest(observation=observation, state=state)])
    assert result.distribution.shape[-1] == env_spec.action.num_actions
    assert (policy.export() is None) == ("cnn" in kind.lower())


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_are_orthogonal_or_uniform(kind: str) -> None:
    make, env_spec = KINDS[kind]
    orthogonal, uniform, again = (
        policy_of(make(initialization=each), env_spec) for each in ("orthogonal", "uniform", "uniform")
    )
    assert torch.equal(*(nn.utils.parameters_to_vector(each.network.parameters()) for each in (uniform, again)))
    assert orthogonal.layout.shapes == uniform.layout.shapes
    for (name, was), now in zip(orthogonal.network.named_parameters(), uniform.network.parameters(), strict=True):
        if was.dim() < 2:
            continue
        fan_in = math.prod(was.shape[1:])
        of_layer = 5 if "recurrent" in name else fan_in  # units of the recurrent layer
        assert float(now.detach().abs().max()) <= of_layer**-0.5, name
        matrix = was.detach().reshape(was.shape[0], -1)
        small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        product = small @ small.T
        torch.testing.assert_close(product / product[0, 0], torch.eye(len(product)), atol=1e-4, rtol=1e-4)
    bias = next(now for name, now in uniform.network.named_parameters() if name.endswith("bias"))
    assert float(bias.abs().max()) > 0


@pytest.mark.parametrize(
    ("env_spec", "outputs", "options"),
    [
        (discrete_env_spec(), "policyAndValue", {}),
        (continuous_env_spec(), "policyAndValue", {"layer_norm": True}),
        (continuous_env_spec(), "policy", {"activation": "relu"}),
        (masked_env_spec(), "policyAndValue", {}),
        (masked_env_spec(), "actionValues", {"dueling": True, "quantiles": 3}),
    ],
)
def test_outputs_that_share_layers_act_without_torch(
    env_spec: EnvSpec, outputs: NetworkOutputs, options: dict[str, Any]
) -> None:
    policy = policy_of(Network(mlp=Mlp(hidden_sizes=(9, 7), share_layers=True, **options)), env_spec, outputs)
    exported = policy.export()
    assert exported is not None
    vector = np.random.default_rng(0).standard_normal(policy.layout.num_parameters).astype(np.float32)
    check_export(policy, exported, replace(policy.parameters(Version(0, 0)), vector=vector))


def test_the_value_trains_the_layers_that_it_shares_with_the_policy() -> None:
    found = {}
    for shares in (False, True):
        policy = policy_of(Network(mlp=Mlp(hidden_sizes=(9, 7), share_layers=shares)), discrete_env_spec())
        vector = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy()).requires_grad_()
        policy.pure(vector, {"observation": torch.randn(4, 4)})["value"].sum().backward()
        assert vector.grad is not None
        gradients = dict(zip(policy.layout.shapes, policy.layout.split(vector.grad), strict=True))
        hidden = "encoder.layers.0.weight" if shares else "actor.0.weight"
        found[shares] = float(gradients[hidden].abs().max())
    assert found[True] > 0
    assert found[False] == 0
