"""One example's very bytes, trained by ``rlsrl run`` and by ``kubectl apply``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rlsrl.testing.kubectl import ClusterExperiment, Namespace
from rlsrl.testing.live_runs import rlsrl_command
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake.yaml"
"""It ends by environment steps, so that both runs take equally many."""
TRAIN_SECONDS = 400.0


def test_the_same_file_trains_on_one_machine_and_on_the_cluster(where: Namespace, tmp_path: Path) -> None:
    file = Path(shutil.copy(EXAMPLE, tmp_path))
    done = subprocess.run(
        [rlsrl_command(), "run", file.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TRAIN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    here = json.loads((tmp_path / "runs" / "frozenlake" / "summary.json").read_text())

    where.kubectl("apply", "-f", str(file))
    experiment = ClusterExperiment(where, "frozenlake")
    experiment.await_phase("Succeeded", seconds=TRAIN_SECONDS)
    until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
    there = experiment.ledger()

    assert file.read_bytes() == EXAMPLE.read_bytes()
    for ledger in (here["ledger"], there):
        assert ledger["balanced"], ledger
        assert ledger["produced"] == ledger["trained"], "a run that ends by steps gathers nothing in vain"
    assert there["trained"] == here["ledger"]["trained"]
    training = experiment.status["training"]
    assert (int(training["trainSteps"]), int(training["envSteps"])) == (here["train_steps"], here["env_steps"])
    assert experiment.status["restarts"] == 0
    assert here["restarts"] == {}
