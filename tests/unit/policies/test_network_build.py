from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.functional import PureNetwork
from rlsrl.policies.networks import MlpActorCritic, Tanh
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import continuous_env_spec, discrete_env_spec

ENV_SPEC = discrete_env_spec(num_features=4, num_actions=3)


class Returns(nn.Module):
    """A network that returns fixed outputs."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.outputs = outputs

    def forward(self, observation: dict[str, torch.Tensor]) -> Any:
        if isinstance(self.outputs, Exception):
            raise self.outputs
        return self.outputs


def vectors(network: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(network.parameters())


def test_seeds_decide_the_weights_and_leave_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, again, other = (vectors(build_network(MlpActorCritic, ENV_SPEC, {}, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mlp_begins_as_ppos_reference_does() -> None:
    network = build_network(MlpActorCritic, ENV_SPEC, {"hidden_sizes": [64, 32]}, seed=0)
    assert isinstance(network, MlpActorCritic)
    gains = [(network.actor[0], math.sqrt(2)), (network.actor[2], math.sqrt(2)), (network.actor[4], 0.01)]
    gains += [(network.critic[0], math.sqrt(2)), (network.critic[2], math.sqrt(2)), (network.critic[4], 1.0)]
    for layer, gain in gains:
        weight = layer.weight.detach()
        small = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(small @ small.T, gain**2 * torch.eye(small.shape[0]), atol=1e-4, rtol=1e-4)
        assert not layer.bias.any()


def test_tanh_is_torchs_to_the_last_bits_and_so_is_its_gradient() -> None:
    inputs = torch.cat([torch.linspace(-20, 20, 100_001), torch.tensor([1e-8, -1e-8, 1e4, -1e4, math.inf, -math.inf])])
    one, other = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    found, expected = Tanh()(one), torch.tanh(other)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2.5e-7)
    assert found.abs().max() <= 1.0
    gradients = (torch.autograd.grad(values.sum(), each)[0] for values, each in ((found, one), (expected, other)))
    torch.testing.assert_close(*gradients, rtol=0.0, atol=5e-7)
    assert Tanh()(torch.tensor(math.nan)).isnan()


@pytest.mark.parametrize(
    ("former", "present"), [("actor_program", "export_actor"), ("arranged", "to_preferred_layout")]
)
@pytest.mark.parametrize("base", [MlpActorCritic, Returns])
def test_an_optional_method_under_its_former_name_is_refused(base: Any, former: str, present: str) -> None:
    network = type("Mine", (base,), {former: lambda self, argument: argument})
    for factory in (network, type("Child", (network,), {})):
        with pytest.raises(ConfigurationError, match=f"method '{former}', .*did you mean '{present}'"):
            build_network(factory, ENV_SPEC, {}, seed=0)


def test_a_method_under_both_names_is_allowed() -> None:
    methods = {name: lambda self, argument: argument for name in ("arranged", "to_preferred_layout")}
    network = type("Mine", (MlpActorCritic,), methods)
    assert isinstance(build_network(network, ENV_SPEC, {}, seed=0), network)


class Heads(nn.Module):
    """Its layers' names clash with others."""

    def __init__(self) -> None:
        super().__init__()
        self.acting, self.value = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, observation: dict[str, torch.Tensor]) -> Any:
        features = observation["observation"]
        return {"policy": self.acting(features), "value": self.value(features).squeeze(-1)}


def test_a_networks_layers_may_be_called_as_they_like() -> None:
    network, observation = Heads(), {"observation": torch.randn(5, 4)}
    expected = network(observation)["value"]
    assert torch.equal(PureNetwork(network)(vectors(network), observation)["value"], expected)
    policy = TorchPolicy(network, ENV_SPEC)
    policy.load(policy.parameters(Version(1, 1)))
    (answer,) = policy.predict([RolloutRequest(observation={"observation": observation["observation"].numpy()})])
    np.testing.assert_array_equal(answer.distribution, network(observation)["policy"].detach().numpy())


def test_mlp_reads_all_observations_in_the_order_of_the_spec() -> None:
    env_spec = EnvSpec(
        observation={
            "observation/b": ArraySpec(shape=(2, 2), dtype="uint8"),
            "observation/a": ArraySpec(shape=(), dtype="float32"),
        },
        action=ENV_SPEC.action,
    )
    network = build_network(MlpActorCritic, env_spec, {}, seed=0)
    assert isinstance(network, MlpActorCritic)
    b, a = torch.randint(0, 255, (6, 2, 2), dtype=torch.uint8), torch.randn(6)
    heads = network({"observation/a": a, "observation/b": b})
    features = torch.cat([b.reshape(6, 4).float(), a[:, None]], -1)
    assert torch.equal(heads["policy"], network.actor(features))
    assert torch.equal(heads["value"], network.critic(features)[:, 0])


