"""Live weights between real processes arrive whole and never move back, and the trainer never waits for them."""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.protocols import (
    Corrupt,
    NonFinite,
    ParameterError,
    Parameters,
    ParameterSource,
    SourceClosed,
    SourceRefused,
    SourceTimeout,
    StaleAttempt,
)
from rlsrl.parameters.service import LivePublisher, LiveReader, TransferRefused, live_publisher
from rlsrl.parameters.service.failures import error_of
from rlsrl.parameters.service.live_server import MAX_POLICIES
from rlsrl.parameters.service.messages import live_description_messages, live_version_messages
from rlsrl.rpc.channels import end_call, open_channel, token_metadata
from rlsrl.rpc.codec import encode
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.testing.parameter_dbs import POLICY, make_parameters
from rlsrl.testing.process_driver import DrivenProcess
from rlsrl.testing.waiting import until

TOKEN = "the-token"
LONG = 60.0
"""Seconds to wait for what will come: never reached."""
SOON = 0.05
"""Seconds to wait for what will not come."""
CALLS = "/rlsrl.rpc.v1.ParameterTransfers"
DESCRIPTION = {"program": {"layers": [1, 2]}}


class Served:
    """A process that serves live weights, with its publishers and readers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
        self.stack = stack
        self.server = self.start()

    def start(self) -> DrivenProcess:
        self.server = self.stack.enter_context(closing(DrivenProcess("rlsrl.testing.parameter_process")))
        self.server.call("serve", address=self.address, token=TOKEN, folder=str(self.folder))
        return self.server

    def restart(self) -> None:
        self.server.kill()
        self.start()

    def publisher(self, policy: str = POLICY, token: str = TOKEN, **description: Any) -> LivePublisher:
        return self.stack.enter_context(closing(LivePublisher(self.address, token, policy, description or DESCRIPTION)))

    def reader(self, policy: str = POLICY, token: str = TOKEN, **options: Any) -> LiveReader:
        return self.stack.enter_context(closing(LiveReader(self.address, token, policy, **options)))

    def publish_raw(self, messages: Iterator[bytes]) -> Any:
        """Open a publisher's call that sends these messages."""
        channel = self.stack.enter_context(open_channel(self.address))
        call = channel.stream_stream(
            f"{CALLS}/Publish", request_serializer=None, response_deserializer=pb.Published.FromString
        )
        return call(messages, timeout=LONG, metadata=token_metadata(TOKEN), wait_for_ready=True)

    def watch_raw(self, policy: str) -> Any:
        """Open a watcher's call, which reads only on request."""
        channel = self.stack.enter_context(open_channel(self.address))
        call = channel.unary_stream(
            f"{CALLS}/Watch", request_serializer=pb.WatchRequest.SerializeToString, response_deserializer=None
        )
        return call(pb.WatchRequest(policy=policy), timeout=LONG, metadata=token_metadata(TOKEN), wait_for_ready=True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


@pytest.fixture(scope="module")
def calm_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("calm"), stack)


@pytest.fixture
def calm(calm_for_all: Served) -> Iterator[Served]:
    """One server for all tests that do not damage it; each test has its own policy, publishers and readers."""
    with ExitStack() as stack:
        calm = copy.copy(calm_for_all)
        calm.stack = stack
        yield calm


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> str:
    return f"p{zlib.crc32(request.node.name.encode()):x}"


def step(number: int, attempt: int = 1, size: int = 16) -> Parameters:
    return make_parameters(Version(attempt, number), size=size)


def version_of(parameters: Parameters | None) -> Version | None:
    return parameters.version if parameters is not None else None


# -- behaviour of every source of live weights ------------------------------------------------------------------------


