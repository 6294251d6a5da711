"""``python -m rlsrl.workers``: invalid input is reported in one line with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.rpc.auth import TOKEN_VARIABLE

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: entry}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 2}
  stop: {trainSteps: 1}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a valid trainer config."""
    placement = local_placement(run_uid="entry", run_folder=tmp_path)
    path = tmp_path / "trainer.json"
    path.write_text(resolve(load_text(EXPERIMENT.encode()), placement).trainer.to_json())
    return path


def start(config: Path, *, role: str = "trainer", token: str | None = "t") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLSRL_")}
    return subprocess.run(
        [sys.executable, "-m", "rlsrl.workers", "--role", role, "--config", str(config)],
        env=environment | ({} if token is None else {TOKEN_VARIABLE: token}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of a worker that refuses to start."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlsrl: ")
    return line


def test_every_wrong_field_of_a_config_is_named_on_one_line(config: Path) -> None:
    value = json.loads(config.read_text())
    del value["policy_name"]
    value["batch_lanes"] = -1
    config.write_text(json.dumps(value))
    line = refused(start(config))
    assert str(config) in line
    assert "trainer" in line
    assert "policy_name: " in line
    assert "batch_lanes: " in line


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_an_invalid_config_is_refused(config: Path, content: str) -> None:
    config.write_text(content)
    assert f"{config} is not a valid config of role trainer" in refused(start(config))


def test_another_roles_config_is_refused(config: Path) -> None:
    assert "is not a valid config of role actor" in refused(start(config, role="actor"))


def test_a_missing_config_is_refused(config: Path) -> None:
    config.unlink()
    assert f"cannot read {config}: No such file" in refused(start(config))


def test_without_a_token_a_worker_refuses_to_start(config: Path) -> None:
    assert TOKEN_VARIABLE in refused(start(config, token=None))


def test_a_role_that_does_not_exist_is_refused_with_those_that_do(config: Path) -> None:
    done = start(config, role="trainee")
    assert done.returncode == 2
    for role in ("coordinator", "trainer", "actor"):
        assert repr(role) in done.stderr
