"""With one rank and lag 0 the same seed gives bit-identical parameters, also after an interruption."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import Parameters, TrainerState
from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {epochs: 2, minibatchSize: 128}}
  actors: {replicas: 2, environments: 8, rolloutLength: 32}
  pacing: {maxPolicyLag: 0}
  parameters: {everySteps: 10, keepLast: 1000}
  stop: {trainSteps: 80}
"""
PPO, DQN = "ppo: {epochs: 2, minibatchSize: 128}", "dqn: {minibatchSize: 32, replay: {capacity: 6000, start: 1024}}"
REPLAY = EXPERIMENT.replace(PPO, DQN).replace("{maxPolicyLag: 0}", "{maxPolicyLag: 0, trainStepsPerEnvStep: 0.0625}")
OTHER_SEED = ("--seed", "5")


def desk_in(folder: Path, experiment: str = EXPERIMENT) -> Desk:
    folder.mkdir()
    return Desk(folder, experiment)


def run_to_the_end(desk: Desk, *arguments: str) -> None:
    with desk.begin(*arguments) as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["train_steps"], summary["max_policy_lag"]) == ("trainSteps", 80, 0)


def stored(desk: Desk, step: int) -> Parameters:
    (info,) = [info for info in desk.facts().versions() if info.version.step == step]
    parameters = FilesystemParameterDB(desk.run_folder / "parameters").get(POLICY_NAME, info.version)
    assert parameters is not None
    return parameters


def final_state(desk: Desk) -> TrainerState:
    state = FilesystemParameterDB(desk.run_folder / "parameters").load_state(POLICY_NAME)
    assert state is not None
    assert state.version.step == 80
    return state


def bits(desk: Desk, step: int) -> bytes:
    return stored(desk, step).vector.tobytes()


def interrupt_after(desk: Desk, step: int, *arguments: str) -> int:
    """Interrupt the run once that many steps are durable; return its last step."""
    with desk.begin(*arguments) as run:
        run.until(
            lambda: run.facts.folder.exists() and any(info.version.step >= step for info in run.facts.versions()),
            f"a durable version of step {step}",
        )
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    newest = desk.facts().newest()
    assert newest is not None
    return newest.version.step


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Run to the end."""
    desk = desk_in(tmp_path_factory.mktemp("determinism") / "finished")
    run_to_the_end(desk)
    return desk


def test_the_same_seed_gives_the_same_parameters(tmp_path: Path, finished: Desk) -> None:
    again = desk_in(tmp_path / "again")
    run_to_the_end(again)
    for step in (0, 10, 40, 80):
        assert bits(finished, step) == bits(again, step), f"version of step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [pytest.param(EXPERIMENT, id="ppo"), pytest.param(REPLAY, id="dqn")])
def test_two_resumes_of_one_interrupted_run_give_the_same_parameters(
    experiment: str, tmp_path: Path, finished: Desk
) -> None:
    interrupted = desk_in(tmp_path / "interrupted", experiment)
    step = interrupt_after(interrupted, 10, *OTHER_SEED)
    assert bits(interrupted, 0) != bits(finished, 0), "another seed, other weights"
    assert bits(interrupted, 10) != bits(finished, 10)
    copies = [desk_in(tmp_path / name, experiment) for name in ("copy", "another")]
    for copy in copies:
        shutil.copytree(interrupted.run_folder, copy.run_folder)
        run_to_the_end(copy, *OTHER_SEED)
        assert copy.facts().logged("trainer-0", "resumed")[-1]["version"] == f"1.{step}"
        assert not any(copy.facts().json("summary.json")["ledger"]["lost"].values()), "a store goes on with all it had"
    one, another = copies
    assert bits(one, 80) == bits(another, 80)
    mine, theirs = final_state(one), final_state(another)
    assert mine.arrays.keys() == theirs.arrays.keys()
    for name, array in mine.arrays.items():
        np.testing.assert_array_equal(array, theirs.arrays[name])
    assert mine.values["learner"] == theirs.values["learner"]
    assert mine.values["progress"]["returns"] == theirs.values["progress"]["returns"]