def test_a_published_version_arrives_bit_for_bit(calm: Served, policy: str) -> None:
    rng = np.random.default_rng(0)
    publisher, reader = calm.publisher(policy), calm.reader(policy)
    for number in range(1, 4):
        published = Parameters(
            version=Version(2, number),
            vector=rng.standard_normal(600_001, dtype=np.float32),
            layout="abc",
            statistics={"mean": rng.standard_normal((2, 3)), "count": np.array(2**53 + 1)},
        )
        publisher.publish(published)
        got = reader.wait(published.version, LONG)
        assert (got.version, got.layout) == (published.version, published.layout)
        assert got.vector.tobytes() == published.vector.tobytes()
        assert {name: array.tobytes() for name, array in got.statistics.items()} == {
            name: array.tobytes() for name, array in published.statistics.items()
        }


def test_a_description_of_any_length_arrives(calm: Served, policy: str) -> None:
    description = {"layout": "abc", "program": "x" * 3_000_000, "nested": [1, {"a": None}]}
    calm.publisher(policy, **description).publish(step(1))
    assert calm.reader(policy).description(LONG) == description


def test_get_does_not_wait_and_returns_only_newer_versions(calm: Served, policy: str) -> None:
    reader: ParameterSource = calm.reader(policy)
    assert reader.get() is None
    publisher = calm.publisher(policy)
    publisher.publish(step(1))
    reader.wait(Version(1, 1), LONG)
    assert version_of(reader.get()) == version_of(reader.get(newer_than=INITIAL)) == Version(1, 1)
    assert reader.get(newer_than=Version(1, 1)) is None
    publisher.publish(step(2))
    reader.wait(Version(1, 2), LONG)
    assert version_of(reader.get(newer_than=Version(1, 1))) == Version(1, 2)


def test_a_publication_wakes_a_waiting_reader(calm: Served, policy: str) -> None:
    readers = [calm.reader(policy) for _ in range(3)]
    publisher = calm.publisher(policy)
    with ThreadPoolExecutor(len(readers)) as pool:
        waiting = [pool.submit(reader.wait, Version(1, 3), LONG) for reader in readers]
        for number in (1, 2, 3):
            publisher.publish(step(number))
        assert [future.result(LONG).version for future in waiting] == [Version(1, 3)] * 3


def test_waiting_ends_at_its_deadline_with_the_reason(calm: Served, policy: str) -> None:
    reader = calm.reader(policy)
    with pytest.raises(SourceTimeout, match=f"nothing came from the coordinator at {calm.address} in time"):
        reader.description(SOON)
    calm.publisher(policy).publish(step(1))
    reader.wait(Version(1, 1), LONG)
    with pytest.raises(SourceTimeout):
        reader.wait(Version(1, 2), SOON)


def test_closing_wakes_a_waiting_reader(calm: Served, policy: str) -> None:
    reader = calm.reader(policy)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(reader.wait, Version(1, 1), LONG), pool.submit(reader.description, LONG)]
        reader.close()
        for future in waiting:
            with pytest.raises(SourceClosed):
                future.result(LONG)
    with pytest.raises(SourceClosed):
        reader.get()
    reader.close()


def test_a_client_without_the_token_is_refused(calm: Served, policy: str) -> None:
    reader, publisher = calm.reader(policy, token="another"), calm.publisher(policy, token="another")
    with pytest.raises(SourceRefused, match="UNAUTHENTICATED"):
        reader.wait(Version(1, 1), LONG)
    with pytest.raises(SourceRefused, match="UNAUTHENTICATED"):
        reader.get()
    publisher.publish(step(1))
    until(lambda: publisher._stream.failure is not None, "the refusal")
    with pytest.raises(ParameterError, match="UNAUTHENTICATED"):
        publisher.publish(step(2))


def test_an_invalid_publication_is_refused_and_the_previous_version_stays(calm: Served, policy: str) -> None:
    publisher, reader = calm.publisher(policy), calm.reader(policy)
    publisher.publish(step(5))
    for number in (5, 4):
        with pytest.raises(ValueError, match=r"is not newer than 1\.5"):
            publisher.publish(step(number))
    with pytest.raises(NonFinite, match="vector"):
        publisher.publish(make_parameters(Version(1, 6), fill=np.nan))
    assert reader.wait(Version(1, 5), LONG).version == Version(1, 5)
    publisher.publish(step(6))
    assert reader.wait(Version(1, 6), LONG).version == Version(1, 6)
    publisher.close()
    with pytest.raises(SourceClosed):
        publisher.publish(step(7))
    publisher.close()


