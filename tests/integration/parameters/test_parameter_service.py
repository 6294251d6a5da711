"""Stored versions from another process, which is killed, frozen, flooded or gets invalid messages."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rlsrl.api.tokens import reading_token
from rlsrl.data.version import Version
from rlsrl.parameters.encoding import encode_parameters
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import Corrupt, ParameterDB, Parameters
from rlsrl.parameters.service import ServiceParameterDB, ServiceRefused, ServiceUnavailable, TransferRefused, client
from rlsrl.parameters.service.failures import error_of
from rlsrl.parameters.service.transfers import CHUNK_BYTES, Transfer, cut, receive
from rlsrl.rpc.channels import open_channel, token_metadata
from rlsrl.rpc.codec import encode
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.testing.leaks import open_descriptors
from rlsrl.testing.parameter_dbs import POLICY, got, make_parameters, make_state, push_steps, stored
from rlsrl.testing.process_driver import DrivenProcess
from rlsrl.testing.waiting import until

TOKEN = "the-token"
LONG = 60.0
"""Seconds to wait for what will come: never reached."""
LARGE = 3_000_000
"""Weights of a version that no connection takes at once."""
UPLOAD = "/rlsrl.rpc.v1.ParameterTransfers/Upload"


class Served:
    """A folder, the process that serves it, and that process's address."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
        self.stack = stack
        self.server = self.start()

    def start(self, **options: Any) -> DrivenProcess:
        self.server = self.stack.enter_context(closing(DrivenProcess("rlsrl.testing.parameter_process")))
        self.server.call("serve", address=self.address, token=TOKEN, folder=str(self.folder), **options)
        return self.server

    def serve_also(self, **options: Any) -> str:
        """Serve the same folder at another address, with other options."""
        address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
        self.server.call("serve", address=address, token=TOKEN, folder=str(self.folder), **options)
        return address

    def db(self, **options: Any) -> ServiceParameterDB:
        return self.stack.enter_context(closing(ServiceParameterDB(self.address, TOKEN, **options)))

    def upload(self, messages: Iterator[bytes], timeout: float | None = LONG) -> Any:
        """Start an upload of these messages; return its future."""
        channel = self.stack.enter_context(open_channel(self.address))
        call = channel.stream_unary(UPLOAD, request_serializer=None, response_deserializer=pb.Stored.FromString)
        return call.future(messages, timeout=timeout, metadata=token_metadata(TOKEN), wait_for_ready=True)

    def refused(self, kind: type[Exception]) -> int:
        """Return the number of calls that the server counted as refused for that reason."""
        return int(self.server.call("refused", address=self.address).get(kind.__name__, 0))

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.name != "writer.lock"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path / "parameters", stack)


@pytest.fixture(scope="module")
def calm_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("calm") / "parameters", stack)


@pytest.fixture
def calm(calm_for_all: Served) -> Iterator[Served]:
    """One server for all tests that do not damage it; each test has its own clients."""
    with ExitStack() as stack:
        calm = copy.copy(calm_for_all)
        calm.stack = stack
        yield calm


def large(step: int) -> Parameters:
    rng = np.random.default_rng(step)
    return Parameters(version=Version(1, step), vector=rng.random(LARGE, dtype=np.float32), layout="layout-1")


def upload_messages(parameters: Parameters, **header: Any) -> list[bytes]:
    data = encode_parameters(parameters, created_at=0.0, metadata={})
    fields = {"nbytes": len(data), "content": pb.CONTENT_PARAMETERS, "policy": POLICY} | header
    return list(cut(pb.Upload(**fields), data))


# -- the server dies, freezes and comes back --------------------------------------------------------------------------


def test_a_push_succeeds_although_the_server_is_killed_halfway(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = []

    def cut_and_kill(header: pb.Upload, content: bytes) -> Iterator[bytes]:
        for number, message in enumerate(cut(header, content)):
            if number == 8 and not kills:
                kills.append(served.server.pid)
                served.server.kill()
                served.start()
            yield message

    monkeypatch.setattr(client, "cut", cut_and_kill)
    db = served.db()
    push_steps(db, 1)
    db.push(POLICY, large(2))
    assert len(kills) == 1
    assert stored(db) == ["1.1", "1.2"]
    np.testing.assert_array_equal(got(db).vector, large(2).vector)


def test_shortly_before_its_end_a_process_stops_waiting_for_an_absent_server(served: Served) -> None:
    db = served.db()
    push_steps(db, 1)
    served.server.kill()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(db.versions, POLICY)
        db.expect_end(0.2)
        with pytest.raises(ServiceUnavailable):
            waiting.result(client.CALL_SECONDS / 2)
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable):
            db.policies()
        assert time.monotonic() - began < client.CALL_SECONDS / 2


