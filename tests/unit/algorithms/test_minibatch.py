"""A compiled step computes the eager step's result from the same state, for every kind of policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsrl.algorithms import gradients
from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import ERRORS, INDEX, POLICY, Algorithm, Tensors
from rlsrl.algorithms.custom import Setup
from rlsrl.algorithms.gradients import MicrobatchGradients, gathered, microbatches
from rlsrl.algorithms.learner import Learner, StepResult
from rlsrl.algorithms.normalizer import Normalizer
from rlsrl.algorithms.ppo import Ppo
from rlsrl.algorithms.pqn import Pqn
from rlsrl.algorithms.schedules import LinearSchedule
from rlsrl.algorithms.spare_core import SpareCore
from rlsrl.api.spec import AlgorithmNeeds, CustomAlgorithmSpec, NetworkOutputs, PqnSpec
from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network, seeded
from rlsrl.policies.cnn import NatureCnnActorCritic
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic, MlpPolicy
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.actor_and_critic import ActorAndCritic
from rlsrl.testing.rollouts import (
    CHOICES_AND_FLAGS,
    MASK,
    MIXED,
    categories_env_spec,
    continuous_env_spec,
    discrete_env_spec,
    masked_env_spec,
    pixels_env_spec,
)

NUM_STEPS, NUM_LANES = 8, 4


class Averaging(Ppo):
    """PPO with a state."""

    def initial_state(self, params: Tensors) -> Tensors:
        return {"mean": params[POLICY].clone()}

    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        return {"mean": torch.lerp(state["mean"], params[POLICY], 0.1)}


class PqnWithErrors(Pqn):
    """PQN whose rows have errors."""

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        loss, metrics = super().loss(params, state, minibatch)
        values = self._network(params[POLICY], minibatch)["q"].amax(dim=-1)
        return loss, {**metrics, ERRORS: (values - minibatch["target"]).detach()}


MLP: dict[str, Any] = {"hidden_sizes": (16,)}
NORMED: dict[str, Any] = {**MLP, "layer_norm": True}
KINDS: dict[str, tuple[Any, EnvSpec, dict[str, Any], type[Algorithm]]] = {
    "discrete": (MlpActorCritic, discrete_env_spec(), MLP, Ppo),
    "masked": (MlpActorCritic, masked_env_spec(), MLP, Ppo),
    "continuous": (MlpActorCritic, continuous_env_spec(), MLP, Ppo),
    "joint": (MlpActorCritic, replace(discrete_env_spec(), action=CHOICES_AND_FLAGS), MLP, Ppo),
    "mixed": (MlpActorCritic, replace(discrete_env_spec(), action=MIXED), MLP, Ppo),
    "categories": (MlpActorCritic, categories_env_spec(), MLP, Ppo),
    "cnn": (NatureCnnActorCritic, pixels_env_spec(), {"hidden_size": 16}, Ppo),
    "cnn in bfloat16": (NatureCnnActorCritic, pixels_env_spec(), {"hidden_size": 16, "precision": "bfloat16"}, Ppo),
    "with a state": (MlpActorCritic, discrete_env_spec(), MLP, Averaging),
    "action values": (MlpActionValues, masked_env_spec(), NORMED, PqnWithErrors),
    "two groups": (MlpPolicy, discrete_env_spec(), MLP, ActorAndCritic),
}
MANY = [name for name in KINDS if name not in ("masked", "cnn in bfloat16")]
"""Kinds whose compiled result is equal within 1e-4. A compiler rounds to bfloat16 in other places."""


def ppo_of(policy: TorchPolicy, algorithm: Any) -> Ppo:
    ppo: Ppo = algorithm(
        policy,
        discount=0.99,
        gae_lambda=0.95,
        clip_range=LinearSchedule(start=0.2, end=0.1, env_steps=100),
        clip_value_loss=True,
        entropy_coefficient=0.01,
        value_coefficient=0.5,
        epochs=2,
        minibatch_size=16,
        normalize_advantages=True,
    )
    return ppo


def pqn_of(policy: TorchPolicy) -> Pqn:
    return PqnWithErrors(policy, PqnSpec(epochs=2), minibatch_size=16, epsilon=0.1)


def actor_and_critic_of(policy: TorchPolicy) -> ActorAndCritic:
    needs = AlgorithmNeeds(minibatch_size=16, epochs=2, outputs="policy")
    settings = CustomAlgorithmSpec(factory="rlsrl.testing.actor_and_critic:ActorAndCritic", needs=needs)
    with seeded(0):
        return ActorAndCritic(Setup(policy=policy, settings=settings, num_ranks=1))


ALGORITHMS: dict[Any, tuple[NetworkOutputs, Callable[[TorchPolicy], Algorithm]]] = {
    PqnWithErrors: ("actionValues", pqn_of),
    ActorAndCritic: ("policy", actor_and_critic_of),
}


def learner_of(kind: str, initial: Parameters | None = None) -> Learner:
    factory, env_spec, kwargs, algorithm = KINDS[kind]
    outputs, made = ALGORITHMS.get(algorithm, ("policyAndValue", lambda policy: ppo_of(policy, algorithm)))
    module = build_network(factory, env_spec, kwargs, seed=0, outputs=outputs)
    policy = TorchPolicy(module, env_spec, outputs=outputs)
    floats = {path: spec for path, spec in env_spec.observation.items() if spec.dtype == "float32"}
    return Learner(
        made(policy),
        initial or policy.parameters(Version(1, 0)),
        learning_rate=LinearSchedule(start=1e-3, end=1e-4, env_steps=100),
        optimizer=Adam(epsilon=1e-5, max_gradient_norm=0.5),
        seed=3,
        normalizer=Normalizer(floats),
    )


def slots_of(kind: str, seed: int) -> Arrays:
    env_spec = KINDS[kind][1]
    arrays = random_slot(env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(seed)).arrays
    if MASK in arrays:
        np.put_along_axis(arrays[MASK][:-1], arrays["action"][..., np.newaxis], 1, axis=-1)
    return arrays


def zeros_of(kind: str) -> Arrays:
    arrays = {name: np.zeros_like(array) for name, array in slots_of(kind, 0).items()}
    arrays["mask"][...] = True
    return arrays


def everything(learner: Learner) -> dict[str, np.ndarray]:
    arrays, _ = learner.state_dict()
    return {**arrays, "params": learner.parameters(Version(1, 0)).vector}


pytestmark = pytest.mark.usefixtures("own_compiler")


def train_both(kind: str, num_steps: int) -> list[tuple[StepResult, StepResult]]:
    """Compare eager and compiled step by step from the same state: trajectories of convolutions are chaotic."""
    pairs, compiled = [], learner_of(kind)
    for seed in range(num_steps):
        eager = learner_of(kind, compiled.parameters(Version(1, seed)))
        eager.load_state_dict(*compiled.state_dict())
        if seed == 0:
            before = everything(compiled)
            compiled.compile(zeros_of(kind))
            assert all(np.array_equal(array, before[path]) for path, array in everything(compiled).items())
            compiled.use_compiled()
            torch.compiler.set_stance("fail_on_recompile")
        slots = slots_of(kind, seed)
        pairs.append((eager.step(slots), compiled.step(slots)))
        for path, array in everything(eager).items():
            np.testing.assert_allclose(everything(compiled)[path], array, rtol=1e-4, atol=2e-6, err_msg=path)
    return pairs


def num_graphs() -> int:
    """Return how many graphs this process has traced."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def check(pairs: list[tuple[StepResult, StepResult]]) -> None:
    for eager, compiled in pairs:
        assert compiled.metrics == pytest.approx(eager.metrics, rel=1e-3, abs=1e-5)
        assert (compiled.errors is None) == (eager.errors is None)
        if eager.errors is not None:
            assert np.isfinite(eager.errors).any()
            np.testing.assert_allclose(compiled.errors, eager.errors, rtol=1e-3, atol=1e-5)
        assert (compiled.step, compiled.optimizer_steps, compiled.skipped) == (
            eager.step,
            eager.optimizer_steps,
            eager.skipped,
        )