@pytest.mark.parametrize("name", ["", "../up", "white space"])
def test_an_invalid_policy_name_is_refused(calm: Served, name: str) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        calm.publisher(name)
    with pytest.raises(ValueError, match="allowed are"):
        calm.reader(name)


def test_a_version_of_a_hundred_megabytes_arrives(calm: Served, policy: str) -> None:
    vector = np.arange(25_000_000, dtype=np.float32)
    calm.publisher(policy).publish(Parameters(version=Version(1, 1), vector=vector, layout="layout-1"))
    np.testing.assert_array_equal(calm.reader(policy).wait(Version(1, 1), LONG).vector, vector)


def test_a_version_over_the_readers_limit_is_refused(calm: Served, policy: str) -> None:
    calm.publisher(policy).publish(step(1, size=100_000))
    reader = calm.reader(policy, max_transfer_bytes=10_000)
    assert reader.description(LONG) == DESCRIPTION
    with pytest.raises(SourceTimeout):
        reader.wait(Version(1, 1), SOON)


# -- versions are whole, and never move back --------------------------------------------------------------------------


def test_a_superseded_trainer_is_refused_and_no_reader_gets_its_versions(calm: Served, policy: str) -> None:
    old, new, reader = calm.publisher(policy), calm.publisher(policy, gang=2), calm.reader(policy)
    old.publish(step(50, attempt=1))
    reader.wait(Version(1, 50), LONG)
    new.publish(step(3, attempt=2))
    assert reader.wait(Version(2, 0), LONG).version == Version(2, 3)
    assert reader.description(LONG) == {"gang": 2}
    old.publish(step(51, attempt=1))
    until(lambda: old._stream.failure is not None, "the refusal")
    with pytest.raises(StaleAttempt, match="succeeded by attempt 2"):
        old.publish(step(52, attempt=1))
    new.publish(step(4, attempt=2))
    assert reader.wait(Version(2, 4), LONG).version == Version(2, 4)
    assert version_of(calm.reader(policy).wait(INITIAL, LONG)) == Version(2, 4)


def test_readers_of_a_fast_publisher_get_rising_whole_versions_and_the_last(calm: Served, policy: str) -> None:
    last = 300
    publisher, readers = calm.publisher(policy), [calm.reader(policy) for _ in range(3)]

    def follow(reader: LiveReader) -> int:
        newest, num_seen = INITIAL, 0
        while newest.step < last:
            parameters = reader.wait(Version(1, newest.step + 1), LONG)
            assert parameters.version > newest
            assert (parameters.vector == parameters.version.step).all()
            newest, num_seen = parameters.version, num_seen + 1
        return num_seen

    with ThreadPoolExecutor(len(readers)) as pool:
        following = [pool.submit(follow, reader) for reader in readers]
        for number in range(1, last + 1):
            publisher.publish(step(number, size=50_000))
        assert all(0 < future.result(LONG) <= last for future in following)


def test_a_slow_reader_skips_to_the_newest_version_and_delays_no_other(calm: Served, policy: str) -> None:
    size, last = 1_000_000, 24
    publisher, quick = calm.publisher(policy), calm.reader(policy)
    publisher.publish(step(1, size=size))
    slow = calm.watch_raw(policy)
    quick.wait(Version(1, 1), LONG)
    for number in range(2, last + 1):
        publisher.publish(step(number, size=size))
        assert quick.wait(Version(1, number), LONG).version == Version(1, number)
    seen = []
    for message in slow:
        head = pb.Live.FromString(message[16 : 16 + int.from_bytes(message[4:8], "little")])
        if head.HasField("version"):
            seen.append(head.version.version.step)
            if seen[-1] == last:
                break
    end_call(slow)
    assert seen == sorted(seen)
    assert seen[0] == 1
    assert len(seen) < last


