"""``actors.replicas: auto`` is one number for a run, from its first start on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rlsrl.api.load import GivenExperiment
from rlsrl.local import auto_actors
from rlsrl.local.auto_actors import choose_actors
from rlsrl.runtime.errors import ConfigurationError
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
    assert other.returncode == 0
    assert "not applied, since the run has ended: spec.actors.replicas: 3 -> 2" in other.stdout


def test_environments_that_compute_get_more_actors_on_more_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits.py").write_text(WAITS.replace("time.sleep(0.02)", "sum(range(200_000))"))
    (tmp_path / "live.yaml").write_text(EXPERIMENT)
    given = GivenExperiment.of_file(tmp_path / "live.yaml", ["actors.environments=8", "algorithm.ppo.minibatchSize=64"])
    found = {}
    for cores in (2, 8):
        monkeypatch.setattr(auto_actors, "usable_cores", lambda cores=cores: cores)
        found[cores] = choose_actors(given, modules=tmp_path)
    assert [choice.cores for choice in found.values()] == [2, 8]
    assert found[2].num_actors < found[8].num_actors


def test_with_replay_each_trainer_gets_equally_many_actors(tmp_path: Path) -> None:
    """Environments that wait are fastest with an actor for each: as far as two trainers can share them."""
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "live.yaml").write_text(EXPERIMENT)
    overrides = ["algorithm={dqn: {}}", "pacing={trainStepsPerEnvStep: 0.01}", "trainers.replicas=2"]
    for environments, actors in {3: 2, 4: 4}.items():
        given = GivenExperiment.of_file(tmp_path / "live.yaml", [*overrides, f"actors.environments={environments}"])
        found = choose_actors(given, modules=tmp_path)
        assert found.num_actors == actors


def test_an_environment_that_hangs_while_it_is_measured_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits.py").write_text("import time\n\n\ndef make():\n    time.sleep(3600)\n")
    (tmp_path / "live.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr(auto_actors, "CHOICE_SECONDS", 15)
    with pytest.raises(ConfigurationError, match="took longer than 15 s; give a number"):
        choose_actors(GivenExperiment.of_file(tmp_path / "live.yaml"), modules=tmp_path)


def test_a_server_that_is_away_while_actors_are_counted_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    away = f'{{http: {{url: "http://127.0.0.1:{port}", retries: 0}}}}'
    found = Desk(tmp_path, EXPERIMENT).call("run", "live.yaml", "--set", f"environment={away}")
    assert found.returncode == 2
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"Error: actors.replicas is auto, and the environment server http://127.0.0.1:{port} is away: "
    )
