"""The contract of every LocalActor. All implementations choose the same actions: exported and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import Slot
from rlsrl.data.specs import ActionSpec, Arrays, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import LocalActor, PolicyActor
from rlsrl.policies.build import build_network
from rlsrl.policies.exported import LayoutMismatch
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.numpy_policy import NumpyActor
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import CHOICES_AND_FLAGS, MIXED, continuous_action, discrete_action

NUM_STEPS, NUM_LANES, NUM_ACTIONS = 12, 5, 4
OBSERVATION = {
    "observation/pose": ArraySpec(shape=(3,), dtype="float32"),
    "observation/grid": ArraySpec(shape=(2, 2), dtype="uint8"),
    "observation/on": ArraySpec(shape=(), dtype="bool"),
    "observation/place": ArraySpec(shape=(2,), dtype="int64", categories=((0, 3), (5, 4))),
}
DISCRETE = EnvSpec(observation=OBSERVATION, action=discrete_action(NUM_ACTIONS))
CONTINUOUS = EnvSpec(observation=OBSERVATION, action=continuous_action(3))
INTEGERS = EnvSpec(observation=OBSERVATION, action=CHOICES_AND_FLAGS)
TUPLES = EnvSpec(observation=OBSERVATION, action=MIXED)
STATISTICS = {
    "observation/pose/mean": np.array([1.0, -2.0, 0.5], np.float32),
    "observation/pose/variance": np.array([4.0, 0.25, 1e-4], np.float32),
}
"""With the last entry beyond the clip range more often than not."""


def policy_with(
    env_spec: EnvSpec = DISCRETE, seed: int = 1, statistics: Arrays | None = None, **kw: Any
) -> TorchPolicy:
    network = build_network(MlpActorCritic, env_spec, {"hidden_sizes": (16, 8), **kw}, seed=seed)
    policy = TorchPolicy(network, env_spec)
    vector = np.random.default_rng(seed).standard_normal(policy.layout.num_parameters).astype(np.float32)
    version, layout = Version(1, 3), policy.layout.digest
    policy.load(Parameters(version=version, vector=vector, layout=layout, statistics=statistics or {}))
    return policy


def actor_of(kind: str, policy: TorchPolicy, *, seed: int = 5, greedy: bool = False) -> LocalActor:
    sizes = {"num_steps": NUM_STEPS, "num_lanes": NUM_LANES, "greedy": greedy}
    rng = np.random.default_rng(seed)
    if kind == "torch":
        return PolicyActor(policy, policy.env_spec, rng=rng, **sizes)
    exported = policy.export()
    assert exported is not None
    return NumpyActor(exported, rng=rng, **sizes)


def slot_with(seed: int, env_spec: EnvSpec = DISCRETE) -> Slot:
    slot = random_slot(env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(seed))
    grid = slot.arrays["observation/grid"]
    grid[...] = np.random.default_rng(seed).integers(0, 5, grid.shape)
    for path in ("action", "behavior_log_prob", "version_attempt", "version_step"):
        slot.arrays[path][...] = -77
    return slot


def fill(actor: LocalActor, slot: Slot) -> list[np.ndarray]:
    actor.begin(slot)
    actions = [actor.act(t).copy() for t in range(NUM_STEPS)]
    actor.finish()
    return actions


class Parts:
    """The distribution of independent parts, by torch's own classes."""

    def __init__(self, action: ActionSpec, parameters: torch.Tensor) -> None:
        self.parts: list[tuple[Distribution, slice]] = []
        begin = 0
        for part, of_part in zip(
            action.parts, parameters.split([each.num_parameters for each in action.parts], -1), strict=True
        ):
            made = {
                "categorical": lambda p: Independent(Categorical(logits=p.unsqueeze(-2)), 1),
                "bernoulli": lambda p: Independent(Bernoulli(logits=p), 1),
                "gaussian": lambda p: Independent(Normal(p.chunk(2, -1)[0], p.chunk(2, -1)[1].exp()), 1),
            }[part.kind](of_part)
            self.parts.append((made, slice(begin, begin + part.num_entries)))
            begin += part.num_entries

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        return sum(made.log_prob(action[..., place].float()) for made, place in self.parts)

    @property
    def mode(self) -> torch.Tensor:
        return torch.cat([made.mode.float() for made, _ in self.parts], -1)


