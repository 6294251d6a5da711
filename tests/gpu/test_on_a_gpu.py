"""A GPU computes the CPU's results. Without a GPU, `make test` reports these tests as skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import POLICY, one_rank
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.random_slots import random_slot
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import NatureCnnActorCritic
from rlsrl.policies.device import CPU, device_for
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.normalization import mean_of, variance_of
from rlsrl.policies.recorded import MOST_LANES
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.live_runs import Desk
from rlsrl.testing.rollouts import MIXED, categories_env_spec, continuous_env_spec, discrete_action, discrete_env_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GPU = torch.device("cuda", 0)
EXAMPLE = Path(__file__).parents[2] / "examples" / "pong.yaml"
NUM_STEPS, NUM_LANES = 8, 16
PIXELS = EnvSpec(observation={"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")}, action=discrete_action(6))
KINDS: dict[str, tuple[Callable[..., Any], EnvSpec, Mapping[str, Any]]] = {
    "discrete": (MlpActorCritic, discrete_env_spec(), {"hidden_sizes": (64, 64)}),
    "categories": (MlpActorCritic, categories_env_spec(), {"hidden_sizes": (64, 64)}),
    "mixed": (MlpActorCritic, replace(discrete_env_spec(), action=MIXED), {"hidden_sizes": (64, 64)}),
    "continuous": (MlpActorCritic, continuous_env_spec(), {"hidden_sizes": (64, 64)}),
    "cnn": (NatureCnnActorCritic, PIXELS, {"hidden_size": 64}),
}


@pytest.fixture(autouse=True)
def own_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without compiled code, and end every compiling process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert device_for("cuda", field="f") == GPU
    yield
    torch.compiler.reset()


def policy_of(kind: str, device: torch.device) -> TorchPolicy:
    factory, env_spec, kwargs = KINDS[kind]
    policy = TorchPolicy(build_network(factory, env_spec, kwargs, seed=0, device=device), env_spec)
    assert policy.device == device
    return policy


def learner_of(kind: str, device: torch.device, initial: Parameters | None = None) -> Learner:
    policy = policy_of(kind, device)
    ppo = Ppo(
        policy,
        discount=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_value_loss=True,
        entropy_coefficient=0.01,
        value_coefficient=0.5,
        epochs=2,
        minibatch_size=64,
        normalize_advantages=True,
    )
    initial = initial or policy.parameters(Version(1, 0))
    optimizer = Adam(epsilon=1e-5, max_gradient_norm=0.5)
    learner = Learner(ppo, initial, learning_rate=1e-3, optimizer=optimizer, seed=3, device=device)
    own = [learner._params[POLICY], *vars(learner._adam[POLICY]).values()]
    assert {tensor.device for tensor in own} == {device}
    rows = ppo.prepare(learner._params, slots_of(kind, 0), one_rank, ppo.evaluate).rows
    assert {tensor.device for tensor in rows.values()} == {device}
    return learner


def slots_of(kind: str, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    arrays = random_slot(KINDS[kind][1], num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng).arrays
    if kind == "cnn":
        arrays["observation"][...] = rng.integers(0, 256, arrays["observation"].shape)
    return arrays


def vector_of(learner: Learner) -> NDArray[np.float32]:
    return learner.parameters(Version(1, 1)).vector


def assert_moved_alike(kind: str, cpu: Learner, gpu: Learner, before: NDArray[np.float32]) -> None:
    """Compare where training has moved the weights.

    Adam divides each gradient by its own size, so that rounding decides where a weight with almost no gradient goes.
    Convolutions round differently on one processor already: after three steps of ``cnn``, oneDNN's and PyTorch's own
    on a CPU are 0.024 apart by this norm, and 0.2 at the worst weight.
    """
    apart, moved = vector_of(gpu) - vector_of(cpu), vector_of(cpu) - before
    if kind == "cnn":
        assert np.linalg.norm(apart) < 0.05 * np.linalg.norm(moved)
    else:
        assert np.abs(apart).max() < 0.02 * np.abs(moved).max()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_trains_there_as_on_the_cpu(kind: str, compiled: bool) -> None:
    cpu, gpu = learner_of(kind, CPU), learner_of(kind, GPU)
    before = vector_of(cpu)
    assert np.array_equal(before, vector_of(gpu)), "orthogonal weights are made on the CPU, for both"
    if compiled:
        gpu.compile(slots_of(kind, 0))
        gpu.use_compiled()
    for seed in range(3):
        expected, found = cpu.step(slots_of(kind, seed)), gpu.step(slots_of(kind, seed))
        assert found.skipped == 0
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-2, abs=1e-3)
    assert_moved_alike(kind, cpu, gpu, before)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_there_where_it_was_on_the_cpu(kind: str) -> None:
    cpu = learner_of(kind, CPU)
    cpu.step(slots_of(kind, 0))
    before = vector_of(cpu)
    gpu = learner_of(kind, GPU, cpu.parameters(Version(1, 1)))
    gpu.load_state_dict(*cpu.state_dict())
    (expected, _), (found, _) = cpu.state_dict(), gpu.state_dict()
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert gpu.step(slots_of(kind, 1)).optimizer_steps == cpu.step(slots_of(kind, 1)).optimizer_steps
    assert_moved_alike(kind, cpu, gpu, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_answers_there_as_on_the_cpu(kind: str) -> None:
    slots = slots_of(kind, 0)
    observation = {path: slots[path][0] for path in KINDS[kind][1].observation}
    answers = []
    for device in (CPU, GPU):
        policy = policy_of(kind, device)
        policy.load(policy.parameters(Version(1, 0)))
        (answer,) = policy.predict([RolloutRequest(observation=observation, state={})])
        answers.append(answer.distribution)
    expected, found = answers
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_evaluations_give_what_a_direct_evaluation_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new weights and with statistics, for numbers of lanes that are recorded, padded and too large."""
    recorded, direct = policy_of(kind, GPU), policy_of(kind, GPU)
    monkeypatch.setattr(direct, "_recorded", None)
    specs, first = KINDS[kind][1].observation, recorded.parameters(Version(1, 0))
    floats = [path for path, spec in specs.items() if spec.dtype == "float32"]
    statistics = {mean_of(path): np.full(specs[path].shape, 0.5, np.float32) for path in floats}
    statistics |= {variance_of(path): np.full(specs[path].shape, 4.0, np.float32) for path in floats}
    trained = Parameters(
        version=Version(1, 1), vector=first.vector * np.float32(1.5), layout=first.layout, statistics=statistics
    )
    observation = {path: array[0] for path, array in slots_of(kind, 0).items() if path in specs}
    for parameters in (first, trained):
        recorded.load(parameters)
        direct.load(parameters)
        for lanes in ([3], [16], [5, 4], [16] * 9, [MOST_LANES + 1]):
            rows = [np.resize(np.arange(NUM_LANES), n) for n in lanes]
            requests = [RolloutRequest(observation={path: a[row] for path, a in observation.items()}) for row in rows]
            found, expected = recorded.predict(requests), direct.predict(requests)
            for answer, other in zip(found, expected, strict=True):
                assert answer.version == parameters.version
                assert np.abs(answer.distribution - other.distribution).max() < 1e-3 * np.abs(other.distribution).max()
    assert recorded._recorded is not None
    assert len({lanes for lanes, *_ in recorded._recorded._recordings}) == 3


