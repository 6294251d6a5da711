"""What the page says of a cluster's experiments. Coordinators are real HTTP servers; the API server is a stand-in."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import structlog
from aiohttp.abc import AbstractResolver, ResolveResult
from prometheus_client import CollectorRegistry
from yarl import URL

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.tokens import viewing_token
from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.exposition import GuardedPageHandler, MetricsServer
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.documents import minimal
from rlsrl.testing.parameter_dbs import make_parameters
from rlsrl.ui.api_server import ExperimentSource
from rlsrl.ui.cluster import ClusterRuns
from rlsrl.ui.coordinators import MAX_STATUS_BYTES, CoordinatorAway, Coordinators, open_session
from rlsrl.ui.runs import NotThere, Row
from rlsrl.ui.server import SafeJson
from rlsrl.ui.status_document import MAX_REPORTS, MAX_WORKERS
from rlsrl.workers.coordinator_pages import CoordinatorPages
from rlsrl.workers.kept_logs import KeptLogs, LogName
from rlsrl.workers.learning_curve import METRICS_FILE
from rlsrl.workers.version_table import VersionTable

KEY = "the-viewing-key"
UID = "uid-1"
T = TypeVar("T")
DOCUMENT = {
    "phase": "training",
    "totals": {"env_steps": 900.0, "train_steps": 20, "return_mean": 31.5, "version": "1.20"},
    "roles": {"actor": [{"index": 0, "state": "running", "stats": {"samples_per_second": 900.0}}]},
    "ledger": {"produced": 1000, "lost": {"producer_died": 60, "odd": "x"}, "balanced": True},
    "stall": {"seconds": 70.0, "reasons": ["the actors wait"]},
}


def experiment(phase: str | None = "Running", **status: Any) -> Row:
    document = minimal()
    document["spec"]["stop"] = {"envSteps": 1800}
    metadata = {"name": "balance", "namespace": "research", "uid": UID, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**document, "metadata": metadata, **({} if phase is None else {"status": {"phase": phase, **status}})}


class Listed(ExperimentSource):
    """Experiments in memory."""

    def __init__(self, *experiments: Row) -> None:
        self._experiments = experiments

    async def all(self) -> Sequence[Row]:
        return self._experiments

    async def one(self, namespace: str, name: str) -> Row | None:
        names = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in self._experiments}
        return names.get((namespace, name))


class OnThisMachine(AbstractResolver):
    """Resolves the names of coordinators' Services to this machine."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.add(host)
        result = ResolveResult(hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=0)
        return [result]

    async def close(self) -> None:
        pass


