"""Illegal actions are never taken and have probability 0, in every kind of actor and policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Categorical

from rlsrl.algorithms.base import INDEX, POLICY, one_rank
from rlsrl.algorithms.normalizer import normalizable
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.envs.wrappers import ActionMask
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import LocalActor, PolicyActor
from rlsrl.policies.build import build_network
from rlsrl.policies.distributions import categorical_log_prob_and_entropy
from rlsrl.policies.export import ExportMismatch, check_export
from rlsrl.policies.exported import MASKED_LOGIT, ExportedActor
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.functional import PureNetwork
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.numpy_policy import NumpyActor, NumpyPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.environments import MaskedEnv, at_any_rank

NUM_ACTIONS, NUM_LANES, NUM_STEPS = 4, 3, 200
MASK = "observation/action_mask"


def masked_envs() -> LoopVectorEnv:
    """Return environments that end the test at the first illegal action."""

    def make() -> ActionMask:
        return ActionMask(MaskedEnv(NUM_ACTIONS), "action_mask")

    return LoopVectorEnv(at_any_rank(make), seeds=range(NUM_LANES), faults=EnvironmentFaults(error_budget=0))


def policy_for(env_spec: EnvSpec, seed: int = 1) -> TorchPolicy:
    """Return a policy with large weights, so that it strongly prefers one action."""
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (16,)}, seed=seed), env_spec)
    vector = 2.0 * np.random.default_rng(seed).standard_normal(policy.layout.num_parameters).astype(np.float32)
    policy.load(Parameters(version=Version(1, 0), vector=vector, layout=policy.layout.digest))
    return policy


def actor_of(kind: str, policy: TorchPolicy, *, greedy: bool) -> LocalActor:
    rng, sizes = np.random.default_rng(5), {"num_steps": NUM_STEPS, "num_lanes": NUM_LANES}
    if kind == "torch":
        return PolicyActor(policy, policy.env_spec, rng=rng, greedy=greedy, **sizes)
    exported = policy.export()
    assert exported is not None
    exported = ExportedActor.from_json(json.loads(json.dumps(exported.to_json())))
    actor: LocalActor = (
        NumpyActor(exported, rng=rng, greedy=greedy, **sizes)
        if kind == "exported"
        else PolicyActor(NumpyPolicy(exported), policy.env_spec, rng=rng, greedy=greedy, **sizes)
    )
    actor.load(policy.parameters(Version(1, 0)))
    return actor


def rollout(kind: str, *, greedy: bool = False, seed: int = 1) -> tuple[TorchPolicy, dict[str, NDArray]]:
    """Return a slot of an environment that raises on an illegal action."""
    envs = masked_envs()
    policy = policy_for(envs.spec, seed)
    layout = rollout_layout(envs.spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES)
    slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
    actor = actor_of(kind, policy, greedy=greedy)
    envs.begin(slot.arrays)
    actor.begin(slot)
    for step in range(NUM_STEPS):
        envs.step(slot.arrays, step, actor.act(step))
    actor.finish()
    return policy, slot.arrays


def legal_choices(policy: TorchPolicy, arrays: Mapping[str, NDArray]) -> list[tuple[NDArray, Categorical, int]]:
    """Return (legal actions, distribution over them, index of the chosen action among them) of each transition."""
    network = build_network(MlpActorCritic, policy.env_spec.unmasked, {"hidden_sizes": (16,)}, seed=0)
    torch.nn.utils.vector_to_parameters(
        torch.from_numpy(policy.parameters(Version(1, 0)).vector.copy()), network.parameters()
    )
    found = []
    for t, n in np.argwhere(arrays["mask"]):
        observation = {
            path: torch.from_numpy(arrays[path][t, n : n + 1]) for path in policy.env_spec.unmasked.observation
        }
        legal = np.flatnonzero(arrays[MASK][t, n])
        logits = network(observation)["policy"][0, torch.from_numpy(legal)]
        found.append((legal, Categorical(logits=logits), int(np.flatnonzero(legal == arrays["action"][t, n])[0])))
    return found


@pytest.mark.parametrize("kind", ["exported", "torch", "exported, by requests"])
@pytest.mark.parametrize("seed", [1, 2])
def test_only_legal_actions_are_taken_and_their_probabilities_are_among_the_legal(kind: str, seed: int) -> None:
    policy, arrays = rollout(kind, seed=seed)
    with torch.no_grad():
        expected = [float(chosen.log_prob(torch.tensor(place))) for _, chosen, place in legal_choices(policy, arrays)]
    np.testing.assert_allclose(arrays["behavior_log_prob"][arrays["mask"]], expected, rtol=1e-4, atol=1e-5)
    assert len(expected) < arrays["mask"].size, "some frames ended episodes, where nothing is legal"
    assert np.isfinite(arrays["behavior_log_prob"]).all()


@pytest.mark.parametrize("kind", ["exported", "torch", "exported, by requests"])
def test_the_greedy_action_is_the_most_probable_that_is_legal(kind: str) -> None:
    policy, arrays = rollout(kind, greedy=True)
    for _, chosen, place in legal_choices(policy, arrays):
        assert chosen.logits[place] == chosen.logits.max()


def test_all_kinds_choose_the_same_actions() -> None:
    chosen = [rollout(kind)[1]["action"] for kind in ("exported", "torch", "exported, by requests")]
    np.testing.assert_array_equal(chosen[0], chosen[1])
    np.testing.assert_array_equal(chosen[1], chosen[2])


def test_log_probabilities_entropies_and_their_gradients_are_those_over_the_legal_actions_alone() -> None:
    policy, arrays = rollout("torch")
    keep = arrays["mask"][:20]
    rows = {path: torch.from_numpy(arrays[path][:20][keep]) for path in policy.env_spec.observation}
    action = torch.from_numpy(arrays["action"][:20][keep])
    weights = torch.linspace(-1.0, 1.0, len(action))
    params = torch.from_numpy(policy.parameters(Version(1, 0)).vector.copy()).requires_grad_()
    log_prob, entropy = categorical_log_prob_and_entropy(policy.pure(params, rows)["policy"], action)
    (gradient,) = torch.autograd.grad((weights * (log_prob + 0.3 * entropy)).sum(), params)

    network = build_network(MlpActorCritic, policy.env_spec.unmasked, {"hidden_sizes": (16,)}, seed=0)
    torch.nn.utils.vector_to_parameters(params.detach().clone(), network.parameters())
    logits = network({path: tensor for path, tensor in rows.items() if path != MASK})["policy"]
    total = torch.zeros(())
    for row, weight in enumerate(weights):
        legal = torch.from_numpy(np.flatnonzero(rows[MASK][row]))
        among = Categorical(logits=logits[row, legal])
        place = torch.nonzero(legal == action[row])[0, 0]
        torch.testing.assert_close(log_prob[row], among.log_prob(place), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[row], among.entropy(), rtol=1e-5, atol=1e-5)
        total = total + weight * (among.log_prob(place) + 0.3 * among.entropy())
    total.backward()
    expected = torch.cat(
        [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in network.parameters()]
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_a_single_legal_action_is_certain_and_teaches_the_policy_nothing() -> None:
    policy = policy_for(masked_envs().spec)
    observation = {
        "observation/state/legal": torch.randn(2, NUM_ACTIONS),
        "observation/state/step": torch.randn(2, 1),
        MASK: torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.int8),
    }
    params = torch.from_numpy(policy.parameters(Version(1, 0)).vector.copy()).requires_grad_()
    logits = policy.pure(params, observation)["policy"]
    log_prob, entropy = categorical_log_prob_and_entropy(logits, torch.tensor([2, 0]))
    assert log_prob.tolist() == [0.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
    assert torch.exp(torch.log_softmax(logits, -1))[observation[MASK] == 0].tolist() == [0.0] * 6
    (gradient,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), params)
    assert not gradient.any()


def test_training_on_masked_rollouts_is_finite_though_final_frames_allow_nothing() -> None:
    policy, arrays = rollout("exported")
    assert (arrays[MASK].sum(axis=-1) == 0).any()
    ppo = Ppo(
        policy, discount=0.99, gae_lambda=0.95, clip_range=0.2, clip_value_loss=True, entropy_coefficient=0.01,
        value_coefficient=0.5, epochs=1, minibatch_size=NUM_STEPS * NUM_LANES, normalize_advantages=True,
    )  # fmt: skip
    params = torch.from_numpy(policy.parameters(Version(1, 0)).vector.copy())
    batch = ppo.prepare({POLICY: params}, arrays, one_rank, ppo.evaluate)
    schedule = ppo.schedule(batch, np.random.default_rng(0), one_rank)
    rows = {path: tensor[schedule[INDEX][0]] for path, tensor in batch.rows.items()}
    entries = {name: entry[0] for name, entry in schedule.items() if name != INDEX}
    coefficients = {name: torch.tensor(value) for name, value in ppo.coefficients(0).items()}
    loss, metrics = ppo.loss({POLICY: params.requires_grad_()}, {}, rows | entries | coefficients)
    (gradient,) = torch.autograd.grad(loss, params)
    assert torch.isfinite(gradient).all()
    assert gradient.any()
    # With equal weights the ratio to the actor's probability is 1: both applied the mask.
    assert abs(batch.metrics["behavior_kl"]) < 1e-6
    assert abs(float(metrics["approx_kl"])) < 1e-6
    assert float(metrics["clip_fraction"]) == 0.0


def test_the_mask_is_exported_with_the_actor() -> None:
    policy = policy_for(masked_envs().spec)
    exported = policy.export()
    assert exported is not None
    assert exported.head.mask == MASK
    assert MASK not in exported.observation
    check_export(policy, exported, policy.parameters(Version(1, 0)))


def test_an_export_with_another_mask_than_its_network_is_refused() -> None:
    policy = policy_for(masked_envs().spec)
    exported = policy.export()
    assert exported is not None
    layers = (replace(exported.layers[0], bias_offset=0), *exported.layers[1:])
    with pytest.raises(ExportMismatch):
        check_export(policy, replace(exported, layers=layers), policy.parameters(Version(1, 0)))
    inverse = TorchPolicy(Inverted(policy.env_spec), policy.env_spec)
    with pytest.raises(ExportMismatch):
        check_export(inverse, inverse.export(), inverse.parameters(Version(1, 0)))


class Inverted(nn.Module):
    """Swaps legal and illegal actions."""

    def __init__(self, env_spec: EnvSpec) -> None:
        super().__init__()
        self.masked = build_network(MlpActorCritic, env_spec, {"hidden_sizes": (16,)}, seed=0)

    def forward(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.masked({**observation, MASK: observation[MASK] == 0})

    def export_actor(self, layout: FlatLayout) -> ExportedActor:
        exported = self.masked.export_actor(layout.below("masked"))
        return replace(exported, layout=layout.digest)


class Opaque(nn.Module):
    """Has no exported form; records its observations."""

    def __init__(self, env_spec: EnvSpec) -> None:
        super().__init__()
        self.given = env_spec
        self.seen: list[set[str]] = []
        self.layer = nn.Linear(1, NUM_ACTIONS)

    def forward(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.seen.append(set(observation))
        logits = self.layer(observation["observation/state/step"])
        return {"policy": logits, "value": logits.sum(-1)}


def test_a_network_of_the_users_own_is_masked_without_knowing_of_it() -> None:
    env_spec = masked_envs().spec
    made: list[Opaque] = []
    network = build_network(lambda spec: made.append(Opaque(spec)) or made[0], env_spec, {}, seed=0)
    logits = network({
        "observation/state/legal": torch.zeros(1, 4),
        "observation/state/step": torch.zeros(1, 1),
        MASK: torch.tensor([[1.0, 0.0, 2.0, 0.0]]),
    })["policy"]  # fmt: skip
    assert (logits == MASKED_LOGIT).tolist() == [[False, True, False, True]]
    assert all(seen == set(env_spec.unmasked.observation) for seen in made[0].seen)
    assert made[0].given == env_spec.unmasked
    assert TorchPolicy(network, env_spec).export() is None


class Arranging(Opaque):
    def to_preferred_layout(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        assert MASK not in observation
        return {path: tensor + 1 for path, tensor in observation.items()}


def test_observations_are_arranged_as_the_network_likes_them_and_the_mask_is_left() -> None:
    observation = {path: torch.zeros(1, *spec.shape) for path, spec in masked_envs().spec.observation.items()}
    networks = [build_network(kind, masked_envs().spec, {}, seed=0) for kind in (Arranging, Opaque)]
    arranged, as_it_was = (PureNetwork(network).to_preferred_layout(observation) for network in networks)
    assert arranged.keys() == as_it_was.keys() == observation.keys()
    for path, tensor in observation.items():
        assert torch.equal(arranged[path], tensor if path == MASK else tensor + 1)
        assert as_it_was[path] is tensor


def test_a_mask_of_floats_is_not_normalised() -> None:
    spec = masked_envs().spec
    floats = replace(spec, observation={**spec.observation, MASK: ArraySpec(shape=(NUM_ACTIONS,), dtype="float32")})
    assert MASK not in normalizable(floats)


def test_a_layout_below_a_module_has_the_same_places() -> None:
    layout = FlatLayout(shapes={"network.a": (2,), "network.b": (3, 1)})
    assert layout.below("network") == FlatLayout(shapes={"a": (2,), "b": (3, 1)})
    with pytest.raises(ValueError, match=r"\['scale'\] are not below 'network'"):
        FlatLayout(shapes={"network.a": (2,), "scale": (1,)}).below("network")
