"""A real coordinator process, and workers that join it over an abstract unix socket."""

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.roles import STREAMS
from rlsrl.api.tokens import reading_token
from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.service import ServiceParameterDB, ServiceRefused
from rlsrl.parameters.terminal import TERMINAL_KEY, UPDATES_SKIPPED, terminal_record
from rlsrl.rpc.channels import open_channel, token_metadata
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorStub, RowsStub
from rlsrl.runtime.activity import CREDIT, END_OF_TRAINING
from rlsrl.runtime.call_board import EnvironmentCall
from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable, ProgramRow, WorkerState
from rlsrl.runtime.heartbeat_queue import MAX_MP4_BYTES, MAX_VIDEOS
from rlsrl.runtime.identity import POD_VARIABLE
from rlsrl.runtime.join_session import JoinError, JoinRefused, JoinRequest, JoinSession, JoinTimeout
from rlsrl.runtime.ledger import ActorLedger, LedgerPage, PageRecord
from rlsrl.testing.parameter_dbs import make_parameters
from rlsrl.testing.tensorboard import shown_pictures
from rlsrl.testing.waiting import until
from rlsrl.workers.status import NO_MORE_SAMPLES
from rlsrl.workers.worker_messages import MAX_LOG_BYTES

TOKEN = "the-token"
DEADLINE = 30.0
"""Deadline for events that take a moment on an idle machine."""
HEARTBEAT_SECONDS = 0.05

COORDINATOR = """
import signal, sys
import structlog
from prometheus_client import CollectorRegistry
from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.coordinator import CoordinatorWorker

worker = CoordinatorWorker(
    token=sys.argv[2],
    viewing_token="look",
    metrics=Metrics(CollectorRegistry()),
    log=structlog.stdlib.get_logger("coordinator"),
)
signal.signal(signal.SIGTERM, lambda *_: worker.exit())
with open(sys.argv[1]) as file:
    worker.configure(CoordinatorConfig.from_json(file.read()))
worker.start()
worker.run()
assert "torch" not in sys.modules
"""

MEMBER = """
import sys, threading
from rlsrl.runtime.join_session import JoinRefused, JoinRequest, JoinSession

request = JoinRequest(address=sys.argv[1], token=sys.argv[2], role="actor")
member = JoinSession.join(request, timeout=30)
print(member.index, member.incarnation, flush=True)
for line in sys.stdin:
    try:
        member.check()
        print("ok", flush=True)
    except JoinRefused as refusal:
        print("refused:", refusal, flush=True)
member.leave("asked to")
"""


class CoordinatorProcess:
    """Starts, kills and restarts a coordinator on one run folder."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
        defaults = {
            "experiment": "cartpole",
            "run_uid": "run-1",
            "seed": 1,
            "coordinator_address": self.address,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "metrics_address": "127.0.0.1:0",
            "log_folder": str(folder / "logs"),
            "ledger_folder": str(folder / "ledger"),
            "http_address": "127.0.0.1:0",
            "lease_seconds": 120.0,
            "roster_path": str(folder / "roster.json"),
            "record_folder": str(folder),
            "parameter_store": {"folder": str(folder / "parameters")},
            "num_actors": 2,
            "num_trainers": 2,
        }
        self._config = folder / "coordinator.json"
        self._config.write_text(CoordinatorConfig(**{**defaults, **config}).to_json())
        self.client = CoordinatorClient(self.address, TOKEN)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "coordinator.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", COORDINATOR, self._config, TOKEN], stdout=log, stderr=log, env=environment()
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def status(self) -> dict[str, Any]:
        return self.client.status(DEADLINE)

    def workers(self, role: str = "actor") -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.status()["roles"].get(role, [])
        return workers

    def rows(self) -> list[dict[str, Any]]:
        whole, _, _ = (self.folder / "metrics.jsonl").read_text().rpartition("\n")  # the last line may be incomplete
        return [json.loads(line) for line in whole.splitlines()]

    def log(self) -> str:
        return (self.folder / "coordinator.log").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.status()  # once it serves, its signal handler is installed
            self.process.terminate()
            assert self.process.wait(DEADLINE) == 0, self.log()
        self.client.close()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


Start = Callable[..., CoordinatorProcess]
Join = Callable[..., JoinSession]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as closing:

        def start(**config: Any) -> CoordinatorProcess:
            coordinator = CoordinatorProcess(tmp_path, **config)
            closing.callback(coordinator.close)
            return coordinator

        yield start


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """A coordinator shared by the tests that leave it unharmed."""
    coordinator = CoordinatorProcess(tmp_path_factory.mktemp("shared"), num_actors=64)
    yield coordinator
    coordinator.close()


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    with ExitStack() as closing:

        def join(
            coordinator: CoordinatorProcess,
            *,
            on_settings: Callable[[], object] = lambda: None,
            timeout: float = DEADLINE,
            **request: Any,
        ) -> JoinSession:
            asked = JoinRequest(**{"address": coordinator.address, "token": TOKEN, "role": "actor"} | request)
            with monkeypatch.context() as pod:  # a second member with the same process identity would replace the first
                pod.setenv(POD_VARIABLE, uuid.uuid4().hex)
                member = JoinSession.join(asked, on_settings=on_settings, timeout=timeout)
            closing.callback(member.leave, "test over", timeout=0.5)
            return member

        yield join


class MemberProcess:
    """An actor in its own process. For each line that it reads it prints the result of `check`."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, coordinator.address, TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        self.lease = tuple(map(int, self.read().split()))

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate(timeout=DEADLINE)