def test_a_version_whose_publisher_dies_halfway_reaches_no_reader(calm: Served, policy: str) -> None:
    whole, torn = ([*live_version_messages(step(number, size=2_000_000))] for number in (1, 2))
    died = threading.Event()

    def until_death() -> Iterator[bytes]:
        yield from live_description_messages(policy, DESCRIPTION)
        yield from whole
        yield from torn[:-1]
        died.wait(LONG)

    call = calm.publish_raw(until_death())
    assert next(call).version.step == 1
    reader = calm.reader(policy)
    assert reader.wait(INITIAL, LONG).version == Version(1, 1)
    died.set()
    end_call(call)
    calm.publisher(policy).publish(step(3))
    assert reader.wait(Version(1, 2), LONG).version == Version(1, 3)


(DESCRIBED,) = live_description_messages("malformed", DESCRIPTION)
(VERSION,) = live_version_messages(step(1))
LARGE = [*live_version_messages(step(1, size=600_000))]


@pytest.mark.parametrize(
    ("messages", "error", "reason"),
    [
        ([b""], TransferRefused, "shorter than its prefix"),
        ([encode(b"\xff\xff\xff")], TransferRefused, "not Live"),
        ([VERSION], TransferRefused, "its description, then versions"),
        ([encode(pb.Live().SerializeToString())], TransferRefused, "its description, then versions"),
        ([*live_description_messages("../up", {})], ValueError, "allowed are"),
        ([DESCRIBED.replace(b'{"program"', b'["program"')], TransferRefused, "a description is JSON"),
        ([encode(pb.Live(nbytes=2, description=pb.LiveDescription(policy="x")).SerializeToString(),
                 [np.frombuffer(b"[]", np.uint8)])], TransferRefused, "a JSON object"),
        ([DESCRIBED, VERSION[:-1] + b"\x01"], Corrupt, "another checksum"),
        ([DESCRIBED, LARGE[0]], TransferRefused, "ended inside a transfer"),
        ([DESCRIBED, LARGE[0], DESCRIBED], TransferRefused, "a second header"),
        ([DESCRIBED, LARGE[0], encode(b"")], TransferRefused, "a chunk of 0 bytes"),
        ([DESCRIBED, encode(pb.Live(nbytes=2**62, version=pb.LiveVersion()).SerializeToString())],
         TransferRefused, "over the limit"),
    ],
)  # fmt: skip
def test_a_publisher_of_invalid_messages_is_refused_and_the_server_continues(
    calm: Served, messages: list[bytes], error: type[Exception], reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(calm.publish_raw(iter(messages)))
    refusal = error_of(raised.value)
    assert type(refusal) is error
    assert reason in str(refusal)
    with pytest.raises(SourceTimeout):
        calm.reader("malformed").wait(INITIAL, SOON)


def test_one_policy_too_many_is_refused(served: Served) -> None:
    for number in range(MAX_POLICIES):
        list(served.publish_raw(iter(live_description_messages(f"p{number}", {}))))
    with pytest.raises(grpc.RpcError) as raised:
        list(served.publish_raw(iter(live_description_messages("one-more", {}))))
    assert "policies are live already" in str(error_of(raised.value))
    served.publisher("p0").publish(step(1))
    assert served.reader("p0").wait(INITIAL, LONG).version == Version(1, 1)


# -- the coordinator dies, freezes and comes back ---------------------------------------------------------------------


def test_after_a_restart_the_newest_version_returns_and_readers_continue(served: Served) -> None:
    publisher, reader = served.publisher(), served.reader()
    publisher.publish(step(1))
    reader.wait(Version(1, 1), LONG)
    for number in (2, 3):
        served.restart()
        late = served.reader()
        assert version_of(late.wait(INITIAL, LONG)) == Version(1, number - 1)
        assert late.description(LONG) == DESCRIPTION
        assert version_of(reader.get()) == Version(1, number - 1)
        publisher.publish(step(number))
        assert reader.wait(Version(1, number), LONG).version == Version(1, number)


def test_an_older_trainer_at_a_restarted_coordinator_moves_no_reader_back(served: Served) -> None:
    reader = served.reader()
    served.publisher().publish(step(7, attempt=2))
    reader.wait(Version(2, 7), LONG)
    served.server.kill()
    served.stack.enter_context(closing(LivePublisher(served.address, TOKEN, "probe", {}))).publish(step(1))
    old = served.stack.enter_context(closing(LivePublisher(served.address, TOKEN, POLICY, {})))
    old.publish(step(90, attempt=1))
    served.start()
    served.reader("probe").wait(INITIAL, LONG)
    assert version_of(reader.get()) == Version(2, 7)
    assert served.reader().wait(Version(2, 7), LONG).version == Version(2, 7)
    assert version_of(reader.get()) == Version(2, 7)


def test_only_the_newest_version_published_during_a_freeze_arrives(served: Served) -> None:
    publisher, reader = served.publisher(), served.reader()
    publisher.publish(step(1))
    reader.wait(Version(1, 1), LONG)
    served.server.stop()
    for number in range(2, 1000):
        publisher.publish(step(number))
    served.server.resume()
    assert reader.wait(Version(1, 999), LONG).version == Version(1, 999)


def test_a_version_that_is_not_confirmed_is_sent_again_on_another_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_publisher, "CONFIRMATION_SECONDS", 0.3)
    publisher = served.publisher()
    publisher.publish(step(1))
    served.reader().wait(Version(1, 1), LONG)
    served.server.stop()
    publisher.publish(step(2))
    streams = set()
    while len(streams) < 3:  # the publisher gives up one connection after the other
        with publisher._changed:
            streams.add(id(publisher._stream._call))
            publisher._changed.wait(SOON)
    served.server.resume()
    assert served.reader().wait(Version(1, 2), LONG).version == Version(1, 2)