def reference(policy: TorchPolicy, slot: Slot) -> Distribution | Parts:
    """Return all steps' distributions, [T, N], by the network itself and torch's own classes."""
    frames = {path: slot.arrays[path][:-1].reshape(-1, *slot.arrays[path].shape[2:]) for path in OBSERVATION}
    loaded = policy.parameters(Version(0, 0))
    if loaded.statistics:
        mean, variance = (loaded.statistics[f"observation/pose/{name}"] for name in ("mean", "variance"))
        pose = (frames["observation/pose"] - mean) / np.sqrt(variance + 1e-8)
        frames["observation/pose"] = np.clip(pose, -10, 10).astype(np.float32)
    tensors = {path: torch.from_numpy(array) for path, array in frames.items()}
    parameters = policy.pure(torch.from_numpy(loaded.vector.copy()), tensors)["policy"].reshape(
        NUM_STEPS, NUM_LANES, -1
    )
    if policy.env_spec.action.kind == "discrete":
        return Categorical(logits=parameters)
    if policy.env_spec.action.kind == "joint":
        return Parts(policy.env_spec.action, parameters)
    mean, log_std = parameters.chunk(2, -1)
    return Independent(Normal(mean, log_std.exp()), 1)


def reference_log_probs(policy: TorchPolicy, slot: Slot) -> np.ndarray:
    """Return the log-probabilities of the slot's actions, [T, N]."""
    return reference(policy, slot).log_prob(torch.from_numpy(slot.arrays["action"])).numpy()


def most_probable(policy: TorchPolicy, slot: Slot) -> np.ndarray:
    return reference(policy, slot).mode.numpy()