@pytest.mark.parametrize("kind", ["cnn", "cnn in bfloat16"])
def test_the_preferred_layout_of_images_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of(kind, 0)
    preferred, plain = learner_of(kind), learner_of(kind)
    preferred.step(slots)
    monkeypatch.setattr(NatureCnnActorCritic, "to_preferred_layout", lambda self, observation: observation)
    plain.step(slots)
    before = everything(learner_of(kind))
    for path, array in everything(preferred).items():
        np.testing.assert_array_equal(everything(plain)[path], array, err_msg=path)
        assert not np.array_equal(before[path], array), path


def test_selected_rows_keep_their_memory_order() -> None:
    plain = torch.arange(6 * 2 * 3 * 4).reshape(6, 2, 3, 4)
    index = torch.tensor([4, 0, 4])
    one_channel = torch.arange(6 * 12).reshape(6, 1, 3, 4)
    rows = {
        "usual": plain,
        "channels last": plain.contiguous(memory_format=torch.channels_last),
        "turned": plain.permute(0, 3, 2, 1),
        "one channel": one_channel,
        "one channel last": one_channel.contiguous(memory_format=torch.channels_last),
        "numbers": torch.arange(6),
    }
    chosen = gathered(rows, {INDEX: index, "weight": torch.ones(3)})
    assert chosen.keys() == {*rows, "weight"}
    for name, tensor in rows.items():
        assert torch.equal(chosen[name], tensor[index]), name
        assert chosen[name].stride() == tensor[:3].clone(memory_format=torch.preserve_format).stride(), name


