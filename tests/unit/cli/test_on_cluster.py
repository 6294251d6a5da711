"""Runs on a cluster, asked for with a kubectl that is a script: what is said when they cannot be reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsrl.cli import main

KUBECTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *"get rlexperiments"*) printf 'cartpole 1-2-3\\nother 4-5-6\\n' ;;
  *"get secrets"*) echo dGhlLXRva2Vu ;;
  *port-forward*) echo "error: unable to forward port because pod is not running" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a kubectl that knows one experiment, and does not reach it, was asked."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(log=tmp_path / "log"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "log"


def listed(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["params", "list", *arguments])
    return result.exit_code, result.output


def test_a_misspelt_experiment_is_named_with_the_nearest(log: Path) -> None:
    code, said = listed("cartpol", "-n", "research")
    assert code == 2
    assert "there is no experiment cartpol in this namespace" in said
    assert "did you mean 'cartpole'?" in said
    assert log.read_text().startswith("--namespace research get rlexperiments")


def test_what_kubectl_says_is_passed_on(log: Path) -> None:
    code, said = listed("cartpole", "-n", "research")
    assert code == 2
    assert "the coordinator of cartpole cannot be reached: error: unable to forward port" in said
    assert "--selector rlsrl.dev/uid=1-2-3" in log.read_text()


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = listed("cartpole", "-n", "research")
    assert code == 2
    assert "no kubectl on the PATH" in said


def test_as_a_plugin_runs_are_on_the_cluster(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/local/bin/kubectl-rlsrl"])
    assert listed("cartpole")[0] == 2
    assert log.read_text().startswith("get rlexperiments"), "in kubectl's own namespace"