@pytest.fixture
def spawn() -> Iterator[Callable[[CoordinatorProcess], MemberProcess]]:
    with ExitStack() as closing:

        def spawn(coordinator: CoordinatorProcess) -> MemberProcess:
            member = MemberProcess(coordinator)
            closing.callback(member.close)
            return member

        yield spawn


def lease_id(member: JoinSession) -> tuple[int, int]:
    return member.index, member.incarnation


def lease_of(coordinator: CoordinatorProcess, actor: int) -> dict[str, Any]:
    """Return the stored lease of the actor's index."""
    lease: dict[str, Any] = json.loads((coordinator.folder / "roster.json").read_text())["roles"]["actor"][str(actor)]
    return lease


def test_workers_lease_the_lowest_index_and_goodbye_frees_it(shared: CoordinatorProcess, join: Join) -> None:
    first, second = join(shared), join(shared)
    assert second.index > first.index
    assert first.leave("over") is True
    assert first.index not in [worker["index"] for worker in shared.workers()]
    assert lease_id(join(shared)) == (first.index, first.incarnation + 1)
    assert first.leave("again") is True


def test_a_successor_gets_the_last_ledger_page_of_its_predecessor(start: Start, join: Join, tmp_path: Path) -> None:
    coordinator = start()
    first = join(coordinator)
    assert first.ledger_copy == b""
    with LedgerPage.open(tmp_path / "a.page", "actor", first.index) as page:
        first.send_ledger_page(page)
        ledger = ActorLedger(page)
        ledger.begin(first.incarnation)
        ledger.produce(0, 7)
        until(lambda: coordinator.status()["ledger"]["produced"] == 7, "the page arrives")
        ledger.produce(1, 5)
        assert first.leave("over")
        left = page.record
    until(lambda: coordinator.status()["ledger"]["produced"] == 12, "the last page arrives")
    until((coordinator.folder / "ledger.json").exists, "the copy is stored")
    until(lambda: not lease_of(coordinator, first.index)["held"], "the freed lease is stored")
    coordinator.kill()
    coordinator.restart()
    second = join(coordinator)
    assert second.index == first.index
    assert PageRecord.decode(second.ledger_copy, role="actor", index=second.index) == left
    assert coordinator.status()["ledger"]["produced"] == 12


@pytest.mark.parametrize("page", [b"nonsense", bytes(70_000)])
def test_an_invalid_page_is_refused(shared: CoordinatorProcess, join: Join, page: bytes) -> None:
    worker = join(shared)
    worker._queue.send_ledger_page(lambda: page)
    until(lambda: refused(worker), "the coordinator refuses")


def refused(worker: JoinSession) -> bool:
    try:
        worker.check()
    except JoinRefused as refusal:
        assert "ledger page" in str(refusal)  # noqa: PT017 - until() calls this
        return True
    return False


Talk = Callable[..., list[pb.CoordinatorMessage]]


@pytest.fixture
def talk(shared: CoordinatorProcess) -> Iterator[Talk]:
    """Return a function that joins as an actor, sends heartbeats with parts of a log, and returns all answers."""
    with open_channel(shared.address) as channel:

        def talk(*heartbeats: list[pb.LogPart]) -> list[pb.CoordinatorMessage]:
            hello = pb.WorkerMessage(hello=pb.Hello(role="actor", instance=str(uuid.uuid4())))
            sent = [pb.WorkerMessage(heartbeat=pb.Heartbeat(log_parts=parts)) for parts in heartbeats]
            call = CoordinatorStub(channel).Join(
                iter([hello, *sent]), metadata=token_metadata(TOKEN), wait_for_ready=True
            )
            return list(call)

        yield talk


def test_parts_of_a_log_are_acknowledged_and_kept_once_at_the_workers_own_index(
    shared: CoordinatorProcess, talk: Talk
) -> None:
    one, two = (pb.LogPart(sequence=number, text=b"line %d\n" % number) for number in range(2))
    answers = talk([one], [one, two])
    assert [answer.log_ack.sequence for answer in answers if answer.HasField("log_ack")] == [0, 1]
    index = answers[0].welcome.index
    (log,) = shared.client.logs("actor", index, tail=None, timeout=DEADLINE)
    assert (log.role, log.index, log.text) == ("actor", index, b"line 0\nline 1")
    assert (shared.folder / "logs" / f"actor-{index}.out").read_bytes() == b"line 0\nline 1\n"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([pb.LogPart(sequence=0, text=bytes(MAX_LOG_BYTES + 1))], "heartbeat: a log of more than 1048576 bytes"),
        ([pb.LogPart(sequence=1), pb.LogPart(sequence=1)], "the sequence numbers of parts of the log must rise from 0"),
        ([pb.LogPart(sequence=-1)], "the sequence numbers of parts of the log must rise from 0"),
    ],
    ids=["long", "repeated", "negative"],
)
def test_an_invalid_log_is_refused(talk: Talk, parts: list[pb.LogPart], reason: str) -> None:
    assert talk(parts)[-1].refused.reason == reason