def test_a_minibatch_of_images_is_cut_into_equal_microbatches() -> None:
    rows = {"pixels": torch.zeros(600, 4, 84, 84, dtype=torch.uint8), "action": torch.arange(600)}
    coefficient = torch.tensor(0.5)
    for size, lengths in {
        256: [128] * 2,
        512: [128] * 4,
        300: [75] * 4,
        375: [125] * 3,
        128: [128],
        257: [257],
    }.items():
        minibatch = {INDEX: torch.arange(size), "weight": torch.rand(size), "clip_range": coefficient}
        parts = microbatches(rows, minibatch)
        assert [len(part[INDEX]) for part in parts] == lengths, size
        for name in (INDEX, "weight"):
            assert torch.equal(torch.cat([part[name] for part in parts]), minibatch[name])
        assert all(part["clip_range"] is coefficient for part in parts)
    small = {INDEX: torch.arange(512), "weight": torch.rand(512)}
    assert microbatches({"observation": torch.zeros(600, 17)}, small) == [small]


class TwoHands:
    """Replaces the spare core: its thread runs every second task, its owner the others."""

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        with ThreadPoolExecutor(1) as spare:
            lent = {number: spare.submit(task) for number, task in enumerate(tasks) if number % 2}
            own = {number: task() for number, task in enumerate(tasks) if not number % 2}
            return [own[number] if number in own else lent[number].result() for number in range(len(tasks))]


