from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rlsrl.api.spec import Stop
from rlsrl.local.controller import ProcessState
from rlsrl.local.view import ProcessRow, RunView, line, render, rows


def process(role: str, number: int, pid: int | None) -> ProcessState:
    """Return the state of a process; without a pid it waits for its restart."""
    return ProcessState(role=role, number=number, state="running" if pid else "restarting", pid=pid)


PROCESSES = (
    process("coordinator", 0, 10),
    process("trainer", 0, 11),
    process("actor", 0, 12),
    process("actor", 1, None),
)
STATUS: dict[str, Any] = {
    "phase": "training",
    "roles": {
        "trainer": [
            {
                "pid": 11,
                "state": "running",
                "activity": {"working": 0.38, "batch": 0.617, "other": 0.003},
                "stats": {"b": 2.0, "a": 12345.678},
                "version": "1.7",
            }
        ],
        "actor": [{"pid": 12, "state": "running", "waiting_for": "", "stats": {}, "version": "1.6", "stale": False}],
    },
    "totals": {
        "env_steps": 48640.0,
        "train_steps": 47.0,
        "env_steps_per_second": 52100.4,
        "return_mean": 201.26,
        "policy_lag": 1.0,
        "version": "1.47",
    },
}
VIEW = RunView(
    name="toy",
    stop=Stop(return_mean=475.0, env_steps=2_000_000),
    elapsed_seconds=12.34,
    processes=PROCESSES,
    status=STATUS,
    status_age_seconds=0.5,
)


def drawn(view: RunView) -> str:
    output = io.StringIO()
    Console(file=output, width=120).print(render(view))
    return output.getvalue()


def test_rows_combine_controller_and_coordinator() -> None:
    assert rows(VIEW) == [
        ProcessRow(name="coordinator-0", state="running"),
        ProcessRow(
            name="trainer-0", state="running", busy="38%", waits="batch 62%", version="1.7", stats="a 12,346  b 2"
        ),
        ProcessRow(name="actor-0", state="running", version="1.6"),
        ProcessRow(name="actor-1", state="restarting"),
    ]


def test_rank_0_stands_for_a_gang() -> None:
    launcher = replace(process("trainer", 0, 99), is_gang=True)
    assert rows(replace(VIEW, processes=(launcher,)))[0].state == "running"
    gone = {**STATUS, "roles": {"trainer": []}}
    assert rows(replace(VIEW, processes=(launcher,), status=gone))[0].state == "starting"


def test_before_the_first_status_everything_is_starting() -> None:
    assert [row.state for row in rows(replace(VIEW, status=None))] == ["starting"] * 3 + ["restarting"]
    assert "starting" in drawn(replace(VIEW, status=None))


def test_a_worker_without_a_report_at_the_end_is_ending() -> None:
    finished = replace(VIEW, status={"phase": "finished", "roles": {}})
    assert [row.state for row in rows(finished)] == ["running", "ending", "ending", "restarting"]


@pytest.mark.parametrize(("state", "title"), [("ending", "ending"), ("ended", "ending"), ("restarting", "recovering")])
def test_an_ending_run_is_not_recovering(state: Any, title: str) -> None:
    trainer = replace(process("trainer", 0, None), state=state)
    without_trainer = {**STATUS, "phase": "recovering"}
    view = replace(VIEW, processes=(process("coordinator", 0, 10), trainer), status=without_trainer)
    assert drawn(view).splitlines()[0].startswith(f"toy  {title}  12.3 s")


def test_an_environment_that_hangs_is_named() -> None:
    text = "environment rank 3 has been in step for 42 s (actor-0)"
    hanging = replace(VIEW, status={**STATUS, "environment_calls": [{"text": text}]})
    assert text in drawn(hanging)
    assert line(hanging).endswith(f" | {text}")
    assert "has been in" not in line(VIEW)


def test_a_silent_worker_is_marked() -> None:
    status = {**STATUS, "roles": {"trainer": [{"pid": 11, "state": "running", "stale": True}]}}
    assert [row.state for row in rows(replace(VIEW, status=status))][1] == "silent"


