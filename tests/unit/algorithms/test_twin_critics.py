"""SAC and TD3: steps by programs of their own with torch's modules, targets, temperature, actions before training."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlsrl.algorithms import gradients
from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import ERRORS, POLICY, one_rank
from rlsrl.algorithms.check import check_algorithm
from rlsrl.algorithms.learner import Learner, StepResult
from rlsrl.algorithms.minibatch import all_due, due_groups
from rlsrl.algorithms.sac import TEMPERATURE, Sac
from rlsrl.algorithms.sac import build as build_sac
from rlsrl.algorithms.td3 import Td3
from rlsrl.algorithms.td3 import build as build_td3
from rlsrl.algorithms.td3 import coefficients as td3_coefficients
from rlsrl.algorithms.twin_critics import TwinCriticAlgorithm
from rlsrl.api.fields import all_fields
from rlsrl.api.spec import AlgorithmSpec, SacSpec, Td3Spec
from rlsrl.buffers.replay.rows import IMPORTANCE, NEXT
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network, seeded
from rlsrl.policies.cnn import NatureCnnPolicy
from rlsrl.policies.critics import CRITICS, TwinCritics
from rlsrl.policies.exploration import DEVIATION, UNIFORM
from rlsrl.policies.exported import MASKED_LOGIT
from rlsrl.policies.networks import MlpPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import (
    MASK,
    MIXED,
    bounded_env_spec,
    discrete_env_spec,
    masked_env_spec,
    masked_rows,
    pixels_env_spec,
    vector_rows,
    with_outcomes,
)

FEATURES, DIMENSIONS, CHOICES = 3, 2, 4
SIZE, UPDATES_A_STEP = 16, 3
NETWORK = {"hidden_sizes": (8,), "activation": "relu"}
CRITIC = {"hiddenSizes": [8]}
RATE, CRITIC_RATE, TAU = 0.02, 0.03, 0.1


SQUASHED, CLIPPED = (bounded_env_spec(vectors, FEATURES, DIMENSIONS) for vectors in ("squashed", "clipped"))
DISCRETE = discrete_env_spec(num_features=FEATURES, num_actions=CHOICES)
MASKED = masked_env_spec()


def fields_of(**fields: Any) -> dict[str, Any]:
    return {"minibatchSize": SIZE, "tau": TAU, "criticLearningRate": CRITIC_RATE, "critic": CRITIC, **fields}


def policy_of(env_spec: EnvSpec) -> TorchPolicy:
    return TorchPolicy(
        build_network(MlpPolicy, env_spec, NETWORK, seed=0, outputs="policy"), env_spec, outputs="policy"
    )


def algorithm_of(env_spec: EnvSpec, **fields: Any) -> TwinCriticAlgorithm[Any]:
    with seeded(1):
        if env_spec is CLIPPED:
            return build_td3(Td3Spec.model_validate(fields_of(**fields)), policy_of(env_spec), 1, None)
        return build_sac(SacSpec.model_validate(fields_of(**fields)), policy_of(env_spec), 1, None)


def learner_of(algorithm: TwinCriticAlgorithm[Any], env_spec: EnvSpec, *, seed: int = 0) -> Learner:
    initial = policy_of(env_spec).parameters(Version(0, 0))
    return Learner(algorithm, initial, learning_rate=RATE, optimizer=Adam(epsilon=1e-8), seed=seed)


def rows_of(env_spec: EnvSpec, seed: int = 0, *, num_rows: int = UPDATES_A_STEP * SIZE) -> Arrays:
    rows = vector_rows(num_rows, seed, num_features=FEATURES, num_dimensions=DIMENSIONS)
    if env_spec is DISCRETE:
        rows = {**rows, "action": np.random.default_rng(seed).integers(0, CHOICES, num_rows)}
    return with_outcomes(rows, seed)


def masked_rows_of(seed: int) -> Arrays:
    return with_outcomes(masked_rows(UPDATES_A_STEP * SIZE, seed), seed)


class Program:
    """What the two programs share: torch's modules, in float64, with the weights that a learner starts from."""

    def __init__(self, learner: Learner, algorithm: TwinCriticAlgorithm[Any], env_spec: EnvSpec) -> None:
        action = env_spec.action
        ((self.observation, array),) = env_spec.unmasked.observation.items()
        (num_features,) = array.shape
        layers = (nn.Linear(num_features, 8), nn.ReLU(), nn.Linear(8, action.num_layer_outputs))
        self.policy = nn.Sequential(*layers).double()
        of_policy = torch.from_numpy(learner.parameters(Version(0, 0)).vector.copy()).double()
        nn.utils.vector_to_parameters(of_policy, self.policy.parameters())
        self.is_discrete = action.kind == "discrete"
        num_inputs = num_features if self.is_discrete else num_features + DIMENSIONS
        num_values = action.num_actions if self.is_discrete else 1
        layout = algorithm._critics.layout
        stored = dict(zip(layout.shapes, layout.split(learner._params[CRITICS].double().clone()), strict=True))
        self.critics = []
        for number in range(2):
            critic = nn.Sequential(nn.Linear(num_inputs, 8), nn.ReLU(), nn.Linear(8, num_values)).double()
            for place, layer in ((0, 0), (2, 1)):
                linear = cast("nn.Linear", critic[place])
                linear.weight.data = stored[f"layers.{layer}.weight"][number].t().clone()
                linear.bias.data = stored[f"layers.{layer}.bias"][number, 0].clone()
            self.critics.append(critic)
        self.targets = copy.deepcopy(self.critics)
        both = [*self.critics[0].parameters(), *self.critics[1].parameters()]
        self.critic_optimizer = torch.optim.Adam(both, lr=CRITIC_RATE)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE)
        self.noise = np.random.default_rng(0)
        self.errors: list[float] = []

    def step(self, rows: Arrays) -> None:
        shape = (UPDATES_A_STEP, SIZE, DIMENSIONS)
        noises = [self.noise.standard_normal(shape, np.float32) if rows["action"].ndim > 1 else None for _ in range(2)]
        for update in range(UPDATES_A_STEP):
            part = slice(update * SIZE, (update + 1) * SIZE)
            now, following = (None if each is None else torch.from_numpy(each[update]).double() for each in noises)
            double = {
                name: torch.from_numpy(array[part]).to(torch.int64 if array.dtype.kind == "i" else torch.float64)
                for name, array in rows.items()
            }
            weights = double[IMPORTANCE] ** 0.4
            self.update(double, weights, now, following)

    def update(self, rows: dict[str, Tensor], weights: Tensor, noise: Any, next_noise: Any) -> None:
        raise NotImplementedError

    def regress(self, found: list[list[Tensor]], targets: list[Tensor], weights: Tensor) -> None:
        losses = []
        for row, target in enumerate(targets):
            errors = [values[row] - target for values in found]
            losses.append(weights[row] * sum(error**2 for error in errors) / 2)
            self.errors.append(sum(abs(float(error.detach())) for error in errors) / 2)
        descend(self.critic_optimizer, torch.stack(losses).sum() / SIZE)

    def follow(self, target: nn.Module, trained: nn.Module) -> None:
        for old, new in zip(target.parameters(), trained.parameters(), strict=True):
            old.data = (1 - TAU) * old.data + TAU * new.data


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class SacProgram(Program):
    """SAC row by row."""

    def __init__(self, learner: Learner, algorithm: TwinCriticAlgorithm[Any], env_spec: EnvSpec, spec: SacSpec) -> None:
        super().__init__(learner, algorithm, env_spec)
        self.spec = spec
        self.log_temperature = torch.tensor(math.log(spec.temperature), dtype=torch.float64, requires_grad=True)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=RATE)

    def soft(
        self, critics: list[nn.Sequential], rows: dict[str, Tensor], row: int, noise: Any, *, prefix: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Return (smaller value, entropy) of the policy's action; of its distribution if actions are discrete."""
        observation = rows[prefix + self.observation][row]
        outputs = self.policy(observation)
        if self.is_discrete:
            legal = self.legal(rows, row, prefix)
            probs = torch.softmax(outputs[legal], dim=0)
            smaller = torch.minimum(*(critic(observation)[legal] for critic in critics)).detach()
            return (probs * smaller).sum(), -(probs * probs.log()).sum()
        mean, log_std = outputs[:DIMENSIONS], outputs[DIMENSIONS:].clamp(-20, 2)
        normal = torch.distributions.Normal(mean, log_std.exp())
        before = mean + log_std.exp() * noise
        action = torch.tanh(before)
        log_prob = (normal.log_prob(before) - torch.log(1 - action**2)).sum()
        return torch.minimum(*(critic(torch.cat([observation, action]))[0] for critic in critics)), -log_prob

    def legal(self, rows: dict[str, Tensor], row: int, prefix: str = "") -> list[int]:
        """Return the legal choices."""
        num_choices = self.policy[-1].out_features
        return [each for each in range(num_choices) if MASK not in rows or rows[prefix + MASK][row][each]]

    def wanted_entropy(self, rows: dict[str, Tensor], row: int) -> float:
        if self.spec.target_entropy is not None:
            return self.spec.target_entropy
        return 0.98 * math.log(len(self.legal(rows, row))) if self.is_discrete else -DIMENSIONS

    def update(self, rows: dict[str, Tensor], weights: Tensor, noise: Any, next_noise: Any) -> None:
        temperature = self.log_temperature.exp().detach()
        targets, found = [], []
        for row in range(SIZE):
            of_row = None if next_noise is None else next_noise[row]
            value, entropy = self.soft(self.targets, rows, row, of_row, prefix=NEXT)
            soft = (value + temperature * entropy).detach()
            targets.append(rows["reward"][row] + rows["discount"][row] * soft)
        for critic in self.critics:
            if self.is_discrete:
                found.append([critic(rows[self.observation][row])[rows["action"][row]] for row in range(SIZE)])
            else:
                inputs = torch.cat([rows["observation"], rows["action"]], dim=1)
                found.append([critic(inputs[row])[0] for row in range(SIZE)])
        self.regress(found, targets, weights)
        losses, surpluses = [], []
        for row in range(SIZE):
            value, entropy = self.soft(self.critics, rows, row, None if noise is None else noise[row])
            losses.append(-value - temperature * entropy)
            surpluses.append(entropy.detach() - self.wanted_entropy(rows, row))
        descend(self.policy_optimizer, torch.stack(losses).mean())
        if self.spec.learn_temperature:
            descend(self.temperature_optimizer, self.log_temperature.exp() * torch.stack(surpluses).mean())
        for target, critic in zip(self.targets, self.critics, strict=True):
            self.follow(target, critic)


class Td3Program(Program):
    """TD3 row by row."""

    def __init__(self, learner: Learner, algorithm: TwinCriticAlgorithm[Any], env_spec: EnvSpec, spec: Td3Spec) -> None:
        super().__init__(learner, algorithm, env_spec)
        self.spec = spec
        self.target_policy = copy.deepcopy(self.policy)
        self.updates = 0

    def update(self, rows: dict[str, Tensor], weights: Tensor, noise: Any, next_noise: Any) -> None:
        del noise
        targets = []
        for row in range(SIZE):
            following = rows[NEXT + "observation"][row]
            limit = self.spec.target_noise_clip
            smoothing = torch.clamp(self.spec.target_deviation * next_noise[row], -limit, limit)
            action = torch.clamp(torch.tanh(self.target_policy(following)) + smoothing, -1, 1)
            value = min(float(critic(torch.cat([following, action]))[0]) for critic in self.targets)
            targets.append(rows["reward"][row] + rows["discount"][row] * value)
        inputs = torch.cat([rows["observation"], rows["action"]], dim=1)
        self.regress([[critic(each)[0] for each in inputs] for critic in self.critics], targets, weights)
        self.updates += 1
        if self.updates % self.spec.policy_period:
            return
        actions = torch.tanh(self.policy(rows["observation"]))
        descend(self.policy_optimizer, -self.critics[0](torch.cat([rows["observation"], actions], dim=1)).mean())
        self.follow(self.target_policy, self.policy)
        for target, critic in zip(self.targets, self.critics, strict=True):
            self.follow(target, critic)


def flat_critics(critics: list[nn.Sequential]) -> np.ndarray:
    """Return both critics' parameters in the order of ``TwinCritics``."""
    parts: list[Tensor] = []
    for place in (0, 2):
        layers = [cast("nn.Linear", critic[place]) for critic in critics]
        parts += [layer.weight.detach().t().reshape(-1) for layer in layers]
        parts += [layer.bias.detach() for layer in layers]
    return torch.cat(parts).numpy()


def flat(module: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy()


CASES: list[tuple[EnvSpec, dict[str, Any]]] = [
    (SQUASHED, {}),
    (SQUASHED, {"temperature": 0.2, "targetEntropy": 0.5}),
    (SQUASHED, {"temperature": 0.2, "learnTemperature": False}),
    (DISCRETE, {}),
    (MASKED, {}),
    (MASKED, {"targetEntropy": 0.5}),
    (CLIPPED, {}),
    (CLIPPED, {"policyPeriod": 3, "targetDeviation": 0.6, "targetNoiseClip": 0.3}),
    (CLIPPED, {"policyPeriod": 1}),
]


@pytest.mark.parametrize(
    ("env_spec", "fields"),
    CASES,
    ids=lambda each: str(each) if isinstance(each, dict) else "masked" if each is MASKED else each.action.vectors,
)
def test_steps_are_those_of_an_independent_program(env_spec: EnvSpec, fields: dict[str, Any]) -> None:
    algorithm = algorithm_of(env_spec, **fields)
    learner = learner_of(algorithm, env_spec)
    program: Any
    if isinstance(algorithm, Td3):
        program = Td3Program(learner, algorithm, env_spec, algorithm._settings)
        targets = {
            "target_policy": lambda: flat(program.target_policy),
            "target_critics": lambda: flat_critics(program.targets),
        }
    else:
        assert isinstance(algorithm, Sac)
        program = SacProgram(learner, algorithm, env_spec, algorithm._settings)
        targets = {"target": lambda: flat_critics(program.targets)}
    close: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-4}
    before = learner.parameters(Version(0, 0)).vector
    for seed in range(4):
        rows = masked_rows_of(seed) if env_spec is MASKED else rows_of(env_spec, seed)
        program.errors.clear()
        program.step(rows)
        result = learner.step(rows)
        assert result.errors is not None
        np.testing.assert_allclose(result.errors, program.errors, **close)
        np.testing.assert_allclose(learner._params[CRITICS].numpy(), flat_critics(program.critics), **close)
        np.testing.assert_allclose(learner.parameters(Version(0, 0)).vector, flat(program.policy), **close)
        for name, expected in targets.items():
            np.testing.assert_allclose(learner._state[name].numpy(), expected(), **close, err_msg=name)
        if TEMPERATURE in learner._params:
            assert float(learner._params[TEMPERATURE]) == pytest.approx(float(program.log_temperature), rel=1e-3)
    assert not np.allclose(before, learner.parameters(Version(0, 0)).vector, atol=1e-2)


@pytest.mark.parametrize(
    "env_spec", [SQUASHED, DISCRETE, MASKED, CLIPPED], ids=["squashed", "discrete", "masked", "clipped"]
)
def test_it_keeps_the_interface_of_algorithms(env_spec: EnvSpec) -> None:
    name = "td3" if env_spec is CLIPPED else "sac"
    for fields in ({}, {"replay": {"priorities": {}}}, {"critic": {"layerNorm": True, "hiddenSizes": [8, 8]}}):
        check_algorithm(AlgorithmSpec.model_validate({name: fields_of(**fields)}), env_spec, MlpPolicy, NETWORK)


def compiled_pair(env_spec: EnvSpec, num_steps: int, **fields: Any) -> list[tuple[StepResult, StepResult]]:
    """Return the results of an eager and of a compiled learner, and compare all that they hold."""
    eager, compiled = (learner_of(algorithm_of(env_spec, **fields), env_spec) for _ in range(2))
    zeros = {name: np.zeros_like(array) for name, array in rows_of(env_spec).items()}
    zeros[IMPORTANCE] += 1
    compiled.compile(zeros)
    compiled.use_compiled()
    torch.compiler.set_stance("fail_on_recompile")
    pairs = []
    for seed in range(num_steps):
        pairs.append((eager.step(rows_of(env_spec, seed)), compiled.step(rows_of(env_spec, seed))))
        of_eager, of_compiled = (each.state_dict()[0] for each in (eager, compiled))
        for path, array in of_eager.items():
            np.testing.assert_allclose(of_compiled[path], array, rtol=1e-3, atol=1e-5, err_msg=path)
    return pairs


@pytest.mark.usefixtures("own_compiler", "tracing_only")
@pytest.mark.parametrize("microbatches", [False, True], ids=["whole", "in microbatches"])
@pytest.mark.parametrize("env_spec", [SQUASHED, DISCRETE, CLIPPED], ids=["squashed", "discrete", "clipped"])
def test_the_compiled_step_computes_the_same(
    env_spec: EnvSpec, microbatches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if microbatches:
        elements = sum(math.prod(array.shape[1:]) for name, array in rows_of(env_spec).items() if name != IMPORTANCE)
        monkeypatch.setattr(gradients, "MICROBATCH_ELEMENTS", SIZE // 4 * elements)
    for eager, compiled in compiled_pair(env_spec, 3):
        assert compiled.metrics == pytest.approx(eager.metrics, rel=1e-3, abs=1e-5)
        assert eager.errors is not None
        np.testing.assert_allclose(compiled.errors, eager.errors, rtol=1e-3, atol=1e-5)
        assert (compiled.taken, compiled.optimizer_steps) == (eager.taken, eager.optimizer_steps)


def test_a_group_is_updated_with_every_so_many_minibatches_also_after_a_resume() -> None:
    env_spec, fields = CLIPPED, {"policyPeriod": 4}
    whole, first = (learner_of(algorithm_of(env_spec, **fields), env_spec) for _ in range(2))
    numbers = []
    for seed in range(3):
        numbers.append(whole.step(rows_of(env_spec, seed)).optimizer_steps)
        if seed == 0:
            first.step(rows_of(env_spec, seed))
    assert numbers == [0, 1, 2], "of 3, 6 and 9 minibatches"
    resumed = learner_of(algorithm_of(env_spec, **fields), env_spec)
    initial = first.parameters(Version(0, 1))
    resumed = Learner(
        algorithm_of(env_spec, **fields), initial, learning_rate=RATE, optimizer=Adam(epsilon=1e-8), seed=9
    )
    resumed.load_state_dict(*first.state_dict())
    for seed in (1, 2):
        resumed.step(rows_of(env_spec, seed))
    assert resumed.digest() == whole.digest()


def test_ranks_that_read_a_state_in_another_order_have_equal_parameters() -> None:
    first, second = (learner_of(algorithm_of(CLIPPED), CLIPPED) for _ in range(2))
    arrays, values = first.state_dict()
    assert sum(path.startswith("state/") for path in arrays) > 1
    second.load_state_dict(dict(reversed(arrays.items())), values)
    assert second.digest() == first.digest()


def test_ranks_draw_noise_of_their_own_whose_state_need_not_be_stored() -> None:
    def rank(stream: int, initial: Parameters) -> Learner:
        optimizer = Adam(epsilon=1e-8)
        return Learner(algorithm_of(SQUASHED), initial, learning_rate=RATE, optimizer=optimizer, seed=0, stream=stream)

    whole = rank(1, policy_of(SQUASHED).parameters(Version(0, 0)))
    whole.step(rows_of(SQUASHED))
    initial, (arrays, values) = whole.parameters(Version(0, 1)), whole.state_dict()
    of_another_rank = np.random.default_rng(9).bit_generator.state
    digests = []
    for stream in (1, 1, 0, 2):
        learner = rank(stream, initial)
        learner.load_state_dict(arrays, {**values, "schedule_rng": of_another_rank})
        learner.step(rows_of(SQUASHED, 1))
        digests.append(learner.digest())
    whole.step(rows_of(SQUASHED, 1))
    assert digests[0] == digests[1] == whole.digest()
    assert len(set(digests)) == 3


def test_a_minibatch_without_an_update_of_the_policy_has_no_metrics_of_it() -> None:
    learner = learner_of(algorithm_of(CLIPPED, policyPeriod=UPDATES_A_STEP + 1), CLIPPED)
    first, second = (set(learner.step(rows_of(CLIPPED, seed)).metrics) for seed in range(2))
    assert second - first == {"policy_loss", "gradient_norm"}
    assert "critics_gradient_norm" in first


def test_state_and_policy_stay_where_a_loss_is_not_finite() -> None:
    learner = learner_of(algorithm_of(SQUASHED), SQUASHED)
    rows = rows_of(SQUASHED)
    before = {path: array.copy() for path, array in learner.state_dict()[0].items()}
    digest = learner.digest()
    result = learner.step({**rows, "reward": np.full_like(rows["reward"], np.nan)})
    assert result.skipped == UPDATES_A_STEP
    assert learner.digest() == digest
    assert all(np.array_equal(array, before[path]) for path, array in learner.state_dict()[0].items())


def test_the_temperature_rises_while_the_entropy_is_below_its_target() -> None:
    for target, sign in ((50.0, 1), (-50.0, -1)):
        learner = learner_of(algorithm_of(SQUASHED, targetEntropy=target), SQUASHED)
        found = [learner.step(rows_of(SQUASHED, seed)).metrics["temperature"] for seed in range(3)]
        assert found == sorted(found, reverse=sign < 0)
        assert (found[-1] - 1.0) * sign > 0.05


def test_the_temperature_aims_at_an_entropy_that_legal_actions_can_have() -> None:
    """With two legal actions of many, a share of the entropy of all could never be reached."""
    logits = torch.zeros(4, CHOICES)
    logits[1, 2:] = logits[2, 1:] = logits[3] = MASKED_LOGIT
    found = cast("Sac", algorithm_of(DISCRETE))._target_entropy(logits)
    torch.testing.assert_close(found, 0.98 * torch.tensor([CHOICES, 2.0, 1.0, 1.0]).log())
    assert cast("Sac", algorithm_of(DISCRETE, targetEntropy=0.25))._target_entropy(logits) == 0.25
    assert cast("Sac", algorithm_of(SQUASHED))._target_entropy(logits) == -DIMENSIONS


def test_images_are_refused() -> None:
    for build, spec, vectors in ((build_sac, SacSpec(), "squashed"), (build_td3, Td3Spec(), "clipped")):
        env_spec = replace(pixels_env_spec(), action=bounded_env_spec(cast("Any", vectors)).action)
        module = build_network(NatureCnnPolicy, env_spec, {"hidden_size": 8}, seed=0, outputs="policy")
        with pytest.raises(ConfigurationError, match=r"critics .* observation is an image, uint8\[2, 36, 36\]"):
            cast("Any", build)(spec, TorchPolicy(module, env_spec, outputs="policy"), 1, None)


@pytest.mark.parametrize("env_spec", [SQUASHED, CLIPPED], ids=["sac", "td3"])
def test_what_an_edit_may_change_leaves_the_form_of_the_state_as_it_is(env_spec: EnvSpec) -> None:
    """A state of another form could not be resumed: each restart would fail."""
    name = "td3" if env_spec is CLIPPED else "sac"
    block = [field for field in all_fields() if field.path[:3] == ("spec", "algorithm", name) and len(field.path) == 4]
    of_sac = {"learnTemperature", "temperature"} if name == "sac" else set()
    assert {field.path[-1] for field in block if field.on_edit == "refuse"} >= {"replay", "critic", *of_sac}
    shared = {
        "tau": 0.5, "criticLearningRate": 0.1, "minibatchSize": 8, "discount": 0.5, "importanceExponent": 1.0,
        "noiseColor": "pink",
    }  # fmt: skip
    own = {
        "sac": {"targetEntropy": 1.0},
        "td3": {"policyPeriod": 5, "targetDeviation": 0.1, "targetNoiseClip": 0.1, "explorationDeviation": 0.3},
    }
    tried, by_learner = (
        {*shared, *own[name]},
        {"learningRate", "maxGradientNorm", "optimizer", "adamEpsilon", "rewardClip"},
    )
    editable = {field.path[-1] for field in block if field.on_edit != "refuse"}
    assert {each for each in editable if not each.endswith("Schedule")} == tried | by_learner
    before, after = (learner_of(algorithm_of(env_spec, **fields), env_spec) for fields in ({}, {**shared, **own[name]}))
    after.load_state_dict(*before.state_dict())
    assert after.digest() == before.digest()


def test_what_follows_has_no_value_where_no_action_is_legal() -> None:
    """So may the last observation of a truncated episode be."""
    env_spec, rng = MASKED, np.random.default_rng(0)
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
        result = learner_of(algorithm_of(env_spec), env_spec).step(rows)
        assert not result.skipped
        errors.append(result.errors)
    np.testing.assert_array_equal(*errors)


def test_actions_are_uniform_until_training_begins() -> None:
    sac, td3 = (algorithm_of(spec, replay={"start": 100}) for spec in (SQUASHED, CLIPPED))
    assert [sac.acting_scalars(number) for number in (0, 99, 100)] == [{UNIFORM: 1.0}, {UNIFORM: 1.0}, {UNIFORM: 0.0}]
    assert td3.acting_scalars(0) == {UNIFORM: 1.0, DEVIATION: 0.1}
    td3.adopt(td3_coefficients(Td3Spec.model_validate(fields_of(explorationDeviation=0.3)), None))
    assert td3.acting_scalars(100) == {UNIFORM: 0.0, DEVIATION: 0.3}
    assert td3.coefficients(0) == {"critic_learning_rate": CRITIC_RATE, "importance_exponent": 0.4}


def test_ranks_share_minibatches() -> None:
    algorithm = build_sac(SacSpec.model_validate(fields_of()), policy_of(SQUASHED), 2, None)
    batch = algorithm.prepare({}, rows_of(SQUASHED), one_rank, algorithm.evaluate)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    assert schedule["noise"].shape == (2 * UPDATES_A_STEP, SIZE // 2, DIMENSIONS)
    assert not torch.equal(schedule["noise"], schedule["next_noise"])


@pytest.mark.parametrize(
    ("build", "spec", "env_spec", "words"),
    [
        (build_sac, SacSpec(), replace(SQUASHED, action=MIXED), ["algorithm.sac", "Discrete", "Box"]),
        (build_td3, Td3Spec(), replace(SQUASHED, action=MIXED), ["algorithm.td3", "joint"]),
        (build_td3, Td3Spec(), DISCRETE, ["algorithm.td3", "discrete", "algorithm.sac"]),
    ],
)
def test_other_actions_are_refused(build: Any, spec: Any, env_spec: EnvSpec, words: list[str]) -> None:
    policy = TorchPolicy(
        build_network(MlpPolicy, env_spec, NETWORK, seed=0, outputs="policy"), env_spec, outputs="policy"
    )
    with pytest.raises(ConfigurationError) as failure:
        build(spec, policy, 1, None)
    assert all(word in str(failure.value) for word in words)


def test_each_way_in_which_groups_are_due_is_known_without_counting_up_to_it() -> None:
    def of(*periods: int) -> Any:
        return [SimpleNamespace(name=name, every=every) for name, every in zip("abcd", periods, strict=False)]

    found = all_due(of(1, 997, 991, 10))
    assert set(found) == {("a", *each) for size in range(4) for each in combinations("bcd", size)}
    assert set(all_due(of(1, 4, 6))) == {due_groups(of(1, 4, 6), number) for number in range(1, 13)}


def test_critics_share_nothing() -> None:
    with seeded(0):
        module = TwinCritics(SQUASHED, hidden_sizes=(8,), layer_norm=True)
    inputs = {"observation": torch.randn(5, FEATURES), "action": torch.randn(5, DIMENSIONS)}
    values = module(inputs)[CRITICS]
    assert values.shape == (2, 5)
    assert not torch.allclose(values[0], values[1])
    values[0].sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad[0].any()), name
        assert not bool(parameter.grad[1].any()), name


def test_errors_are_the_mean_of_both_critics() -> None:
    learner = learner_of(algorithm_of(CLIPPED), CLIPPED)
    result = learner.step(rows_of(CLIPPED))
    assert result.errors is not None
    assert result.errors.shape == (UPDATES_A_STEP * SIZE,)
    assert result.metrics["td_error"] == pytest.approx(result.errors.mean(), rel=1e-4)
    assert ERRORS not in result.metrics
    assert POLICY in learner._params
