"""``rlsrl run`` where descriptors or ports are scarce: one clear error, and no wait."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk, rlsrl_command

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 4}
  stop: {trainSteps: 2}
  restarts: {budget: 1}
"""
OWN_NETWORK = ["unshare", "--map-root-user", "--net"]
"""Starts a command in a network namespace of its own."""


def shell(folder: Path, script: str, *prefix: str) -> tuple[int, str]:
    Desk(folder, EXPERIMENT)
    done = subprocess.run(
        [*prefix, "bash", "-c", script.replace("RUN", f"timeout -s KILL 60 {rlsrl_command()} run live.yaml")],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_too_few_descriptors_end_the_run_at_once(tmp_path: Path) -> None:
    assert shell(tmp_path, "ulimit -n 24; RUN") == (
        2,
        "Error: a process may open 24 files; a run of 3 workers needs 44: ulimit -n 44\n",
    )


def test_exhausted_ports_end_the_run_with_one_line(tmp_path: Path) -> None:
    if subprocess.run([*OWN_NETWORK, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no permission to create a network namespace")
    one_port = "ip link set lo up; echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range; "

    code, output = shell(tmp_path, f"{one_port} RUN", *OWN_NETWORK)

    assert code == 1, output
    assert "127.0.0.1 has no free port for the metrics page" in output
    assert "Traceback" not in output
    assert 'File "' not in output