def test_the_status_has_what_workers_report(start: Start, join: Join) -> None:
    coordinator = start()
    actor = join(coordinator, endpoints={"metrics": "127.0.0.1:4711"})
    trainer = join(coordinator, role="trainer", index=0, attempt=3)
    actor.report(state=WorkerState.RUNNING)
    actor.turn_to("credit")
    trainer.report(state=WorkerState.RUNNING, stats={"train_steps": 1.0, "env_steps": 10.0})
    until(lambda: coordinator.status()["totals"]["env_steps"] == 10.0, "the first report arrives")
    trainer.report(stats={"train_steps": 2.0, "env_steps": 20.0}, version=Version(3, 2))
    status = until(
        lambda: (
            (found := coordinator.status())["totals"]["train_steps"] == 2.0
            and found["roles"]["actor"][0]["waiting_for"]
            and found
        ),
        "the reports arrive",
    )
    assert status["phase"] == "training"
    assert status["totals"]["version"] == "3.2"
    assert status["totals"]["env_steps_per_second"] > 0
    (worker,) = status["roles"]["actor"]
    assert worker["pid"] == os.getpid()
    assert worker["state"] == "running"
    assert worker["waiting_for"] == "credit"
    assert worker["endpoints"] == {"metrics": "127.0.0.1:4711"}
    trainer.leave("finished", done=True)
    assert coordinator.status()["phase"] == "finished"


def test_workers_without_credit_wait_for_the_end_once_the_run_needs_no_more_samples(start: Start, join: Join) -> None:
    coordinator = start()
    actor = join(coordinator)
    trainer = join(coordinator, role="trainer", index=0, attempt=1)
    actor.report(state=WorkerState.RUNNING)
    actor.turn_to(CREDIT)

    def awaits(what: str) -> bool:
        (worker,) = coordinator.status()["roles"]["actor"]
        return worker["waiting_for"] == what and what in worker["activity"]

    for needs_none, what in ((0.0, CREDIT), (1.0, END_OF_TRAINING), (0.0, CREDIT)):
        trainer.report(state=WorkerState.RUNNING, stats={NO_MORE_SAMPLES: needs_none})
        until(partial(awaits, what), f"the actor is shown to wait for {what}")
    trainer.report(stats={NO_MORE_SAMPLES: 1.0})
    until(lambda: awaits(END_OF_TRAINING), "all is granted again")
    other = join(coordinator, role="trainer", index=1, attempt=1)
    other.report(state=WorkerState.RUNNING)
    until(lambda: awaits(CREDIT), "another rank has not granted all")
    other.report(stats={NO_MORE_SAMPLES: 1.0})
    until(lambda: awaits(END_OF_TRAINING), "both have granted all")
    other.leave("finished")
    until(lambda: awaits(END_OF_TRAINING), "the ranks that are there count")
    trainer.leave("crashed")
    until(lambda: awaits(CREDIT), "the next trainer may have to repeat steps")


def test_long_environment_calls_are_shown_until_they_end_or_their_worker_leaves(start: Start, join: Join) -> None:
    coordinator = start()
    actor = join(coordinator)
    process = actor._queue.hello().process
    calls = [
        EnvironmentCall(first_rank=3, num_environments=1, name="step", seconds=6.0),
        EnvironmentCall(first_rank=8, num_environments=4, name="reset", seconds=5.0),
        EnvironmentCall(first_rank=-1, num_environments=1, name="step", seconds=5.0),
    ]

    def report(*calls: EnvironmentCall, limit: str = "", of: str = process) -> list[dict[str, Any]]:
        coordinator.client.report_calls(of, calls, limit=limit, timeout=DEADLINE)
        shown: list[dict[str, Any]] = coordinator.status()["environment_calls"]
        return shown

    first, second = report(*calls)
    assert first.pop("seconds") >= 6.0
    assert first.pop("text").startswith("environment rank 3 has been in step for 6 s (actor-")
    assert first == {"role": "actor", "index": actor.index, "first_rank": 3, "num_environments": 1, "call": "step"}
    assert (second["first_rank"], second["num_environments"], second["call"]) == (8, 4, "reset")
    assert report() == []
    assert report(*calls, of="nobody's") == []
    assert len(report(calls[0], limit="environment.stepSeconds")) == 1
    url = f"http://{coordinator.status()['endpoints']['http']}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE) as response:
        assert 'rlsrl_environment_faults_total{reason="hang"} 1.0' in response.read().decode()
    assert "environment_hang" in coordinator.log()
    actor.leave("over")
    assert coordinator.status()["environment_calls"] == []


def test_status_health_and_metrics_are_served_over_http(shared: CoordinatorProcess, join: Join) -> None:
    member = join(shared)
    url = f"http://{shared.status()['endpoints']['http']}"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/status", timeout=DEADLINE)
    request = urllib.request.Request(f"{url}/status", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        assert response.headers["Content-Type"] == "application/json"
        assert member.index in [worker["index"] for worker in json.load(response)["roles"]["actor"]]
    with urllib.request.urlopen(f"{url}/healthz", timeout=DEADLINE) as response:
        assert response.read() == b"ok\n"
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE) as response:
        assert 'rlsrl_joins_total{worker_role="actor"} ' in response.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/secrets", timeout=DEADLINE)


