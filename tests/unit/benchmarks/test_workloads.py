"""All contestants get the same work."""

from __future__ import annotations

from pathlib import Path

import bench
import pytest
import reference_dqn
import reference_ppo
import reference_recurrent_ppo
import reference_twin_critics
import torch
import yaml
from contestants import PEERS
from figures import SINGLE_FILE
from report import table
from workloads import WORKLOADS, Workload

from rlsrl.api.load import load_text
from rlsrl.api.spec import DqnSpec, ReplaySettings, RLExperiment, SacSpec


def told(workload: Workload) -> RLExperiment:
    """Return the experiment as rlsrl reads it."""
    return load_text(yaml.safe_dump(workload.experiment(seed=7)).encode(), source=workload.name)


def test_all_workloads_are_there_in_order() -> None:
    names = "W1 B1 B1N W1N W2 B2 W3 W4-16 W4-64 R1 RB1 R2 G2 L M1 M1G S1 D1 D2"
    assert list(WORKLOADS) == names.split()
    assert all(name == workload.name for name, workload in WORKLOADS.items())


@pytest.mark.parametrize(
    ("name", "num_envs", "num_steps", "minibatch_size", "epochs"),
    [
        ("W1", 8, 128, 256, 4),
        ("B1", 64, 64, 1024, 1),
        ("W2", 8, 128, 256, 4),
        ("B2", 16, 64, 512, 1),
        ("W3", 8, 256, 512, 4),
        ("W4-16", 16, 32, 256, 4),
        ("W4-64", 64, 32, 256, 4),
        ("R1", 8, 128, 256, 4),
        ("RB1", 64, 64, 1024, 1),
        ("R2", 8, 128, 256, 4),
        ("M1", 8, 128, 256, 4),
        ("M1G", 8, 128, 256, 4),
    ],
)
def test_workloads_have_their_agreed_sizes(
    name: str, num_envs: int, num_steps: int, minibatch_size: int, epochs: int
) -> None:
    spec = told(WORKLOADS[name]).spec
    assert spec.batch_transitions == num_envs * num_steps, "a batch is one iteration of the peers'"
    assert (spec.actors.num_environments, spec.actors.rollout_length) == (num_envs, num_steps)
    assert (spec.algorithm.chosen.minibatch_size, spec.algorithm.chosen.epochs) == (minibatch_size, epochs)
    assert spec.pacing.max_policy_lag == 1


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if workload.algorithm == "ppo"])
def test_peers_get_the_same_inputs_as_rlsrl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = WORKLOADS[name]
    (single,) = [peer for peer in PEERS if peer.name == SINGLE_FILE]
    monkeypatch.setattr("sys.argv", ["reference_ppo.py", *single.inputs(workload, seed=7)])
    is_recurrent = workload.program != workload.algorithm
    peer, spec = (reference_recurrent_ppo if is_recurrent else reference_ppo).arguments(), told(workload).spec
    ppo = spec.algorithm.chosen
    if is_recurrent:
        recurrent = spec.policy.network.recurrent
        assert (peer.recurrent, peer.recurrent_size) == (recurrent.kind, recurrent.size)
        assert peer.sequence_length == ppo.sequence_length == 16
    assert (peer.seed, peer.num_envs, peer.num_steps) == (
        spec.seed,
        spec.actors.num_environments,
        spec.actors.rollout_length,
    )
    assert (peer.epochs, peer.minibatch_size, peer.learning_rate) == (ppo.epochs, ppo.minibatch_size, ppo.learning_rate)
    assert (peer.discount, peer.gae_lambda, peer.clip_range) == (ppo.discount, ppo.gae_lambda, ppo.clip_range)
    assert (peer.entropy_coefficient, peer.value_coefficient) == (ppo.entropy_coefficient, ppo.value_coefficient)
    assert (peer.max_gradient_norm, peer.clip_value_loss) == (ppo.max_gradient_norm, ppo.clip_value_loss)
    assert peer.normalize == spec.policy.normalize_observations == ppo.normalize_rewards
    assert (peer.anneal, ppo.learning_rate_schedule) == (False, None)
    assert peer.report
    if workload.goal is not None:
        assert peer.goal == spec.stop.return_mean == 475.0
    assert peer.device == spec.trainers.device
    assert spec.policy_workers is None or spec.policy_workers.device == peer.device
    assert peer.network == ("mlp" if spec.policy.network.cnn is None else "cnn")


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if workload.algorithm != "ppo"])
def test_peers_that_replay_get_the_same_inputs_as_rlsrl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = WORKLOADS[name]
    (single,) = [peer for peer in PEERS if peer.name == SINGLE_FILE]
    monkeypatch.setattr("sys.argv", ["single.py", *single.inputs(workload, seed=7)])
    reference = reference_dqn if workload.algorithm == "dqn" else reference_twin_critics
    peer, spec = reference.arguments(), told(workload).spec
    algorithm = spec.algorithm.chosen
    assert isinstance(algorithm, ReplaySettings)
    assert (peer.algorithm, peer.seed, peer.env_id) == (spec.algorithm.name, spec.seed, spec.environment.id)
    assert (peer.num_envs, peer.num_steps) == (spec.actors.num_environments, spec.actors.rollout_length)
    assert peer.updates_per_env_step == spec.pacing.train_steps_per_env_step
    assert (peer.minibatch_size, peer.learning_rate) == (algorithm.minibatch_size, algorithm.learning_rate)
    assert (peer.discount, peer.capacity, peer.start) == (
        algorithm.discount,
        algorithm.replay.capacity,
        algorithm.replay.start,
    )
    assert algorithm.replay.n_step == 1
    assert algorithm.replay.priorities is None
    if (mlp := spec.policy.network.mlp) is not None:
        assert mlp.hidden_sizes == (peer.hidden_size,) * 2
    if isinstance(algorithm, DqnSpec):
        assert peer.network == ("mlp" if spec.policy.network.cnn is None else "cnn")
        assert (peer.target_period, peer.max_gradient_norm) == (algorithm.target_period, algorithm.max_gradient_norm)
        (schedule,) = algorithm.schedules.values()
        assert (algorithm.epsilon, schedule.to, schedule.env_steps) == (1.0, peer.last_epsilon, peer.epsilon_steps)
        assert algorithm.double == (not peer.plain)
    if isinstance(algorithm, SacSpec):
        assert peer.critic_learning_rate == algorithm.critic_learning_rate
        assert algorithm.critic.hidden_sizes == (peer.hidden_size,) * 2
        assert (peer.tau, peer.temperature) == (algorithm.tau, algorithm.temperature)
        assert algorithm.max_gradient_norm == 1_000_000, "no limit, as in the single file"
    assert peer.report


