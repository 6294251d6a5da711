from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.distributions import Categorical, Distribution, Independent, Normal

from rlsrl.algorithms.base import INDEX, POLICY, Batch, one_rank
from rlsrl.algorithms.ppo import Ppo, clipped_square_error, clipped_surrogate
from rlsrl.algorithms.schedules import LinearSchedule
from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import continuous_env_spec, discrete_env_spec

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
NUM_STEPS, NUM_LANES = 16, 4
SETTINGS: dict[str, Any] = {
    "discount": 0.97,
    "gae_lambda": 0.9,
    "clip_range": 0.2,
    "clip_value_loss": True,
    "entropy_coefficient": 0.013,
    "value_coefficient": 0.7,
    "epochs": 3,
    "minibatch_size": 16,
    "normalize_advantages": True,
}
CLIP_RANGE = torch.tensor(0.2)


def make_policy(env_spec: EnvSpec = ENV_SPEC) -> TorchPolicy:
    return TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (8,)}, seed=0), env_spec)


def make_params(policy: TorchPolicy, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(policy.layout.num_parameters, generator=generator)


def make_slots(
    seed: int = 0, *, num_lanes: int = NUM_LANES, end_probability: float = 0.15, env_spec: EnvSpec = ENV_SPEC
) -> Arrays:
    rng = np.random.default_rng(seed)
    return random_slot(
        env_spec, num_steps=NUM_STEPS, num_lanes=num_lanes, rng=rng, end_probability=end_probability
    ).arrays


def distribution(env_spec: EnvSpec, parameters: torch.Tensor) -> Distribution:
    """Return torch's own distribution."""
    if env_spec.action.kind == "discrete":
        return Categorical(logits=parameters)
    mean, log_std = parameters.chunk(2, -1)
    return Independent(Normal(mean, log_std.exp()), 1)


def coefficients(ppo: Ppo, env_steps: int = 0) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in ppo.coefficients(env_steps).items()}


def prepared(ppo: Ppo, params: torch.Tensor, slots: Arrays) -> Batch:
    return ppo.prepare({POLICY: params}, slots, one_rank, ppo.evaluate)


def minibatches(ppo: Ppo, batch: Batch, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    schedule = ppo.schedule(batch, np.random.default_rng(seed), one_rank)
    return [
        {path: rows[schedule[INDEX][k]] for path, rows in batch.rows.items()}
        | {name: entry[k] for name, entry in schedule.items() if name != INDEX}
        | coefficients(ppo)
        for k in range(len(schedule[INDEX]))
    ]


@pytest.mark.parametrize("env_spec", [ENV_SPEC, continuous_env_spec(3, 2)], ids=["discrete", "continuous"])
def test_loss_and_gradient_are_those_of_the_textbook(env_spec: EnvSpec) -> None:
    """Compute the same numbers by torch's modules and distributions over the transitions alone, one unmasked minibatch.

    The policy that acted is not the one that the step begins with.
    """
    policy = make_policy(env_spec)
    ppo = Ppo(policy, **SETTINGS | {"minibatch_size": NUM_STEPS * NUM_LANES, "epochs": 1})
    behind = make_params(policy)
    acting = behind + 0.3 * make_params(policy, 2)
    params = (behind + 0.5 * make_params(policy, 1)).requires_grad_()
    slots = make_slots(env_spec=env_spec)
    acted_on = {"observation": torch.from_numpy(slots["observation"][:-1].reshape(-1, 3))}
    actions = torch.from_numpy(slots["action"].reshape(NUM_STEPS * NUM_LANES, *env_spec.action.array.shape))
    acted = distribution(env_spec, policy.pure(acting, acted_on)["policy"]).log_prob(actions)
    begun = distribution(env_spec, policy.pure(behind, acted_on)["policy"]).log_prob(actions)
    slots["behavior_log_prob"][...] = acted.numpy().reshape(NUM_STEPS, NUM_LANES)
    batch = prepared(ppo, behind, slots)
    (minibatch,) = minibatches(ppo, batch)
    loss, metrics = ppo.loss({POLICY: params}, {}, minibatch)
    (gradient,) = torch.autograd.grad(loss, params)

    chosen = torch.from_numpy(slots["mask"].reshape(-1))
    assert 0 < int((~chosen).sum()) < len(chosen) // 2
    rows = {path: tensor[chosen] for path, tensor in batch.rows.items()}
    advantage = torch.from_numpy(batch.schedule_inputs["advantage"])[chosen]
    network = build_network(MlpActorCritic, env_spec, {"hidden_sizes": (8,)}, seed=5)
    torch.nn.utils.vector_to_parameters(params.detach(), network.parameters())
    heads = network({"observation": rows["observation"]})
    parameters, value = heads["policy"], heads["value"]
    chosen_by = distribution(env_spec, parameters)
    ratio = torch.exp(chosen_by.log_prob(rows["action"]) - begun[chosen])
    importance = torch.exp(begun - acted)[chosen]
    assert importance.std() > 0.05
    normalized = importance * (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = torch.max(-normalized * ratio, -normalized * torch.clamp(ratio, 0.8, 1.2)).mean()
    kept = rows["value"] + torch.clamp(value - rows["value"], -0.2, 0.2)
    value_loss = 0.5 * torch.max((value - rows["return"]) ** 2, (kept - rows["return"]) ** 2).mean()
    entropy = chosen_by.entropy().mean()
    expected = policy_loss + 0.7 * value_loss - 0.013 * entropy
    expected.backward()
    expected_gradient = torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters()])

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    expected_metrics = {
        "loss": expected,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - ratio.log()).mean(),
        "clip_fraction": ((ratio - 1).abs() > 0.2).float().mean(),
    }
    assert set(metrics) == set(expected_metrics)
    for name, metric in expected_metrics.items():
        torch.testing.assert_close(metrics[name], metric.detach(), rtol=1e-4, atol=1e-6)
        assert not metrics[name].requires_grad
    assert 0.1 < float(metrics["clip_fraction"]) < 0.9, "both branches of the clip are compared"


