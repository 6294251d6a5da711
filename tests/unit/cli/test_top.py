"""``rlsrl top`` on run folders of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsrl.cli import main
from rlsrl.cli.run_status import run_status
from rlsrl.local.run_folder import RunFolder
from rlsrl.testing.waiting import DEADLINE_SECONDS

DOCUMENT: dict[str, Any] = {
    "experiment": "cartpole",
    "phase": "training",
    "totals": {"env_steps": 62971.0, "version": "1.62"},
    "roles": {"actor": [{"index": 0, "host": "here", "state": "running", "activity": {"working": 1.0}, "stats": {}}]},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a run in runs/ without processes."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "cartpole"
    with RunFolder.open(path) as opened:
        opened.create(as_given=b"given", resolved=b"resolved", package_version="0.1")
    return path


def put(folder: Path, *, age: float = 0.0) -> None:
    path = folder / "status.json"
    path.write_text(json.dumps(DOCUMENT))
    os.utime(path, (time.time() - age,) * 2)


def told(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["top", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("run", ["cartpole", "runs/cartpole"])
def test_a_run_that_goes_on_is_shown_by_its_name_or_folder(folder: Path, run: str) -> None:
    put(folder)
    with RunFolder.open(folder):
        code, said = told(run)
    assert code == 0
    assert said.splitlines()[0].startswith("cartpole: training, env steps 62,971, ")
    assert "here  running" in said
    assert "ago" not in said


def test_a_silent_coordinator_is_reported_with_its_last_status(folder: Path) -> None:
    put(folder, age=90.0)
    with RunFolder.open(folder):
        assert told("cartpole")[1].endswith("\n\n1m30s old: the coordinator does not answer\n")


def test_before_the_coordinator_has_answered_the_run_starts(folder: Path) -> None:
    with RunFolder.open(folder):
        assert told("cartpole") == (0, "cartpole: starting\n")


def test_an_ended_run_shows_its_last_status(folder: Path) -> None:
    put(folder, age=7200.0)
    code, said = told("cartpole")
    assert code == 0
    assert said.splitlines()[0].startswith("cartpole: ended, env steps 62,971, ")
    assert "here  ended" in said
    assert said.endswith("\n\n2h old: the run has ended\n")


def test_a_run_whose_controller_was_killed_is_shown_as_killed_with_what_resumes_it(folder: Path) -> None:
    with RunFolder.open(folder) as opened:
        opened.begin_life(modules=folder)
    put(folder, age=5.0)
    code, said = told("cartpole")
    assert code == 0
    assert said.splitlines()[0].startswith("cartpole: killed, env steps 62,971, ")
    assert "here  killed" in said
    assert "running" not in said
    assert said.endswith("\n\n5s old: the run was killed before it could end; the command that started it resumes it\n")


def test_the_last_status_of_a_finished_run_keeps_its_phase(folder: Path) -> None:
    (folder / "status.json").write_text(json.dumps({**DOCUMENT, "phase": "finished"}))
    assert told("cartpole")[1].startswith("cartpole: finished, ")


def test_a_run_without_a_status_is_reported(folder: Path) -> None:
    assert told("cartpole") == (2, "Error: runs/cartpole is not running and has no status.json of an earlier life\n")


def test_wrong_folders_and_names_are_reported_with_the_nearest_match(folder: Path) -> None:
    (folder.parent / "cartpoles").mkdir()
    assert told("cartpol") == (
        2,
        "Error: run cartpol does not exist, neither here nor in runs/ (did you mean 'cartpole'?)\n",
    )
    assert told("runs/cartpoles") == (
        2,
        "Error: runs/cartpoles is not a run folder: it has no controller.json (did you mean 'cartpole'?)\n",
    )
    assert told("else") == (2, "Error: run else does not exist, neither here nor in runs/\n")


def test_an_invalid_status_is_reported_in_one_line(folder: Path) -> None:
    (folder / "status.json").write_text("[]")
    code, said = told("cartpole")
    assert code == 2
    assert said.startswith("Error: the status of runs/cartpole cannot be read: ")
    assert len(said.splitlines()) == 1


def test_the_last_refresh_is_after_the_end(folder: Path) -> None:
    put(folder)
    with RunFolder.open(folder):
        assert run_status(folder, whole=False)[1] is False
    text, is_last = run_status(folder, whole=False)
    assert is_last
    assert "the run has ended" in text


def test_on_a_terminal_it_is_live_until_the_run_ends(folder: Path) -> None:
    put(folder)
    with RunFolder.open(folder):
        command = "import sys; sys.stdout.isatty = lambda: True; from rlsrl.cli import main; main()"
        top = subprocess.Popen(
            [sys.executable, "-c", command, "top", "cartpole"], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        try:
            assert top.stdout is not None
            first = top.stdout.readline()
            assert top.poll() is None, "it goes on while the run does"
        except BaseException:
            top.send_signal(signal.SIGKILL)
            raise
    rest, _ = top.communicate(timeout=DEADLINE_SECONDS)
    assert top.returncode == 0
    assert "cartpole: training" in first
    assert rest.rstrip().endswith("the run has ended")
