"""One example's very bytes, trained by ``rlsrl run`` and by ``kubectl apply``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rlsrl.api.load import load_file
from rlsrl.testing.kubectl import ClusterExperiment, Namespace
from rlsrl.testing.live_runs import rlsrl_command
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake.yaml"
"""It ends by environment steps, so both runs take as many, up to one batch."""
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
    spec = load_file(EXAMPLE).spec
    assert spec.stop.env_steps is not None
    for ledger in (here["ledger"], there):
        assert ledger["balanced"], ledger
        assert ledger["produced"] == ledger["trained"], "a run that ends by steps gathers nothing in vain"
        # With a policy lag two runs differ in their episodes, and so in the steps that reset an environment.
        assert spec.stop.env_steps <= ledger["trained"] < spec.stop.env_steps + spec.batch_transitions
    assert here["env_steps"] == here["ledger"]["trained"]
    assert int(experiment.status["training"]["envSteps"]) == there["trained"]
    assert experiment.status["restarts"] == 0
    assert here["restarts"] == {}
