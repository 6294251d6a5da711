"""The convolutional network equals the published one, takes its images only, and acts in every kind of actor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlsrl.api.spec import Cnn, Network
from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.acting import PolicyActor
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import NatureCnnActorCritic
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import continuous_action, discrete_action
from rlsrl.workers.build.common import torch_policy


def images(*shape: int, dtype: str = "uint8", action: ActionSpec | None = None) -> EnvSpec:
    return EnvSpec(
        observation={"observation": ArraySpec(shape=shape, dtype=dtype)},
        action=discrete_action(6) if action is None else action,
    )


ATARI = images(4, 84, 84)


def network_for(env_spec: EnvSpec, **kwargs: int | str) -> NatureCnnActorCritic:
    network = build_network(NatureCnnActorCritic, env_spec, kwargs, seed=0)
    assert isinstance(network, NatureCnnActorCritic)
    return network


def outputs(network: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return distribution parameters and values."""
    heads = network({"observation": pixels})
    assert [*heads] == ["policy", "value"]
    return heads["policy"], heads["value"]


def test_it_is_the_published_network() -> None:
    network = network_for(ATARI)
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert list(shapes.values()) == [
        (32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,), (512, 3136), (512,),
        (6, 512), (6,), (1, 512), (1,),
    ]  # fmt: skip
    assert sum(math.prod(shape) for shape in shapes.values()) == 1_687_719


def test_in_bfloat16_it_computes_the_same_to_bfloat16s_precision() -> None:
    exact, fast = network_for(ATARI), network_for(ATARI, precision="bfloat16")
    pixels = torch.randint(0, 256, (32, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    gradients = []
    for network in (exact, fast):
        logits, value = outputs(network, pixels)
        assert (logits.dtype, value.dtype) == (torch.float32, torch.float32)
        (logits.square().mean() + value.square().mean()).backward()
        weights = list(network.parameters())
        assert {weight.dtype for weight in weights} == {torch.float32}
        gradients.append(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))
    expected, got = (outputs(network, pixels)[1] for network in (exact, fast))
    assert not torch.equal(got, expected), "it does compute in another precision"
    # bfloat16 keeps 8 bits: 2^-8 for each of the four layers.
    assert float(((got - expected).norm() / expected.norm()).detach()) < 4 * 2**-8
    assert float(functional.cosine_similarity(gradients[0], gradients[1], dim=0)) > 0.999


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("action", [discrete_action(6), continuous_action(2)], ids=["discrete", "continuous"])
def test_acting_it_computes_the_same_to_the_bit_by_the_weights_of_the_moment(
    precision: str, action: ActionSpec
) -> None:
    network = network_for(images(4, 84, 84, action=action), precision=precision)
    pixels = {"observation": torch.arange(5 * 4 * 84 * 84).remainder(256).to(torch.uint8).reshape(5, 4, 84, 84)}
    with torch.inference_mode():
        before, acting = network(pixels)["policy"], network.prepared_actor()
        assert torch.equal(acting(pixels), before)
        for parameter in network.parameters():
            parameter.mul_(1.01)
        after = network(pixels)["policy"]
        assert not torch.equal(after, before)
        assert torch.equal(network.prepared_actor()(pixels), after)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_images_that_are_arranged_have_their_channels_last_and_give_the_same_to_the_bit(precision: str) -> None:
    network = network_for(ATARI, precision=precision)
    pixels = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    arranged = network.to_preferred_layout({"observation": pixels})
    assert torch.equal(arranged["observation"], pixels)
    assert arranged["observation"].is_contiguous(memory_format=torch.channels_last)
    for given, expected in zip(network(arranged).values(), outputs(network, pixels), strict=True):
        assert torch.equal(given, expected)


def test_pixels_in_bfloat16_are_those_in_float32_rounded_once() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pixels.bfloat16().div_(255.0), (pixels.float() / 255.0).bfloat16())


def test_it_computes_what_its_layers_say_of_pixels_between_0_and_1() -> None:
    network = network_for(ATARI)
    pixels = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weights = list(network.parameters())
    hidden = pixels.double() / 255.0
    for layer, stride in enumerate((4, 2, 1)):
        weight, bias = (each.double() for each in weights[2 * layer : 2 * layer + 2])
        hidden = functional.conv2d(hidden, weight, bias, stride=stride).relu()
    hidden = functional.linear(hidden.reshape(3, -1), weights[6].double(), weights[7].double()).relu()
    logits, value = outputs(network, pixels)
    torch.testing.assert_close(logits.double(), functional.linear(hidden, weights[8].double()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        value.double(), functional.linear(hidden, weights[10].double())[:, 0], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "gain"),
    [("body.0", math.sqrt(2)), ("body.4", math.sqrt(2)), ("body.7", math.sqrt(2)), ("actor", 0.01), ("critic", 1.0)],
)
def test_weights_are_orthogonal_with_the_usual_gains_and_biases_zero(name: str, gain: float) -> None:
    layer = network_for(ATARI).get_submodule(name)
    rows = layer.weight.detach().flatten(1)
    torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-4)
    assert not layer.bias.any()


def test_the_smallest_image_and_the_vector_action() -> None:
    network = network_for(images(1, 36, 50, action=continuous_action(2)), hidden_size=8)
    distribution, value = outputs(network, torch.zeros(5, 1, 36, 50, dtype=torch.uint8))
    assert distribution.shape == (5, 4)
    assert value.shape == (5,)


@pytest.mark.parametrize(
    "env_spec",
    [
        images(84, 84),
        images(4, 35, 84),
        images(84, 84, 4),
        images(4, 84, 84, dtype="float32"),
        EnvSpec(
            observation={**ATARI.observation, "observation/more": ArraySpec(shape=(3,), dtype="float32")},
            action=discrete_action(2),
        ),
    ],
    ids=["no channels", "too small", "channels last", "floats", "not alone"],
)
def test_other_observations_are_refused_with_the_cure(env_spec: EnvSpec) -> None:
    with pytest.raises(ConfigurationError, match=r"needs one uint8 image .* of at least 36 x 36"):
        network_for(env_spec)


def test_a_policy_acts_with_it_and_is_not_exported() -> None:
    env_spec = images(2, 40, 40)
    policy = torch_policy(Network(cnn=Cnn(hidden_size=16)), env_spec, outputs="policyAndValue", seed=0)
    assert policy.export() is None
    actor = PolicyActor(policy, policy.env_spec, num_steps=3, num_lanes=2, rng=np.random.default_rng(0))
    actor.load(policy.parameters(Version(1, 0)))
    slot = random_slot(env_spec, num_steps=3, num_lanes=2, rng=np.random.default_rng(1))
    slot.arrays["observation"][...] = np.random.default_rng(2).integers(0, 256, slot.arrays["observation"].shape)
    actor.begin(slot)
    for step in range(3):
        actor.act(step)
    actor.finish()
    frames = torch.from_numpy(slot.arrays["observation"][:-1].reshape(6, 2, 40, 40))
    params = torch.from_numpy(policy.parameters(Version(1, 0)).vector.copy())
    logits = policy.pure(params, {"observation": frames})["policy"].log_softmax(-1).numpy()
    chosen = np.take_along_axis(logits, slot.arrays["action"].reshape(6, 1), axis=1).reshape(3, 2)
    np.testing.assert_allclose(slot.arrays["behavior_log_prob"], chosen, rtol=1e-5, atol=1e-6)
