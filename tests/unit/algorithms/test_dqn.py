"""DQN: loss and gradient by torch's own modules, target networks, draws by priority, epsilon, compiled steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import ERRORS, INDEX, POLICY, WEIGHT, one_rank
from rlsrl.algorithms.check import check_algorithm
from rlsrl.algorithms.dqn import TARGET, Dqn, build, coefficients
from rlsrl.algorithms.gradients import LocalGradients
from rlsrl.algorithms.learner import Learner
from rlsrl.api.spec import AlgorithmSpec, DqnSpec
from rlsrl.buffers.replay.rows import IMPORTANCE, NEXT
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.epsilon_greedy import EPSILON
from rlsrl.policies.networks import MlpActionValues
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import MASK, discrete_env_spec, masked_env_spec, masked_rows, vector_rows, with_outcomes

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
MASKED = masked_env_spec()
SIZE, UPDATES_A_STEP = 16, 3
NETWORK = {"hidden_sizes": (8,), "activation": "relu"}


def spec_of(**fields: Any) -> DqnSpec:
    return DqnSpec.model_validate({"minibatchSize": SIZE, "targetPeriod": 4, "maxGradientNorm": 1e6, **fields})


def policy_of(seed: int = 0, env_spec: EnvSpec = ENV_SPEC, **options: Any) -> TorchPolicy:
    module = build_network(MlpActionValues, env_spec, {**NETWORK, **options}, seed=seed, outputs="actionValues")
    return TorchPolicy(module, env_spec, outputs="actionValues")


def rows_of(seed: int = 0, *, num_rows: int = UPDATES_A_STEP * SIZE) -> Arrays:
    action = np.random.default_rng(seed).integers(0, 4, num_rows)
    return with_outcomes({**vector_rows(num_rows, seed, num_features=3), "action": action}, seed)


def masked_rows_of(seed: int) -> Arrays:
    return with_outcomes(masked_rows(UPDATES_A_STEP * SIZE, seed), seed)


def network_of(policy: TorchPolicy) -> nn.Sequential:
    """Return the same network as torch's own modules."""
    vector = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())
    ((num_features,),) = (spec.shape for spec in policy.env_spec.unmasked.observation.values())
    module = nn.Sequential(nn.Linear(num_features, 8), nn.ReLU(), nn.Linear(8, policy.env_spec.action.num_actions))
    nn.utils.vector_to_parameters(vector, module.parameters())
    return module


class SingleFile:
    """DQN as a program of its own: loops over rows, torch's modules, autograd and Adam."""

    def __init__(self, policy: TorchPolicy, spec: DqnSpec) -> None:
        (self.observation,) = policy.env_spec.unmasked.observation
        self.network = network_of(policy)
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.1, eps=1e-5)
        self.spec = spec
        self.updates = 0
        self.errors: list[float] = []

    def step(self, rows: Arrays) -> None:
        for start in range(0, len(rows["reward"]), SIZE):
            self.update({name: array[start : start + SIZE] for name, array in rows.items()})

    def update(self, rows: Arrays) -> None:
        weights = rows[IMPORTANCE] ** self.spec.importance_exponent
        losses = []
        for row in range(SIZE):
            q = self.network(torch.from_numpy(rows[self.observation][row]))[int(rows["action"][row])]
            with torch.no_grad():
                following = torch.from_numpy(rows[NEXT + self.observation][row])
                of_target = self.target(following).tolist()
                chooser = self.network(following).tolist() if self.spec.double else of_target
                legal = [each for each in range(len(chooser)) if MASK not in rows or rows[NEXT + MASK][row][each]]
                value = of_target[max(legal, key=chooser.__getitem__)] if legal else 0.0
                target = float(rows["reward"][row]) + float(rows["discount"][row]) * value
            error = q - target
            delta = self.spec.huber_delta
            huber = 0.5 * error**2 if abs(float(error)) <= delta else delta * (abs(error) - 0.5 * delta)
            losses.append(float(weights[row]) * huber)
            self.errors.append(abs(float(error)))
        self.optimizer.zero_grad()
        (torch.stack(losses).sum() / SIZE).backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.spec.target_period == 0:
            self.target.load_state_dict(self.network.state_dict())


def learner_of(policy: TorchPolicy, spec: DqnSpec) -> Learner:
    algorithm = build(spec, policy, 1, None)
    optimizer = Adam(epsilon=1e-5, max_gradient_norm=1e6)
    return Learner(algorithm, policy.parameters(Version(0, 0)), learning_rate=0.1, optimizer=optimizer, seed=0)


