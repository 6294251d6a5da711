"""Signals to ``rlsrl run``: a clean end with a last checkpoint, or an immediate kill; both can be resumed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from rlsrl.local.controller import EndDeadlines
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, LiveRun


class GatedDesk(Desk):
    """A desk with an experiment that reaches its goal after ``open_gate``."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "gate"
        super().__init__(folder, GATED_EXPERIMENT.format(gate=self._gate))

    def open_gate(self) -> None:
        self._gate.touch()


@pytest.fixture
def desk(tmp_path: Path) -> GatedDesk:
    return GatedDesk(tmp_path)


def await_new_version(run: LiveRun) -> int:
    """Wait for a durable version of this life; return its step."""
    before = run.facts.newest() if run.facts.folder.exists() else None
    start = -1 if before is None else before.version.step

    def newer() -> int | None:
        newest = run.facts.newest()
        return newest.version.step if newest is not None and newest.version.step > max(start, 0) else None

    return run.until(lambda: run.facts.folder.exists() and newer(), "a new durable version") or 0


def interrupt(run: LiveRun, signum: signal.Signals) -> None:
    """Request a clean end and check it."""
    step = await_new_version(run)
    run.send(signum)
    assert run.wait() == 128 + signum, run.output
    facts = run.facts
    assert facts.leftovers() == []
    newest = facts.newest()
    assert newest is not None
    assert newest.version.step >= step
    summary = facts.json("summary.json")
    rows = (facts.folder / "metrics.jsonl").read_text().splitlines()
    assert rows, "the curve up to here is kept"
    assert (summary["finished"], summary["train_steps"]) == (False, newest.version.step)
    # What was trained is in the last checkpoint, to the last transition.
    assert summary["ledger"]["trained"] == newest.metadata["env_steps"]
    assert summary["ledger"]["balanced"]
    assert set(summary["ledger"]["lost"].values()) == {0}
    assert re.search(r"to resume: \S*rlsrl run live.yaml\n", run.output)


def finish(desk: GatedDesk) -> None:
    """Resume exactly at the last life's end and reach the goal."""
    before = desk.facts().newest()
    assert before is not None
    with desk.begin() as run:
        await_new_version(run)
        assert run.facts.logged("trainer-0", "resumed")[-1]["version"] == str(before.version)
        desk.open_gate()
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert summary["finished"]
    assert summary["ledger"]["balanced"]


def test_ctrl_c_ends_cleanly_a_second_one_kills_and_the_run_can_be_resumed(desk: GatedDesk) -> None:
    with desk.begin() as run:
        interrupt(run, signal.SIGINT)
    with desk.begin() as run:
        await_new_version(run)
        # A stopped process does not end, also not after SIGTERM.
        (trainer,) = run.workers("trainer")
        os.kill(trainer.pid, signal.SIGSTOP)
        durable = run.facts.newest()
        run.send(signal.SIGINT)
        run.until(lambda: "Storing a last checkpoint" in run.output, "the answer to the first Ctrl-C")
        time.sleep(EndDeadlines().repeat)  # before, it would be the same request
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
        assert "killed without a last checkpoint" in run.output
    assert desk.facts().leftovers() == []
    assert desk.facts().newest() == durable
    assert desk.facts().json("summary.json")["ledger"]["balanced"]
    finish(desk)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_requests_to_end_are_like_ctrl_c(desk: GatedDesk, signum: signal.Signals) -> None:
    with desk.begin() as run:
        interrupt(run, signum)
    finish(desk)


@pytest.mark.slow
def test_ctrl_c_during_start_up_leaves_nothing_and_can_be_resumed(desk: GatedDesk) -> None:
    with desk.begin() as run:
        run.until(lambda: run.workers("trainer"), "a trainer's process")
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    assert desk.facts().leftovers() == []
    desk.open_gate()
    with desk.begin() as run:
        assert run.wait() == 0, run.output
