"""The parameter broadcast between processes, and across the death of its publisher."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.data.version import Version
from rlsrl.parameters.broadcast import BroadcastReader, SourceTimeout

SCRIPT = Path(__file__).with_name("broadcast_peers.py")
TOKEN = "token"
LONG = 60.0


@pytest.fixture
def name() -> str:
    return f"rlsrl-test-{uuid.uuid4()}"


class Peer:
    """A process that runs broadcast_peers.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def peer(role: str, name: str, attempt: int, last_step: int) -> Iterator[Peer]:
    command = [sys.executable, str(SCRIPT), role, name, str(attempt), str(last_step)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def test_readers_never_see_a_torn_or_an_older_version(name: str) -> None:
    last_step = 3000
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(peer("publish", name, 1, last_step))
        assert publisher.line() == "ready"
        readers = [stack.enter_context(peer("read", name, 1, last_step)) for _ in range(2)]
        assert [reader.line() for reader in readers] == ["ready"] * 2
        publisher.go_on()
        assert publisher.line() == "published"
        nums_reads = [reader.line() for reader in readers]
        assert all(num_reads and int(num_reads) > 1 for num_reads in nums_reads), nums_reads
        assert [reader.process.wait(LONG) for reader in readers] == [0, 0]


def test_a_reader_survives_its_publisher_and_follows_the_next(name: str) -> None:
    with contextlib.closing(BroadcastReader(name, TOKEN)) as reader:
        for attempt in (1, 2, 3):
            with peer("publish", name, attempt, 10) as publisher:
                assert publisher.line() == "ready"
                publisher.go_on()
                parameters = reader.wait(Version(attempt, 10), LONG)
                assert parameters.version == Version(attempt, 10)
                assert reader.description(LONG) == {"attempt": attempt}
            assert publisher.process.returncode == -9
            kept = reader.get()
            assert kept is not None
            assert kept.version == Version(attempt, 10)
        with pytest.raises(SourceTimeout, match="it is not there"):
            reader.wait(Version(4, 0), 0.0)


def test_a_publisher_killed_during_a_publication_leaves_a_whole_version(name: str) -> None:
    with contextlib.closing(BroadcastReader(name, TOKEN)) as reader:
        for attempt in range(1, 6):
            with peer("publish", name, attempt, 1_000_000) as publisher:
                assert publisher.line() == "ready"
                publisher.go_on()
                seen = reader.wait(Version(attempt, 20 * attempt), LONG).version
            parameters = reader.get()
            assert parameters is not None
            assert parameters.version >= seen
            assert (parameters.vector == parameters.version.step).all()
            assert (parameters.statistics["mean"] == parameters.version.step).all()
