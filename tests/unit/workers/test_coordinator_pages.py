"""What coordinators show over HTTP: curve, versions and logs."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from rlsrl.api.placement import CURVE_PAGE, LOG_PAGE, LOGS_PAGE, VERSIONS_PAGE
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.objects import StoreUnreachable
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.memory_parameter_db import MemoryParameterDB
from rlsrl.testing.parameter_dbs import make_parameters
from rlsrl.workers.coordinator_pages import LOG_BYTES, MAX_PAGES, CoordinatorPages
from rlsrl.workers.curve_rows import MAX_BYTES, rows_after
from rlsrl.workers.kept_logs import KeptLogs, LogName
from rlsrl.workers.learning_curve import METRICS_FILE
from rlsrl.workers.version_table import STORE_SECONDS, VersionTable


@pytest.fixture
def logs(tmp_path: Path) -> KeptLogs:
    return KeptLogs(tmp_path / "logs", log=structlog.stdlib.get_logger())


@pytest.fixture
def pages(tmp_path: Path, logs: KeptLogs) -> CoordinatorPages:
    db = FilesystemParameterDB(tmp_path / "parameters")
    db.push(
        POLICY_NAME, make_parameters(Version(1, 20)), tags=["best"], metadata={"env_steps": 900, "return_mean": 31.5}
    )
    table = VersionTable(db, folder=tmp_path / "parameters", clock=ManualClock())
    return CoordinatorPages(tmp_path, run_uid="run-1", logs=logs, versions=table)


def ask(pages: CoordinatorPages, path: str, **query: str) -> Any:
    content_type, body = pages.by_path()[path](query)
    assert content_type == "application/json"
    return json.loads(body)


def row(step: int, **scalars: Any) -> str:
    return json.dumps({"step": step, "wall": 1.0, "role": "trainer", "scalars": scalars}) + "\n"


def test_the_curve_is_read_on_from_where_it_ended(pages: CoordinatorPages, tmp_path: Path) -> None:
    assert ask(pages, CURVE_PAGE)["rows"] == []
    (tmp_path / METRICS_FILE).write_text(row(1, return_mean=3.0, odd="nan"))
    first = ask(pages, CURVE_PAGE)
    assert first["rows"] == [{"step": 1, "role": "trainer", "scalars": {"return_mean": 3.0}}]
    assert first["file"].startswith("run-1-")
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(row(2))
    second = ask(pages, CURVE_PAGE, after=str(first["next"]), file=first["file"])
    assert ([each["step"] for each in second["rows"]], second["anew"], second["more"]) == ([2], False, False)
    assert ask(pages, CURVE_PAGE, after="1", file="another")["anew"]


@pytest.mark.parametrize("after", ["-1", "x", "", "1.5", "\u0661"])
def test_a_place_in_the_curve_is_a_number_of_bytes(pages: CoordinatorPages, after: str) -> None:
    with pytest.raises(ValueError, match=r"after: .*; allowed: a number of bytes"):
        ask(pages, CURVE_PAGE, after=after)


def test_a_long_curve_comes_in_parts(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text("".join(row(step, note="x" * 1000) for step in range(3 * MAX_BYTES // 1000)))
    steps: list[int] = []
    answer = rows_after(path, 0, run_uid="run-1")
    parts = 1
    while True:
        steps += [each["step"] for each in answer["rows"]]
        if not answer["more"]:
            break
        answer = rows_after(path, answer["next"], answer["file"], run_uid="run-1")
        parts += 1
    assert steps == list(range(3 * MAX_BYTES // 1000))
    assert (parts, answer["next"]) == (4, path.stat().st_size)


def test_a_line_longer_than_an_answer_is_no_end_of_the_questions(tmp_path: Path) -> None:
    """The page asks again at once while there is more."""
    (tmp_path / METRICS_FILE).write_text("x" * 2 * MAX_BYTES)
    answer = rows_after(tmp_path / METRICS_FILE, 0, run_uid="run-1")
    assert (answer["next"], answer["more"], answer["rows"]) == (0, False, [])


def test_versions_have_their_numbers(pages: CoordinatorPages) -> None:
    (found,) = ask(pages, VERSIONS_PAGE)
    assert (found["version"], found["tags"], found["envSteps"], found["returnMean"]) == ("1.20", ["best"], 900.0, 31.5)
    assert found["createdAt"] > 0


def test_a_store_that_cannot_be_read_is_a_failure_of_the_page(tmp_path: Path, logs: KeptLogs) -> None:
    class Away(MemoryParameterDB):
        def versions(self, policy: str) -> Any:
            raise StoreUnreachable("the bucket does not answer")

    table = VersionTable(Away(), folder=tmp_path, clock=ManualClock())
    pages = CoordinatorPages(tmp_path, run_uid="run-1", logs=logs, versions=table)
    with pytest.raises(OSError, match="the bucket does not answer"):
        ask(pages, VERSIONS_PAGE)


def test_a_store_that_hangs_takes_few_threads(tmp_path: Path, logs: KeptLogs) -> None:
    """The threads that answer the kubelet are the same ones."""
    asked, answered = threading.Semaphore(0), threading.Event()

    class Hanging(VersionTable):
        def rows(self) -> list[dict[str, Any]]:
            asked.release()
            answered.wait()
            return []

    table = Hanging(MemoryParameterDB(), folder=tmp_path, clock=ManualClock())
    pages = CoordinatorPages(tmp_path, run_uid="run-1", logs=logs, versions=table)
    with ThreadPoolExecutor(MAX_PAGES) as threads:
        try:
            reading = [threads.submit(ask, pages, VERSIONS_PAGE) for _ in range(MAX_PAGES)]
            assert all(asked.acquire(timeout=60) for _ in reading)
            with pytest.raises(OSError, match="try again"):
                ask(pages, LOGS_PAGE)
        finally:
            answered.set()
        assert [each.result() for each in reading] == [[]] * MAX_PAGES
    assert ask(pages, LOGS_PAGE) == []


def test_while_a_store_is_read_the_last_table_is_shown(tmp_path: Path) -> None:
    asked, answered = threading.Semaphore(0), threading.Event()

    class Slow(MemoryParameterDB):
        is_slow = False

        def versions(self, policy: str) -> list[VersionInfo]:
            if self.is_slow:
                asked.release()
                answered.wait()
            return super().versions(policy)

    db, clock = Slow(), ManualClock()
    db.push(POLICY_NAME, make_parameters(Version(1, 20)))
    table = VersionTable(db, folder=tmp_path, clock=clock)
    assert [row["version"] for row in table.rows()] == ["1.20"]
    db.push(POLICY_NAME, make_parameters(Version(1, 30)))
    db.is_slow = True
    clock.advance(STORE_SECONDS)
    with ThreadPoolExecutor(1) as thread:
        try:
            reading = thread.submit(table.rows)
            assert asked.acquire(timeout=60)
            assert [row["version"] for row in table.rows()] == ["1.20"]
        finally:
            answered.set()
        assert [row["version"] for row in reading.result()] == ["1.30", "1.20"]


def test_logs_are_known_by_name_and_never_by_path(pages: CoordinatorPages, logs: KeptLogs, tmp_path: Path) -> None:
    assert ask(pages, LOGS_PAGE) == []
    for name, text in ((LogName("trainer", 0), b"a line\n"), (LogName("actor", 11), b"x" * (LOG_BYTES + 7) + b"\xff")):
        logs.append(name, "process", [pb.LogPart(sequence=0, text=text)])
    assert ask(pages, LOGS_PAGE) == ["actor-11", "trainer-0"]
    assert ask(pages, LOG_PAGE, name="trainer-0") == "a line\n"
    assert ask(pages, LOG_PAGE, name="actor-11") == "x" * (LOG_BYTES - 1) + "\ufffd"
    (tmp_path / "secret").write_text("no")
    for name in ("", "../secret", "trainer-0.out", "trainer-00", "actor-1"):
        with pytest.raises(LookupError, match=r"allowed: actor-11, trainer-0$"):
            ask(pages, LOG_PAGE, name=name)
