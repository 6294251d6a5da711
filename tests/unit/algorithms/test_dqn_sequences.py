"""DQN on sequences (R2D2), against a program of its own: torch's cells, loops over rows and frames, autograd, Adam."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import ERRORS, INDEX, POLICY, WEIGHT, one_rank
from rlsrl.algorithms.dqn import TARGET, build
from rlsrl.algorithms.gradients import LocalGradients
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.normalizer import ReplayNormalizer
from rlsrl.algorithms.value_rescaling import rescaled, restored
from rlsrl.api.spec import DqnSpec, Mlp, Network, Recurrent
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.rows import FOLLOWING, IMPORTANCE, RowForm, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.random_slots import random_slot
from rlsrl.data.sequences import HAS_BURN_IN, IS_FIRST
from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.build.common import torch_policy

ENV_SPEC = discrete_env_spec(num_features=3, num_actions=4)
NUM_STEPS, NUM_LANES, ROWS, UPDATES, HIDDEN, UNITS = 5, 3, 4, 3, 6, 7
KINDS = ("gru", "lstm")
ETA, IMPORTANCE_EXPONENT = 0.75, 0.5


def spec_of(**fields: Any) -> DqnSpec:
    replay = {"nStep": 2, "priorities": {"largestErrorWeight": ETA}}
    return DqnSpec.model_validate(
        {
            "minibatchSize": ROWS * NUM_STEPS,
            "targetPeriod": 4,
            "maxGradientNorm": 1e6,
            "importanceExponent": IMPORTANCE_EXPONENT,
            "replay": replay,
            **fields,
        }
    )


def policy_of(kind: str, **options: Any) -> TorchPolicy:
    mlp = Mlp(hidden_sizes=(HIDDEN,), **options)
    network = Network(mlp=mlp, recurrent=Recurrent(kind=kind, size=UNITS))  # type: ignore[arg-type]
    return torch_policy(network, ENV_SPEC, outputs="actionValues", seed=0)


def drawn(policy: TorchPolicy, seed: int, *, burn_in: bool = True, num_rows: int = UPDATES * ROWS) -> Arrays:
    """Return sequences from a store with three slots, and random importance ratios."""
    layout = rollout_layout(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, state=policy.state)
    store = ReplayLayout.of(layout, capacity=3 * NUM_STEPS * NUM_LANES)
    segments, rng = Segments(store, bytearray(store.nbytes)), np.random.default_rng(seed)
    for sequence in range(3):
        slot = random_slot(
            ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng, end_probability=0.2, state=policy.state
        )
        slot.producer, slot.sequence = ProducerId(0, 1), sequence
        segments.insert(slot)
    keys = rng.integers(0, 3 * NUM_LANES, num_rows) * NUM_STEPS
    rows = rows_of(segments, keys, RowForm(num_steps=2, discount=0.9, burn_in=burn_in))
    return {**rows, IMPORTANCE: rng.uniform(0.1, 1.0, num_rows).astype(np.float32)}


class SingleFile(nn.Module):
    """The network and its training as a program of its own."""

    def __init__(self, policy: TorchPolicy, kind: str, spec: DqnSpec) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh())
        self.cell = (nn.GRUCell if kind == "gru" else nn.LSTMCell)(HIDDEN, UNITS)
        self.last = nn.Linear(UNITS, 4)
        vector = torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())
        nn.utils.vector_to_parameters(vector, self.parameters())
        self.is_lstm, self.spec = kind == "lstm", spec
        self.target = copy.deepcopy(self)
        self.optimizer = torch.optim.Adam(self.parameters_of_network(), lr=0.05, eps=1e-5)
        self.updates = 0
        self.errors: list[float] = []

    def parameters_of_network(self) -> list[nn.Parameter]:
        return [each for part in (self.hidden, self.cell, self.last) for each in part.parameters()]

    def values(self, frames: Tensor, is_first: Tensor, state: dict[str, Tensor], num_before: int) -> Tensor:
        """Return the values [frames, A] of one lane, one frame after the other; none of the first ones."""
        found = []
        for place in range(len(frames)):
            if bool(is_first[place]):
                state = {name: torch.zeros_like(array) for name, array in state.items()}
            with torch.set_grad_enabled(place >= num_before and torch.is_grad_enabled()):
                inputs = self.hidden(frames[place : place + 1])
                if self.is_lstm:
                    hidden, cell = self.cell(inputs, (state["hidden"], state["cell"]))
                    state = {"hidden": hidden, "cell": cell}
                else:
                    state = {"hidden": self.cell(inputs, state["hidden"])}
                if place >= num_before:
                    found.append(self.last(state["hidden"])[0])
        return torch.stack(found)

    def step(self, rows: Arrays) -> None:
        for start in range(0, UPDATES * ROWS, ROWS):
            self.update({name: array[start : start + ROWS] for name, array in rows.items()})

    def update(self, rows: Arrays) -> None:
        total, count = torch.zeros(()), int(rows["mask"].sum())
        for row in range(ROWS):
            tensors = {name: torch.from_numpy(np.array(array[row])) for name, array in rows.items()}
            num_before = len(tensors[IS_FIRST]) - NUM_STEPS - 1
            skipped = num_before if num_before and not bool(tensors[HAS_BURN_IN]) else 0
            state = {name[6:]: tensor[None] for name, tensor in tensors.items() if name.startswith("state/")}
            frames = tensors["observation"][skipped:], tensors[IS_FIRST][skipped:]
            q = self.values(*frames, state, num_before - skipped)
            with torch.no_grad():
                of_target = self.target.values(*frames, state, num_before - skipped)
            errors = []
            for step in range(NUM_STEPS):
                if not bool(tensors["mask"][step]):
                    continue
                following = int(tensors[FOLLOWING][step])
                chooser = q if self.spec.double else of_target
                next_value = of_target[following][int(chooser[following].argmax())].double()
                reward, discount = float(tensors["reward"][step]), float(tensors["discount"][step])
                if self.spec.value_rescaling:
                    goal = _h(reward + discount * _inverse_of_h(float(next_value)))
                else:
                    goal = reward + discount * float(next_value)
                error = q[step][int(tensors["action"][step])] - goal
                size = error.abs()
                huber = 0.5 * error**2 if float(size) <= 1.0 else size - 0.5
                total = total + float(rows[IMPORTANCE][row]) ** IMPORTANCE_EXPONENT * huber / count
                errors.append(float(size))
            self.errors.append(ETA * max(errors) + (1 - ETA) * sum(errors) / len(errors))
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.spec.target_period == 0:
            for own, others in zip(self.parameters_of_network(), self.target.parameters_of_network(), strict=True):
                others.data.copy_(own.data)

    @property
    def vector(self) -> np.ndarray:
        found: np.ndarray = nn.utils.parameters_to_vector(self.parameters_of_network()).detach().numpy()
        return found


def _h(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def _inverse_of_h(x: float) -> float:
    """In the paper's form, of floats with 53 bits."""
    root = (math.sqrt(1 + 4e-3 * (abs(x) + 1 + 1e-3)) - 1) / 2e-3
    return math.copysign(root**2 - 1, x)