@pytest.fixture(params=["exported", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


CASES = pytest.mark.parametrize(
    ("env_spec", "statistics"),
    [
        (DISCRETE, {}),
        (CONTINUOUS, {}),
        (DISCRETE, STATISTICS),
        (CONTINUOUS, STATISTICS),
        (INTEGERS, STATISTICS),
        (TUPLES, {}),
    ],
    ids=["discrete", "continuous", "discrete, normalised", "continuous, normalised", "integers, normalised", "tuples"],
)


@CASES
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_writes_what_the_slot_needs(kind: str, activation: str, env_spec: EnvSpec, statistics: Arrays) -> None:
    policy = policy_with(env_spec, activation=activation, statistics=statistics)
    actor, slot = actor_of(kind, policy), slot_with(0, env_spec)
    actor.load(policy.parameters(Version(2, 9)))
    actions = fill(actor, slot)
    assert np.array_equal(np.stack(actions), slot.arrays["action"])
    if env_spec is DISCRETE:
        assert set(np.unique(slot.arrays["action"])) <= set(range(NUM_ACTIONS))
    log_probs = reference_log_probs(policy, slot)
    np.testing.assert_allclose(slot.arrays["behavior_log_prob"], log_probs, rtol=1e-5, atol=5e-5)
    fill(actor, following := slot_with(4, env_spec))
    for each in (slot, following):
        assert (each.arrays["version_attempt"] == 2).all()
        assert (each.arrays["version_step"] == 9).all()


@CASES
def test_exported_and_torch_actors_choose_the_same_actions(env_spec: EnvSpec, statistics: Arrays) -> None:
    policy = policy_with(env_spec, statistics=statistics)
    slots = {}
    for kind in ("exported", "torch"):
        actor = actor_of(kind, policy, seed=11)
        actor.load(policy.parameters(Version(1, 0)))
        slots[kind] = [slot_with(seed, env_spec) for seed in range(20)]
        for slot in slots[kind]:
            fill(actor, slot)
    for by_export, by_torch in zip(slots["exported"], slots["torch"], strict=True):
        np.testing.assert_allclose(by_export.arrays["action"], by_torch.arrays["action"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            by_export.arrays["behavior_log_prob"], by_torch.arrays["behavior_log_prob"], rtol=0, atol=5e-5
        )


@CASES
def test_greedy_takes_the_most_probable_action_and_draws_nothing(
    kind: str, env_spec: EnvSpec, statistics: Arrays
) -> None:
    policy = policy_with(env_spec, statistics=statistics)
    actor, slot = actor_of(kind, policy, greedy=True), slot_with(1, env_spec)
    actor.load(policy.parameters(Version(1, 0)))
    fill(actor, slot)
    np.testing.assert_allclose(slot.arrays["action"], most_probable(policy, slot), rtol=1e-5, atol=1e-5)


def test_continuous_actions_are_kept_as_drawn_beyond_the_bounds(kind: str) -> None:
    policy = policy_with(CONTINUOUS)
    actor, slot = actor_of(kind, policy), slot_with(0, CONTINUOUS)
    actor.load(policy.parameters(Version(1, 0)))
    fill(actor, slot)
    assert (np.abs(slot.arrays["action"]) > 1.0).any()


@pytest.mark.parametrize("env_spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_statistics_go_with_their_version(kind: str, env_spec: EnvSpec) -> None:
    """Statistics are loaded and replaced with the weights: each step uses those of its own version."""
    plain, normalised = policy_with(env_spec), policy_with(env_spec, statistics=STATISTICS)
    actor, slot = actor_of(kind, policy_with(env_spec), greedy=True), slot_with(4, env_spec)
    versions = [normalised.parameters(Version(1, 0)), plain.parameters(Version(1, 1))] * (NUM_STEPS // 2)
    for t, version in enumerate(versions):
        actor.load(version)
        if t == 0:
            actor.begin(slot)
        actor.act(t)
    expected = np.where(
        (np.arange(NUM_STEPS) % 2 == 0).reshape(-1, *[1] * (slot.arrays["action"].ndim - 1)),
        most_probable(normalised, slot),
        most_probable(plain, slot),
    )
    np.testing.assert_allclose(slot.arrays["action"], expected, rtol=1e-5, atol=1e-5)


def test_new_weights_act_from_the_next_step_on(kind: str) -> None:
    first, second = policy_with(seed=1), policy_with(seed=2)
    old, new = first.parameters(Version(1, 4)), second.parameters(Version(1, 5))
    actor, slot = actor_of(kind, first, greedy=True), slot_with(3)
    actor.load(old)
    actor.begin(slot)
    for t in range(NUM_STEPS):
        if t == 7:
            actor.load(new)
        actor.act(t)
    actor.finish()
    assert slot.arrays["version_step"].tolist() == [4] * 7 + [5] * 5
    first.load(old)
    expected = np.concatenate([most_probable(first, slot)[:7], most_probable(second, slot)[7:]])
    assert np.array_equal(slot.arrays["action"], expected)


@pytest.mark.parametrize("env_spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_each_rollout_draws_its_own_noise_and_seeds_repeat(kind: str, env_spec: EnvSpec) -> None:
    def actions(seed: int) -> list[np.ndarray]:
        policy = policy_with(env_spec)
        actor = actor_of(kind, policy, seed=seed)
        actor.load(policy.parameters(Version(1, 0)))
        slots = [slot_with(0, env_spec), slot_with(0, env_spec)]
        for slot in slots:
            fill(actor, slot)
        return [slot.arrays["action"] for slot in slots]

    one, again, other = actions(1), actions(1), actions(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one[0], other[0])


def test_weights_of_another_network_are_refused(kind: str) -> None:
    policy = policy_with()
    actor = actor_of(kind, policy)
    with pytest.raises(LayoutMismatch, match=policy.layout.digest):
        actor.load(policy_with(hidden_sizes=(7,)).parameters(Version(1, 0)))