def test_remote_workloads_only_add_a_policy_worker() -> None:
    for remote, inline in (("R1", "W1"), ("RB1", "B1"), ("R2", "W2")):
        spec, without = told(WORKLOADS[remote]).spec, told(WORKLOADS[inline]).spec
        assert spec.policy_workers is not None
        assert without.policy_workers is None
        assert (spec.algorithm, spec.environment, spec.policy) == (
            without.algorithm,
            without.environment,
            without.policy,
        )


def test_without_a_gpu_its_workload_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench.py", "G2"])
    assert bench.main() == 2
    assert "G2 is skipped" in capsys.readouterr().err
    (row,) = [line for line in table({}).splitlines() if line.startswith("| G2 |")]
    assert "not shown: not measured, needs a GPU" in row


def test_slow_environments_have_a_limit_and_others_none() -> None:
    assert WORKLOADS["W4-16"].latency_limit == 3200.0
    assert WORKLOADS["W4-64"].latency_limit == 12800.0
    assert WORKLOADS["W1"].latency_limit is None


def test_slow_environments_are_made_by_the_peers_own_function() -> None:
    environment = told(WORKLOADS["W4-16"]).spec.environment
    assert environment.factory == "environments:make"
    assert (Path(reference_ppo.__file__).parent / "environments.py").exists()
    assert environment.kwargs == {"env_id": "CartPole-v1", "step_seconds": 0.005}