def test_shortly_before_its_end_a_process_uses_its_open_connection(served: Served) -> None:
    """In a deleted experiment the Service, and so the address, may be gone before the server."""
    connections = [open_channel(served.address)]
    with closing(ServiceParameterDB("127.0.0.1:1", TOKEN, open_connection=lambda: connections[0])) as db:
        db.expect_end(LONG)
        push_steps(db, 1)
        assert stored(db) == ["1.1"]
        connections[0].close()
        db.expect_end(0.2)
        with pytest.raises(ServiceUnavailable):
            db.policies()


def test_a_get_succeeds_although_the_server_is_killed_halfway(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = []

    def receive_and_kill(
        call: Iterable[bytes], header: type[pb.Download], *, max_nbytes: int
    ) -> Iterator[Transfer[Any]]:
        def messages() -> Iterator[bytes]:
            for message in call:
                yield message
                if not kills:
                    kills.append(served.server.pid)
                    served.server.kill()
                    served.start()

        return receive(messages(), header, max_nbytes=max_nbytes)

    FilesystemParameterDB(served.folder).push(POLICY, large(1))
    monkeypatch.setattr(client, "receive", receive_and_kill)
    np.testing.assert_array_equal(got(served.db()).vector, large(1).vector)
    assert len(kills) == 1


def test_calls_to_a_frozen_server_complete_when_it_continues(served: Served) -> None:
    db = served.db()
    push_steps(db, 1)
    served.server.stop()
    with ThreadPoolExecutor(2) as pool:
        pushed, read = pool.submit(db.push, POLICY, large(2)), pool.submit(db.versions, POLICY)
        with pytest.raises(ServiceUnavailable, match="DEADLINE_EXCEEDED"):
            served.db(call_seconds=0.3).policies()
        assert not pushed.done()
        assert not read.done()
        served.server.resume()
        pushed.result(LONG)
        read.result(LONG)
    np.testing.assert_array_equal(got(db).vector, large(2).vector)


def test_without_a_server_a_call_raises_oserror_at_its_deadline() -> None:
    address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
    with closing(ServiceParameterDB(address, TOKEN, call_seconds=0.05)) as db:
        for call in calls_of(db):
            with pytest.raises(
                ServiceUnavailable, match=f"no answer from the parameter service at {address}"
            ) as raised:
                call()
            assert isinstance(raised.value, OSError)


def test_closing_ends_waiting_calls() -> None:
    db = ServiceParameterDB(f"unix-abstract:rlsrl-test-{uuid.uuid4()}", TOKEN)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(db.policies)
        db.close()
        with pytest.raises(ServiceUnavailable):
            waiting.result(LONG)
    with pytest.raises(ServiceUnavailable):
        db.policies()


# -- the store fails --------------------------------------------------------------------------------------------------


def test_a_disk_error_arrives_with_its_errno_and_leaves_no_files(served: Served) -> None:
    db = served.db()
    push_steps(db, 1)
    before = served.files()
    pid = served.server.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))
    with pytest.raises(OSError, match="File too large") as raised:
        db.push(POLICY, large(2))
    assert raised.value.errno == errno.EFBIG
    assert served.files() == before
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    db.push(POLICY, large(2))
    assert stored(db) == ["1.1", "1.2"]


def test_writers_that_wait_for_the_disk_delay_no_reader(calm: Served) -> None:
    db = calm.db()
    db.push("busy", make_parameters(Version(1, 1)))
    with ThreadPoolExecutor(8) as pool:
        with (calm.folder / "busy" / "writer.lock").open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            writers = [pool.submit(db.push, "busy", make_parameters(Version(1, step))) for step in range(2, 10)]
            assert db.get("busy") is not None
            assert [info.version.step for info in db.versions("busy")] == [1]
            assert not any(writer.done() for writer in writers)
        for writer in writers:
            writer.result(LONG)
    assert [info.version.step for info in db.versions("busy")] == list(range(1, 10))


# -- uploads that stop, are invalid or too large ----------------------------------------------------------------------


def test_a_stalled_upload_delays_no_client_and_an_aborted_one_leaves_nothing(served: Served) -> None:
    messages = upload_messages(large(1))
    standing, going_on = threading.Event(), threading.Event()

    def paused() -> Iterator[bytes]:
        yield from messages[:5]
        standing.set()
        going_on.wait(LONG)
        yield from messages[5:]

    finished, broken = served.upload(paused()), served.upload(iter([*messages[:5], b""]))
    assert standing.wait(LONG)
    with pytest.raises(grpc.RpcError):
        broken.result(LONG)
    db = served.db()
    assert (db.policies(), served.files()) == ([], [])
    db.push("other", make_parameters(Version(1, 1)))
    going_on.set()
    finished.result(LONG)
    np.testing.assert_array_equal(got(db).vector, large(1).vector)


