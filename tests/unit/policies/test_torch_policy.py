from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlsrl.data.inference import RolloutRequest
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.export import ExportMismatch, check_export, export_dense
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec, joint_action

ENV_SPEC = discrete_env_spec(num_features=4, num_actions=3)


class Scaled(nn.Module):
    """Exports a tower, but computes ``scale`` times its logits."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = self.actor(observation["observation"]) * self.scale
        return {"policy": logits, "value": logits.sum(-1)}

    def export_actor(self, layout: FlatLayout) -> ExportedActor:
        return export_dense(self.actor, "actor", layout, ENV_SPEC.observation)


class Opaque(nn.Module):
    """Has no exported form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = self.layer(observation["observation"])
        return {"policy": logits, "value": logits.sum(-1)}


def mlp_policy(seed: int = 0) -> TorchPolicy:
    return TorchPolicy(build_network(MlpActorCritic, ENV_SPEC, {"hidden_sizes": (16,)}, seed=seed), ENV_SPEC)


def requests_of(sizes: list[int]) -> list[RolloutRequest]:
    rng = np.random.default_rng(0)
    return [RolloutRequest(observation={"observation": rng.standard_normal((n, 4)).astype(np.float32)}) for n in sizes]


def test_requests_are_answered_in_order_as_if_each_were_alone() -> None:
    policy = mlp_policy()
    policy.load(policy.parameters(Version(3, 7)))
    requests = requests_of([3, 1, 5])
    results = policy.predict(requests)
    assert [result.distribution.shape for result in results] == [(3, 3), (1, 3), (5, 3)]
    for request, result in zip(requests, results, strict=True):
        (alone,) = policy.predict([request])
        np.testing.assert_allclose(result.distribution, alone.distribution, rtol=1e-5, atol=1e-7)
        assert result.version == (3, 7)
        assert dict(result.state) == {}


@pytest.mark.filterwarnings("error")
def test_read_only_observations_are_fine() -> None:
    policy = mlp_policy()
    policy.load(policy.parameters(Version(1, 0)))
    (request,) = requests_of([2])
    request.observation["observation"].flags.writeable = False
    assert np.isfinite(policy.predict([request])[0].distribution).all()


def test_loaded_weights_are_those_that_answer() -> None:
    one, other = mlp_policy(seed=0), mlp_policy(seed=1)
    one.load(other.parameters(Version(1, 2)))
    other.load(other.parameters(Version(1, 2)))
    (request,) = requests_of([4])
    assert np.array_equal(one.predict([request])[0].distribution, other.predict([request])[0].distribution)
    assert np.array_equal(one.parameters(Version(1, 2)).vector, other.parameters(Version(1, 2)).vector)


def test_answers_need_weights() -> None:
    with pytest.raises(RuntimeError, match="load"):
        mlp_policy().predict(requests_of([1]))


def test_parameters_are_read_only_copies() -> None:
    policy = mlp_policy()
    parameters = policy.parameters(Version(1, 0))
    assert not parameters.vector.flags.writeable
    before = parameters.vector.copy()
    policy.load(mlp_policy(seed=5).parameters(Version(1, 1)))
    assert np.array_equal(parameters.vector, before)


def test_the_network_as_a_function_ignores_the_loaded_weights() -> None:
    policy, other = mlp_policy(seed=0), mlp_policy(seed=1)
    observation = {"observation": torch.randn(3, 4)}
    vector = torch.from_numpy(other.parameters(Version(1, 0)).vector.copy())
    assert torch.equal(policy.pure(vector, observation)["policy"], other.pure(vector, observation)["policy"])


def test_what_a_network_cannot_export_it_does_not() -> None:
    assert TorchPolicy(build_network(lambda spec: Opaque(), ENV_SPEC, {}, seed=0), ENV_SPEC).export() is None


def test_a_true_export_passes_the_check() -> None:
    for policy in (mlp_policy(), TorchPolicy(Scaled(1.0), ENV_SPEC)):
        exported = policy.export()
        assert exported is not None
        check_export(policy, exported, policy.parameters(Version(1, 0)))


@pytest.mark.parametrize("scale", [1.0002, 0.0, float("nan")])
def test_an_export_that_computes_something_else_is_refused(scale: float) -> None:
    policy = TorchPolicy(Scaled(scale), ENV_SPEC)
    exported = policy.export()
    assert exported is not None
    with pytest.raises(ExportMismatch, match="differ from the network's"):
        check_export(policy, exported, policy.parameters(Version(1, 0)))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([nn.Linear(4, 3), nn.Tanh()], "must end with the nn.Linear"),
        ([nn.Linear(4, 8), nn.Linear(8, 3)], r"actor.1 is Linear"),
        ([nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)], r"actor.1 is Dropout"),
        ([nn.Tanh(), nn.Linear(4, 3)], r"actor.0 is Tanh"),
        ([nn.Linear(4, 3, bias=False)], "actor.0 has no bias"),
    ],
)
def test_towers_without_an_exported_form_are_refused(modules: list[nn.Module], message: str) -> None:
    tower = nn.Sequential(*modules)
    layout = FlatLayout.of(nn.ModuleDict({"actor": tower}))
    with pytest.raises(ValueError, match=message):
        export_dense(tower, "actor", layout, ENV_SPEC.observation)


def test_deviations_that_do_not_fit_the_means_are_refused() -> None:
    tower = nn.Sequential(nn.Linear(4, 3))
    layout = FlatLayout.of(nn.ModuleDict({"actor": tower, "other": nn.LayerNorm(2)}))
    for name in ("other.weight", "log_std"):
        with pytest.raises(ValueError, match=rf"{name} is not a parameter of shape \(3,\)"):
            export_dense(tower, "actor", layout, ENV_SPEC.observation, log_std=name)


class WithoutParts(MlpActorCritic):
    """Exports its actor as if its outputs were the logits of one choice."""

    def export_actor(self, layout: FlatLayout) -> ExportedActor:
        return export_dense(self.actor, "actor", layout, ENV_SPEC.observation)


def test_an_export_of_other_actions_is_refused() -> None:
    env_spec = replace(ENV_SPEC, action=joint_action(("categorical", 2), ("categorical", 3)))
    policies = [
        TorchPolicy(build_network(factory, env_spec, {"hidden_sizes": (8,)}, seed=0), env_spec)
        for factory in (MlpActorCritic, WithoutParts)
    ]
    exported = policies[0].export()
    assert exported is not None
    check_export(policies[0], exported, policies[0].parameters(Version(1, 0)))
    with pytest.raises(ExportMismatch, match=r"Pass action=env_spec.action to export_dense\(\)"):
        policies[1].export()
