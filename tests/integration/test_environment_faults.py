"""Environments that turn NaN: one of eight costs its own steps only, all eight end the run with a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole.yaml"
SICK = """
import itertools
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
    assert last in run.output
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {}
    assert summary["ledger"]["balanced"]
    assert "transitions were not finite (NaN or inf)" in run.output