@pytest.mark.parametrize("env_spec", [ENV_SPEC, MASKED], ids=["plain", "masked"])
@pytest.mark.parametrize("fields", [{}, {"double": False}, {"huberDelta": 50, "importanceExponent": 1.0}], ids=str)
def test_steps_are_those_of_an_independent_program(fields: dict[str, Any], env_spec: EnvSpec) -> None:
    policy, spec = policy_of(env_spec=env_spec), spec_of(**fields)
    learner, program = learner_of(policy, spec), SingleFile(policy, spec)
    for seed in range(4):
        rows = rows_of(seed) if env_spec is ENV_SPEC else masked_rows_of(seed)
        program.errors.clear()
        program.step(rows)
        result = learner.step(rows)
        assert result.errors is not None
        np.testing.assert_allclose(result.errors, program.errors, rtol=1e-3, atol=1e-4)
        found = learner.parameters(Version(0, 0)).vector
        expected = nn.utils.parameters_to_vector(program.network.parameters()).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        target = nn.utils.parameters_to_vector(program.target.parameters()).detach().numpy()
        np.testing.assert_allclose(learner._state[TARGET].numpy(), target, rtol=1e-3, atol=1e-4)
    assert learner.optimizer_steps == 4 * UPDATES_A_STEP


def test_the_target_network_is_copied_with_every_so_many_minibatches_also_after_a_resume() -> None:
    policy, spec = policy_of(), spec_of(targetPeriod=UPDATES_A_STEP + 2)
    whole, first, second = (learner_of(policy, spec) for _ in range(3))
    targets = []
    for seed in range(4):
        whole.step(rows_of(seed))
        targets.append(whole._state[TARGET].clone())
    first.step(rows_of(0))
    second.load_state_dict(*first.state_dict())
    second._params[POLICY].copy_(first._params[POLICY])
    for seed in range(1, 4):
        second.step(rows_of(seed))
        assert torch.equal(second._state[TARGET], targets[seed])
    assert not torch.equal(targets[0], targets[1])
    assert not torch.equal(whole._state[TARGET], whole._params[POLICY]), "its minibatch was in the midst of a step"


def test_a_skipped_minibatch_leaves_the_target_network_as_it_is() -> None:
    policy = policy_of()
    learner = learner_of(policy, spec_of(targetPeriod=UPDATES_A_STEP))
    learner.step(rows_of(0))
    before = learner._state[TARGET].clone()
    rows = {name: array.copy() for name, array in rows_of(1).items()}
    rows["reward"][-SIZE:] = np.nan  # of the last minibatch, with which the copy is due; the others change the network

    assert learner.step(rows).taken == (True, True, False)
    assert torch.equal(learner._state[TARGET], before)
    learner.step(rows_of(2))
    assert torch.equal(learner._state[TARGET], learner._params[POLICY])


def test_options_change_what_is_learned() -> None:
    vectors = []
    for fields in ({}, {"double": False}, {"huberDelta": 50}, {"importanceExponent": 1.0}, {"targetPeriod": 1}):
        learner = learner_of(policy_of(), spec_of(**fields))
        for seed in range(3):
            learner.step(rows_of(seed))
        vectors.append(learner.parameters(Version(0, 0)).vector)
    for place, vector in enumerate(vectors):
        assert not any(np.array_equal(vector, other) for other in vectors[place + 1 :])


def test_the_next_value_is_the_target_networks_of_the_action_that_the_network_prefers() -> None:
    """Van Hasselt et al., equation 4, by two networks that disagree."""
    policy = policy_of()
    algorithm = build(spec_of(huberDelta=1e6), policy, 1, None)
    online, target = (torch.from_numpy(policy_of(seed).parameters(Version(0, 0)).vector.copy()) for seed in (1, 2))
    rows = rows_of(num_rows=SIZE)
    batch = algorithm.prepare({POLICY: online}, rows, one_rank, algorithm.evaluate)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    minibatch = {name: tensor[0] for name, tensor in schedule.items()}
    minibatch["importance_exponent"] = torch.tensor(0.0)
    state = {TARGET: target}
    gradients = LocalGradients(POLICY, algorithm.loss)
    loss, metrics, _ = gradients({POLICY: online}, state, batch.rows, minibatch)
    following = {"observation": torch.from_numpy(rows[NEXT + "observation"])}
    chooser, values = (policy.pure(vector, following)["q"] for vector in (online, target))
    assert not torch.equal(chooser.argmax(-1), values.argmax(-1))
    next_value = values[torch.arange(SIZE), chooser.argmax(-1)].detach().numpy()
    chosen = policy.pure(online, {"observation": torch.from_numpy(rows["observation"])})["q"]
    error = chosen.detach().numpy()[np.arange(SIZE), rows["action"]] - rows["reward"] - rows["discount"] * next_value
    np.testing.assert_allclose(metrics[ERRORS].numpy(), np.abs(error), rtol=1e-4, atol=1e-5)
    assert float(loss) == pytest.approx(float(np.square(error).mean() / 2), rel=1e-4)