def test_without_a_coordinator_joining_ends_at_its_deadline() -> None:
    address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
    with pytest.raises(JoinTimeout, match=f"no lease from the coordinator at {address}"):
        JoinSession.join(JoinRequest(address=address, token=TOKEN, role="actor"), timeout=0.2)
    assert "join-session" not in {thread.name for thread in threading.enumerate()}


def test_after_a_kill_of_the_coordinator_workers_keep_their_leases_and_every_row_is_kept_once(
    start: Start, join: Join
) -> None:
    coordinator = start()
    actor, trainer = join(coordinator), join(coordinator, role="trainer", index=1, attempt=1)
    step = 0
    for _ in range(2):
        before = step
        while len(coordinator.rows()) < before + 20:  # so that the kill comes while rows are in flight
            trainer.record(step, {"loss": step / 2})
            step += 1
        coordinator.restart()
        trainer.record(step, {"loss": step / 2})
        step += 1
        until(
            lambda: len(coordinator.workers()) == 1 and len(coordinator.workers("trainer")) == 1,
            "both workers are back",
        )
    until(lambda: trainer.unacknowledged == 0, "every row is acknowledged")
    assert [(row["step"], row["sequence"], row["scalars"]) for row in coordinator.rows()] == [
        (number, number, {"loss": number / 2}) for number in range(step)
    ]
    assert {row["instance"] for row in coordinator.rows()} == {trainer.instance}
    assert lease_id(actor) == (0, 0)
    assert [(worker["index"], worker["incarnation"]) for worker in coordinator.workers("trainer")] == [(1, 0)]
    assert [(worker["index"], worker["incarnation"]) for worker in coordinator.workers()] == [(0, 0)]
    assert lease_id(join(coordinator)) == (1, 0)


def test_leaving_sends_every_row_first(start: Start, join: Join) -> None:
    coordinator = start(heartbeat_seconds=60.0)
    trainer = join(coordinator, role="trainer", index=0, attempt=1)
    for step in range(600):
        trainer.record(step, {"loss": 0.0})
    assert trainer.leave("over") is True
    assert [row["sequence"] for row in coordinator.rows()] == list(range(600))


def test_a_video_is_kept_at_the_index_of_its_evaluator_and_acknowledged(start: Start, join: Join) -> None:
    coordinator = start(num_evaluators=2)
    _, evaluator = (join(coordinator, role="evaluator") for _ in range(2))
    mp4, gif = b"\x00\x00\x00\x20ftypisom" + bytes(MAX_MP4_BYTES - 12), b"GIF89a\xf0\x00\xa0\x00" + bytes(1000)
    for step in range(MAX_VIDEOS):
        assert evaluator.send_video(Version(1, step), is_fixed=False, mp4=mp4, gif=gif)
    assert not evaluator.send_video(Version(1, 9), is_fixed=False, mp4=mp4, gif=gif)
    until(lambda: evaluator.has_room_for_video, "a video is acknowledged")
    assert evaluator.send_video(Version(2, 9), is_fixed=True, mp4=mp4, gif=gif)
    assert evaluator.leave("over") is True
    videos = {path.name: path.stat().st_size for path in (coordinator.folder / "videos").iterdir()}
    assert videos == dict.fromkeys([*(f"1-1.{step}.mp4" for step in range(MAX_VIDEOS)), "1-2.9.mp4"], MAX_MP4_BYTES)
    assert [(tag, step) for tag, step, *_ in shown_pictures(coordinator.folder)] == [
        *(("videos/evaluation", step) for step in range(MAX_VIDEOS)),
        ("videos/fixed_evaluation", 9),
    ]
    assert "malformed" not in coordinator.log()


def test_a_video_of_an_actor_ends_its_stream(shared: CoordinatorProcess) -> None:
    with open_channel(shared.address) as channel:
        hello = pb.WorkerMessage(hello=pb.Hello(role="actor", instance=str(uuid.uuid4())))
        video = pb.Video(version=pb.Version(attempt=1), mp4=b"\x00\x00\x00\x20ftypisom")
        sent = [hello, pb.WorkerMessage(heartbeat=pb.Heartbeat(video=video))]
        call = CoordinatorStub(channel).Join(iter(sent), metadata=token_metadata(TOKEN), wait_for_ready=True)
        assert list(call)[-1].refused.reason == "heartbeat: a video of a worker of the role 'actor'"
    assert not (shared.folder / "videos").exists()


def test_leaving_a_coordinator_that_is_gone_ends_at_its_deadline(start: Start, join: Join) -> None:
    coordinator = start()
    member = join(coordinator)
    coordinator.kill()
    member.record(1, {})
    assert member.leave("over", timeout=0.2) is False
    assert "join-session" not in {thread.name for thread in threading.enumerate()}


def test_a_lease_is_on_disk_before_its_worker_is_welcomed(shared: CoordinatorProcess, join: Join) -> None:
    for _ in range(3):
        member = join(shared)
        lease = lease_of(shared, member.index)
        assert (lease["incarnation"], lease["instance"], lease["held"]) == (member.incarnation, member.instance, True)
        member.leave("over")


def test_a_coordinator_of_a_retry_withdraws_the_earlier_failure(start: Start, tmp_path: Path) -> None:
    db = FilesystemParameterDB(tmp_path / "parameters")
    db.push(POLICY_NAME, make_parameters(Version(1, 4)))
    db.annotate(POLICY_NAME, Version(1, 4), {TERMINAL_KEY: {"reason": UPDATES_SKIPPED, "failure": "150 of 200"}})
    assert terminal_record(db, POLICY_NAME) is not None
    start(first_attempt=2).status()
    assert terminal_record(db, POLICY_NAME) is None


