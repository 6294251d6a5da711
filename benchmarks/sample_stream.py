"""Measure slots a second between two processes: the shared-memory and gRPC streams beside a bare socket.

    python benchmarks/sample_stream.py [ROUNDS]

One process writes each slot and the other copies it out. The bare socket does the least that can carry a slot: a token
of 40 bytes answered by 40 bytes (ping-pong), or by the slot's bytes. The contenders alternate within one run, and the
best round counts: only ratios are meaningful. CPU time is that of the receiving process.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlsrl.api.process_environment import PROCESS_ENVIRONMENT
from rlsrl.data.slots import ProducerId, Slot, SlotLayout, rollout_layout
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import ActorLedger, LedgerPage, Mark, ProducerProgress, TrainerLedger
from rlsrl.streams.connect import open_sample_consumer, open_sample_producer
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.producer_core import ProducerOptions

TOKEN_BYTES, TOKEN = b"x" * 40, "benchmark"
SECONDS_A_TURN, TIMEOUT = 0.3, 30.0
LAYOUTS = {"CartPole, 8 x 128": ((4,), "float32", 8), "84 x 84 x 4, 8 x 16": ((4, 84, 84), "uint8", 8)}


def layout_of(name: str) -> SlotLayout:
    shape, dtype, num_lanes = LAYOUTS[name]
    env = EnvSpec(
        observation={"observation": ArraySpec(shape=shape, dtype=dtype)},
        action=ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=2),
    )
    return rollout_layout(env, num_steps=128 if dtype == "float32" else 16, num_lanes=num_lanes)


class NoLedger:
    """A ledger that keeps nothing, to time the stream alone."""

    def __init__(self) -> None:
        self._total = 0

    def marked_sequence(self, producer: ProducerId) -> int:  # noqa: ARG002
        return -1

    def meet(self, producer: ProducerId, progress: ProducerProgress) -> Mark:  # noqa: ARG002
        return Mark(producer.incarnation, -1)

    def take(self, producer: ProducerId, sequence: int, num_transitions: int, total: int) -> None: ...

    def produce(self, sequence: int, num_transitions: int) -> int:  # noqa: ARG002
        self._total += num_transitions
        return self._total

    def acknowledge(self, sequence: int) -> None: ...


def serve_stream(name: str, layout_name: str, folder: str) -> None:
    """Run the other process of a stream: fill slots until killed."""
    layout = layout_of(layout_name)
    ledger: NoLedger | ActorLedger = NoLedger()
    if folder:
        ledger = ActorLedger(LedgerPage.open(Path(folder) / "actor-0.page", "actor", 0))
        ledger.begin(0)
    options = ProducerOptions(token=TOKEN, layout=layout, producer_id=ProducerId(0, 0), ledger=ledger)
    producer = open_sample_producer(name, options, find=str, tls=None)
    source = layout.view(bytearray(layout.nbytes))
    while True:
        slot = producer.acquire(3600)
        copy(source, slot)
        slot.num_transitions = layout.num_steps * layout.num_lanes
        producer.post(slot)


def serve_socket(descriptor: str, nbytes: str) -> None:
    """Run the other process of a socket: answer each token with ``nbytes`` bytes."""
    answer = bytes(int(nbytes))
    with socket.socket(fileno=int(descriptor)) as connection:
        while connection.recv(len(TOKEN_BYTES)):
            connection.sendall(answer)


def copy(source: dict[str, np.ndarray], slot: Slot) -> None:
    for name, array in slot.arrays.items():
        array[...] = source[name]


class Stream:
    """An exchange over a stream: receive a slot, copy it out and release it."""

    def __init__(self, layout_name: str, *, num_slots: int, with_ledger: bool = False, prefix: str = "") -> None:
        layout = layout_of(layout_name)
        self.nbytes = layout.nbytes
        name = f"{prefix}rlsrl-benchmark-{id(self)}-{time.time_ns()}"
        self._folder = tempfile.TemporaryDirectory()
        ledger: NoLedger | TrainerLedger = NoLedger()
        if with_ledger:
            ledger = TrainerLedger(LedgerPage.open(Path(self._folder.name) / "trainer-0.page", "trainer", 0))
        options = ConsumerOptions(
            token=TOKEN, layout_digest=layout.step_digest, ledger=ledger, slots_per_producer=num_slots
        )
        self._consumer = open_sample_consumer(name, options, tls=None, on_unauthenticated=lambda: None)
        folder = self._folder.name if with_ledger else ""
        self._process = subprocess.Popen([sys.executable, __file__, "stream", name, layout_name, folder])
        self._num_lanes = layout.num_lanes
        self._copy = layout.view(bytearray(layout.nbytes))
        self._consumer.grant(num_slots * layout.num_lanes, Version(1, 0))

    def __call__(self) -> None:
        for slot in self._consumer.receive(64, TIMEOUT):
            for name, array in slot.arrays.items():
                self._copy[name][...] = array
            self._consumer.release(slot)
            self._consumer.grant(self._num_lanes, Version(1, 0))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._consumer.close()
        self._folder.cleanup()


class Socket:
    """An exchange over a socket: send a token, receive ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "socket", str(theirs.fileno()), str(nbytes)], pass_fds=[theirs.fileno()]
            )
        self._buffer = memoryview(bytearray(nbytes))

    def __call__(self) -> None:
        self._socket.send(TOKEN_BYTES)
        received = 0
        while received < len(self._buffer):
            received += self._socket.recv_into(self._buffer[received:])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def measure(exchange: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds and this process's CPU seconds of one exchange."""
    count, start, cpu_start = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < SECONDS_A_TURN:
        exchange()
        count += 1
    return elapsed / count, (time.process_time() - cpu_start) / count


def compare(layout_name: str, rounds: int) -> None:
    nbytes = layout_of(layout_name).nbytes
    contenders: dict[str, Socket | Stream] = {
        "bare socket, ping-pong of 40 bytes": Socket(len(TOKEN_BYTES)),
        "bare socket, the slot's bytes": Socket(nbytes),
        "shared memory, 1 slot": Stream(layout_name, num_slots=1),
        "shared memory, 2 slots": Stream(layout_name, num_slots=2),
        "shared memory, 2 slots, with ledger": Stream(layout_name, num_slots=2, with_ledger=True),
        "gRPC, unix socket, 2 slots": Stream(layout_name, num_slots=2, prefix="unix-abstract:"),
    }
    best = dict.fromkeys(contenders, (math.inf, math.inf))
    for exchange in contenders.values():
        exchange()
    for _ in range(rounds):
        for name, exchange in contenders.items():
            seconds, cpu_seconds = measure(exchange)
            best[name] = min(best[name][0], seconds), min(best[name][1], cpu_seconds)
    print(f"\n{layout_name}: slots of {nbytes / 1e3:.0f} kB")
    for name, exchange in contenders.items():
        exchange.close()
        seconds, cpu_seconds = best[name]
        print(
            f"{name:36} {1 / seconds:8.0f} /s {exchange.nbytes / seconds / 1e6:8.0f} MB/s {cpu_seconds * 1e6:6.0f} us"
        )


def main(rounds: str = "5") -> None:
    os.environ.update(PROCESS_ENVIRONMENT)  # the workers' gRPC settings
    for layout_name in LAYOUTS:
        compare(layout_name, int(rounds))


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"stream": serve_stream, "socket": serve_socket}
    if sys.argv[1:2] and sys.argv[1] in commands:
        commands[sys.argv[1]](*sys.argv[2:])
    else:
        main(*sys.argv[1:])