@pytest.mark.parametrize("quantiles", [1, 4])
def test_what_follows_has_no_value_where_no_action_is_legal(quantiles: int) -> None:
    """So may the last observation of a truncated episode be."""
    env_spec = MASKED
    kwargs = {**NETWORK, "quantiles": quantiles}
    module = build_network(MlpActionValues, env_spec, kwargs, seed=1, outputs="actionValues")
    policy = TorchPolicy(module, env_spec, outputs="actionValues")
    rng = np.random.default_rng(0)
    mask = np.ones((SIZE, 3), np.int8)
    rows = {
        **{prefix + "observation/x": rng.standard_normal((SIZE, 4), np.float32) for prefix in ("", NEXT)},
        MASK: mask,
        NEXT + MASK: np.where(np.arange(SIZE)[:, None] % 2, mask, 0).astype(np.int8),
        "action": rng.integers(0, 3, SIZE),
        "reward": rng.standard_normal(SIZE, np.float32),
        "discount": np.full(SIZE, 0.99, np.float32),
        IMPORTANCE: np.ones(SIZE, np.float32),
    }
    errors = []
    for discount in (0.99, 0.0):
        rows["discount"][::2] = discount  # of those without a legal action
        algorithm = build(spec_of(), policy, 1, None)
        params = {POLICY: torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())}
        batch = algorithm.prepare(params, rows, one_rank, algorithm.evaluate)
        schedule = algorithm.schedule(batch, rng, one_rank)
        minibatch = {name: tensor[0] for name, tensor in schedule.items()} | {"importance_exponent": torch.tensor(0.0)}
        gradients = LocalGradients(POLICY, algorithm.loss)
        _, metrics, _ = gradients(params, algorithm.initial_state(params), batch.rows, minibatch)
        errors.append(metrics[ERRORS].numpy())
    np.testing.assert_array_equal(*errors)
    assert errors[0].max() < 100


@pytest.mark.parametrize("huber_delta", [1.0, 0.25])
def test_quantiles_are_regressed_towards_those_of_the_target(huber_delta: float) -> None:
    """Dabney et al. (2018), algorithm 1, in loops."""
    number = 5
    algorithm = build(spec_of(huberDelta=huber_delta), policy := policy_of(quantiles=number), 1, None)
    online, target = (
        torch.from_numpy(policy_of(seed, quantiles=number).parameters(Version(0, 0)).vector.copy()) for seed in (1, 2)
    )
    rows = rows_of(num_rows=SIZE)
    batch = algorithm.prepare({POLICY: online}, rows, one_rank, algorithm.evaluate)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    minibatch = {name: tensor[0] for name, tensor in schedule.items()} | {"importance_exponent": torch.tensor(1.0)}
    state = {TARGET: target}
    loss, metrics, gradient = LocalGradients(POLICY, algorithm.loss)({POLICY: online}, state, batch.rows, minibatch)
    own = online.clone().requires_grad_()
    heads = policy.pure(own, {"observation": torch.from_numpy(rows["observation"])})
    following = {"observation": torch.from_numpy(rows[NEXT + "observation"])}
    best = policy.pure(online, following)["quantiles"].mean(-1).argmax(-1)
    of_target = policy.pure(target, following)["quantiles"]
    importance = rows[IMPORTANCE]
    expected, errors = torch.zeros(()), []
    for row in range(SIZE):
        theta = heads["quantiles"][row, int(rows["action"][row])]
        values = float(rows["reward"][row]) + float(rows["discount"][row]) * of_target[row, int(best[row])].detach()
        for i in range(number):
            for j in range(number):
                u = values[j] - theta[i]
                huber = 0.5 * u**2 if abs(float(u)) <= huber_delta else huber_delta * (u.abs() - 0.5 * huber_delta)
                share = abs((i + 0.5) / number - float(float(u) < 0))
                expected = expected + float(importance[row]) * share * huber / huber_delta / number / SIZE
        errors.append(abs(float(theta.mean() - values.mean())))
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    np.testing.assert_allclose(metrics[ERRORS].numpy(), errors, rtol=1e-4, atol=1e-5)
    (by_loops,) = torch.autograd.grad(expected, own)
    torch.testing.assert_close(gradient, by_loops, rtol=1e-3, atol=1e-5)


