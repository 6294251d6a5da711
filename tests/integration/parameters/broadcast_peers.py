"""One end of a parameter broadcast, as a process. Run by test_broadcast_processes.py."""

from __future__ import annotations

import sys

import numpy as np

from rlsrl.data.version import Version
from rlsrl.parameters.broadcast import BroadcastPublisher, BroadcastReader
from rlsrl.parameters.protocols import Parameters

TOKEN = "token"
SIZE = 50_000
LONG = 60.0


def publish(name: str, attempt: int, last_step: int) -> None:
    """Publish as fast as possible, then wait until standard input ends."""
    vector = np.zeros(SIZE, np.float32)
    statistics = {"mean": np.zeros(100)}
    publisher = BroadcastPublisher(name, TOKEN, {"attempt": attempt})
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(1, last_step + 1):
        vector[:] = step
        statistics["mean"][:] = step
        version = Version(attempt, step)
        publisher.publish(Parameters(version=version, vector=vector, layout="layout", statistics=statistics))
    print("published", flush=True)
    sys.stdin.readline()
    publisher.close()


def read(name: str, attempt: int, last_step: int) -> None:
    """Read until the last version. Check that each copy belongs to one version and that versions rise."""
    reader = BroadcastReader(name, TOKEN)
    reader.description(LONG)
    print("ready", flush=True)
    newest, num_reads = Version(0, 0), 0
    while newest < Version(attempt, last_step):
        got = (
            reader.get(newer_than=newest) if num_reads % 2 else reader.wait(newest._replace(step=newest.step + 1), LONG)
        )
        if got is None:
            continue
        assert got.version > newest, (got.version, newest)
        assert (got.vector == got.version.step).all(), got.version
        assert (got.statistics["mean"] == got.version.step).all(), got.version
        newest = got.version
        num_reads += 1
    reader.close()
    print(num_reads, flush=True)


if __name__ == "__main__":
    role = {"publish": publish, "read": read}[sys.argv[1]]
    role(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
