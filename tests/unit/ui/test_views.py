"""What the page says of run folders: whole, damaged, growing and with hundreds of workers."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsrl.local.run_folder import LOCK, METRICS, RECORD, STATUS, SUMMARY
from rlsrl.testing.stored_runs import BALANCES, CARTPOLE, LINEAR, make_run, push
from rlsrl.ui.views import NotThere, curve, find, log_lines, run_list, run_names, run_page

WORKER = {
    "index": 0,
    "state": "running",
    "version": "1.20",
    "stats": {"samples_per_second": 900.0},
    "activity": {"working: environment": 0.5, "working: inference": 0.25, "credit": 0.25},
    "stale": False,
}


def status(**changes: Any) -> dict[str, Any]:
    return {
        "phase": "training",
        "totals": {"env_steps": 900.0, "train_steps": 20, "return_mean": 31.5, "version": "1.20", "policy_lag": 1.0},
        "roles": {"actor": [WORKER, {**WORKER, "index": 1, "stale": True}], "trainer": [WORKER]},
        "gone": [{"role": "actor", "index": 2}],
        "ledger": {
            "produced": 1000,
            "trained": 900,
            "lost": {"producer_died": 60, "rolled_back": 40},
            "balanced": True,
        },
        **changes,
    }


def row(step: int, role: str = "trainer") -> str:
    return json.dumps({"step": step, "wall": 1.0, "role": role, "scalars": {"return_mean": step, "odd": "nan"}}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose lock is held, as that of a run that trains."""
    folder = make_run(tmp_path / "balance", CARTPOLE)
    push(folder, 20, BALANCES, exported=LINEAR, tag="best")
    (folder / RECORD).write_text("{}")
    (folder / STATUS).write_text(json.dumps(status()))
    (folder / METRICS).write_text(row(1) + row(2))
    (folder / "logs").mkdir()
    event = {"timestamp": "12:00", "level": "info", "event": "serving", "port": 7}
    (folder / "logs" / "actor-0.jsonl").write_text(json.dumps(event) + "\nTraceback (most recent call last):\n")
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def test_the_workers_of_a_run_that_was_killed_have_ended(run: Path, tmp_path: Path) -> None:
    (run / SUMMARY).write_text(json.dumps({"failure": "that of an earlier life"}))
    assert run_page(run)["problems"] == []
    (run / LOCK).unlink()
    page = run_page(run)
    assert {worker["state"] for worker in page["roles"]["actor"]["workers"]} == {"ended"}
    assert page["goals"] == []
    assert page["problems"] == ["FAILED: that of an earlier life"]


def test_a_run_is_shown_with_workers_versions_ledger_and_logs(run: Path) -> None:
    page = run_page(run)
    assert page["totals"]["version"] == "1.20"
    first, silent, gone = page["roles"]["actor"]["workers"]
    assert (first["state"], first["busy"], first["waits"]) == ("running", 0.75, {"credit": 0.25})
    assert first["perSecond"] == 900.0
    assert (silent["state"], gone["state"]) == ("silent", "gone")
    assert page["roles"]["actor"]["number"] == 2
    assert page["ledger"] == {"produced": 1000, "trained": 900, "lost": 100}
    (version,) = page["versions"]
    assert (version["version"], version["tags"], version["hasState"]) == ("1.20", ["best"], False)
    assert page["logs"] == ["actor-0.jsonl"]
    assert log_lines(run, "actor-0.jsonl") == ["12:00 info serving port=7", "Traceback (most recent call last):"]
    assert page["statusAge"] >= 0


def test_hundreds_of_workers_are_listed(run: Path) -> None:
    workers = [{**WORKER, "index": index} for index in range(500)]
    (run / STATUS).write_text(json.dumps(status(roles={"actor": workers}, gone=[])))
    role = run_page(run)["roles"]["actor"]
    assert (role["number"], len(role["workers"])) == (500, 500)


def test_the_curve_goes_on_where_the_last_answer_ended(run: Path) -> None:
    first = curve(run, 0)
    assert [each["step"] for each in first["rows"]] == [1, 2]
    assert first["rows"][0]["scalars"] == {"return_mean": 1}, "what is no number is left out"
    assert curve(run, first["next"]) == {"next": first["next"], "anew": False, "rows": []}
    with (run / METRICS).open("a") as file:
        file.write(row(3) + "no JSON\n" + row(4)[:-5])
    second = curve(run, first["next"])
    assert [each["step"] for each in second["rows"]] == [3], "a half row waits for its end"
    with (run / METRICS).open("a") as file:
        file.write(row(4)[-5:])
    assert [each["step"] for each in curve(run, second["next"])["rows"]] == [4]
    (run / METRICS).write_text(row(1))
    anew = curve(run, second["next"])
    assert (anew["anew"], [each["step"] for each in anew["rows"]]) == (True, [1]), "another run has the folder now"
    (run / METRICS).unlink()
    assert curve(run, 5) == {"next": 0, "anew": True, "rows": []}


def test_runs_are_listed_by_their_last_change_with_their_state(run: Path, tmp_path: Path) -> None:
    for name, summary in (
        ("done", {"finished": True, "return_mean": 480.0, "env_steps": 5000}),
        ("broken", {"finished": False, "failure": "the gripper is stuck", "env_steps": 7}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text("{}")
        (tmp_path / name / SUMMARY).write_text(json.dumps(summary))
    (tmp_path / "no-run").mkdir()
    for place, name in enumerate(("balance", "broken", "done")):
        for path in (tmp_path / name).iterdir():
            os.utime(path, (1000.0 + place, 1000.0 + place))
    assert run_names(tmp_path) == ["done", "broken", "balance"]
    done, broken, balance = run_list(tmp_path)
    assert (done["state"], done["returnMean"], done["envSteps"]) == ("finished", 480.0, 5000.0)
    assert broken["state"] == "failed"
    assert run_page(tmp_path / "broken")["problems"] == ["FAILED: the gripper is stuck"]
    assert balance["state"] == "training"
    assert (balance["returnMean"], balance["changedAt"]) == (31.5, 1000.0)
    assert run_list(tmp_path / "absent") == []


def test_damaged_files_leave_the_rest_of_the_page(run: Path) -> None:
    for name in (STATUS, SUMMARY, METRICS, "resolved.json", "experiment.resolved.yaml"):
        (run / name).write_bytes(b"\xff{")
    page = run_page(run)
    assert (page["versions"], page["roles"], page["goals"]) == ([], {}, [])
    assert curve(run, 0)["rows"] == []


@pytest.mark.parametrize("name", ["..", ".", "", "balance/..", "/etc", "balanc"])
def test_names_are_no_paths(run: Path, name: str) -> None:
    with pytest.raises(NotThere):
        find(run.parent, name)
    for log in (name, "../controller.json", "../logs/actor-0.jsonl"):
        with pytest.raises(NotThere):
            log_lines(run, log)
    assert find(run.parent, "balance") == run