def test_prepared_rows_are_values_and_advantages_of_the_parameters_given() -> None:
    policy = make_policy()
    params, slots = make_params(policy), make_slots()
    batch = prepared(Ppo(policy, **SETTINGS), params, slots)
    frames = torch.from_numpy(slots["observation"].reshape(-1, 3))
    value = policy.pure(params, {"observation": frames})["value"].reshape(NUM_STEPS + 1, NUM_LANES)
    torch.testing.assert_close(batch.rows["value"], value[:-1].reshape(-1))
    mask = torch.from_numpy(slots["mask"].reshape(-1))
    advantage = torch.from_numpy(batch.schedule_inputs["advantage"])
    torch.testing.assert_close(batch.rows["return"][mask], (advantage + batch.rows["value"])[mask])
    assert batch.num_transitions == int(mask.sum())
    explained = 1 - torch.var(batch.rows["return"][mask] - batch.rows["value"][mask]) / torch.var(
        batch.rows["return"][mask]
    )
    assert batch.metrics["explained_variance"] == pytest.approx(float(explained), rel=1e-4)


def test_without_lag_all_importance_weights_are_one() -> None:
    policy = make_policy()
    params, slots = make_params(policy), make_slots()
    ppo = Ppo(policy, **SETTINGS)
    proximal = prepared(ppo, params, slots).rows["proximal_log_prob"].numpy().reshape(NUM_STEPS, NUM_LANES)
    slots["behavior_log_prob"][...] = proximal
    alike = prepared(ppo, params, slots)
    assert (alike.schedule_inputs["importance"] == 1.0).all()
    assert alike.metrics["behavior_kl"] == 0.0
    slots["behavior_log_prob"][...] = proximal - np.float32(np.log(2.0))
    twice = prepared(ppo, params, slots)
    np.testing.assert_allclose(twice.schedule_inputs["importance"], 2.0, rtol=1e-6)
    assert twice.metrics["behavior_kl"] == pytest.approx(1.0 - np.log(2.0), rel=1e-5)


