"""One real run of the first example, with a snapshot while it lives; test modules check its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk, LiveRun
from rlsrl.testing.run_snapshot import WatchedRun, take_snapshot

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole.yaml"


@pytest.fixture(scope="session")
def cartpole_run(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """``rlsrl run examples/cartpole.yaml`` to its end. It learns only once the snapshot is taken."""
    text = EXAMPLE.read_text().replace("name: cartpole", "name: live")
    desk = Desk(tmp_path_factory.mktemp("cartpole"), text)
    # Every process writes its imports to standard error, which is in the logs.
    with desk.begin("--set", "algorithm.ppo.learningRate=1e-9", environment={"PYTHONPROFILEIMPORTTIME": "1"}) as run:
        run.until(lambda: run.is_complete() and _has_trained(run), "all processes at work, and a training step")
        snapshot = take_snapshot(run)
        top = run.until(lambda: _top_of_workers(desk), "what `rlsrl top` shows of workers at work")
        edited = desk.call("edit", "live", "--set", "algorithm.ppo.learningRate=1e-3")
        assert edited.returncode == 0, edited.stderr
        return WatchedRun(desk=desk, exit_code=run.wait(timeout=250.0), output=run.output, snapshot=snapshot, top=top)


def _top_of_workers(desk: Desk) -> str | None:
    output = desk.call("top", "live").stdout
    return output if "trainer" in output else None


def _has_trained(run: LiveRun) -> bool:
    status = run.facts.status()
    return status is not None and (status["totals"]["train_steps"] or 0) > 0