@pytest.mark.parametrize("is_gang", [False, True])
def test_a_living_process_whose_lease_has_expired_is_silent(is_gang: bool) -> None:
    """As a trainer after SIGSTOP. A gang's launcher has another pid than rank 0."""
    trainer = replace(process("trainer", 0, 99 if is_gang else 11), is_gang=is_gang)
    status = {"roles": {"trainer": []}, "gone": [{"role": "trainer", "index": 0, "pid": 11, "age_seconds": 34.2}]}
    view = replace(VIEW, processes=(trainer,), status=STATUS | status, status_age_seconds=0.5)
    assert rows(view)[0].state == "silent for 35 s"
    assert "trainer-0 silent for 35 s" in line(view)
    assert rows(replace(view, processes=(process("trainer", 0, 12),)))[0].state == "starting", "a new process"


def test_an_old_status_is_marked_and_still_shown() -> None:
    old = replace(VIEW, status_age_seconds=9.0)
    assert "status is 9 s old" in line(old)
    assert "status is 9 s old" in drawn(old)
    assert "return 201.3" in line(old)
    assert rows(old)[0].state == "silent"


def test_a_large_role_is_counted() -> None:
    many = tuple(process("actor", number, number + 100 if number else None) for number in range(20))
    found = rows(replace(VIEW, processes=many))
    assert [row.name for row in found] == [*(f"actor-{number}" for number in range(7)), "13 more actors"]
    assert found[-1].state == "13 starting"


def test_the_plain_line() -> None:
    assert line(VIEW) == (
        "   12.3 s | return 201.3 of 475 | env steps 48,640 of 2,000,000 | 52,100 steps/s | lag 1 | version 1.47 | "
        "at most about 37 s left | actor-1 restarting"
    )


@pytest.mark.parametrize(
    ("return_mean", "text"),
    [(0.93456, "0.935"), (-0.04, "-0.0400"), (-0.0, "0.00"), (21.456, "21.5"), (99.96, "100.0")],
)
def test_small_returns_are_shown_with_three_digits(return_mean: float, text: str) -> None:
    totals = {**STATUS["totals"], "return_mean": return_mean}
    view = replace(VIEW, status={**STATUS, "totals": totals})
    assert f"| return {text} of 475 |" in line(view)
    assert f"{text} of 475" in drawn(view)
    assert f"| return {text} |" in line(replace(view, stop=Stop(env_steps=10)))


def test_versions_that_are_not_stored_are_shown() -> None:
    totals = {**STATUS["totals"], "unstored_versions": 1.0, "unstored_reason": "1.47: disk full"}
    full = replace(VIEW, status={**STATUS, "totals": totals})
    text = "NOT STORED: the newest 1 versions (1.47: disk full)"
    assert text in line(full)
    assert text in " ".join(drawn(full).split())
    assert "NOT STORED" not in line(VIEW) + drawn(VIEW)


def test_versions_that_are_stored_late_are_shown() -> None:
    totals = {**STATUS["totals"], "late_version": "version 1.46 was due 95 s ago and is not stored yet"}
    late = replace(VIEW, status={**STATUS, "totals": totals})
    text = "STORED LATE: version 1.46 was due 95 s ago and is not stored yet"
    assert text in line(late)
    assert text in " ".join(drawn(late).split())


def test_evaluations_that_fail_and_values_that_are_not_finite_are_shown() -> None:
    failed = {"number": 2.0, "last": "evaluator-0: 1.46: No space left on device"}
    nan = {"number": 5.0, "last": "actor-0: environment rank 3: reward is nan at step 50 of its episode"}
    sick = replace(VIEW, status={**STATUS, "failed_evaluations": failed, "non_finite_steps": nan})
    for text in (
        f"EVALUATIONS FAILED: the newest 2, the last of {failed['last']}",
        f"NAN OR INFINITY: 5 steps or resets, the last of {nan['last']} (logs: environment_fault)",
    ):
        assert text in line(sick)
        assert text in " ".join(drawn(sick).split())