def test_no_worker_is_welcomed_while_the_roster_cannot_be_written(start: Start, join: Join, tmp_path: Path) -> None:
    coordinator = start(roster_path=str(tmp_path / "away" / "roster.json"))
    coordinator.status()
    with pytest.raises(JoinTimeout, match="the roster cannot be written"):
        join(coordinator, timeout=1.0)
    assert coordinator.workers() == []
    (tmp_path / "away").mkdir()
    assert join(coordinator).index == 0


def test_a_full_disk_leaves_rows_with_the_worker_until_it_has_space(start: Start, join: Join) -> None:
    coordinator = start()
    trainer = join(coordinator, role="trainer", index=0, attempt=1)
    for step in range(100):  # so that metrics.jsonl is by far the largest file of the coordinator
        trainer.record(step, {f"scalar-{number}": 1.0 for number in range(100)})
    until(lambda: trainer.unacknowledged == 0, "the rows are kept")
    before = (coordinator.folder / "metrics.jsonl").read_bytes()
    pid, (_, hard) = coordinator.process.pid, resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    trainer.record(100, {})
    until(lambda: "rows_not_written" in coordinator.log(), "the write was tried")
    trainer.record(101, {})
    trainer.report(version=Version(1, 7))
    until(lambda: coordinator.workers("trainer")[0]["version"] == "1.7", "a heartbeat with the second row has arrived")
    assert (coordinator.folder / "metrics.jsonl").read_bytes() == before
    assert trainer.unacknowledged == 2
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert trainer.leave("no further row brings a heartbeat")
    assert [row["sequence"] for row in coordinator.rows()] == list(range(102))
    assert coordinator.log().count("] rows_not_written") == 1
    assert "rejoined" not in coordinator.log(), "the stream has stayed open"


def test_a_row_of_a_program_is_stored_once_beside_the_trainers(start: Start, join: Join) -> None:
    coordinator = start()
    trainer = join(coordinator, role="trainer", index=0, attempt=1)
    trainer.record(1, {"env_steps": 10.0})
    until(lambda: trainer.unacknowledged == 0, "the trainer's row is stored")
    rows = [ProgramRow(sequence=number, step=1, wall=5.0, scalars={"own/score": float(number)}) for number in range(3)]
    instance = str(uuid.uuid4())
    with closing(CoordinatorClient(coordinator.address, TOKEN)) as client:
        client.add_rows(instance, rows[:2], DEADLINE)
        client.add_rows(instance, rows, DEADLINE)  # as after a reply that was lost
        client.add_rows(str(uuid.uuid4()), rows[:1], DEADLINE)
    found = [(row["role"], row["step"], row["scalars"]) for row in coordinator.rows()]
    assert found == [
        ("trainer", 1, {"env_steps": 10.0}),
        *(("program", 1, {"own/score": float(number)}) for number in (0, 1, 2, 0)),
    ]
    coordinator.process.kill()
    coordinator.process.wait()
    with closing(CoordinatorClient(start().address, TOKEN)) as client:
        client.add_rows(instance, rows, DEADLINE)
    assert len(coordinator.rows()) == 5, "a coordinator that restarts knows what is stored"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.ProgramRows(instance="me"), "instance 'me' is not a UUID"),
        (pb.ProgramRows(records=[pb.Record(scalars={"env_steps": 1.0})]), "the name 'env_steps' is not allowed"),
        (pb.ProgramRows(records=[pb.Record(scalars={"own/" + "x" * 200: 1.0})]), "have at most 200 characters"),
        (pb.ProgramRows(records=[pb.Record(sequence=1), pb.Record(sequence=1)]), "must rise from 0"),
        (pb.ProgramRows(records=[pb.Record(step=-1)]), "must not be negative"),
    ],
)
def test_malformed_rows_of_a_program_are_refused(
    shared: CoordinatorProcess, message: pb.ProgramRows, reason: str
) -> None:
    shared.status()  # waits until it serves
    before = len(shared.rows())
    message.instance = message.instance or str(uuid.uuid4())
    with open_channel(shared.address, None) as channel, pytest.raises(grpc.RpcError) as raised:
        RowsStub(channel).Add(message, timeout=DEADLINE, metadata=token_metadata(TOKEN), wait_for_ready=True)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert reason in raised.value.details()  # type: ignore[attr-defined]
    assert len(shared.rows()) == before