def test_mlp_gives_means_near_zero_and_deviations_of_one_for_continuous_actions() -> None:
    network = build_network(MlpActorCritic, continuous_env_spec(num_features=4, num_dimensions=3), {}, seed=0)
    assert isinstance(network, MlpActorCritic)
    assert network.log_std is not None
    weight = network.actor[4].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 0.01**2 * torch.eye(3), atol=1e-6, rtol=1e-4)
    observation = {"observation": torch.randn(5, 4)}
    heads = network(observation)
    parameters, value = heads["policy"], heads["value"]
    assert (parameters.shape, value.shape) == ((5, 6), (5,))
    assert torch.equal(parameters[:, :3], network.actor(observation["observation"]))
    assert not parameters[:, 3:].any()
    (gradient,) = torch.autograd.grad(parameters[:, 3:].sum(), network.log_std)
    torch.testing.assert_close(gradient, torch.full((3,), 5.0))


def test_networks_give_a_mean_and_a_deviation_for_each_entry_of_an_action() -> None:
    outputs = {"policy": torch.zeros(3, 2), "value": torch.zeros(3)}
    with pytest.raises(ConfigurationError, match=r"shape \(3, 2\).*\(3, 4\) and torch.float32"):
        build_network(lambda env_spec: Returns(outputs), continuous_env_spec(num_dimensions=2), {}, seed=0)


LOGITS, VALUES = torch.zeros(3, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("needed", "heads", "message"),
    [
        (
            "policyAndValue",
            LOGITS,
            "returned a Tensor; the algorithm needs a mapping with the tensors",
        ),
        ("policyAndValue", (LOGITS, VALUES), "returned a tuple; "),
        ("policyAndValue", {"policy": LOGITS}, r"returned the heads \['policy'\]; .* 'policy' and 'value'"),
        ("policyAndValue", {"policy": LOGITS, "value": 0.0}, r"heads \['policy', 'value'\]; .* with the tensors"),
        (
            "policyAndValue",
            {"policy": LOGITS[:, :2], "value": VALUES},
            r"'policy' of shape \(3, 2\).*\(3, 3\) and",
        ),
        (
            "policyAndValue",
            {"policy": LOGITS, "value": VALUES[:, None]},
            r"'value' of shape \(3, 1\).*\(3,\) and",
        ),
        ("policyAndValue", {"policy": LOGITS.double(), "value": VALUES}, "torch.float64"),
        ("policyAndValue", {"policy": LOGITS, "value": VALUES + torch.nan}, "'value' with values that are not finite"),
        ("policy", {"q": LOGITS}, r"heads \['q'\]; the algorithm needs a mapping with the tensors 'policy'$"),
        (
            "actionValues",
            {"values": LOGITS},
            r"heads \['values'\]; the algorithm needs a .* tensors 'q'$",
        ),
        ("actionValues", {"q": LOGITS[:, :2]}, r"'q' of shape \(3, 2\)"),
        (
            "actionValues",
            {"q": LOGITS, "policy": LOGITS},
            "'policy', by which actors would choose; .* needs 'q'",
        ),
        ("policyAndValue", RuntimeError("mat1 and mat2"), r"RuntimeError for observations of shape.*\(3, 4\).*mat1"),
    ],
)
def test_networks_without_the_heads_that_the_algorithm_needs_are_refused(
    needed: NetworkOutputs, heads: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_network(lambda env_spec: Returns(heads), ENV_SPEC, {}, seed=0, outputs=needed)


def test_values_of_actions_need_discrete_actions() -> None:
    heads = {"q": torch.zeros(3, 2)}
    with pytest.raises(ConfigurationError, match="needs the action space Discrete; the environment's actions are cont"):
        build_network(
            lambda _: Returns(heads), continuous_env_spec(num_dimensions=2), {}, seed=0, outputs="actionValues"
        )


@pytest.mark.parametrize("needed", ["policy", "policyAndValue"])
def test_networks_may_have_further_heads(needed: NetworkOutputs) -> None:
    heads = {"policy": LOGITS, "value": VALUES, "next": torch.zeros(7)}
    build_network(lambda env_spec: Returns(heads), ENV_SPEC, {}, seed=0, outputs=needed)


def test_a_factory_that_fails_is_named_with_its_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"MlpActorCritic raised TypeError.*'hidden': 3.*unexpected keyword"):
        build_network(MlpActorCritic, ENV_SPEC, {"hidden": 3}, seed=0)


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="returned a dict, not an"):
        build_network(lambda env_spec: {}, ENV_SPEC, {}, seed=0)
