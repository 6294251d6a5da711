"""``actors.replicas: auto`` is one number for a run, from its first start on."""

from __future__ import annotations

from pathlib import Path

from rlsrl.testing.live_runs import Desk

EXPERIMENT = """\
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {factory: "waits:make"}
  algorithm: {ppo: {epochs: 1, minibatchSize: 48}}
  actors: {replicas: auto, environments: 3, rolloutLength: 16}
  trainers: {compile: "off"}
  stop: {trainSteps: 2}
"""
WAITS = """\
import time
import gymnasium


class Waits(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


def make():
    return Waits(gymnasium.make("CartPole-v1"))
"""


def test_a_run_chooses_its_actors_once_and_records_them(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXPERIMENT)
    (tmp_path / "waits.py").write_text(WAITS)
    with desk.begin() as run:
        assert run.wait(timeout=120) == 0, run.output
        assert "actors.replicas: auto is 3 (cores: " in run.output, "each environment waits in an actor of its own"
    assert desk.facts().replicas()["actor"] == 3
    # The environment no longer waits, so that one actor would be enough.
    (tmp_path / "waits.py").write_text(WAITS.replace("time.sleep(0.02)", "pass"))
    with desk.begin() as run:
        assert run.wait(timeout=120) == 0, run.output
        assert "auto is" not in run.output
        assert "runs/live has finished" in run.output
    other = desk.call("run", "live.yaml", "--set", "actors.replicas=2")
    assert other.returncode == 2
    assert "spec.actors.replicas: 3 -> 2" in other.stderr