def test_a_follower_of_a_role_learns_the_addresses_of_its_members(start: Start, join: Join) -> None:
    coordinator = start(num_actors=3)
    before = join(coordinator, role="trainer", index=0, endpoints={STREAMS: "10.0.0.1:7", "metrics": "10.0.0.1:8"})
    follower = join(coordinator, follows={"trainer"})
    stranger = join(coordinator, follows={"actor"})
    until(lambda: follower.address_of("trainer", 0) == "10.0.0.1:7", "the present address")
    join(coordinator, role="trainer", index=1, endpoints={STREAMS: "10.0.0.2:7"})
    until(lambda: follower.address_of("trainer", 1) == "10.0.0.2:7", "the address of a later member")
    before.leave("moves")
    until(lambda: follower.address_of("trainer", 0) is None, "a member that left has no address")
    join(coordinator, role="trainer", index=0, endpoints={STREAMS: "10.0.0.3:7"})
    until(lambda: follower.address_of("trainer", 0) == "10.0.0.3:7", "the address of the successor")

    coordinator.kill()
    assert follower.address_of("trainer", 1) == "10.0.0.2:7", "known while the coordinator is down"
    coordinator.restart()
    late = join(coordinator, follows={"trainer"})
    for member in (follower, late):
        until(lambda member=member: member.address_of("trainer", 0) == "10.0.0.3:7", "as before the restart")
        until(lambda member=member: member.address_of("trainer", 1) == "10.0.0.2:7", "as before the restart")
    assert stranger.address_of("trainer", 0) is None


def test_check_raises_the_error_of_a_handler_of_settings(start: Start, join: Join, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    member = join(start(settings_path=str(path)), on_settings=lambda: {}["no"])
    write_settings(path, actor={"rate": 1})
    until(lambda: member._calls.failure is not None, "the handler's error")
    with pytest.raises(JoinError, match="the join session thread failed") as raised:
        member.check()
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_call_over_the_connection_of_a_dead_coordinator_is_answered_by_the_next(start: Start, join: Join) -> None:
    coordinator = start()
    join(coordinator)
    for _ in range(3):
        coordinator.restart()
        assert coordinator.client.status(DEADLINE)["roles"] is not None
        coordinator.restart()
        until(lambda: len(coordinator.client.status(DEADLINE)["roles"].get("actor", [])) == 1, "back")


def test_a_call_by_a_closed_client_is_an_error(shared: CoordinatorProcess) -> None:
    client = CoordinatorClient(shared.address, TOKEN)
    client.close()
    with pytest.raises(CoordinatorUnavailable, match="closed"):
        client.status(DEADLINE)


@pytest.mark.parametrize("token", ["", "another-token", TOKEN + "x"])
def test_every_call_without_the_token_is_refused(shared: CoordinatorProcess, join: Join, token: str) -> None:
    before = shared.workers()
    with pytest.raises(JoinRefused, match="UNAUTHENTICATED"):
        join(shared, token=token)
    stranger = CoordinatorClient(shared.address, token)
    with pytest.raises(CoordinatorUnavailable, match="UNAUTHENTICATED"):
        stranger.status(DEADLINE)
    stranger.close()
    assert len(shared.workers()) == len(before)


def test_unauthenticated_calls_are_refused_before_a_message_is_read_or_a_method_looked_up(
    shared: CoordinatorProcess,
) -> None:
    with open_channel(shared.address) as channel:
        silent = threading.Event()
        requests: Iterator[bytes] = iter(lambda: silent.wait(DEADLINE) and b"", b"")
        calls = [
            channel.stream_stream("/rlsrl.rpc.v1.Coordinator/Join")(requests, timeout=DEADLINE, wait_for_ready=True),
            channel.stream_stream("/nobody/knows")(iter([]), timeout=DEADLINE),
            channel.stream_stream("/nobody/knows")(
                iter([]), timeout=DEADLINE, metadata=(("authorization", f"Basic {TOKEN}"),)
            ),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        silent.set()


def test_the_reading_token_opens_no_call_of_the_coordinator(shared: CoordinatorProcess, join: Join) -> None:
    with pytest.raises(JoinRefused, match="UNAUTHENTICATED"):
        join(shared, token=reading_token(TOKEN))
    reader = CoordinatorClient(shared.address, reading_token(TOKEN))
    with closing(reader), pytest.raises(CoordinatorUnavailable, match="UNAUTHENTICATED"):
        reader.status(DEADLINE)
    with closing(ServiceParameterDB(shared.address, reading_token(TOKEN))) as db:
        assert db.versions(POLICY_NAME) == []


def test_the_viewing_token_opens_the_pages_and_no_call(shared: CoordinatorProcess, join: Join) -> None:
    with pytest.raises(JoinRefused, match="UNAUTHENTICATED"):
        join(shared, token="look")
    with closing(CoordinatorClient(shared.address, "look")) as client:
        with pytest.raises(CoordinatorUnavailable, match="UNAUTHENTICATED"):
            client.status(DEADLINE)
        with pytest.raises(CoordinatorUnavailable, match="UNAUTHENTICATED"):
            client.logs(None, None, tail=None, timeout=DEADLINE)
    db = ServiceParameterDB(shared.address, "look", call_seconds=DEADLINE)
    with closing(db), pytest.raises(ServiceRefused):
        db.versions(POLICY_NAME)
    url = f"http://{shared.status()['endpoints']['http']}"

    def page(path: str, token: str = "look") -> Any:
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return json.load(answer)

    assert page("/status")["experiment"] == "cartpole"
    assert page("/versions") == []
    assert all(isinstance(page(f"/log?name={name}"), str) for name in page("/logs")), "those of other tests' workers"
    assert page("/curve?after=0")["next"] >= 0
    for path in ("/status", "/curve", "/versions", "/logs", "/log"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            page(path, token="lock")


HELLO = pb.Hello(role="actor", instance="8c39373c-9b1b-4550-aaaa-677f656cecc4")


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "the first message of a stream must be a hello"),
        (b"\xff\xff\xff", "the bytes are not a WorkerMessage"),
        (
            pb.WorkerMessage(heartbeat=pb.Heartbeat()).SerializeToString(),
            "the first message of a stream must be a hello",
        ),
        (pb.WorkerMessage(hello=pb.Hello(role="actor", instance="me")).SerializeToString(), "'me' is not a UUID"),
        (
            pb.WorkerMessage(hello=pb.Hello(role="x" * 1000, instance=HELLO.instance)).SerializeToString(),
            "this experiment has no",
        ),
        (
            pb.WorkerMessage(hello=pb.Hello(role="actor", instance=HELLO.instance, incarnation=1)).SerializeToString(),
            "an incarnation without its index",
        ),
        (
            pb.WorkerMessage(hello=pb.Hello(role="actor", instance=HELLO.instance, attempt=-1)).SerializeToString(),
            "must not be negative",
        ),
    ],
)
def test_a_malformed_first_message_is_refused_with_its_reason_and_the_server_lives(
    shared: CoordinatorProcess, join: Join, first: bytes, reason: str
) -> None:
    (answer,) = converse(shared, first)
    assert reason in answer.refused.reason
    join(shared).check()


