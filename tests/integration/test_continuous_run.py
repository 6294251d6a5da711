"""Continuous actions and normalisation in real runs: the HalfCheetah example, and bit-identical resumes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import Parameters, TrainerState
from rlsrl.testing.live_runs import Desk

EXAMPLE = Path(__file__).parents[2] / "examples" / "halfcheetah.yaml"
FEW_STEPS = ("--set", "stop.envSteps=6000", "--set", "algorithm.ppo.epochs=2")
PENDULUM = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: Pendulum-v1}
  policy: {normalizeObservations: true}
  algorithm:
    ppo:
      epochs: 2
      minibatchSize: 64
      normalizeRewards: true
      learningRateSchedule: {linear: {to: 0, envSteps: 10000}}
      clipRangeSchedule: {linear: {to: 0.1, envSteps: 10000}}
      entropyCoefficientSchedule: {linear: {to: 0.01, envSteps: 10000}}
  actors: {replicas: 2, environments: 8, rolloutLength: 32}
  pacing: {maxPolicyLag: 0}
  parameters: {everySteps: 5, keepLast: 1000}
  stop: {trainSteps: 30}
"""


def database(desk: Desk) -> FilesystemParameterDB:
    return FilesystemParameterDB(desk.run_folder / "parameters")


def final_parameters(desk: Desk) -> Parameters:
    parameters = database(desk).get(POLICY_NAME)
    assert parameters is not None
    return parameters


def final_state(desk: Desk) -> TrainerState:
    state = database(desk).load_state(POLICY_NAME)
    assert state is not None
    return state


@pytest.fixture(scope="module")
def halfcheetah(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A short run of the example."""
    desk = Desk(tmp_path_factory.mktemp("halfcheetah"), EXAMPLE.read_text().replace("name: halfcheetah", "name: live"))
    with desk.begin(*FEW_STEPS) as run:
        assert run.wait() == 0, run.output
    return desk


def test_the_halfcheetah_example_trains(halfcheetah: Desk) -> None:
    summary = halfcheetah.facts().json("summary.json")
    assert summary["reason"] == "envSteps"
    assert summary["env_steps"] >= 6000
    assert summary["ledger"]["balanced"]
    last = json.loads((halfcheetah.run_folder / "metrics.jsonl").read_text().splitlines()[-1])["scalars"]
    assert last["train/non_finite_transitions"] == 0
    # The last batch began after at least two thirds of the steps that the schedule takes.
    assert 0.0 < last["train/learning_rate"] < 1.1e-4


def test_its_versions_contain_the_statistics_and_the_exported_actor(halfcheetah: Desk) -> None:
    statistics = final_parameters(halfcheetah).statistics
    assert {name: array.shape for name, array in statistics.items()} == {
        "observation/mean": (17,),
        "observation/variance": (17,),
        "observation/count": (),
    }
    assert statistics["observation/count"] >= 6000
    assert (statistics["observation/variance"] > 0).all()
    assert not np.allclose(statistics["observation/variance"], 1.0, atol=0.05)
    newest = halfcheetah.facts().newest()
    assert newest is not None
    assert newest.metadata["program"]["head"]["kind"] == "gaussian"


def test_its_last_version_can_be_played(halfcheetah: Desk) -> None:
    played = halfcheetah.call("eval", "runs/live", "--episodes", "2", "--environments", "2", "--json")
    assert played.returncode == 0, played.stderr
    result = json.loads(played.stdout)
    assert (result["episodes"], result["length_mean"]) == (2, 1000.0)


def test_mujoco_leaves_no_file_beside_the_run(halfcheetah: Desk) -> None:
    assert list(halfcheetah.folder.rglob("MUJOCO*")) == []
    log = (halfcheetah.run_folder / "logs" / "actor-0.jsonl").read_text().splitlines()
    assert "mujoco" in {json.loads(line)["logger"] for line in log}, "what would have stood in that file"


@pytest.mark.slow
def test_two_resumes_of_one_interrupted_run_are_equal_in_weights_statistics_and_state(tmp_path: Path) -> None:
    def desk_in(name: str) -> Desk:
        (tmp_path / name).mkdir()
        return Desk(tmp_path / name, PENDULUM)

    interrupted = desk_in("interrupted")
    with interrupted.begin() as run:
        run.until(
            lambda: run.facts.folder.exists() and any(info.version.step >= 5 for info in run.facts.versions()),
            "a durable version of step 5",
        )
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    copies = [desk_in(name) for name in ("copy", "another")]
    for copy in copies:
        shutil.copytree(interrupted.run_folder, copy.run_folder)
        with copy.begin() as run:
            assert run.wait() == 0, run.output
        assert copy.facts().logged("trainer-0", "resumed")
    one, another = (final_parameters(copy) for copy in copies)
    assert one.version.step == 30
    assert one.vector.tobytes() == another.vector.tobytes()
    assert {name: array.tobytes() for name, array in one.statistics.items()} == {
        name: array.tobytes() for name, array in another.statistics.items()
    }
    states = [final_state(copy) for copy in copies]
    assert {"normalizer/observation/mean", "normalizer/return/squares"} <= states[0].arrays.keys()
    assert states[0].arrays["normalizer/return/count"] == states[0].values["learner"]["env_steps"] > 7000
    for name, array in states[0].arrays.items():
        np.testing.assert_array_equal(array, states[1].arrays[name])
    assert states[0].values["learner"] == states[1].values["learner"]
