from __future__ import annotations

import pytest
import torch
from torch import nn

from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.functional import PureNetwork
from rlsrl.runtime.errors import ConfigurationError


class Tied(nn.Module):
    """One weight under two names, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, observation: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = self.second(self.first(observation["observation"]).tanh()) * self.scale
        return {"policy": features, "value": features.sum(-1)}


def test_flatten_and_split_are_inverse() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layout = FlatLayout.of(network)
    vector = layout.flatten(network)
    assert vector.shape == (layout.num_parameters,) == (3 * 4 + 4 + 4 * 2 + 2,)
    for part, parameter in zip(layout.split(vector), network.parameters(), strict=True):
        assert torch.equal(part, parameter)
    assert layout.offsets == {"0.weight": 0, "0.bias": 12, "1.weight": 16, "1.bias": 24}


def test_digest_tells_layouts_apart() -> None:
    networks = [
        nn.Sequential(nn.Linear(3, 4)),
        nn.Sequential(nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
        nn.ModuleDict({"0": nn.Linear(3, 4), "a": nn.Linear(4, 1)}),
    ]
    digests = {FlatLayout.of(network).digest for network in networks}
    assert len(digests) == len(networks)
    assert FlatLayout.of(nn.Sequential(nn.Linear(3, 4))).digest in digests


def test_a_pure_network_equals_functional_call_in_values_and_gradients() -> None:
    network = Tied()
    pure = PureNetwork(network)
    before = [parameter.clone() for parameter in network.parameters()]
    vector = torch.randn(pure.layout.num_parameters, requires_grad=True)
    observation = {"observation": torch.randn(5, 3)}
    outputs = pure(vector, observation)
    named = dict(zip(pure.layout.shapes, pure.layout.split(vector), strict=True))
    expected = torch.func.functional_call(network, named, (observation,))
    assert outputs.keys() == expected.keys() == {"policy", "value"}
    for head in outputs:
        assert torch.equal(outputs[head], expected[head])
    (gradient,) = torch.autograd.grad(outputs["policy"].square().sum() + outputs["value"].sum(), vector)
    (reference,) = torch.autograd.grad(expected["policy"].square().sum() + expected["value"].sum(), vector)
    torch.testing.assert_close(gradient, reference)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert network.second.weight is network.first.weight


def test_the_network_is_whole_again_after_an_error() -> None:
    network = Tied()
    pure = PureNetwork(network)
    with pytest.raises(KeyError):
        pure(torch.zeros(pure.layout.num_parameters), {})
    assert all(isinstance(parameter, nn.Parameter) for parameter in network.parameters())


def frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].bias.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1.running_mean.*LayerNorm"),
        (nn.Sequential(nn.Linear(2, 2, dtype=torch.float64)), "'0.weight' is torch.float64"),
        (frozen(), "'0.bias' has requires_grad=False"),
        (nn.Sequential(nn.Tanh()), "no parameters"),
    ],
)
def test_what_one_trained_vector_cannot_hold_is_refused(network: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FlatLayout.of(network)