def test_environments_that_raise_are_shown() -> None:
    errors = {"number": 3.0, "last": "actor-0: environment rank 3 raised ValueError: stuck"}
    failing = replace(VIEW, status={**STATUS, "environment_errors": errors})
    text = f"ENVIRONMENT ERRORS: 3, the last of {errors['last']} (logs: environment_fault)"
    assert text in line(failing)
    assert text in " ".join(drawn(failing).split())
    assert "ENVIRONMENT" not in line(VIEW) + drawn(VIEW)


def test_the_newest_evaluation_is_shown() -> None:
    reports = [
        {"pid": 14, "stats": {"step": 40.0, "return_mean": 481.26}},
        {"pid": 15, "stats": {"step": 30.0, "return_mean": 500.0}},
        {"pid": 16, "stats": {}},
    ]
    view = replace(VIEW, status={**STATUS, "roles": {"evaluator": reports}})
    assert "version 1.47 | evaluated 481.3 at step 40" in line(view)
    assert "evaluated 481.3 at step 40" in " ".join(drawn(view).split())


def test_a_fixed_version_is_shown_and_is_not_the_newest_evaluation() -> None:
    stats = {"version_attempt": 3.0, "version_step": 700.0, "fixed_return_mean": 481.26}
    view = replace(VIEW, status={**STATUS, "roles": {"evaluator": [{"pid": 14, "stats": stats}]}})
    assert "version 1.47 | fixed version 3.700: 481.3" in line(view)
    assert "fixed version 3.700: 481.3" in " ".join(drawn(view).split())
    assert "evaluated" not in line(view)


def test_ended_processes_are_not_listed_as_problems() -> None:
    ended = ProcessState(role="trainer", number=0, state="ended", pid=None)
    view = replace(VIEW, processes=(ended,))
    assert rows(view) == [ProcessRow(name="trainer-0", state="ended")]
    assert "trainer-0" not in line(view)


def test_the_plain_line_before_the_first_numbers() -> None:
    assert line(replace(VIEW, status=None)) == "   12.3 s | starting"
    assert line(replace(VIEW, status={}, processes=())) == "   12.3 s | starting"
    only_actors = {"totals": {"env_steps": None, "train_steps": None, "environment_errors": 0}}
    assert line(replace(VIEW, status=only_actors, processes=())) == "   12.3 s | starting"
    totals = {"totals": {"env_steps": 3}}
    text = line(replace(VIEW, status=totals, processes=(), stop=Stop(train_steps=7, wall_seconds=60.0)))
    assert text == (
        "   12.3 s | return - | env steps 3 | train steps - of 7 | - steps/s | lag - | version - | about 48 s left"
    )


def test_the_view_contains_all_parts() -> None:
    text = drawn(VIEW)
    for expected in (
        "toy",
        "training",
        "12.3 s",
        "48,640 env steps",
        "52,100 steps/s",
        "lag 1",
        "38%",
        "batch 62%",
        "actor-1",
    ):
        assert expected in text
    assert "coordinator-0  " in text, "names are not cut for the sake of statistics"
    assert "201.3 of 475" in text


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"roles": None, "totals": []},
        {"roles": {"evaluator": 3}},
        {"gone": [3, {"pid": None}, {"pid": 12, "age_seconds": "x"}]},
        {"roles": {"evaluator": [None, {"stats": {"step": "x", "return_mean": None}}]}},
        {"roles": {"trainer": 3, "actor": [None, {"pid": "x"}, {"pid": 12, "stats": [], "version": 7}]}},
        {"totals": {"return_mean": "high", "env_steps": None, "version": None}, "phase": None},
        {"roles": {"actor": [{"pid": 12, "activity": {"[red]markup[/red]": 1.0}, "state": "running"}]}},
    ],
)
def test_an_unexpected_status_is_shown_as_far_as_possible(status: dict[str, Any]) -> None:
    view = replace(VIEW, status=status)
    assert line(view)
    assert "actor-0" in drawn(view)
    if "roles" in status and "markup" in str(status):
        assert "[red]markup[/red]" in drawn(view)
