from __future__ import annotations

import os
import socket
import threading
import tracemalloc
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.broadcast import (
    GREETING_SECONDS,
    BroadcastPublisher,
    BroadcastReader,
    SourceClosed,
    SourceRefused,
    SourceTimeout,
)
from rlsrl.parameters.protocols import Corrupt, NonFinite, ParameterError, Parameters
from rlsrl.parameters.segment import SegmentReader, SegmentWriter
from rlsrl.rpc.local import connect, listen, recv_json, send_json
from rlsrl.testing.leaks import open_descriptors
from rlsrl.testing.parameter_dbs import make_parameters

TOKEN = "token"
LONG = 60.0
"""Seconds to wait for what will come: never reached."""
SOON = 0.05
"""Seconds to wait for what will not come."""

Publish = Callable[..., BroadcastPublisher]
Read = Callable[..., BroadcastReader]


@pytest.fixture
def name() -> str:
    return f"rlsrl-test-{uuid.uuid4()}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publisher(name: str, stack: ExitStack) -> Publish:
    def make(*, greeting_seconds: float = GREETING_SECONDS, **description: Any) -> BroadcastPublisher:
        made = BroadcastPublisher(name, TOKEN, description, greeting_seconds=greeting_seconds)
        return stack.enter_context(closing(made))

    return make


@pytest.fixture
def reader(name: str, stack: ExitStack) -> Read:
    def make(token: str = TOKEN) -> BroadcastReader:
        return stack.enter_context(closing(BroadcastReader(name, token)))

    return make


def step(number: int, attempt: int = 1) -> Parameters:
    return make_parameters(Version(attempt, number))


def version_of(parameters: Parameters | None) -> Version | None:
    return parameters.version if parameters is not None else None


def test_a_description_of_any_length_arrives(publisher: Publish, reader: Read) -> None:
    description = {"layout": "abc", "program": "x" * 300_000, "nested": [1, {"a": None}]}
    publisher(**description)
    assert reader().description(LONG) == description


