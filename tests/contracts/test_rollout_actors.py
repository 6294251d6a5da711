"""What every RolloutActor promises, and that all of them act alike: by program and by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlsrl.data.slots import Slot
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import RolloutActor
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.program import LayoutMismatch, ProgramActor
from rlsrl.policies.torch_policy import TorchActor, TorchPolicy
from rlsrl.testing.rollouts import discrete_action, random_slot

NUM_STEPS, NUM_LANES, NUM_ACTIONS = 12, 5, 4
ENV_SPEC = EnvSpec(
    observation={
        "observation/pose": ArraySpec(shape=(3,), dtype="float32"),
        "observation/grid": ArraySpec(shape=(2, 2), dtype="uint8"),
        "observation/on": ArraySpec(shape=(), dtype="bool"),
    },
    action=discrete_action(NUM_ACTIONS),
)


def policy_with(seed: int = 1, **kwargs: Any) -> TorchPolicy:
    network = build_network(MlpActorCritic, ENV_SPEC, {"hidden_sizes": (16, 8), **kwargs}, seed=seed)
    policy = TorchPolicy(network, ENV_SPEC)
    vector = np.random.default_rng(seed).standard_normal(policy.layout.num_parameters).astype(np.float32)
    policy.load(Parameters(version=Version(1, 3), vector=vector, layout=policy.layout.digest))
    return policy


def actor_of(kind: str, policy: TorchPolicy, *, seed: int = 5, greedy: bool = False) -> RolloutActor:
    sizes = {"num_steps": NUM_STEPS, "num_lanes": NUM_LANES, "greedy": greedy}
    rng = np.random.default_rng(seed)
    if kind == "torch":
        return TorchActor(policy, rng=rng, **sizes)
    program = policy.export()
    assert program is not None
    return ProgramActor(program, rng=rng, **sizes)


def slot_with(seed: int) -> Slot:
    slot = random_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(seed))
    grid = slot.arrays["observation/grid"]
    grid[...] = np.random.default_rng(seed).integers(0, 5, grid.shape)
    for path in ("action", "behavior_log_prob", "version_attempt", "version_step"):
        slot.arrays[path][...] = -77
    return slot


def fill(actor: RolloutActor, slot: Slot) -> list[np.ndarray]:
    actor.begin(slot)
    actions = [actor.act(t).copy() for t in range(NUM_STEPS)]
    actor.finish()
    return actions


def reference_log_probs(policy: TorchPolicy, slot: Slot) -> np.ndarray:
    """All steps' log softmax(logits) from the network itself, [T, N, A]."""
    frames = {path: slot.arrays[path][:-1].reshape(-1, *slot.arrays[path].shape[2:]) for path in ENV_SPEC.observation}
    vector = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())
    logits, _ = policy.pure(vector, {path: torch.from_numpy(array) for path, array in frames.items()})
    return torch.log_softmax(logits, -1).numpy().reshape(NUM_STEPS, NUM_LANES, -1)


@pytest.fixture(params=["program", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_writes_what_the_slot_needs(kind: str, activation: str) -> None:
    policy = policy_with(activation=activation)
    actor, slot = actor_of(kind, policy), slot_with(0)
    actor.load(policy.parameters(Version(2, 9)))
    actions = fill(actor, slot)
    assert np.array_equal(np.stack(actions), slot.arrays["action"])
    assert set(np.unique(slot.arrays["action"])) <= set(range(NUM_ACTIONS))
    chosen = np.take_along_axis(reference_log_probs(policy, slot), slot.arrays["action"][..., None], -1)[..., 0]
    np.testing.assert_allclose(slot.arrays["behavior_log_prob"], chosen, rtol=1e-5, atol=1e-5)
    assert (slot.arrays["version_attempt"] == 2).all()
    assert (slot.arrays["version_step"] == 9).all()


def test_program_and_torch_choose_the_same_actions_from_the_same_seed() -> None:
    policy = policy_with()
    slots = {}
    for kind in ("program", "torch"):
        actor = actor_of(kind, policy, seed=11)
        actor.load(policy.parameters(Version(1, 0)))
        slots[kind] = [slot_with(seed) for seed in range(20)]
        for slot in slots[kind]:
            fill(actor, slot)
    for by_program, by_torch in zip(slots["program"], slots["torch"], strict=True):
        assert np.array_equal(by_program.arrays["action"], by_torch.arrays["action"])
        np.testing.assert_allclose(
            by_program.arrays["behavior_log_prob"], by_torch.arrays["behavior_log_prob"], rtol=0, atol=1e-5
        )


def test_greedy_takes_the_most_probable_action_and_draws_nothing(kind: str) -> None:
    policy = policy_with()
    actor, slot = actor_of(kind, policy, greedy=True), slot_with(1)
    actor.load(policy.parameters(Version(1, 0)))
    fill(actor, slot)
    assert np.array_equal(slot.arrays["action"], reference_log_probs(policy, slot).argmax(-1))


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
    expected = np.concatenate(
        [reference_log_probs(first, slot)[:7].argmax(-1), reference_log_probs(second, slot)[7:].argmax(-1)]
    )
    assert np.array_equal(slot.arrays["action"], expected)


def test_each_rollout_draws_its_own_noise_and_seeds_repeat(kind: str) -> None:
    def actions(seed: int) -> list[np.ndarray]:
        policy = policy_with()
        actor = actor_of(kind, policy, seed=seed)
        actor.load(policy.parameters(Version(1, 0)))
        slots = [slot_with(0), slot_with(0)]
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