class Cluster:
    """One experiment with its coordinator's pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = KeptLogs(folder / "logs", log=structlog.stdlib.get_logger())
        self.pages: dict[str, GuardedPageHandler] = {"/status": lambda query: ("application/json", self.status)}
        db = FilesystemParameterDB(folder / "parameters")
        db.push(POLICY_NAME, make_parameters(Version(1, 20)), metadata={"return_mean": 31.5})
        table = VersionTable(db, folder=folder / "parameters", clock=ManualClock())
        self.pages |= CoordinatorPages(folder, run_uid="run-1", logs=self.logs, versions=table).by_path()
        self.status = json.dumps(DOCUMENT).encode()
        self.token = viewing_token(KEY, UID)
        self.resolver = OnThisMachine()
        self.experiments = [experiment()]

    def ask(self, question: Callable[[ClusterRuns], Coroutine[Any, Any, T]]) -> T:
        """Serve the coordinator's pages, and put the question to the page's server."""

        async def answer(port: int) -> T:
            connector = aiohttp.TCPConnector(resolver=self.resolver)
            async with aiohttp.ClientSession(connector=connector) as session:
                coordinators = Coordinators(session, viewing_key=KEY, port=port)
                return await question(ClusterRuns(Listed(*self.experiments), coordinators))

        registry, own = CollectorRegistry(), {"host": "127.0.0.1", "port": 0, "token": "the-token"}
        with MetricsServer(registry, **own, viewing_token=self.token, guarded=self.pages) as server:
            return asyncio.run(answer(server.address[1]))

    def page(self) -> Row:
        return self.ask(lambda runs: runs.page("research:balance"))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_run_is_what_its_coordinator_says(cluster: Cluster) -> None:
    cluster.logs.append(LogName("actor", 0), "process", [pb.LogPart(sequence=0, text=b"a line\n")])
    page = cluster.page()
    assert cluster.resolver.asked == {"balance-coordinator.research.svc"}
    assert (page["name"], page["state"], page["statusAge"]) == ("research:balance", "running", 0.0)
    assert page["totals"]["version"] == "1.20"
    assert page["ledger"] == {"produced": 1000, "lost": 60}
    assert page["roles"]["actor"]["perSecond"] == 900.0
    assert page["logs"] == ["actor-0"]
    assert page["problems"] == ["NO STEP for 70 s: the actors wait"]
    assert [goal["fraction"] for goal in page["goals"]][:1] == [0.5]
    assert "namespace: research" in page["experiment"]
    assert "envSteps: 1800" in page["experiment"]


def test_curve_versions_and_logs_come_from_the_coordinator(cluster: Cluster) -> None:
    row = {"step": 1, "wall": 1.0, "role": "trainer", "scalars": {"return_mean": 3.0}}
    (cluster.folder / METRICS_FILE).write_text(json.dumps(row) + "\n")
    cluster.logs.append(LogName("actor", 0), "process", [pb.LogPart(sequence=0, text=b'{"event": "serving"}\nx\n')])
    name = "research:balance"
    first = cluster.ask(lambda runs: runs.curve(name, 0, ""))
    assert [each["step"] for each in first["rows"]] == [1]
    again = cluster.ask(lambda runs: runs.curve(name, first["next"], first["file"]))
    assert (again["rows"], again["anew"]) == ([], False)
    versions = cluster.ask(lambda runs: runs.versions(name))
    assert [(each["version"], each["returnMean"]) for each in versions["versions"]] == [("1.20", 31.5)]
    assert versions["problem"] is None
    assert cluster.ask(lambda runs: runs.log(name, "actor-0")) == ["serving", "x"]
    with pytest.raises(NotThere):
        cluster.ask(lambda runs: runs.log(name, "../secret"))


def test_conditions_come_with_their_cures(cluster: Cluster) -> None:
    at = "2026-01-01T01:00:00Z"
    conditions = [
        {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": at},
        {
            "type": "Finished",
            "status": "True",
            "reason": "BudgetExhausted",
            "message": "an end",
            "lastTransitionTime": at,
        },
    ]
    cluster.experiments = [experiment("Failed", conditions=conditions)]
    page = cluster.page()
    accepted, finished = page["conditions"]
    assert (accepted["isTrouble"], accepted["cure"]) == (False, "")
    assert finished["isTrouble"]
    assert "kubectl rlsrl logs balance --role trainer" in finished["cure"]
    assert finished["since"] == page["changedAt"] == 1767229200.0
    assert page["problems"] == [f"FAILED: an end\n{finished['cure']}"]
    assert {each["mark"] for each in page["roles"]["actor"]["workers"]} == {"ended"}


@pytest.mark.parametrize("phase", ["Pending", "Queued", "Suspended"])
def test_without_a_pod_no_coordinator_is_asked(cluster: Cluster, phase: str) -> None:
    cluster.experiments = [experiment(phase)]
    page = cluster.page()
    assert (page["state"], page["problems"], page["roles"]) == (phase.lower(), [], {})
    assert cluster.ask(lambda runs: runs.versions("research:balance")) == {"versions": [], "problem": None}
    assert cluster.ask(lambda runs: runs.curve("research:balance", 7, "f"))["next"] == 7
    with pytest.raises(NotThere):
        cluster.ask(lambda runs: runs.log("research:balance", "actor-0"))
    assert cluster.resolver.asked == set()


def test_an_experiment_that_no_operator_sees_says_so(cluster: Cluster) -> None:
    cluster.experiments = [experiment(None)]
    page = cluster.page()
    assert page["state"] == "not seen"
    assert "No operator manages the experiment" in page["problems"][0]


def refusing(status: Exception) -> GuardedPageHandler:
    def refuse(_: Mapping[str, str]) -> tuple[str, bytes]:
        raise status

    return refuse


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (lambda query: ("application/json", b"{"), "the coordinator's answer is invalid JSON"),
        (lambda query: ("application/json", b"[" * 100_000), "the coordinator's answer is invalid JSON"),
        (lambda query: ("text/html", b"<script>"), "the coordinator's answer cannot be used: 200 text/html"),
        (lambda query: ("application/json", b" " * (MAX_STATUS_BYTES + 1)), "is longer than 8,388,608 bytes"),
        (refusing(OSError("the disk is gone")), "the coordinator's answer cannot be used: 503 text/plain"),
    ],
)
def test_an_answer_that_cannot_be_used_leaves_the_rest_of_the_page(
    cluster: Cluster, page: GuardedPageHandler, problem: str
) -> None:
    cluster.pages["/status"] = page
    found = cluster.page()
    assert len(found["problems"]) == 1
    assert problem in found["problems"][0]
    assert (found["roles"], found["statusAge"]) == ({}, None)
    assert found["experiment"]


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "status",
    [
        b"[]",
        b'"text"',
        b'{"totals": {"env_steps": -Infinity, "env_steps_per_second": 1e300, "return_mean": NaN}}',
        b'{"totals": {"env_steps": %s}, "ledger": {"lost": {"a": %s, "b": 0.5}}}' % (b"9" * 400, b"9" * 400),
        b'{"totals": {"env_steps": 1e308, "env_steps_per_second": 1e-308}, "ledger": {"a": 1e308, "b": [1]}}',
        b'{"roles": {"actor": [{"index": %s, "version": %s, "activity": {"credit": %s}}]}}' % ((deep(300),) * 3),
        b'{"roles": {"actor": 7, "trainer": [7, {"state": {}, "stats": []}]}, "gone": [{"role": "trainer"}]}',
        b'{"stall": {"seconds": 1, "reasons": [[]]}, "paused": {"text": 7}, "environment_calls": [{"text": []}]}',
    ],
)
def test_odd_values_of_a_coordinator_end_neither_the_page_nor_its_json(cluster: Cluster, status: bytes) -> None:
    cluster.status = status
    page = cluster.page()
    assert page["name"] == "research:balance"
    assert SafeJson(page).body


def test_more_workers_than_a_run_can_have_are_not_read(cluster: Cluster) -> None:
    cluster.status = b'{"roles": {"actor": [%s]}}' % b",".join([b"{}"] * (MAX_REPORTS + 1))
    role = cluster.page()["roles"]["actor"]
    assert (role["number"], len(role["workers"])) == (MAX_REPORTS, MAX_WORKERS)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (b"[]", {"next": 5, "more": False}),
        (b'{"next": "x", "more": true}', {"next": 5, "more": False}),
        (b'{"next": -1}', {"next": 5, "more": False}),
        (b'{"next": 5, "more": true, "rows": []}', {"next": 5, "more": False}),
        (b'{"next": 0, "more": true, "anew": true, "rows": []}', {"next": 0, "more": False, "anew": True}),
        (
            b'{"next": 9, "more": true, "file": 7, "rows": [{"step": 1, "role": 2, "scalars": {"a": 1, "b": ""}}, 7]}',
            {"next": 9, "more": True, "file": "7", "rows": [{"step": 1, "role": "2", "scalars": {"a": 1.0}}]},
        ),
    ],
)
def test_a_curve_has_the_form_that_the_page_reads(cluster: Cluster, curve: bytes, expected: Row) -> None:
    cluster.pages["/curve"] = lambda query: ("application/json", curve)
    answer = cluster.ask(lambda runs: runs.curve("research:balance", 5, "f"))
    assert {name: answer[name] for name in expected} == expected
    assert answer.keys() == {"next", "file", "anew", "more", "rows"}


def test_versions_have_the_form_that_the_page_reads(cluster: Cluster) -> None:
    answer = b'[7, {"tags": 7, "createdAt": "x", "hasState": 1}]'
    cluster.pages["/versions"] = lambda query: ("application/json", answer)
    (row,) = cluster.ask(lambda runs: runs.versions("research:balance"))["versions"]
    assert (row["tags"], row["createdAt"], row["envSteps"], row["hasState"]) == ([], 0.0, None, False)


def test_a_coordinators_cookies_reach_no_other() -> None:
    async def kept() -> int:
        async with open_session() as session:
            session.cookie_jar.update_cookies({"a": "b"}, URL("http://x-coordinator.research.svc/"))
            return len(session.cookie_jar)

    assert asyncio.run(kept()) == 0


def test_a_coordinator_of_an_earlier_operator_is_named(cluster: Cluster) -> None:
    cluster.token = ""
    assert "an operator without this page began the experiment" in cluster.page()["problems"][0]
    assert "without this page" in cluster.ask(lambda runs: runs.versions("research:balance"))["problem"]
    with pytest.raises(CoordinatorAway, match="without this page"):
        cluster.ask(lambda runs: runs.log("research:balance", "actor-0"))


def test_a_coordinator_that_is_away_leaves_the_numbers_of_the_status(cluster: Cluster) -> None:
    training = {"envSteps": 900, "trainSteps": 20, "returnMean": "31.50", "envStepsPerSecond": 10}
    cluster.experiments = [experiment(training=training)]

    async def answer() -> Row:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=OnThisMachine())) as session:
            with ExitStack() as closing:
                free = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
                port = free.getsockname()[1]
            coordinators = Coordinators(session, viewing_key=KEY, port=port)
            return await ClusterRuns(Listed(*cluster.experiments), coordinators).page("research:balance")

    page = asyncio.run(answer())
    assert page["problems"][0].startswith("the coordinator does not answer: ")
    assert (page["returnMean"], page["envSteps"], page["stepsPerSecond"]) == (31.5, 900.0, 10.0)


def test_experiments_are_listed_by_their_last_change(cluster: Cluster) -> None:
    other = experiment("Pending")
    other["metadata"] = {**other["metadata"], "name": "later", "creationTimestamp": "2026-02-01T00:00:00Z"}
    odd = {"metadata": {"name": "odd", "namespace": "research", "uid": "2"}, "status": {"phase": 7, "training": []}}
    cluster.experiments = [experiment(), other, odd]
    rows = cluster.ask(lambda runs: runs.rows())
    assert [(row["name"], row["state"]) for row in rows] == [
        ("research:later", "pending"),
        ("research:balance", "running"),
        ("research:odd", "7"),
    ]


@pytest.mark.parametrize(
    "name", ["balance", "research:absent", "research/balance", "..:balance", "research:", ":x", "a:b:c"]
)
def test_names_are_looked_up(cluster: Cluster, name: str) -> None:
    with pytest.raises(NotThere):
        cluster.ask(lambda runs: runs.page(name))
    assert cluster.resolver.asked == set()
