"""``rlsrl run`` without a reader of its output: the run goes on, and its exit status is its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk, rlsrl_command
from rlsrl.testing.waiting import DEADLINE_SECONDS

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 64}}
  actors: {environments: 4, rolloutLength: 32}
  stop: {trainSteps: 2}
"""


@pytest.mark.parametrize("redirection", ["| head -n 1", ">&- 2>&- <&-"])
def test_a_run_outlives_its_console(tmp_path: Path, redirection: str) -> None:
    desk = Desk(tmp_path, EXPERIMENT)

    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{rlsrl_command()} run live.yaml {redirection}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert desk.facts().json("summary.json")["finished"]
