"""The check of the user's environment warns, and neither a crash nor a hang of it matters."""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.spec import Environment
from rlsrl.local.environment_check import CHECK_COMMAND, CHECK_SECONDS, EnvironmentCheck, is_users_own
from rlsrl.testing.waiting import DEADLINE_SECONDS

ENVIRONMENTS = """
import gymnasium

class Old(gymnasium.Wrapper):
    def step(self, action):
        print("the simulator says hello")
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, info

def old():
    return Old(gymnasium.make("CartPole-v1"))

class Blind(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return observation * 0

def blind():
    return Blind(gymnasium.make("CartPole-v1"))

def sound():
    return gymnasium.make("CartPole-v1")

def broken():
    raise ConnectionError("no licence")
"""


class Shown:
    """Takes what a check shows."""

    def __init__(self, folder: Path, *command: str, seconds: float = CHECK_SECONDS) -> None:
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.report = folder / "report.txt"
        self.check = EnvironmentCheck(
            folder / "actor.json",
            self.report,
            environment={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
            show=self.texts.put,
            command=command or CHECK_COMMAND,
            seconds=seconds,
        )

    def end(self) -> list[str]:
        """Wait until the check has ended by itself, and return what it has shown."""
        self.check._thread.join(DEADLINE_SECONDS)
        assert not self.check._thread.is_alive()
        return [self.texts.get() for _ in range(self.texts.qsize())]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def write_config(folder: Path, factory: str) -> None:
    (folder / "mine.py").write_text(ENVIRONMENTS)
    text = f"""
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "mine:{factory}"}}
  actors: {{environments: 2}}
  algorithm: {{ppo: {{}}}}
  stop: {{trainSteps: 1}}
"""
    experiment = load_text(text.encode(), source="test")
    resolved = resolve(experiment, local_placement(run_uid="test", run_folder=folder))
    (folder / "actor.json").write_text(resolved.configs["actor"].to_json())


def test_a_step_without_five_results_is_named_before_training(tmp_path: Path) -> None:
    write_config(tmp_path, "old")
    (text,) = Shown(tmp_path).end()
    assert text.splitlines() == [
        "warning: the environment breaks Gymnasium's contract:",
        "  - step() returned a tuple of 4, not (observation, reward, terminated, truncated, info)",
    ]


def test_a_constant_observation_is_named_before_training(tmp_path: Path) -> None:
    write_config(tmp_path, "blind")
    assert Shown(tmp_path).end() == [
        "warning: the observation was the same in 50 steps with random actions: the policy cannot tell states apart"
    ]


@pytest.mark.parametrize("factory", ["sound", "broken"])
def test_a_sound_environment_and_one_that_cannot_be_made_show_nothing(tmp_path: Path, factory: str) -> None:
    write_config(tmp_path, factory)
    shown = Shown(tmp_path)
    assert shown.end() == []
    assert shown.report.exists() == (factory == "sound")


def test_a_crash_shows_nothing(tmp_path: Path) -> None:
    assert Shown(tmp_path, *python("import os; os.abort()")).end() == []


def test_a_hang_is_killed_in_time(tmp_path: Path) -> None:
    shown = Shown(tmp_path, *python("import time; time.sleep(3600)"), seconds=0.2)
    assert shown.end() == []
    assert shown.check._process.returncode == -9


def test_closing_ends_a_check_at_once(tmp_path: Path) -> None:
    shown = Shown(tmp_path, *python("import time; time.sleep(3600)"))
    shown.check.close()
    shown.check.close()
    assert shown.end() == []
    assert shown.check._process.returncode == -9


def test_many_problems_are_counted(tmp_path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('\\n'.join(map(str, range(8))))"
    (text,) = Shown(tmp_path, *python(code)).end()
    assert text.splitlines()[1:] == [*(f"  - {number}" for number in range(5)), "  and 3 more"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (Environment(id="CartPole-v1"), False),
        (Environment(id="ALE/Pong-v5"), False),
        (Environment(id="mine:Arm-v0"), True),
        (Environment(factory="mine:make"), True),
    ],
)
def test_only_environments_of_users_are_checked(environment: Environment, expected: bool) -> None:
    assert is_users_own(environment) == expected
