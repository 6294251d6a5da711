"""A run whose minibatches are not finite ends with the reason, and accounts for what it did not train."""

from __future__ import annotations

from pathlib import Path

from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {factory: "extreme:make"}
  actors: {environments: 2, rolloutLength: 8}
  algorithm: {ppo: {epochs: 2, minibatchSize: 16}}
  stop: {trainSteps: 100000}
"""

EXTREME = """
import gymnasium

class Extreme(gymnasium.Wrapper):
    def step(self, action):
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, 1e30, terminated, truncated, info

def make():
    return Extreme(gymnasium.make("CartPole-v1"))
"""
"""Finite rewards, whose squares overflow in the value's loss."""


def test_a_run_that_does_not_learn_ends_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "extreme.py").write_text(EXTREME)
    desk = Desk(tmp_path, EXPERIMENT)
    with desk.begin() as run:
        assert run.wait() == 1, run.output
    reason = "200 of the last 200 minibatches were skipped"
    assert run.output.splitlines()[-1].startswith(f"error: {reason}"), run.output
    summary = desk.facts().json("summary.json")
    assert (summary["finished"], summary["reason"]) == (False, "updatesSkipped")
    assert summary["failure"].startswith(reason)
    assert summary["minibatches_skipped"] == summary["minibatches"] >= 200
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert (ledger["trained"], ledger["dropped"]["update_skipped"]) == (0, summary["env_steps"])
    assert desk.facts().leftovers() == []
    with desk.begin() as again:
        assert again.wait() == 1, again.output
    assert "runs/live has failed; --fresh" in again.output
    assert again.output.splitlines()[-1].startswith(f"error: {reason}")
