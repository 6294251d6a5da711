"""What a GPU computes is what the CPU does: where there is one. Elsewhere `make test` says that it left this out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.policies.build import build_network
from rlsrl.policies.cnn import NatureCnnActorCritic
from rlsrl.policies.device import CPU
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.live_runs import Desk
from rlsrl.testing.rollouts import continuous_env_spec, discrete_action, discrete_env_spec, random_slot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GPU = torch.device("cuda", 0)
EXAMPLE = Path(__file__).parents[2] / "examples" / "pong.yaml"
NUM_STEPS, NUM_LANES = 8, 16
PIXELS = EnvSpec(observation={"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")}, action=discrete_action(6))
KINDS: dict[str, tuple[Callable[..., Any], EnvSpec, Mapping[str, Any]]] = {
    "discrete": (MlpActorCritic, discrete_env_spec(), {"hidden_sizes": (64, 64)}),
    "continuous": (MlpActorCritic, continuous_env_spec(), {"hidden_sizes": (64, 64)}),
    "cnn": (NatureCnnActorCritic, PIXELS, {"hidden_size": 64}),
}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Convolutions in float32, as on the CPU; cuDNN would round their factors to 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
    torch.compiler.reset()


def policy_of(kind: str, device: torch.device) -> TorchPolicy:
    factory, env_spec, kwargs = KINDS[kind]
    return TorchPolicy(build_network(factory, env_spec, kwargs, seed=0).to(device), env_spec)


def learner_of(kind: str, device: torch.device) -> Learner:
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
    initial = policy.parameters(Version(1, 0))
    bounds = {"adam_epsilon": 1e-5, "max_gradient_norm": 0.5}
    return Learner(ppo, initial, learning_rate=1e-3, seed=3, device=device, **bounds)


def slots_of(kind: str, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return random_slot(KINDS[kind][1], num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng).arrays


def vector_of(learner: Learner) -> NDArray[np.float32]:
    return learner.parameters(Version(1, 1)).vector


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
    moved = np.abs(vector_of(cpu) - before).max()
    assert np.abs(vector_of(gpu) - vector_of(cpu)).max() < 0.02 * moved


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_there_where_it_was_on_the_cpu(kind: str) -> None:
    cpu = learner_of(kind, CPU)
    cpu.step(slots_of(kind, 0))
    gpu = learner_of(kind, GPU)
    gpu.load_state_dict(*cpu.state_dict())
    (expected, _), (found, _) = cpu.state_dict(), gpu.state_dict()
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert gpu.step(slots_of(kind, 1)).optimizer_steps == cpu.step(slots_of(kind, 1)).optimizer_steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_answers_there_as_on_the_cpu(kind: str) -> None:
    slots = slots_of(kind, 0)
    observation = {path: slots[path][0] for path in KINDS[kind][1].observation}
    answers = []
    for device in (CPU, GPU):
        policy = policy_of(kind, device)
        policy.load(policy.parameters(Version(1, 0)))
        (answer,) = policy.rollout([RolloutRequest(observation=observation, state={})])
        answers.append(answer.distribution)
    assert np.allclose(*answers, rtol=1e-4, atol=1e-5)


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
        assert run.wait() == 0, run.output
    logs = "".join(path.read_text() for path in (desk.run_folder / "logs").iterdir())
    assert logs.count('"cuda:0"') == 2, logs
    assert '"compiled"' in logs, logs
