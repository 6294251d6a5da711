"""The number of actors that ``actors.replicas: auto`` stands for, by the model of ``rlsrl size``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsrl.api.load import GivenExperiment
from rlsrl.cli import main
from rlsrl.data.specs import EnvSpec
from rlsrl.envs.factory import EnvironmentSource, environment_spec
from rlsrl.local.auto_actors import choice, fewest
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.sizing.advice import MOST_LOSS
from rlsrl.sizing.costs import MeasuredCosts
from rlsrl.sizing.workload import EnvironmentSpeed
from rlsrl.testing.workloads import TYPICAL

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: counted}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {epochs: 1, minibatchSize: 512}}
  actors: {replicas: auto, environments: 16, rolloutLength: 32}
  stop: {trainSteps: 2}
"""
SPEC = environment_spec(EnvironmentSource(id="CartPole-v1"))
BUSY_TRAINERS = "algorithm.ppo.epochs=100"
"""Training takes about as long as gathering."""
TWO_TRAINERS = "trainers.replicas=2"
MILLISECOND = 1e-3


def chosen(*overrides: str, cores: int = 8, step_seconds: float = MILLISECOND, env_spec: EnvSpec = SPEC) -> int:
    """Return the number of actors for environments that compute for so long in each step."""
    given = GivenExperiment(text=EXPERIMENT.encode(), source="counted.yaml", overrides=overrides)
    speed = EnvironmentSpeed(step_seconds=step_seconds)
    found = choice(given, env_spec, environment=speed, costs=TYPICAL, cores=cores)
    assert found.cores == cores
    return found.num_actors


def test_the_fewest_actors_of_about_the_highest_speed_are_chosen() -> None:
    assert fewest({1: 100.0, 2: 180.0, 3: 199.0, 4: 200.0, 5: 150.0}) == 3
    assert fewest({1: 100.0, 2: 101.0}) == 1
    assert fewest({4: 7.0}) == 4


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_environments_that_compute_get_an_actor_for_each_core(cores: int) -> None:
    assert chosen(cores=cores) == cores


def test_cores_that_trainers_keep_busy_are_left_to_them() -> None:
    assert [chosen(BUSY_TRAINERS), chosen(BUSY_TRAINERS, TWO_TRAINERS)] == [7, 6]


def test_trainers_that_are_the_limit_need_few_actors() -> None:
    assert chosen("algorithm.ppo.epochs=200") < 6


def test_a_policy_worker_that_is_the_limit_needs_fewer_actors() -> None:
    """Here it answers as many requests as five actors send."""
    alone, one, two = (
        chosen(*overrides, step_seconds=0.1 * MILLISECOND)
        for overrides in ((), ("policyWorkers.replicas=1",), ("policyWorkers.replicas=2",))
    )
    assert one < two
    assert one < alone


def test_numbers_that_cannot_work_are_not_chosen() -> None:
    """A message of gRPC takes 67 MB."""
    assert chosen("transport=grpc", "actors.environments=1024", "actors.rolloutLength=4096", cores=2) == 3


def test_an_experiment_that_cannot_work_with_any_number_of_actors_is_refused() -> None:
    stacked = environment_spec(EnvironmentSource(id="CartPole-v1", frame_stack=64))
    with pytest.raises(
        ConfigurationError, match=r"auto, and no number of actors works: with 16, a rollout has"
    ) as caught:
        chosen("transport=grpc", "actors.rolloutLength=65536", env_spec=stacked)
    assert "a smaller actors.rolloutLength" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (BUSY_TRAINERS, TWO_TRAINERS),
        ("policyWorkers.replicas=1",),
        ("algorithm={dqn: {}}", "pacing={trainStepsPerEnvStep: 0.1}", TWO_TRAINERS),
    ],
)
def test_the_choice_is_the_best_that_size_ranks_but_for_the_loss_that_is_allowed(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = MeasuredCosts(machine="a machine", date="2026-11-22", source="made up", costs=TYPICAL)
    monkeypatch.setattr("rlsrl.sizing.costs.measured_costs", lambda: measured)
    (tmp_path / "counted.yaml").write_text(EXPERIMENT)
    speeds = {}
    for number in range(1, 17):
        changes = [f"--set={override}" for override in (*overrides, f"actors.replicas={number}")]
        asked = [str(tmp_path / "counted.yaml"), "--cores=8", f"--env-step-seconds={MILLISECOND}", *changes]
        printed = CliRunner().invoke(main, ["size", *asked])
        if found := re.search(r"about ([\d,]+) env steps/s", printed.output):
            speeds[number] = float(found[1].replace(",", ""))
    number = chosen(*overrides)
    enough = (1 - MOST_LOSS) * max(speeds.values())
    assert speeds[number] > enough - 1, "whole env steps are printed"
    assert all(speed < enough + 1 for fewer, speed in speeds.items() if fewer < number)