@pytest.mark.parametrize(
    "second",
    [
        b"\xff",
        b"",
        pb.WorkerMessage(hello=HELLO).SerializeToString(),
        pb.WorkerMessage(heartbeat=pb.Heartbeat(records=[pb.Record(sequence=1), pb.Record(sequence=1)])),
        pb.WorkerMessage(heartbeat=pb.Heartbeat(records=[pb.Record(sequence=1, step=-1)])),
    ],
)
def test_a_malformed_later_message_ends_its_stream_only(
    shared: CoordinatorProcess, join: Join, second: bytes | pb.WorkerMessage
) -> None:
    other = join(shared)
    second = second if isinstance(second, bytes) else second.SerializeToString()
    welcome, refusal = converse(shared, pb.WorkerMessage(hello=HELLO).SerializeToString(), second)
    assert welcome.HasField("welcome")
    assert refusal.refused.reason
    before = len(shared.rows())
    other.record(1, {})
    until(lambda: other.unacknowledged == 0, "other workers are served")
    assert len(shared.rows()) == before + 1


def test_a_message_over_the_limit_is_refused_and_the_server_lives(shared: CoordinatorProcess, join: Join) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        converse(shared, bytes(65 * 1024 * 1024), limit=False)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    join(shared).check()


def converse(coordinator: CoordinatorProcess, *messages: bytes, limit: bool = True) -> list[pb.CoordinatorMessage]:
    """Return the coordinator's answers to raw messages, up to the end of the stream."""
    coordinator.status()  # waits until it serves
    options = [] if limit else [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(coordinator.address, options=options) as channel:
        call = channel.stream_stream(
            "/rlsrl.rpc.v1.Coordinator/Join", response_deserializer=pb.CoordinatorMessage.FromString
        )
        return list(call(iter(messages), timeout=DEADLINE, metadata=token_metadata(TOKEN)))


def test_an_old_attempt_is_fenced_and_a_new_one_takes_over(shared: CoordinatorProcess, join: Join) -> None:
    coordinator = shared
    old = join(coordinator, role="trainer", index=0, attempt=1)
    new = join(coordinator, role="trainer", index=0, attempt=2)
    assert lease_id(new) == (0, 1)
    until(lambda: old._calls.failure is not None, "the old session ends")
    with pytest.raises(JoinRefused, match="succeeded by attempt 2"):
        old.check()
    with pytest.raises(JoinRefused, match="succeeded by attempt 2"):
        join(coordinator, role="trainer", index=1, attempt=1)
    new.check()


def test_the_index_of_a_killed_worker_is_free_at_once(
    start: Start, join: Join, spawn: Callable[[CoordinatorProcess], MemberProcess]
) -> None:
    coordinator = start(num_actors=1, lease_seconds=10 * DEADLINE)
    killed = spawn(coordinator)
    assert killed.lease == (0, 0)
    killed.process.kill()
    assert lease_id(join(coordinator)) == (0, 1)


def test_a_coordinator_that_starts_after_its_workers_died_leases_their_indices_again(
    start: Start, join: Join, spawn: Callable[[CoordinatorProcess], MemberProcess]
) -> None:
    coordinator = start(num_actors=1, lease_seconds=10 * DEADLINE)
    member = spawn(coordinator)
    coordinator.kill()
    member.process.kill()
    member.process.wait(DEADLINE)
    coordinator.restart()
    assert lease_id(join(coordinator)) == (0, 1)


def test_a_frozen_worker_is_stale_and_then_loses_its_index_to_a_waiting_worker(
    start: Start, join: Join, spawn: Callable[[CoordinatorProcess], MemberProcess]
) -> None:
    coordinator = start(num_actors=1, lease_seconds=1.0)
    frozen = spawn(coordinator)
    frozen.signal(signal.SIGSTOP)
    until(lambda: coordinator.workers()[0]["stale"], "the worker is stale")
    successor = join(coordinator)
    assert lease_id(successor) == (0, 1)
    frozen.signal(signal.SIGCONT)
    refusal = until(lambda: (answer := frozen.ask()) != "ok" and answer, "the worker is refused")
    assert "another process has leased actor 0" in refusal
    successor.check()


def test_a_frozen_worker_whose_index_was_not_leased_again_keeps_it(
    start: Start, spawn: Callable[[CoordinatorProcess], MemberProcess]
) -> None:
    coordinator = start(num_actors=1, lease_seconds=0.5)
    frozen = spawn(coordinator)
    frozen.signal(signal.SIGSTOP)
    until(lambda: coordinator.workers() == [], "the lease expires")
    frozen.signal(signal.SIGCONT)
    (worker,) = until(coordinator.workers, "the worker is back")
    assert (worker["index"], worker["incarnation"]) == (0, 0)
    assert frozen.ask() == "ok"


def test_two_coordinators_cannot_serve_one_run(start: Start) -> None:
    coordinator = start()
    coordinator.status()
    second = coordinator._start()
    assert second.wait(DEADLINE) == 1
    assert "is another process of this run alive?" in coordinator.log()
    coordinator.status()


def write_settings(path: Path, **by_role: object) -> None:
    """Write the file of live settings, as a whole."""
    (new := path.with_suffix(".new")).write_text(json.dumps(by_role))
    new.rename(path)


def test_paused_workers_learn_it_at_once_when_they_join_and_from_the_next_coordinator(
    start: Start, join: Join, tmp_path: Path
) -> None:
    path = tmp_path / "settings.json"
    counts = {"num_actors": 3}

    def pause(*paused: object) -> None:
        write_settings(path, coordinator={**counts, **({"paused": paused} if paused else {})})

    pause()
    coordinator = start(settings_path=str(path), num_actors=3)
    trainer = join(coordinator, role="trainer", index=0, attempt=1)
    actors = [join(coordinator), join(coordinator)]
    assert not any(each.is_paused for each in (trainer, *actors))
    pause({"role": "actor", "indices": [1, 2]}, {"role": "trainer"})
    until(lambda: trainer.is_paused and actors[1].is_paused, "both are paused")
    assert not actors[0].is_paused
    assert join(coordinator).is_paused, "a later worker is paused from its start"
    coordinator.restart()
    until(lambda: len(coordinator.workers("actor")) == 3, "the workers are back")
    assert (actors[0].is_paused, actors[1].is_paused, trainer.is_paused) == (False, True, True)
    pause()  # the document leaves an empty list out
    until(lambda: not (trainer.is_paused or actors[1].is_paused), "they go on")


def test_live_settings_reach_present_and_new_workers(start: Start, join: Join, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    edit = partial(write_settings, path)
    edit(trainer={"rate": 1}, coordinator={"num_actors": 1})
    coordinator = start(settings_path=str(path), num_actors=3)
    notified: queue.SimpleQueue[str] = queue.SimpleQueue()
    trainer = join(coordinator, role="trainer", index=0, attempt=1, on_settings=lambda: notified.put("trainer"))
    actor = join(coordinator, on_settings=lambda: notified.put("actor"))
    assert (trainer.settings, actor.settings) == ({"rate": 1}, {})
    assert notified.get(timeout=DEADLINE) == "trainer"
    with pytest.raises(JoinTimeout):
        join(coordinator, timeout=1.0)
    edit(trainer={"rate": 2}, coordinator={"num_actors": 2})
    assert notified.get(timeout=DEADLINE) == "trainer"
    assert trainer.settings == {"rate": 2}
    assert join(coordinator).index == 1, "the new number of actors applies"
    path.write_text("{half")
    until(lambda: "settings_not_read" in coordinator.log(), "unreadable settings are logged")
    edit(trainer={"rate": 2}, coordinator={"num_actors": "many"})
    until(lambda: coordinator.log().count("settings_not_read") > 1, "invalid settings are logged")
    edit(trainer={"rate": 3})
    assert notified.get(timeout=DEADLINE) == "trainer"
    coordinator.restart()
    until(lambda: len(coordinator.workers("trainer")) == 1, "the worker is back")
    assert trainer.settings == {"rate": 3}
    assert notified.empty(), "each change notifies once, and only its role"


def test_workers_that_join_and_leave_leak_no_resources(shared: CoordinatorProcess, join: Join) -> None:
    def resources() -> tuple[int, int]:
        folder = Path(f"/proc/{shared.process.pid}")
        return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))

    def churn(times: int) -> None:
        for _ in range(times):
            join(shared).leave("over")

    churn(5)
    before = resources()
    threads = threading.active_count()
    churn(40)
    until(
        lambda: all(now <= then + 1 for now, then in zip(resources(), before, strict=True)),
        "no descriptor or thread is left",
    )
    until(lambda: threading.active_count() <= threads + 1, "the threads end")


def test_a_worker_that_hangs_up_without_goodbye_keeps_its_lease(shared: CoordinatorProcess) -> None:
    with open_channel(shared.address) as channel:
        hung_up = threading.Event()
        hello = pb.Hello(role="actor", instance=str(uuid.uuid4()))

        def requests() -> Iterator[pb.WorkerMessage]:
            yield pb.WorkerMessage(hello=hello)
            hung_up.wait(DEADLINE)

        call = CoordinatorStub(channel).Join(requests(), metadata=token_metadata(TOKEN), wait_for_ready=True)
        index = next(call).welcome.index
        hung_up.set()
        assert list(call) == []
    assert index in [worker["index"] for worker in shared.workers()], "the worker may reconnect"