def test_a_client_that_dies_during_an_upload_leaves_nothing(served: Served) -> None:
    messages = upload_messages(large(1))
    sent, dead = threading.Event(), threading.Event()

    def until_death() -> Iterator[bytes]:
        yield from messages[:-1]
        sent.set()
        dead.wait(LONG)

    uploading = served.upload(until_death())
    assert sent.wait(LONG)
    uploading.cancel()
    dead.set()
    db = served.db()
    assert (db.policies(), served.files()) == ([], [])
    db.push(POLICY, large(1))
    assert stored(db) == ["1.1"]


SMALL = make_parameters(Version(1, 1))
(WHOLE,) = upload_messages(SMALL)
FIRST, *REST = upload_messages(large(1))


def spoil(message: bytes) -> bytes:
    return message[:-9] + bytes([message[-9] ^ 1]) + message[-8:]


@pytest.mark.parametrize(
    ("messages", "error", "reason"),
    [
        ([], TransferRefused, "exactly one transfer"),
        ([b""], TransferRefused, "shorter than its prefix"),
        ([b"garbage" * 10], TransferRefused, "begins with"),
        ([encode(b"\xff\xff\xff")], TransferRefused, "not Upload"),
        ([encode(pb.Upload(nbytes=-1).SerializeToString())], TransferRefused, "over the limit"),
        ([encode(pb.Upload(nbytes=2**62).SerializeToString())], TransferRefused, "over the limit"),
        ([FIRST], TransferRefused, "ended inside a transfer"),
        ([FIRST, *REST[:-1]], TransferRefused, "ended inside a transfer"),
        ([FIRST, FIRST], TransferRefused, "a second header"),
        ([FIRST, encode(b"")], TransferRefused, "a chunk of 0 bytes"),
        ([WHOLE, REST[0]], TransferRefused, "where 0 are missing"),
        ([FIRST, REST[1], REST[0], *REST[2:]], Corrupt, "checksum"),
        ([spoil(WHOLE)], Corrupt, "checksum"),
        (upload_messages(SMALL, content=pb.CONTENT_UNSPECIFIED), TransferRefused, "of parameters or of a state"),
        (upload_messages(SMALL, content=pb.CONTENT_STATE), Corrupt, "rlsrl.state"),
        (upload_messages(SMALL, policy="../up"), ValueError, "allowed are"),
        (upload_messages(SMALL, tags=["latest"]), ValueError, "already name versions"),
    ],
)
def test_an_invalid_upload_is_refused_with_its_reason_and_the_server_continues(
    calm: Served, messages: list[bytes], error: type[Exception], reason: str
) -> None:
    before, refused = calm.files(), calm.refused(error)
    with pytest.raises(grpc.RpcError) as raised:
        calm.upload(iter(messages)).result(LONG)
    refusal = error_of(raised.value)
    assert type(refusal) is error
    assert reason in str(refusal)
    assert calm.files() == before
    assert calm.refused(error) == refused + 1
    calm.db().policies()


def test_an_upload_without_a_deadline_is_refused(calm: Served) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        calm.upload(iter([WHOLE]), timeout=None).result(LONG)
    assert "states a deadline" in str(error_of(raised.value))


def test_a_message_over_the_limit_is_refused_and_the_server_continues(calm: Served) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(calm.address, options=options) as channel:
        call = channel.stream_unary(UPLOAD, request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.RpcError) as raised:
            call(iter([bytes(MAX_MESSAGE_BYTES + 1)]), timeout=LONG, metadata=token_metadata(TOKEN))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    calm.db().policies()


def test_a_version_over_the_services_limit_is_refused_in_both_directions(calm: Served) -> None:
    calm.db().push("limited", make_parameters(Version(1, 1), size=5000))
    address = calm.serve_also(max_transfer_bytes=10_000)
    with closing(ServiceParameterDB(address, TOKEN)) as db:
        with pytest.raises(TransferRefused, match="over the limit of 10000"):
            db.push("limited", make_parameters(Version(1, 2), size=5000))
        db.push("limited", make_parameters(Version(1, 2), size=1000))
    limited = calm.db(max_transfer_bytes=10_000)
    assert got_of(limited, "limited", "1.2").vector.size == 1000
    with pytest.raises(TransferRefused, match="over the limit of 10000"):
        limited.get("limited", "1.1")


