import pytest

from rlsrl.api.spec import CriticSpec
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import NatureCnnActorCritic
from rlsrl.policies.effort import network_effort
from rlsrl.policies.networks import MlpActorCritic, MlpPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import bounded_env_spec, discrete_action, discrete_env_spec

IMAGE = EnvSpec(
    observation={"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")},
    action=ActionSpec(kind="discrete", array=discrete_action(6).array, num_actions=6),
)


def test_two_towers_of_dense_layers() -> None:
    env_spec = discrete_env_spec(num_features=4, num_actions=2)
    effort = network_effort(TorchPolicy(build_network(MlpActorCritic, env_spec, {}, seed=0), env_spec))

    assert effort.exported
    assert effort.acting_macs == 4 * 64 + 64 * 64 + 64 * 2
    assert effort.forward_macs == effort.acting_macs + 4 * 64 + 64 * 64 + 64
    assert effort.num_weights == effort.forward_macs + 4 * 64 + 2 + 1
    assert effort.weight_bytes == 4 * effort.num_weights


def test_two_critics_beside_the_network() -> None:
    """Of four features and two actions, with hidden layers of 8 and 16 units."""
    env_spec = bounded_env_spec("squashed", 4, 2)
    policy = TorchPolicy(build_network(MlpPolicy, env_spec, {}, seed=0, outputs="policy"), env_spec, outputs="policy")
    alone, both = (network_effort(policy, critic=each) for each in (None, CriticSpec(hidden_sizes=(8, 16))))

    assert (alone.critic_macs, both.critic_macs) == (0, 2 * (6 * 8 + 8 * 16 + 16 * 1))
    assert both.gradient_bytes - alone.gradient_bytes == 4 * both.critic_macs
    assert alone.gradient_bytes == alone.weight_bytes == both.weight_bytes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_convolutions_are_told_from_dense_layers_and_precisions_from_each_other(precision: str) -> None:
    network = build_network(NatureCnnActorCritic, IMAGE, {"precision": precision}, seed=0)
    products = network_effort(TorchPolicy(network, IMAGE)).products

    assert [product.dense for product in products[:4]] == [False, False, False, True]
    assert all(product.dense for product in products[3:])
    assert [product.bfloat16 for product in products[:4]] == [precision == "bfloat16"] * 4


def test_convolutions() -> None:
    effort = network_effort(TorchPolicy(build_network(NatureCnnActorCritic, IMAGE, {}, seed=0), IMAGE))
    convolutions = 20 * 20 * 32 * 4 * 64 + 9 * 9 * 64 * 32 * 16 + 7 * 7 * 64 * 64 * 9

    assert not effort.exported
    assert effort.forward_macs == pytest.approx(convolutions + 3136 * 512 + 512 * 7)
    assert effort.acting_macs == effort.forward_macs