def silent_server(stack: ExitStack) -> str:
    """Return the address of a server that accepts connections and sends nothing."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return f"127.0.0.1:{listener.getsockname()[1]}"


def no_server(stack: ExitStack) -> str:
    return f"unix-abstract:rlsrl-test-{uuid.uuid4()}"


@pytest.mark.parametrize("address_of", [silent_server, no_server])
def test_publishing_does_not_wait_for_a_silent_server(address_of: Callable[[ExitStack], str]) -> None:
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(LivePublisher(address_of(stack), TOKEN, POLICY, DESCRIPTION)))
        for number in range(1, 3000):
            publisher.publish(step(number))
    assert publisher._stream.close(), "its thread has ended"


@pytest.mark.parametrize("address_of", [silent_server, no_server])
def test_a_reader_of_a_silent_server_ends_at_its_deadlines(address_of: Callable[[ExitStack], str]) -> None:
    with ExitStack() as stack:
        reader = stack.enter_context(closing(LiveReader(address_of(stack), TOKEN, POLICY)))
        assert reader.get() is None
        with pytest.raises(SourceTimeout):
            reader.wait(INITIAL, SOON)
    assert reader._stream.close(), "its thread has ended"


def test_clients_that_connect_and_close_leave_no_resources(calm: Served, policy: str) -> None:
    def churn(times: int) -> None:
        for _ in range(times):
            number = next(numbers)
            with (
                closing(LivePublisher(calm.address, TOKEN, policy, {})) as publisher,
                closing(LiveReader(calm.address, TOKEN, policy)) as reader,
            ):
                publisher.publish(step(number, size=250_000))
                reader.wait(Version(1, number), LONG)

    numbers = iter(range(1, 10_000))
    churn(20)
    before, threads = resources(calm.server.pid), threading.active_count()
    churn(200)
    for now, then in zip(resources(calm.server.pid), before, strict=True):
        assert now <= then + 4
    until(lambda: threading.active_count() <= threads + 2, "threads end")


def resources(pid: int) -> tuple[int, int, int]:
    """Return a process's number of descriptors and threads, and its memory in tens of megabytes."""
    folder = Path(f"/proc/{pid}")
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), resident // 10**7


def test_the_description_of_a_publisher_must_be_json(calm: Served, policy: str) -> None:
    with pytest.raises(TypeError):
        calm.publisher(policy, wrong={1, 2})
    assert json.loads(json.dumps(DESCRIPTION)) == DESCRIPTION