@pytest.mark.slow
def test_a_version_of_a_hundred_megabytes_arrives(served: Served) -> None:
    vector = np.arange(25_000_000, dtype=np.float32)
    assert vector.nbytes > MAX_MESSAGE_BYTES
    db = served.db()
    db.push(POLICY, Parameters(version=Version(1, 1), vector=vector, layout="layout-1"))
    np.testing.assert_array_equal(got(db).vector, vector)


# -- authentication ---------------------------------------------------------------------------------------------------


def calls_of(db: ParameterDB) -> list[Callable[[], Any]]:
    """Return every call of the service."""
    return [
        lambda: db.get(POLICY),
        lambda: db.push(POLICY, make_parameters(Version(9, 9))),
        lambda: db.save_state(POLICY, make_state(Version(1, 1))),
        lambda: db.load_state(POLICY),
        lambda: db.tag(POLICY, "latest", "best"),
        lambda: db.annotate(POLICY, Version(1, 1), {}),
        lambda: db.versions(POLICY),
        lambda: db.prune(POLICY, keep_last=0),
        db.policies,
    ]


@pytest.mark.parametrize("token", ["", "another", TOKEN + "x"])
def test_every_call_presents_the_token(calm: Served, token: str) -> None:
    before = calm.files()
    with closing(ServiceParameterDB(calm.address, token)) as db:
        for call in calls_of(db):
            with pytest.raises(ServiceRefused, match="UNAUTHENTICATED"):
                call()
    assert calm.files() == before


def test_the_reading_token_reads_stored_versions_and_does_nothing_else(calm: Served) -> None:
    calm.db().push(POLICY, make_parameters(Version(1, 1)), state=make_state(Version(1, 1)))
    before = calm.files()
    with closing(ServiceParameterDB(calm.address, reading_token(TOKEN))) as db:
        assert [info.version for info in db.versions(POLICY)] == [Version(1, 1)]
        assert (found := db.get(POLICY)) is not None
        assert found.version == Version(1, 1)
        assert db.load_state(POLICY) is not None
        for call in (
            lambda: db.push(POLICY, make_parameters(Version(9, 9))),
            lambda: db.save_state(POLICY, make_state(Version(1, 1))),
            lambda: db.tag(POLICY, "latest", "best"),
            lambda: db.annotate(POLICY, Version(1, 1), {}),
            lambda: db.prune(POLICY, keep_last=0),
            lambda: db.resume_point(POLICY),
            lambda: db.damage(POLICY),
            db.policies,
        ):
            with pytest.raises(ServiceRefused, match="UNAUTHENTICATED"):
                call()
    assert calm.files() == before


# -- resources --------------------------------------------------------------------------------------------------------


def test_clients_that_connect_and_close_leave_no_resources(calm: Served) -> None:
    calm.db().push("churn", make_parameters(Version(1, 1)))
    calm.db().push("large", make_parameters(Version(1, 1), size=CHUNK_BYTES))

    def churn(times: int) -> None:
        for number in range(times):
            if number % 2:
                with closing(ServiceParameterDB(calm.address, TOKEN)) as db:
                    assert db.get("churn") is not None
            else:  # stopped halfway
                with closing(open_channel(calm.address)) as channel:
                    call = channel.unary_stream(
                        "/rlsrl.rpc.v1.ParameterTransfers/Download",
                        request_serializer=pb.DownloadRequest.SerializeToString,
                        response_deserializer=None,
                    )(
                        pb.DownloadRequest(content=pb.CONTENT_PARAMETERS, policy="large", ref="latest"),
                        timeout=LONG,
                        metadata=token_metadata(TOKEN),
                        wait_for_ready=True,
                    )
                    next(iter(call))

    churn(10)
    before, threads, descriptors = resources(calm.server.pid), threading.active_count(), open_descriptors()
    churn(100)
    calm.db().policies()
    for now, then in zip(resources(calm.server.pid), before, strict=True):
        assert now <= then + 4
    until(lambda: threading.active_count() <= threads + 2, "threads end")
    until(lambda: open_descriptors() <= descriptors + 4, "descriptors are closed")


def resources(pid: int) -> tuple[int, int, int]:
    """Return a process's number of descriptors and threads, and its memory in hundreds of kilobytes."""
    folder = Path(f"/proc/{pid}")
    resident = int((folder / "statm").read_text().split()[1]) * resource.getpagesize()
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), resident // 10**7


def got_of(db: ParameterDB, policy: str, ref: str) -> Parameters:
    parameters = db.get(policy, ref)
    assert parameters is not None
    return parameters
