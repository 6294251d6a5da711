"""Experiments that cannot train end at once, with the failing code's own message."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {environment}
  actors: {{environments: 2, rolloutLength: 8, vectorization: {vectorization}}}
  algorithm: {{ppo: {{minibatchSize: 16}}}}
  stop: {{trainSteps: 10}}
  restarts: {{budget: 1000}}
"""

BROKEN = """
import gymnasium

class Broken(gymnasium.Wrapper):
    def step(self, action):
        raise RuntimeError("the robot arm does not answer")

def make():
    return Broken(gymnasium.make("CartPole-v1"))
"""


OLD = """
import gymnasium

class Old(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, info

def make():
    return Old(gymnasium.make("CartPole-v1"))
"""


def experiment(environment: str, vectorization: str = "loop") -> str:
    return EXPERIMENT.format(environment=environment, vectorization=vectorization)


def test_an_environment_that_does_not_exist_ends_the_run_with_its_name(tmp_path: Path) -> None:
    desk = Desk(tmp_path, experiment("{id: CartPole-v9}"))
    with desk.begin() as run:
        assert run.wait() == 2, run.output
    assert "CartPole-v9" in run.output
    assert "Traceback" not in run.output
    assert desk.facts().leftovers() == []
    assert desk.facts().json("summary.json")["restarts"] == {}


def test_an_environment_without_vectorisation_ends_the_run_with_the_cure(tmp_path: Path) -> None:
    desk = Desk(tmp_path, experiment("{id: Acrobot-v1}", vectorization="native"))
    with desk.begin() as run:
        assert run.wait() == 2, run.output
    assert "actors.vectorization: native: environment 'Acrobot-v1' is registered without" in run.output
    assert "use loop or threads" in run.output
    assert "Traceback" not in run.output
    assert desk.facts().leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["loop", "threads"])
def test_an_environment_that_never_works_is_reported_at_each_restart_and_ends_the_run(
    tmp_path: Path, vectorization: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    desk = Desk(tmp_path, experiment('{factory: "broken:make"}', vectorization))
    termination = tmp_path / "termination-message"
    with desk.begin(environment={"RLSRL_RESULT_FILE": str(termination)}) as run:
        assert run.wait() == 1, run.output
    lines = run.output.splitlines()
    restarts = [line for line in lines if "; restarting " in line]
    assert restarts
    assert all(" actor-0 exited with code 1: " in line for line in restarts)
    assert all("the robot arm does not answer" in line for line in restarts)
    _, _, error = run.output.partition("error: actor-0 exited with code 1: it failed in the same way")
    _, frame, *_, message, last = error.splitlines()
    assert frame.startswith("  Traceback")
    assert error.count("  File ") == 1, "the user's own frame only"
    assert f'File "{tmp_path / "broken.py"}", line ' in error
    assert message == "  RuntimeError: the robot arm does not answer"
    assert last.startswith("  rlsrl: environment rank ")
    assert termination.read_text().splitlines() == [line.removeprefix("  ") for line in error.splitlines()[1:]]
    assert "rlsrl eval" not in run.output
    assert desk.facts().leftovers() == []
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {"actor": len(restarts)}
    assert summary["ledger"]["balanced"]


@pytest.mark.slow
def test_an_environment_of_the_old_interface_is_told_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD)
    desk = Desk(tmp_path, experiment('{factory: "old:make"}'))
    with desk.begin() as run:
        assert run.wait() == 1, run.output
    says = "step() returned a tuple of 4, not (observation, reward, terminated, truncated, info)"
    warning, _, error = run.output.partition("error: ")
    assert f"warning: the environment breaks Gymnasium's contract:\n  - {says}" in warning
    assert says in error
    assert "not enough values to unpack" not in run.output
    assert "Traceback" not in run.output