@pytest.mark.parametrize("env_spec", [ENV_SPEC, continuous_env_spec(3, 2)], ids=["discrete", "continuous"])
def test_actions_of_reset_steps_are_not_read(env_spec: EnvSpec) -> None:
    policy = make_policy(env_spec)
    params, slots = make_params(policy), make_slots(env_spec=env_spec)
    ppo = Ppo(policy, **SETTINGS)
    expected = prepared(ppo, params, slots)
    assert not slots["mask"].all()
    slots["action"][~slots["mask"]] = -7 if env_spec.action.kind == "discrete" else np.nan
    slots["behavior_log_prob"][~slots["mask"]] = np.nan
    found = prepared(ppo, params, slots)
    assert found.metrics == expected.metrics
    for one, other in zip(minibatches(ppo, found), minibatches(ppo, expected), strict=True):
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_prepare_copies_no_observation_without_need() -> None:
    policy, slots = make_policy(), make_slots()
    batch = prepared(Ppo(policy, **SETTINGS), make_params(policy), slots)
    assert np.shares_memory(batch.rows["observation"].numpy(), slots["observation"])


def test_each_epoch_visits_each_transition_once_in_an_order_of_its_own() -> None:
    policy, slots = make_policy(), make_slots()
    ppo = Ppo(policy, **SETTINGS)
    batch = prepared(ppo, make_params(policy), slots)
    schedule = ppo.schedule(batch, np.random.default_rng(0), one_rank)
    assert schedule[INDEX].shape == schedule["weight"].shape == schedule["advantage"].shape == (3 * 4, 16)
    orders = [
        index[weight > 0]
        for index, weight in zip(schedule[INDEX].view(3, -1), schedule["weight"].view(3, -1), strict=True)
    ]
    for order in orders:
        assert sorted(order.tolist()) == np.flatnonzero(slots["mask"].reshape(-1)).tolist()
    assert not torch.equal(orders[0], orders[1])
    torch.testing.assert_close(schedule["weight"].sum(1), torch.ones(12))