def learner_of(policy: TorchPolicy, spec: DqnSpec) -> Learner:
    algorithm = build(spec, policy, 1, None)
    optimizer = Adam(epsilon=1e-5, max_gradient_norm=1e6)
    return Learner(algorithm, policy.parameters(Version(0, 0)), learning_rate=0.05, optimizer=optimizer, seed=0)


@pytest.mark.parametrize(
    "fields", [{}, {"burnIn": False}, {"double": False, "valueRescaling": True}, {"valueRescaling": True}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_an_independent_program(kind: str, fields: dict[str, Any]) -> None:
    policy, spec = policy_of(kind), spec_of(**fields)
    learner, program = learner_of(policy, spec), SingleFile(policy, kind, spec)
    without_burn_in = 0
    for seed in range(3):
        rows = drawn(policy, seed, burn_in=spec.burn_in)
        without_burn_in += int(np.count_nonzero(~rows.get(HAS_BURN_IN, np.ones(1, np.bool_))))
        program.errors.clear()
        program.step(rows)
        result = learner.step(rows)
        assert result.errors is not None
        np.testing.assert_allclose(result.errors, program.errors, rtol=1e-3, atol=1e-4)
        assert result.num_transitions == int(rows["mask"].sum()) < UPDATES * ROWS * NUM_STEPS
        np.testing.assert_allclose(learner.parameters(Version(0, 0)).vector, program.vector, rtol=1e-3, atol=1e-4)
    assert program.updates == 3 * UPDATES
    assert without_burn_in > 0 or not spec.burn_in, "some have no known segment before them"


def test_the_frames_before_a_sequence_and_its_own_state_matter() -> None:
    """Each changes the values where it is used, and only there."""
    policy, spec = policy_of("gru"), spec_of()
    rows = drawn(policy, 0)
    known = rows[HAS_BURN_IN]
    assert 0 < known.sum() < len(known)
    errors = learner_of(policy, spec).step(rows).errors
    before, first = rows["observation"].copy(), rows[IS_FIRST].copy()
    before[:, : NUM_STEPS - 1] += 1.0
    first[:, :NUM_STEPS] = False
    moved = learner_of(policy, spec).step({**rows, "observation": before}).errors
    assert errors is not None
    assert moved is not None
    carried = known & ~rows[IS_FIRST][:, NUM_STEPS]
    of_first_minibatch = np.arange(len(known)) < ROWS  # later ones follow from other weights
    np.testing.assert_array_equal(moved[of_first_minibatch] != errors[of_first_minibatch], carried[:ROWS])


def test_quantiles_and_dueling_networks_are_trained_on_sequences() -> None:
    """The gradient of a minibatch is the sum of those of its sequences, each unrolled by itself."""
    policy = policy_of("lstm", dueling=True, quantiles=3)
    algorithm = build(spec_of(valueRescaling=True), policy, 1, None)
    params = {POLICY: torch.from_numpy(policy.parameters(Version(0, 0)).vector.copy())}
    rows = drawn(policy, 1, num_rows=ROWS)
    batch = algorithm.prepare(params, rows, one_rank, algorithm.evaluate)
    schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
    assert schedule[WEIGHT].shape == (1, ROWS, NUM_STEPS)
    assert float(schedule[WEIGHT].sum()) == pytest.approx(1.0)
    np.testing.assert_array_equal(schedule[WEIGHT][0].numpy() > 0, rows["mask"])
    coefficients = {"importance_exponent": torch.tensor(0.5)}
    gradients = LocalGradients(POLICY, algorithm.loss)
    state = {TARGET: 0.5 * params[POLICY]}

    def gradient(chosen: list[int]) -> tuple[Tensor, Tensor]:
        minibatch = {name: tensor[0][chosen] for name, tensor in schedule.items()} | coefficients
        _, metrics, found = gradients(params, state, batch.rows, minibatch)
        return found, metrics[ERRORS]

    whole, errors = gradient([*range(ROWS)])
    parts = [gradient([row]) for row in range(ROWS)]
    torch.testing.assert_close(whole, torch.stack([found for found, _ in parts]).sum(dim=0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(errors, torch.cat([found for _, found in parts]), rtol=1e-4, atol=1e-6)
    assert bool(torch.isfinite(whole).all())
    assert float(whole.abs().max()) > 0


def test_a_minibatch_of_two_ranks_weighs_each_transition_alike() -> None:
    policy = policy_of("gru")
    spec = spec_of(minibatchSize=2 * ROWS * NUM_STEPS)
    counts = []
    for seed in range(2):
        algorithm = build(spec, policy, 2, None)
        rows = drawn(policy, seed)
        batch = algorithm.prepare({}, rows, one_rank, algorithm.evaluate)
        other = drawn(policy, 1 - seed)["mask"].reshape(UPDATES, -1).sum(axis=1)
        schedule = algorithm.schedule(batch, np.random.default_rng(0), lambda own, other=other: own + other)  # type: ignore[misc]
        assert schedule[INDEX].shape == (UPDATES, ROWS)
        counts.append(schedule[WEIGHT].sum(dim=(1, 2)))
    torch.testing.assert_close(counts[0] + counts[1], torch.ones(UPDATES))


def test_all_frames_of_a_sequence_are_normalised() -> None:
    """Those of the burn-in, too; what is no observation stays as it is."""
    rows = drawn(policy_of("gru"), 0)
    normalizer = ReplayNormalizer(ENV_SPEC.observation)
    seen = rows["observation"].reshape(-1, 3)
    normalizer.learn(normalizer.moments_of({"observation": seen}), one_rank)
    found, _ = normalizer.step(rows, one_rank)
    expected = (seen - seen.mean(axis=0)) / seen.std(axis=0)
    np.testing.assert_allclose(found["observation"].reshape(-1, 3), expected, rtol=1e-3, atol=1e-3)
    assert all(found[name] is array for name, array in rows.items() if name != "observation")


def test_a_minibatch_that_is_no_whole_number_of_sequences_is_refused() -> None:
    policy = policy_of("gru")
    algorithm = build(spec_of(minibatchSize=NUM_STEPS + 1), policy, 1, None)
    with pytest.raises(ValueError, match="sequences of 5 steps must divide minibatches of 6"):
        algorithm.prepare({}, drawn(policy, 0), one_rank, algorithm.evaluate)


def test_rescaled_values_are_the_papers_and_come_back() -> None:
    values = torch.tensor([-1e5, -300.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 42.0, 1e4])
    found = rescaled(values)
    torch.testing.assert_close(found, torch.tensor([_h(float(value)) for value in values]))
    assert float(rescaled(torch.tensor(1e-6))) == pytest.approx(0.501e-6, rel=1e-3)
    torch.testing.assert_close(restored(found), values, rtol=1e-4, atol=1e-5)
    exact = torch.tensor([_inverse_of_h(float(value)) for value in found.double()])
    torch.testing.assert_close(restored(found), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_equal_eager_ones(kind: str, tracing_only: None) -> None:
    learners = [learner_of(policy_of(kind), spec_of(valueRescaling=True)) for _ in range(2)]
    example = drawn(policy_of(kind), 9)
    learners[1].compile({name: np.zeros_like(array) for name, array in example.items()})
    learners[1].use_compiled()
    for seed in range(2):
        rows = drawn(policy_of(kind), seed)
        eager, compiled = (learner.step(rows) for learner in learners)
        assert compiled.metrics == pytest.approx(eager.metrics, rel=1e-3, abs=1e-5)
        np.testing.assert_allclose(compiled.errors, eager.errors, rtol=1e-3, atol=1e-4)
    vectors = [learner.parameters(Version(0, 0)).vector for learner in learners]
    np.testing.assert_allclose(*vectors, rtol=1e-3, atol=1e-5)
