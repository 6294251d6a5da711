"""Environments that turn NaN or raise: one of eight costs its own steps only, all eight end the run with a name."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole.yaml"
SICK = """
import itertools
import os
import sys
from pathlib import Path

import gymnasium
import numpy as np

NUMBER = itertools.count()

class Sick(gymnasium.Wrapper):
    "From its 50th step on, what it gives is NaN for good."

    def __init__(self, env, what):
        super().__init__(env)
        self.what, self.taken = what, 0

    def step(self, action):
        self.taken += 1
        observation, reward, *rest = self.env.step(action)
        return self.mask(observation), np.nan if self.is_sick("rewards") else reward, *rest

    def reset(self, **options):
        observation, info = self.env.reset(**options)
        return self.mask(observation), info

    def mask(self, observation):
        return np.full_like(observation, np.nan) if self.is_sick("observations") else observation

    def is_sick(self, what):
        return self.what == what and self.taken >= 50

def make(what, sick):
    env = gymnasium.make("CartPole-v1")
    return Sick(env, what) if next(NUMBER) in sick else env

class Raising(gymnasium.Wrapper):
    taken = 0

    def step(self, action):
        self.taken += 1
        if self.taken == 50:
            self.fail()
        return self.env.step(action)

    def fail(self):
        raise ConnectionError("the simulator hung up")

class Exiting(Raising):
    def fail(self):
        sys.exit(3)

def raising(kind=Raising):
    "Of an actor's eight, the fourth raises in its 50th step, and so do the first two that are made in its place."
    env = gymnasium.make("CartPole-v1")
    return kind(env) if next(NUMBER) in (3, 8, 9) else env

def exiting():
    return raising(Exiting)

class Closing(gymnasium.Wrapper):
    def close(self):
        if "actor" in sys.argv:
            sys.exit(3)

def closing():
    return Closing(gymnasium.make("CartPole-v1"))

def first_actor():
    if "actor" not in sys.argv:
        return False
    try:
        Path(__file__).with_name("first").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

IS_FIRST_ACTOR = first_actor()

def by_actor(all_sick):
    env = gymnasium.make("CartPole-v1")
    return Sick(env, "rewards") if all_sick or IS_FIRST_ACTOR else env
"""
TWO_ACTORS = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "sick:by_actor", kwargs: {{all_sick: {all_sick}}}, maxNonFinite: 200}}
  actors: {{replicas: 2, environments: 8, rolloutLength: 16}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 32}}}}
  stop: {{trainSteps: 40}}
"""
RAISING = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "sick:{factory}"}}
  actors: {{environments: 8, rolloutLength: 32, vectorization: {vectorization}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 64}}}}
  stop: {{trainSteps: 20}}