class Deciding(nn.Module):
    """Waits for a value on the GPU, which no recording can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = self.layer(observation["observation"])
        return {"policy": logits if logits.sum().item() < 1e9 else -logits, "value": logits.sum(-1)}


def test_a_network_that_cannot_be_recorded_is_evaluated_directly() -> None:
    spec = discrete_env_spec(num_features=4, num_actions=3)
    policy = TorchPolicy(build_network(lambda _: Deciding(), spec, {}, seed=0, device=GPU), spec)
    policy.load(policy.parameters(Version(1, 0)))
    request = RolloutRequest(observation={"observation": np.ones((5, 4), np.float32)})
    first, second = policy.predict([request])[0], policy.predict([request])[0]
    assert np.isfinite(first.distribution).all()
    assert np.array_equal(first.distribution, second.distribution)
    assert policy._recorded is not None
    assert policy._recorded._fails


@pytest.mark.timeout(900)
def test_a_run_trains_there(tmp_path: Path) -> None:
    """Actors ask a policy worker, whose network no program can be."""
    desk = Desk(tmp_path, EXAMPLE.read_text().replace("name: pong", "name: live"))
    changes = (
        "policyWorkers={device: cuda}",
        "trainers={device: cuda, compile: upfront}",
        "actors.rolloutLength=32",
        "stop={trainSteps: 5, envSteps: 10000000}",
    )
    with desk.begin(*(argument for change in changes for argument in ("--set", change))) as run:
        assert run.wait(timeout=600) == 0, run.output
    logs = "".join(path.read_text() for path in (desk.run_folder / "logs").iterdir())
    assert logs.count('"cuda:0"') == 2, logs
    assert '"compiled"' in logs, logs