def test_minibatches_are_the_rows_in_order_with_their_importance() -> None:
    policy, rows = policy_of(), rows_of()
    algorithm = build(spec_of(), policy, 2, None)
    params = {POLICY: torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())}
    batch = algorithm.prepare(params, rows, one_rank, algorithm.evaluate)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    assert schedule[INDEX].flatten().tolist() == list(range(UPDATES_A_STEP * SIZE))
    assert schedule[INDEX].shape == (2 * UPDATES_A_STEP, SIZE // 2), "two ranks share each minibatch"
    torch.testing.assert_close(schedule[WEIGHT], torch.full_like(schedule[WEIGHT], 1 / SIZE))
    np.testing.assert_array_equal(schedule[IMPORTANCE].numpy(), rows[IMPORTANCE].reshape(-1, SIZE // 2))


def test_actions_are_random_until_training_begins() -> None:
    policy = policy_of()
    schedule = {"epsilonSchedule": {"linear": {"to": 0.1, "envSteps": 1000}}}
    spec = spec_of(epsilon=0.5, replay={"start": 100}, **schedule)
    algorithm: Dqn = build(spec, policy, 1, None)
    epsilons = [algorithm.acting_scalars(env_steps)[EPSILON] for env_steps in (0, 99, 100, 500, 2000)]
    assert epsilons == pytest.approx([1.0, 1.0, 0.46, 0.3, 0.1])
    algorithm.adopt(coefficients(spec_of(epsilon=0.25, importanceExponent=0.75), None))
    assert algorithm.acting_scalars(500)[EPSILON] == 0.25
    assert algorithm.coefficients(500) == {"importance_exponent": 0.75}


def everything(learner: Learner) -> Arrays:
    """Return the weights, the target network's and the optimizer's state."""
    return {**learner.state_dict()[0], "weights": learner.parameters(Version(0, 0)).vector}


@pytest.fixture
def eager_losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each loss that is computed without compiled code."""
    losses: list[str] = []
    loss = Dqn.loss

    def counted(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            losses.append("eager")
        return loss(*arguments)

    monkeypatch.setattr(Dqn, "loss", counted)
    return losses


def compare_compiled_with_eager_steps(fields: dict[str, Any], options: dict[str, Any], eager_losses: list[str]) -> None:
    """Train 12 minibatches, with three copies of the target network, by rows of three steps drawn by priority."""
    eager, compiled = (learner_of(policy_of(**options), spec_of(**fields)) for _ in range(2))
    before = everything(eager)
    compiled.compile({name: np.ones_like(array) for name, array in rows_of().items()})
    compiled.use_compiled()
    torch.compiler.set_stance("fail_on_recompile")
    eager_losses.clear()
    for seed in range(4):
        results = [learner.step(rows_of(seed)) for learner in (eager, compiled)]
        assert results[1].metrics == pytest.approx(results[0].metrics, rel=1e-3, abs=1e-5)
        assert results[0].errors is not None
        assert results[1].errors is not None
        np.testing.assert_allclose(results[1].errors, results[0].errors, rtol=1e-3, atol=1e-4)
        assert results[1].taken == results[0].taken == (True,) * UPDATES_A_STEP
        found, expected = everything(compiled), everything(eager)
        for path, array in expected.items():
            np.testing.assert_allclose(found[path], array, rtol=1e-3, atol=1e-5, err_msg=path)
    assert not np.allclose(expected["weights"], before["weights"], atol=0.1)
    assert len(eager_losses) == 4 * UPDATES_A_STEP, "the compiled learner computed none of them"


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"double": False}, {}),
    "double": ({}, {}),
    "dueling": ({}, {"dueling": True}),
    "quantiles": ({"huberDelta": 0.25}, {"quantiles": 4}),
    "all": ({"importanceExponent": 1.0}, {"dueling": True, "quantiles": 4}),
}
"""Fields of the spec and of the network, by name. All weigh rows by their importance, with 0.4 if none is given."""


@pytest.mark.usefixtures("own_compiler", "tracing_only")
@pytest.mark.parametrize("kind", COMPILED)
def test_the_step_is_one_graph_that_computes_the_same(kind: str, eager_losses: list[str]) -> None:
    compare_compiled_with_eager_steps(*COMPILED[kind], eager_losses)


@pytest.mark.usefixtures("own_compiler", "cache")
@pytest.mark.parametrize(
    "kind", [kind if kind == "all" else pytest.param(kind, marks=pytest.mark.slow) for kind in COMPILED]
)
def test_the_compiled_step_computes_the_same(kind: str, eager_losses: list[str]) -> None:
    compare_compiled_with_eager_steps(*COMPILED[kind], eager_losses)


@pytest.mark.parametrize("env_spec", [ENV_SPEC, MASKED], ids=["plain", "masked"])
def test_it_keeps_the_interface_of_algorithms(env_spec: Any) -> None:
    spec = AlgorithmSpec.model_validate({"dqn": {"minibatchSize": 64, "replay": {"priorities": {}}}})
    for options in ({}, {"dueling": True, "quantiles": 4}):
        check_algorithm(spec, env_spec, MlpActionValues, {**NETWORK, **options})