def test_advantages_are_normalised_over_the_transitions_of_each_minibatch() -> None:
    policy = make_policy()
    ppo = Ppo(policy, **SETTINGS)
    batch = prepared(ppo, make_params(policy), make_slots())
    schedule = ppo.schedule(batch, np.random.default_rng(0), one_rank)
    normalised = (
        schedule["advantage"] / torch.from_numpy(batch.schedule_inputs["importance"])[schedule[INDEX]]
    ).float()
    for k in range(len(normalised)):
        advantage = normalised[k][schedule["weight"][k] > 0]
        assert len(advantage) < 17
        torch.testing.assert_close(advantage.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(advantage.std(), torch.tensor(1.0), atol=1e-5, rtol=0)


def test_advantages_stay_as_they_are_if_not_normalised() -> None:
    policy = make_policy()
    ppo = Ppo(policy, **SETTINGS | {"normalize_advantages": False})
    batch = prepared(ppo, make_params(policy), make_slots())
    schedule = ppo.schedule(batch, np.random.default_rng(0), one_rank)
    chosen = schedule["weight"] > 0
    expected = torch.from_numpy(batch.schedule_inputs["advantage"] * batch.schedule_inputs["importance"])[
        schedule[INDEX]
    ]
    assert torch.equal(schedule["advantage"][chosen], expected[chosen].float())


def test_two_ranks_shares_add_up_to_the_loss_of_the_whole_batch() -> None:
    """Minibatch k of both ranks together is one minibatch: same weights, same normalisation, summed losses."""
    policy = make_policy()
    params = make_params(policy, 1)
    ppo = Ppo(policy, **SETTINGS | {"epochs": 1, "minibatch_size": NUM_STEPS * 2})
    whole_ppo = Ppo(policy, **SETTINGS | {"epochs": 1, "minibatch_size": NUM_STEPS * 4})
    slots = make_slots()
    halves = [
        {name: array[:, lanes].copy() for name, array in slots.items() if array.ndim > 1} for lanes in ([0, 1], [2, 3])
    ]
    batches = [prepared(ppo, params, half) for half in halves]
    sums: list[np.ndarray] = []
    for batch in batches:
        ppo.schedule(batch, np.random.default_rng(0), lambda values: sums.append(values) or values)
    shares = []
    for batch in batches:
        schedule = ppo.schedule(batch, np.random.default_rng(0), lambda values: sums[0] + sums[1])
        minibatch = {path: rows[schedule[INDEX][0]] for path, rows in batch.rows.items()}
        minibatch |= {name: entry[0] for name, entry in schedule.items()} | coefficients(ppo)
        shares.append(ppo.loss({POLICY: params}, {}, minibatch)[0])
    whole = prepared(whole_ppo, params, slots)
    (minibatch,) = minibatches(whole_ppo, whole)
    torch.testing.assert_close(
        shares[0] + shares[1], whole_ppo.loss({POLICY: params}, {}, minibatch)[0], rtol=1e-5, atol=1e-6
    )


def tower_gradients(policy: TorchPolicy, ppo: Ppo, minibatch: dict[str, torch.Tensor]) -> dict[str, float]:
    params = make_params(policy, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(ppo.loss({POLICY: params}, {}, minibatch)[0], params)
    named = zip(policy.layout.shapes, policy.layout.split(gradient), strict=True)
    sums = {"actor": 0.0, "critic": 0.0}
    for name, part in named:
        sums[name.split(".")[0]] += float(part.abs().sum())
    return sums


@pytest.mark.parametrize(
    ("settings", "advantage_scale", "moved"),
    [
        ({}, 1.0, {"actor", "critic"}),
        ({"value_coefficient": 0.0}, 1.0, {"actor"}),
        ({"entropy_coefficient": 0.0}, 0.0, {"critic"}),
        ({"value_coefficient": 0.0}, 0.0, {"actor"}),
        ({"value_coefficient": 0.0, "entropy_coefficient": 0.0}, 0.0, set()),
    ],
    ids=["all", "no value loss", "value loss alone", "entropy alone", "nothing"],
)
def test_gradients_flow_only_where_a_term_reaches(
    settings: dict[str, float], advantage_scale: float, moved: set[str]
) -> None:
    policy = make_policy()
    ppo = Ppo(policy, **SETTINGS | settings)
    minibatch = minibatches(ppo, prepared(ppo, make_params(policy), make_slots()))[0]
    minibatch["advantage"] = minibatch["advantage"] * advantage_scale
    gradients = tower_gradients(policy, ppo, minibatch)
    assert {name for name, total in gradients.items() if total > 0} == moved


def test_more_entropy_lowers_the_loss() -> None:
    policy = make_policy()
    plain, bonus = (Ppo(policy, **SETTINGS | {"entropy_coefficient": c}) for c in (0.0, 0.5))
    params = make_params(policy)
    minibatch = minibatches(plain, prepared(plain, params, make_slots()))[0]
    (loss, metrics), (with_bonus, _) = (
        ppo.loss({POLICY: params}, {}, minibatch | coefficients(ppo)) for ppo in (plain, bonus)
    )
    torch.testing.assert_close(loss - with_bonus, 0.5 * metrics["entropy"])


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 1e30])
def test_the_surrogate_is_the_minimum_and_flat_where_it_is_clipped(advantage: float, ratio: float) -> None:
    r, a = torch.tensor([ratio], requires_grad=True), torch.tensor([advantage])
    surrogate = clipped_surrogate(r, a, CLIP_RANGE)
    expected = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    torch.testing.assert_close(surrogate, expected.detach().requires_grad_())
    (slope,) = torch.autograd.grad(surrogate.sum(), r)
    clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert float(slope) == (0.0 if clipped else advantage)


@pytest.mark.parametrize("value", [-3.0, -0.2, -0.1, 0.0, 0.05, 0.2, 0.3, 3.0])
@pytest.mark.parametrize("target", [-1.0, 0.0, 0.07, 1.0])
def test_the_value_error_is_the_maximum_and_flat_where_it_is_clipped(value: float, target: float) -> None:
    v, old, goal = (torch.tensor([number]) for number in (value, 0.0, target))
    v.requires_grad_()
    error = clipped_square_error(v, old, goal, CLIP_RANGE)
    kept = old + (v - old).clamp(-0.2, 0.2)
    torch.testing.assert_close(error, torch.maximum((v - goal) ** 2, (kept - goal) ** 2))
    (slope,) = torch.autograd.grad(error.sum(), v)
    stuck = abs(value) > 0.2 and abs(float(kept.detach()) - target) > abs(value - target)
    assert float(slope) == pytest.approx(0.0 if stuck else 2 * (value - target))


