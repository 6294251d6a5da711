"""Reports of environments that wait for their server, for the status document."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlsrl.api.spec import WorkerEnvironment
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.workers.build import common
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.server_waits import ServerWaitReport
from rlsrl.workers.status import SERVER_AWAY_SINCE, SERVER_WAITS


class Reports:
    """A worker's context that keeps what is reported."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stats: dict[str, float] = {}
        self.reasons: list[tuple[float, str]] = []
        self.clock = SimpleNamespace(time=lambda: self.now)
        self.join_session = SimpleNamespace(check=lambda: None)

    def report_stats(self, stats: dict[str, float]) -> None:
        self.stats |= stats

    def report_failure(self, name: str, number: int, last: str) -> None:
        assert name == SERVER_WAITS
        self.reasons.append((number, last))

    def waiting(self, reason: str) -> Any:
        assert reason == "environment"
        return nullcontext()


def test_the_time_is_that_of_the_first_wait_of_an_outage() -> None:
    reports = Reports()
    report = ServerWaitReport(cast("WorkerContext", reports))
    for number in (1, 2, 1):
        report(number, "refused")
        reports.now += 1
    assert reports.stats == {SERVER_AWAY_SINCE: 100.0}
    report(0, "refused")
    assert reports.reasons == [(1, "refused"), (2, "refused"), (1, "refused"), (0, "")]
    report(1, "refused again")
    assert reports.stats == {SERVER_AWAY_SINCE: 103.0}


def test_a_worker_that_only_learns_the_spaces_reports_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, answers = Reports(), iter([False, True, False])

    def interface(_: object) -> str:
        if next(answers):
            return "the interface"
        raise EnvironmentUnreachable("http://sim is away", wait=lambda _: True)

    monkeypatch.setattr(common, "environment_interface", interface)
    environment = WorkerEnvironment.model_validate({"http": {"url": "http://sim"}})
    found: Any = common.interface_of_environments(environment, cast("WorkerContext", reports))
    assert found == "the interface"
    assert reports.reasons == [(1, "http://sim is away"), (0, "")]