def test_a_published_version_arrives_bit_for_bit(publisher: Publish, reader: Read) -> None:
    rng = np.random.default_rng(0)
    publish, read = publisher().publish, reader()
    for number in range(1, 4):
        published = Parameters(
            version=Version(2, number),
            vector=rng.standard_normal(1001, dtype=np.float32),
            layout="abc",
            statistics={
                "mean": rng.standard_normal((2, 3)),
                "count": np.array(2**53 + 1),
                "strided": np.arange(12.0)[::2],
                "empty": np.zeros((0, 3), np.float16),
                "seen": np.array([True, False]),
            },
        )
        publish(published)
        got = read.wait(published.version, LONG)
        assert (got.version, got.layout) == (published.version, published.layout)
        assert got.vector.tobytes() == published.vector.tobytes()
        assert got.statistics.keys() == published.statistics.keys()
        for path, array in published.statistics.items():
            there = got.statistics[path]
            assert (there.dtype, there.shape, there.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_each_reader_gets_its_own_read_only_copy(publisher: Publish, reader: Read) -> None:
    publish, read = publisher().publish, reader()
    publish(step(1))
    first = read.wait(Version(1, 1), LONG)
    for number in range(2, 5):
        publish(step(number))
    np.testing.assert_array_equal(first.vector, np.full(16, 1, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        first.vector[0] = 0


def test_get_does_not_wait_and_returns_only_newer_versions(publisher: Publish, reader: Read) -> None:
    read = reader()
    assert read.get() is None
    publish = publisher().publish
    read.description(LONG)
    assert read.get() is None
    publish(step(1))
    assert version_of(read.get()) == version_of(read.get(newer_than=INITIAL)) == Version(1, 1)
    assert read.get(newer_than=Version(1, 1)) is None
    publish(step(2))
    assert version_of(read.get(newer_than=Version(1, 1))) == Version(1, 2)


def test_get_connects_to_the_publisher(publisher: Publish, reader: Read) -> None:
    publisher().publish(step(1))
    read = reader()
    while (got := read.get()) is None:
        pass
    assert got.version == Version(1, 1)


def test_a_publication_wakes_a_waiting_reader(publisher: Publish, reader: Read) -> None:
    publish = publisher().publish
    readers = [reader() for _ in range(3)]
    for read in readers:
        read.description(LONG)
    with ThreadPoolExecutor(len(readers)) as pool:
        waiting = [pool.submit(read.wait, Version(1, 3), LONG) for read in readers]
        for number in (1, 2, 3):
            publish(step(number))
        assert [future.result(LONG).version for future in waiting] == [Version(1, 3)] * 3


def test_a_publisher_that_comes_later_is_found(publisher: Publish, reader: Read) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader().wait, Version(1, 1), LONG)
        publisher().publish(step(1))
        assert waiting.result(LONG).version == Version(1, 1)


def test_closing_wakes_a_waiting_reader(publisher: Publish, reader: Read) -> None:
    publisher()
    read = reader()
    read.description(LONG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read.wait, INITIAL, LONG)
        read.close()
        with pytest.raises(SourceClosed):
            waiting.result(LONG)
    read.close()
    for call in (read.get, lambda: read.wait(INITIAL, LONG), lambda: read.description(LONG)):
        with pytest.raises(SourceClosed):
            call()


def test_a_timeout_says_what_is_missing(name: str, publisher: Publish, reader: Read) -> None:
    read = reader()
    with pytest.raises(SourceTimeout, match="it is not there"):
        read.wait(INITIAL, SOON)
    with listen(name), pytest.raises(SourceTimeout, match="does not answer"):
        reader().description(SOON)
    publish = publisher().publish
    publish(step(1))
    assert read.wait(Version(1, 1), LONG).version == Version(1, 1)
    with pytest.raises(TimeoutError, match=r"in time$"):
        read.wait(Version(1, 2), SOON)
    publish(step(2))
    assert read.wait(Version(1, 2), LONG).version == Version(1, 2)


def test_another_token_is_refused(publisher: Publish, reader: Read) -> None:
    publisher().publish(step(1))
    stranger = reader("another")
    for call in (lambda: stranger.description(LONG), lambda: stranger.wait(INITIAL, LONG)):
        with pytest.raises(SourceRefused, match="token"):
            call()
    assert reader().wait(INITIAL, LONG).version == Version(1, 1)


def test_another_protocol_is_refused_by_name(publisher: Publish, name: str) -> None:
    publisher()
    with connect(name, LONG) as stranger:
        send_json(stranger, {"token": TOKEN, "protocol": 7})
        answer, _ = recv_json(stranger)
    assert answer == {"refused": "the publisher speaks protocol 1, the reader 7"}


@pytest.mark.parametrize("greeting", [b"{}", b"[1]", b"\xff\xfe", b"{" * 100, b"[" * 60_000, b'{"token": 5}'])
def test_an_invalid_greeting_harms_no_reader(publisher: Publish, reader: Read, name: str, greeting: bytes) -> None:
    publish = publisher().publish
    with connect(name, LONG) as silent, connect(name, LONG) as stranger:
        stranger.send(greeting)
        with connect(name, LONG):
            pass
        stranger.recv(1000)
        publish(step(1))
        assert reader().wait(Version(1, 1), LONG).version == Version(1, 1)
        silent.send(b"too late to matter")


def test_a_connection_without_a_greeting_is_dropped(publisher: Publish, name: str) -> None:
    publisher(greeting_seconds=SOON)
    with connect(name, LONG) as silent:
        assert silent.recv(1) == b""


def test_a_reader_that_sends_data_is_dropped(publisher: Publish, name: str) -> None:
    publish = publisher().publish
    with connect(name, LONG) as talker:
        send_json(talker, {"token": TOKEN, "protocol": 1})
        _, descriptors = recv_json(talker, 1)
        os.close(descriptors[0])
        talker.send(b"hello")
        with pytest.raises(ConnectionResetError):  # the reader's data is unread
            talker.recv(1)
    publish(step(1))


def test_a_reader_cannot_write_into_shared_memory(publisher: Publish, name: str) -> None:
    publisher()
    with connect(name, LONG) as stranger:
        send_json(stranger, {"token": TOKEN, "protocol": 1})
        _, (descriptor,) = recv_json(stranger, 1)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_not_published(publisher: Publish, reader: Read, bad: float) -> None:
    publish, read = publisher().publish, reader()
    publish(make_parameters(Version(1, 1), mean=np.zeros(2)))
    vector = np.zeros(16, np.float32)
    vector[3] = bad
    with pytest.raises(NonFinite, match="vector"):
        publish(Parameters(version=Version(1, 2), vector=vector, layout="layout-1", statistics={"mean": np.zeros(2)}))
    with pytest.raises(NonFinite, match="mean"):
        publish(make_parameters(Version(1, 2), mean=np.array([bad, -bad])))
    assert read.wait(INITIAL, LONG).version == Version(1, 1)


def test_weights_whose_sum_overflows_count_as_finite(publisher: Publish, reader: Read) -> None:
    publisher().publish(make_parameters(Version(1, 1), fill=3e38))
    assert reader().wait(INITIAL, LONG).vector.max() == np.float32(3e38)


@pytest.mark.parametrize(
    "other",
    [
        make_parameters(Version(1, 2), size=17),
        make_parameters(Version(1, 2), layout="layout-2"),
        make_parameters(Version(1, 2), mean=np.zeros(2)),
    ],
)
def test_a_publication_of_another_shape_is_refused(publisher: Publish, reader: Read, other: Parameters) -> None:
    publish, read = publisher().publish, reader()
    publish(step(1))
    with pytest.raises(ValueError, match="all versions must have"):
        publish(other)
    assert read.wait(INITIAL, LONG).version == Version(1, 1)
    publish(step(2))
    assert read.wait(Version(1, 2), LONG).version == Version(1, 2)


def test_versions_only_rise(publisher: Publish) -> None:
    publish = publisher().publish
    publish(step(5))
    for older in (step(5), step(4), step(9, attempt=0)):
        with pytest.raises(ValueError, match=r"not newer than 1\.5"):
            publish(older)


def test_a_second_publisher_of_the_same_name_is_refused(publisher: Publish) -> None:
    publisher()
    with pytest.raises(OSError, match="Address already in use"):
        publisher()


def test_readers_follow_the_next_publisher_and_never_return(publisher: Publish, reader: Read) -> None:
    first = publisher(attempt=1)
    read = reader()
    first.publish(step(10, attempt=2))
    assert read.wait(INITIAL, LONG).version == Version(2, 10)
    first.close()
    assert version_of(read.get()) == Version(2, 10)
    with closing(publisher(attempt=1)) as older:
        older.publish(step(99, attempt=1))
        with pytest.raises(SourceTimeout):
            read.wait(Version(2, 11), 10 * SOON)
        assert version_of(read.get()) == Version(2, 10)
        assert read.description(LONG) == {"attempt": 1}
        older.publish(step(11, attempt=2))
        assert read.wait(Version(2, 11), LONG).version == Version(2, 11)
    last = publisher(attempt=3)
    last.publish(step(1, attempt=3))
    assert read.wait(Version(3, 0), LONG).version == Version(3, 1)
    assert read.description(LONG) == {"attempt": 3}


def test_a_reader_that_does_not_read_delays_no_other(publisher: Publish, reader: Read) -> None:
    publish, lazy, busy = publisher().publish, reader(), reader()
    lazy.description(LONG)
    busy.description(LONG)
    num_versions = 5000  # many more wake-ups than a socket's buffer holds
    for number in range(1, num_versions + 1):
        publish(step(number))
    assert version_of(lazy.get()) == Version(1, num_versions)
    assert busy.wait(Version(1, num_versions), LONG).version == Version(1, num_versions)
    publish(step(num_versions + 1))
    assert lazy.wait(Version(1, num_versions + 1), LONG).version.step == num_versions + 1


def test_publishing_allocates_little_memory(publisher: Publish, reader: Read) -> None:
    publish = publisher().publish
    reader().description(LONG)
    published = [make_parameters(Version(1, number), size=1_000_000, mean=np.zeros(1000)) for number in range(3)]
    publish(published[0])
    tracemalloc.start()
    try:
        for parameters in published[1:]:
            publish(parameters)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000


def test_replaced_and_closed_memory_is_freed(name: str) -> None:
    def held() -> tuple[int, int]:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").count(f"memfd:{name}")
        return mapped, open_descriptors()

    _, before = held()
    with closing(BroadcastReader(name, TOKEN)) as read:
        for attempt in range(1, 5):
            with closing(BroadcastPublisher(name, TOKEN, {})) as publisher:
                publisher.publish(step(1, attempt))
                read.wait(Version(attempt, 1), LONG)
            assert read.get(newer_than=Version(attempt, 1)) is None
            mapped, open_files = held()
            assert mapped == 1
            assert open_files <= before + 3
    mapped, open_files = held()
    assert mapped == 0
    assert open_files <= before


def test_an_incomplete_write_is_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher stops before it writes the checksum, as if it were killed."""
    with closing(SegmentWriter(name, {})) as writer:
        writer.write(step(1))
        read = SegmentReader(writer.open_read_only())
        for number in (2, 3):

            def die(_: object) -> int:
                raise InterruptedError

            monkeypatch.setattr(zlib, "crc32", die)
            with pytest.raises(InterruptedError):
                writer.write(step(number))
            monkeypatch.undo()
            assert (read.version, read.read().version) == (Version(1, 1), Version(1, 1))
        writer.write(step(4))
        assert read.read().version == Version(1, 4)


def test_changed_memory_is_detected(name: str) -> None:
    with closing(SegmentWriter(name, {})) as writer:
        writer.write(step(1))
        read = SegmentReader(writer.open_read_only())
        views = writer._views[1]
        views[""][5] += 1
        with pytest.raises(Corrupt, match="checksum"):
            read.read()


def test_memory_of_another_format_is_refused() -> None:
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(Corrupt, match="not a parameter broadcast"):
        SegmentReader(descriptor)


def test_publish_raises_the_error_that_ended_the_accept_thread(
    publisher: Publish, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = publisher()

    def fail(*_: object) -> None:
        raise MemoryError("out of descriptors")

    monkeypatch.setattr(BroadcastPublisher, "_accept", fail)
    with connect(name, LONG):
        publishing._thread.join(LONG)
    with pytest.raises(ParameterError, match="accept thread died") as raised:
        publishing.publish(step(1))
    assert isinstance(raised.value.__cause__, MemoryError)


def test_a_closed_publisher_publishes_nothing(publisher: Publish) -> None:
    publishing = publisher()
    publishing.close()
    publishing.close()
    with pytest.raises(SourceClosed):
        publishing.publish(step(1))
    assert not any(thread.name == "broadcast-accept" for thread in threading.enumerate())


def test_a_reader_leaves_a_publisher_that_passes_no_memory(name: str, publisher: Publish, reader: Read) -> None:
    read = reader()

    def impersonate(listener: socket.socket) -> None:
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            recv_json(connection)
            send_json(connection, {"protocol": 1})

    with ThreadPoolExecutor(1) as pool, listen(name) as listener:
        done = pool.submit(impersonate, listener)
        with pytest.raises(SourceTimeout):
            read.description(10 * SOON)
        done.result(LONG)
    publisher().publish(step(1))
    assert read.wait(INITIAL, LONG).version == Version(1, 1)
