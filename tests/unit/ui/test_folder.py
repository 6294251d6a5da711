"""What the page says of run folders: whole, damaged, growing, resumed and with thousands of workers."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsrl.local.run_folder import LOCK, METRICS, STATUS, SUMMARY
from rlsrl.local.run_names import RECORD
from rlsrl.local.run_record import RunRecord, Span
from rlsrl.testing.stored_runs import CARTPOLE, make_run
from rlsrl.ui.folder import RESUME, curve, find, log_lines, run_list, run_names, run_page
from rlsrl.ui.runs import NotThere
from rlsrl.ui.status_document import MAX_WORKERS

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
    write_record(folder, lives=1)
    (folder / METRICS).write_text(row(1) + row(2))
    (folder / "logs").mkdir()
    event = {"timestamp": "12:00", "level": "info", "event": "serving", "port": 7}
    (folder / "logs" / "actor-0.jsonl").write_text(json.dumps(event) + "\nTraceback (most recent call last):\n")
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / STATUS).write_text(json.dumps(status()))
        yield folder


def write_record(folder: Path, *, lives: int, run_uid: str = "1", failure: str = "") -> None:
    spans = tuple(Span(started_at=float(place)) for place in range(lives))
    record = RunRecord(
        run_uid=run_uid, created_at=0.0, package_version="0", attempt=lives, lives=spans, failure=failure
    )
    (folder / RECORD).write_text(json.dumps(record.to_json()))


def test_the_workers_of_a_run_that_was_killed_have_ended(run: Path) -> None:
    (run / LOCK).unlink()
    page = run_page(run)
    actors = page["roles"]["actor"]
    assert {(worker["state"], worker["mark"], worker["waitsFor"]) for worker in actors["workers"]} == {
        ("ended", "ended", "")
    }
    assert (page["goals"], actors["number"], actors["perSecond"]) == ([], 3, None)


def test_workers_that_left_after_the_end_of_training_have_ended(run: Path) -> None:
    (run / STATUS).write_text(json.dumps(status(phase="finished")))
    actors = run_page(run)["roles"]["actor"]
    assert [worker["mark"] for worker in actors["workers"]] == ["alive", "bad", "ended"]
    assert actors["number"] == 3


def test_a_worker_that_ended_for_good_is_why_the_run_failed(run: Path) -> None:
    failure = "actor-0 exited with code 1: all 0 restarts of this role are spent."
    write_record(run, lives=1, failure=failure)
    live = run_page(run)
    assert (live["state"], live["problems"]) == ("training", [])
    (run / LOCK).unlink()
    page = run_page(run)
    assert (page["state"], page["problems"]) == ("failed", [f"FAILED: {failure}\n{RESUME}"])
    (listed,) = run_list(run.parent)
    assert listed["state"] == "failed"
    (run / SUMMARY).write_text(json.dumps({"finished": False, "failure": "no minibatch is finite", "lives": 1}))
    assert run_page(run)["problems"] == ["FAILED: no minibatch is finite"], "the end of training counts first"
    (run / SUMMARY).write_text(json.dumps({"finished": True, "lives": 1}))
    finished = run_page(run)
    assert (finished["state"], finished["problems"]) == ("finished", [])


def test_the_summary_of_the_last_life_counts_and_no_other(run: Path) -> None:
    summary = {"finished": True, "return_mean": 480.0, "lives": 1, "ledger": {"produced": 7}}
    (run / SUMMARY).write_text(json.dumps(summary))
    (run / STATUS).write_text(json.dumps(status(ledger={})))
    write_record(run, lives=2)
    live = run_page(run)
    assert (live["state"], live["returnMean"], live["ledger"]) == ("training", 31.5, {})
    (run / LOCK).unlink()
    killed = run_page(run)
    assert (killed["state"], killed["returnMean"], killed["ledger"]) == ("not finished", 31.5, {})
    (run / SUMMARY).write_text(json.dumps({**summary, "finished": False, "failure": "no room", "lives": 2}))
    ended = run_page(run)
    assert (ended["state"], ended["problems"]) == ("failed", ["FAILED: no room"])
    assert (ended["returnMean"], ended["ledger"]) == (480.0, {"produced": 7})


def test_a_run_that_starts_again_is_not_shown_as_it_ended(run: Path) -> None:
    """Until the new life removes it, the folder has the last status of the life before."""
    (run / STATUS).write_text(json.dumps(status(phase="finished")))
    (run / SUMMARY).write_text(json.dumps({"finished": True, "lives": 1}))
    locked_at = (run / LOCK).stat().st_mtime
    os.utime(run / STATUS, (locked_at - 3600, locked_at - 3600))
    page = run_page(run)
    assert (page["state"], page["roles"], page["problems"]) == ("starting", {}, [])
    (listed,) = run_list(run.parent)
    assert listed["state"] == "starting"


def test_a_run_is_shown_with_workers_ledger_and_logs(run: Path) -> None:
    page = run_page(run)
    assert page["totals"]["version"] == "1.20"
    first, silent, gone = page["roles"]["actor"]["workers"]
    assert (first["state"], first["busy"], first["waits"]) == ("running", 0.75, {"credit": 0.25})
    assert first["works"] == {"environment": 0.5, "inference": 0.25}
    assert first["perSecond"] == 900.0
    assert (silent["state"], gone["state"]) == ("silent", "gone")
    assert [worker["mark"] for worker in (first, silent, gone)] == ["alive", "bad", "bad"]
    assert (page["roles"]["actor"]["number"], page["roles"]["actor"]["perSecond"]) == (2, 1800.0)
    assert page["ledger"] == {"produced": 1000, "trained": 900, "lost": 100}
    assert page["logs"] == ["actor-0.jsonl"]
    assert log_lines(run, "actor-0.jsonl") == ["12:00 info serving port=7", "Traceback (most recent call last):"]
    assert page["statusAge"] >= 0


def test_hundreds_of_workers_are_listed(run: Path) -> None:
    workers = [{**WORKER, "index": index} for index in range(500)]
    (run / STATUS).write_text(json.dumps(status(roles={"actor": workers}, gone=[])))
    role = run_page(run)["roles"]["actor"]
    assert (role["number"], len(role["workers"])) == (500, 500)


def test_of_too_many_workers_those_that_do_not_run_are_listed_first(run: Path) -> None:
    workers = [{**WORKER, "index": index} for index in range(MAX_WORKERS + 1)]
    workers[-1]["stale"] = True
    gone = [{"role": "actor", "index": 9999}]
    (run / STATUS).write_text(json.dumps(status(roles={"actor": workers}, gone=gone)))
    role = run_page(run)["roles"]["actor"]
    listed = [(worker["index"], worker["state"]) for worker in role["workers"]]
    assert listed[:3] == [(MAX_WORKERS, "silent"), (9999, "gone"), (0, "running")]
    assert len(listed) == MAX_WORKERS
    assert role["perSecond"] == 900.0 * (MAX_WORKERS + 1), "the rate is that of all"


def test_the_curve_goes_on_where_the_last_answer_ended(run: Path) -> None:
    first = curve(run, 0)
    assert [each["step"] for each in first["rows"]] == [1, 2]
    assert first["rows"][0]["scalars"] == {"return_mean": 1}, "what is no number is left out"
    file_id = first["file"]
    same = {"next": first["next"], "file": file_id, "anew": False, "more": False, "rows": []}
    assert curve(run, first["next"], file_id) == same
    with (run / METRICS).open("a") as file:
        file.write(row(3) + "no JSON\n" + row(4)[:-5])
    second = curve(run, first["next"], file_id)
    assert [each["step"] for each in second["rows"]] == [3], "a half row waits for its end"
    with (run / METRICS).open("a") as file:
        file.write(row(4)[-5:])
    assert [each["step"] for each in curve(run, second["next"], file_id)["rows"]] == [4]
    (run / METRICS).write_text(row(1))
    anew = curve(run, second["next"], file_id)
    assert (anew["anew"], [each["step"] for each in anew["rows"]]) == (True, [1]), "another run has the folder now"
    (run / METRICS).unlink()
    assert curve(run, 5, file_id) == {"next": 0, "file": "", "anew": True, "more": False, "rows": []}


def test_the_curve_of_a_fresh_run_begins_anew_however_long_it_is(run: Path) -> None:
    first = curve(run, 0)
    (run / METRICS).rename(run / "aside")  # as `rlsrl run --fresh` moves the folder
    (run / METRICS).write_text(row(7) * 5)
    fresh = curve(run, first["next"], first["file"])
    assert (fresh["anew"], [each["step"] for each in fresh["rows"]]) == (True, [7] * 5)
    assert curve(run, fresh["next"], fresh["file"])["anew"] is False
    write_record(run, lives=1, run_uid="2")
    assert curve(run, fresh["next"], fresh["file"])["anew"], "another run, though its file has the same inode"


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
    assert (page["roles"], page["goals"]) == ({}, [])
    assert curve(run, 0)["rows"] == []


@pytest.mark.parametrize("name", ["..", ".", "", "balance/..", "/etc", "balanc"])
def test_names_are_no_paths(run: Path, name: str) -> None:
    with pytest.raises(NotThere):
        find(run.parent, name)
    for log in (name, "../controller.json", "../logs/actor-0.jsonl"):
        with pytest.raises(NotThere):
            log_lines(run, log)
    assert find(run.parent, "balance") == run