def cut_in_four(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the minibatches of 16."""
    observed = sum(math.prod(spec.shape) for spec in KINDS[kind][1].observation.values())
    of_a_row = observed + math.prod(KINDS[kind][1].action.array.shape) + 3  # log-probability, return, value
    monkeypatch.setattr(gradients, "MICROBATCH_ELEMENTS", 4 * of_a_row)


def check_hands(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the result has the same bits, whichever thread computes a microbatch."""
    cut_in_four(kind, monkeypatch)
    learners = []
    without_help = partial(SpareCore, prompt_seconds=-1.0)
    for core in (without_help, TwoHands):
        monkeypatch.setattr(gradients, "SpareCore", core)
        learner = learner_of(kind)
        learner.compile(zeros_of(kind))
        learner.use_compiled()
        learners.append((learner, [learner.step(slots_of(kind, seed)) for seed in range(4)]))
    (alone, told_alone), (helped, told_helped) = learners
    assert told_alone == told_helped
    for path, array in everything(alone).items():
        np.testing.assert_array_equal(everything(helped)[path], array, err_msg=path)


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize("kind", ["cnn", "cnn in bfloat16", "continuous"])
def test_the_thread_of_a_microbatch_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hands(kind, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", ["cnn", "cnn in bfloat16"])
def test_two_threads_call_compiled_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hands(kind, monkeypatch)


def test_a_step_is_not_taken_if_one_microbatch_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MICROBATCH_ELEMENTS", 2)
    rows = {"observation": torch.tensor([[1.0], [2.0], [math.inf], [4.0]])}

    def microbatch_sum(
        params: Tensors, state: Tensors, rows: Tensors, minibatch: Tensors
    ) -> tuple[Tensor, Tensors, Tensor]:
        loss = gathered(rows, minibatch)["observation"].sum()
        return loss, {"loss": loss}, loss * params["w"]

    microbatch_gradients = MicrobatchGradients(microbatch_sum)
    for index, expected in ([0, 1, 3, 0], 8.0), ([0, 1, 2, 3], math.inf):
        total_loss, metrics, gradient = microbatch_gradients(
            {"w": torch.ones(3)}, {}, rows, {INDEX: torch.tensor(index)}
        )
        assert (float(total_loss), float(metrics["loss"])) == (expected, expected)
        assert gradient.tolist() == [expected] * 3


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize("kind", [name for name in KINDS if name != "cnn in bfloat16"])  # bfloat16 rounds each sum
def test_compiled_microbatches_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tasks, graphs = [], []
    before = num_graphs()

    class Counting(TwoHands):
        def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
            num_tasks.append(len(tasks))
            graphs.append(num_graphs() - before)
            return super().run(tasks)

    cut_in_four(kind, monkeypatch)
    monkeypatch.setattr(gradients, "SpareCore", Counting)
    check(train_both(kind, 2))
    assert set(num_tasks) == {4}
    num_groups = len(learner_of(kind)._params)
    assert graphs[:2] == [1 + num_groups, 2 + num_groups], (
        "the evaluation's, a microbatch's of each group before two threads need it, then the rest's of the first group"
    )


@pytest.mark.usefixtures("tracing_only")
def test_compiled_microbatches_leave_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two threads could not call it at once: eager code replaces the network's parameters."""
    cut_in_four("cnn", monkeypatch)
    learner = learner_of("cnn")
    learner.compile(zeros_of("cnn"))
    learner.use_compiled()
    algorithm = cast("Ppo", learner._algorithm)
    places = algorithm._rows._network._places
    seen = []

    class Watching(TwoHands):
        def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
            own = [holder.pop(name) for holder, name, _ in places]
            try:
                results = super().run(tasks)
                seen.append(any(name in holder for holder, name, _ in places))
            finally:
                for (holder, name, _), parameter in zip(places, own, strict=True):
                    holder[name] = parameter
            return results

    monkeypatch.setattr(SpareCore, "run", Watching().run)
    assert learner.step(slots_of("cnn", 0)).skipped == 0
    assert seen
    assert not any(seen)


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_one_graph_that_computes_the_same(kind: str) -> None:
    check(train_both(kind, 2))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", ["masked", *(pytest.param(kind, marks=pytest.mark.slow) for kind in MANY)])
def test_the_compiled_step_computes_the_same(kind: str) -> None:
    check(train_both(kind, 3))


@pytest.mark.usefixtures("tracing_only")
def test_the_compiled_step_skips_non_finite_gradients() -> None:
    learner = learner_of("discrete")
    learner.compile(zeros_of("discrete"))
    learner.use_compiled()
    broken = slots_of("discrete", 0)
    broken["reward"][...] = np.nan
    before = learner.parameters(Version(1, 0)).vector
    assert learner.step(broken).skipped == 2 * NUM_STEPS * NUM_LANES // 16
    assert np.array_equal(learner.parameters(Version(1, 0)).vector, before)
    assert learner.step(slots_of("discrete", 1)).skipped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_trains_batches_of_its_form_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stand_in(step: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return lambda *inputs: calls.append(step) or step(*inputs)

    monkeypatch.setattr(torch, "compile", stand_in)
    learner = learner_of(kind)
    learner.compile(zeros_of(kind))
    learner.use_compiled()
    for seed in range(2):
        calls.clear()
        learner.step(slots_of(kind, seed))
        assert len(calls) == 1 + 2 * NUM_STEPS * NUM_LANES // 16, "the evaluation and each minibatch"
    calls.clear()
    learner.step(random_slot(KINDS[kind][1], num_steps=NUM_STEPS, num_lanes=8, rng=np.random.default_rng(0)).arrays)
    assert calls == []


@pytest.mark.usefixtures("tracing_only")
def test_changed_coefficients_reach_the_compiled_step() -> None:
    """Also from 0: compiled code has no Python branches left, and torch does not compile again."""
    learners = [learner_of("discrete"), learner_of("discrete")]
    for learner in learners:
        learner.adopt(1e-3, {"clip_range": 0.2, "entropy_coefficient": 0.0})
    learners[0].compile(zeros_of("discrete"))
    learners[0].use_compiled()
    for coefficient in (0.0, 0.5, 0.0):
        for learner in learners:
            learner.adopt(1e-3, {"clip_range": 0.2, "entropy_coefficient": coefficient})
        compiled, eager = (learner.step(slots_of("discrete", 0)) for learner in learners)
        assert compiled.metrics == pytest.approx(eager.metrics, rel=1e-3, abs=1e-5)
        for path, array in everything(learners[1]).items():
            np.testing.assert_allclose(everything(learners[0])[path], array, rtol=1e-4, atol=2e-6, err_msg=path)


@pytest.mark.usefixtures("tracing_only")
def test_each_learner_has_a_compiled_step_of_its_own() -> None:
    pairs = [(learner_of(kind), learner_of(kind)) for kind in ("discrete", "with a state")]
    for compiled, _ in pairs:
        compiled.compile(zeros_of("discrete"))
        compiled.use_compiled()
    for compiled, eager in pairs:
        assert compiled.step(slots_of("discrete", 0)).metrics == pytest.approx(
            eager.step(slots_of("discrete", 0)).metrics, rel=1e-3, abs=1e-5
        )
        assert everything(compiled).keys() == everything(eager).keys()


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_batch_of_another_form_is_trained_without_compiling(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails during a run would end the run."""
    if is_cut:
        cut_in_four("discrete", monkeypatch)
    learner = learner_of("discrete")
    learner.compile(zeros_of("discrete"))
    learner.use_compiled()
    eager = learner_of("discrete")
    wide = random_slot(discrete_env_spec(), num_steps=NUM_STEPS, num_lanes=8, rng=np.random.default_rng(0)).arrays
    before = num_graphs()
    assert learner.step(wide).metrics == pytest.approx(eager.step(wide).metrics, rel=1e-3, abs=1e-5)
    assert num_graphs() == before


class Widening(Averaging):
    """Its state becomes float64 with the second minibatch. It counts losses computed eagerly."""

    state_every = 2
    eager_losses = 0

    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        new = super().update_state(params, {name: tensor.float() for name, tensor in state.items()})
        return {name: tensor.double() for name, tensor in new.items()}

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        if not torch.compiler.is_compiling():
            self.eager_losses += 1
        return super().loss(params, state, minibatch)


@pytest.mark.usefixtures("tracing_only")
def test_minibatches_after_a_state_has_changed_its_form_are_trained_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "widening", (MlpActorCritic, discrete_env_spec(), MLP, Widening))
    learner = learner_of("widening")
    learner.compile(zeros_of("widening"))
    learner.use_compiled()
    algorithm = learner._algorithm
    assert isinstance(algorithm, Widening)
    before = algorithm.eager_losses
    learner.step(slots_of("widening", 0))
    assert algorithm.eager_losses - before == 2, "of four minibatches: those after the second"


def test_a_failed_compilation_raises_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no such instruction")

    monkeypatch.setattr(torch, "compile", failing)
    learner, untouched = learner_of("discrete"), learner_of("discrete")
    with pytest.raises(ArithmeticError, match="no such instruction"):
        learner.compile(zeros_of("discrete"))
    for each in (learner, untouched):
        each.step(slots_of("discrete", 0))
    assert all(np.array_equal(array, everything(untouched)[path]) for path, array in everything(learner).items())