"""


def desk_for(folder: Path, what: str, sick: list[int]) -> Desk:
    (folder / "sick.py").write_text(SICK)
    text = EXAMPLE.read_text().replace("name: cartpole", "name: live")
    environment = f"""{{factory: "sick:make", kwargs: {{what: {what}, sick: {sick}}}}}"""
    usual = "environment:\n    id: CartPole-v1"
    assert usual in text
    return Desk(folder, text.replace(usual, f"environment: {environment}"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rewards", "observations"])
def test_one_sick_environment_of_eight_keeps_no_run_from_its_goal(tmp_path: Path, what: str) -> None:
    desk = desk_for(tmp_path, what, [3])
    with desk.begin() as run:
        assert run.wait(timeout=250.0) == 0, run.output
    summary = desk.facts().json("summary.json")
    assert summary["return_mean"] >= 475
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert ledger["dropped"]["non_finite"] >= 1
    assert "transitions were not finite (NaN or inf)" in run.output
    assert {event["rank"] for event in desk.facts().logged("actor-0", "environment_fault")} == {3}


@pytest.mark.parametrize(("what", "key"), [("rewards", "reward is nan"), ("observations", "observation[0] is nan")])
def test_environments_that_are_all_sick_end_the_run(tmp_path: Path, what: str, key: str) -> None:
    desk = desk_for(tmp_path, what, list(range(8)))
    with desk.begin() as run:
        assert run.wait(timeout=60.0) == 1, run.output
    assert "error: actor-0 exited with code 3: its environments end the run." in run.output
    last = (desk.run_folder / "logs" / "actor-0.out").read_text().splitlines()[-1]
    assert last.startswith("rlsrl: environment rank ")
    assert key in last
    assert run.output.splitlines()[-1].strip() == last
    assert "rlsrl eval" not in run.output
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {}
    assert summary["ledger"]["balanced"]
    assert "transitions were not finite (NaN or inf)" in run.output


@pytest.mark.parametrize("all_sick", [False, True])
def test_an_actor_whose_environments_are_all_sick_ends_no_run_that_others_keep_alive(
    tmp_path: Path, all_sick: bool
) -> None:
    (tmp_path / "sick.py").write_text(SICK)
    desk = Desk(tmp_path, TWO_ACTORS.format(all_sick=str(all_sick).lower()))
    with desk.begin() as run:
        assert run.wait(timeout=120.0) == int(all_sick), run.output
    summary = desk.facts().json("summary.json")
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["dropped"]["non_finite"] > 200, "more than maxNonFinite"
    assert summary["restarts"] == {}
    if all_sick:
        assert run.output.splitlines()[-1].strip().startswith("rlsrl: environment rank ")
        assert "(environment.maxNonFinite)" in run.output


@pytest.mark.parametrize(
    ("vectorization", "factory", "raised"),
    [
        ("loop", "raising", "ConnectionError: the simulator hung up"),
        ("threads", "raising", "ConnectionError: the simulator hung up"),
        pytest.param("loop", "exiting", "SystemExit: 3", id="exit code 3 would end the run"),
    ],
)
def test_an_environment_that_raises_costs_its_own_episodes_only(
    tmp_path: Path, vectorization: str, factory: str, raised: str
) -> None:
    (tmp_path / "sick.py").write_text(SICK)
    desk = Desk(tmp_path, RAISING.format(vectorization=vectorization, factory=factory))
    with desk.begin() as run:
        assert run.wait(timeout=120.0) == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["restarts"], summary["ledger"]["balanced"]) == ("trainSteps", {}, True)
    first, *others = desk.facts().logged("actor-0", "environment_fault")
    assert [event["reason"] for event in (first, *others)] == ["environment_error"] * 3
    assert {event["rank"] for event in (first, *others)} == {3}
    assert f'File "{tmp_path / "sick.py"}", line ' in first["traceback"].splitlines()[1]
    assert first["traceback"].splitlines()[-1] == raised


def test_errors_that_cost_no_restart_are_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sick.py").write_text(SICK)
    endless = RAISING.format(vectorization="loop", factory="raising").replace("trainSteps: 20", "trainSteps: 1000000")
    desk = Desk(tmp_path, endless)
    last = "environment rank 3 raised ConnectionError: the simulator hung up (error 3 of this environment)"
    text = f"ENVIRONMENT ERRORS: 3, the last of actor-0: {last} (logs: environment_fault)"
    with desk.begin() as run:
        run.until(lambda: text in desk.call("top", "live").stdout, "rlsrl top")
        run.send(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert text in run.output


def test_values_that_are_not_finite_are_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sick.py").write_text(SICK)
    endless = RAISING.format(vectorization="loop", factory="make").replace("trainSteps: 20", "trainSteps: 1000000")
    desk = Desk(tmp_path, endless.replace('"sick:make"', '"sick:make", kwargs: {what: rewards, sick: [3]}'))
    text = re.compile(
        r"NAN OR INFINITY: [\d,]+ steps or resets, the last of actor-0: environment rank 3: reward is nan at step \d+ "
    )
    with desk.begin() as run:
        run.until(lambda: text.search(desk.call("top", "live").stdout), "rlsrl top")
        run.send(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert text.search(run.output)
    assert "transitions were not finite (NaN or inf)" in run.output


def test_an_environment_that_exits_while_it_is_closed_chooses_no_exit_code_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "sick.py").write_text(SICK)
    desk = Desk(tmp_path, RAISING.format(vectorization="loop", factory="closing"))
    with desk.begin() as run:
        assert run.wait(timeout=120.0) == 0, run.output
    assert "actor-0 exited with code 1 instead of ending cleanly: SystemExit: 3" in run.output
    assert desk.facts().json("summary.json")["restarts"] == {}