def test_without_value_clipping_the_value_loss_is_the_plain_square() -> None:
    policy = make_policy()
    ppo = Ppo(policy, **SETTINGS | {"clip_value_loss": False})
    minibatch = minibatches(ppo, prepared(ppo, make_params(policy), make_slots()))[0]
    params = make_params(policy, 1)
    _, metrics = ppo.loss({POLICY: params}, {}, minibatch)
    value = policy.pure(params, minibatch)["value"]
    torch.testing.assert_close(
        metrics["value_loss"], 0.5 * ((value - minibatch["return"]) ** 2 * minibatch["weight"]).sum()
    )


def test_scheduled_coefficients_are_current() -> None:
    policy = make_policy()
    settings = {
        "clip_range": LinearSchedule(start=0.3, end=0.1, env_steps=1000),
        "entropy_coefficient": LinearSchedule(start=0.0, end=0.5, env_steps=200),
    }
    scheduled = Ppo(policy, **SETTINGS | settings)
    minibatch = minibatches(scheduled, prepared(scheduled, make_params(policy), make_slots()))[0]
    params = make_params(policy, 1)
    for env_steps, clip_range, entropy_coefficient in [(0, 0.3, 0.0), (100, 0.28, 0.25), (5000, 0.1, 0.5)]:
        constant = Ppo(policy, **SETTINGS | {"clip_range": clip_range, "entropy_coefficient": entropy_coefficient})
        loss, _ = scheduled.loss({POLICY: params}, {}, minibatch | coefficients(scheduled, env_steps))
        torch.testing.assert_close(loss, constant.loss({POLICY: params}, {}, minibatch | coefficients(constant))[0])


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    policy = make_policy()
    with pytest.raises(ValueError, match="16 steps x 3 lanes has 48 rows, no multiple of the minibatch size 20"):
        prepared(Ppo(policy, **SETTINGS | {"minibatch_size": 20}), make_params(policy), make_slots(num_lanes=3))


def test_a_minibatch_without_transitions_weighs_nothing() -> None:
    policy, slots = make_policy(), make_slots()
    ppo = Ppo(policy, **SETTINGS)
    slots["mask"][...] = False
    slots["mask"][0, 0] = True
    batch = prepared(ppo, make_params(policy), slots)
    losses = [
        float(ppo.loss({POLICY: make_params(policy, 1)}, {}, minibatch)[0]) for minibatch in minibatches(ppo, batch)
    ]
    assert sum(loss != 0.0 for loss in losses) == SETTINGS["epochs"]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("env_spec", [ENV_SPEC, continuous_env_spec(3, 2)], ids=["discrete", "continuous"])
def test_the_loss_compiles_whole_and_once(env_spec: EnvSpec) -> None:
    """The compiled step needs a loss without graph breaks, and no second compilation when a coefficient changes."""
    policy = make_policy(env_spec)
    ppo = Ppo(policy, **SETTINGS | {"clip_range": LinearSchedule(start=0.3, end=0.1, env_steps=1000)})
    batch = prepared(ppo, make_params(policy), make_slots(env_spec=env_spec))
    minibatch, params = minibatches(ppo, batch)[0], make_params(policy, 1)

    def value_and_metrics(vector: torch.Tensor, minibatch: dict[str, torch.Tensor]) -> Any:
        loss, metrics = ppo.loss({POLICY: vector}, {}, minibatch)
        return loss, (loss, metrics)

    counter = CompileCounter()
    by_hand = torch.func.grad(value_and_metrics, has_aux=True)
    compiled = torch.compile(by_hand, fullgraph=True, backend=counter)
    losses = []
    for env_steps in (0, 500):
        entry = minibatch | coefficients(ppo, env_steps)
        gradient, (loss, metrics) = by_hand(params, entry)
        compiled_gradient, (compiled_loss, compiled_metrics) = compiled(params, entry)
        torch.testing.assert_close(compiled_gradient, gradient)
        torch.testing.assert_close(compiled_loss, loss)
        torch.testing.assert_close(compiled_metrics, dict(metrics))
        losses.append(float(loss))
    assert losses[0] != losses[1]
    assert counter.frame_count == 1
