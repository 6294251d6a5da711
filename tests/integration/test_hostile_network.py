"""Foreign clients reach every port of every worker: the run continues, and refused clients are counted."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from rlsrl.api.placement import COORDINATOR_PORT, HTTP_PORT, STREAMS_PORT
from rlsrl.rpc.channels import token_metadata
from rlsrl.testing.live_runs import fetch
from rlsrl.testing.pods import TOKEN, Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: besieged}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 1, environments: 4, rolloutLength: 16}
  policyWorkers: {replicas: 1}
  bufferWorkers: {replicas: 1}
  trainers: {compile: "off"} # a compiled step takes some hundred megabytes
  parameters: {everySteps: 20}
  stop: {trainSteps: 1000000}
"""
METHODS = {
    "coordinator": "/rlsrl.rpc.v1.Coordinator/Join",
    "policy": "/rlsrl.inference/Converse",
    "buffer": "/rlsrl.samples/Deliver",
    "trainer": "/rlsrl.samples/Deliver",
}
"""The roles that serve gRPC."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
BOMB_BYTES = 512 * 1024 * 1024
NUM_STRANGERS = 50
MAX_GROWTH_BYTES = 256 * 1024 * 1024
Place = tuple[str, int]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


HEADERS = b"\x83\x86\x44\x02/x\x41\x01h"
"""HPACK: POST, http, a path and an authority."""
FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "garbage": lambda: iter([random.Random(1).randbytes(65_536)]),
    "half a preface": lambda: iter([PREFACE[:10]]),
    "a frame too long": lambda: iter([PREFACE, frame(0, 0, 1, b"")[3:], bytes(1 << 20)]),
    "settings": lambda: (frame(4, 0, 0, b"\0\3\0\0\0\1") * 1000 for _ in range(50)),
    "pings": lambda: (frame(6, 0, 0, bytes(8)) * 1000 for _ in range(50)),
    "headers without an end": lambda: iter([frame(1, 0, 1, HEADERS), *[frame(9, 0, 1, HEADERS * 1000)] * 500]),
    "streams reset at once": lambda: (
        b"".join(frame(1, 4, 2 * each + 1, HEADERS) + frame(3, 0, 2 * each + 1, b"\0\0\0\x08") for each in some)
        for some in (range(start, start + 500) for start in range(0, 20_000, 500))
    ),
    "window updates": lambda: iter([frame(8, 0, 0, b"\x7f\xff\xff\xff") * 1000]),
}
"""Messages that are sent without reading an answer."""


def flood(place: Place, pieces: Iterator[bytes], *, preface: bool) -> None:
    """Send as much as the server accepts: it may close the connection or stop reading."""
    with socket.create_connection(place, DEADLINE_SECONDS) as attacker, suppress(OSError):
        attacker.settimeout(1.0)
        if preface:
            attacker.sendall(PREFACE)
        for piece in pieces:
            attacker.sendall(piece)


def code_of(place: Place, method: str, message: bytes, token: str, **channel_arguments: object) -> grpc.StatusCode:
    """Return the status of a call with that message."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel("{}:{}".format(*place), options=options, **channel_arguments) as channel:  # type: ignore[arg-type]
        metadata = token_metadata(token)
        call = channel.stream_stream(method)(iter([message]), metadata=metadata, timeout=DEADLINE_SECONDS)
        return call.code()


class Besieged:
    """A run and the ports of all its workers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.pods = Pods(EXPERIMENT, folder, stack)
        told = self.pods.resolved
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts: dict[str, str] = {}
        for role, arguments in (
            ("coordinator", ()),
            ("policy", ()),
            ("buffer", ()),
            ("trainer", ("--attempt", "1")),
            ("actor", ()),
        ):
            self.workers[role], self.hosts[role] = self.pods.start(role, told.configs[role], *arguments)
        self.goes_on("at first")
        self._memory = self._resident()

    def grpc_place(self, role: str) -> Place:
        return self.hosts[role], COORDINATOR_PORT if role == "coordinator" else STREAMS_PORT

    def http_place(self, role: str) -> Place:
        return self.hosts[role], HTTP_PORT

    def goes_on(self, what: str) -> None:
        """Check that training continues, no worker has restarted, and memory stays within its bound."""
        steps = self.pods.train_steps()
        until(lambda: self.pods.train_steps() > steps + 3, f"training steps: {what}")
        assert all(process.poll() is None for process in self.workers.values()), what

    def check_memory(self, what: str) -> None:
        for role, now in self._resident().items():
            assert now < self._memory[role] + MAX_GROWTH_BYTES, (what, role)

    def _resident(self) -> dict[str, int]:
        return {role: psutil.Process(process.pid).memory_info().rss for role, process in self.workers.items()}

    def strangers(self, role: str, kind: str) -> float:
        """Return the number of clients refused at that port."""
        name = f'rlsrl_strangers_refused_total{{kind="{kind}"}} '
        lines = fetch("http://{}:{}/metrics".format(*self.http_place(role))).splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    with ExitStack() as stack:
        yield Besieged(tmp_path_factory.mktemp("besieged"), stack)


def test_training_continues_whatever_foreign_clients_send_to_any_port(run: Besieged) -> None:
    with ExitStack() as stack:
        for role in run.workers:  # these stay, and say nothing
            for place in (run.http_place(role), *([run.grpc_place(role)] if role in METHODS else [])):
                for _ in range(20):
                    stack.enter_context(closing(socket.create_connection(place, DEADLINE_SECONDS)))
        for name, pieces in FLOODS.items():
            for role in METHODS:
                flood(run.grpc_place(role), pieces(), preface=name not in ("garbage", "half a preface"))
            run.goes_on(name)
        run.check_memory("floods")
        for role, method in METHODS.items():
            for _ in range(NUM_STRANGERS):
                assert code_of(run.grpc_place(role), method, b"", "stolen elsewhere") is grpc.StatusCode.UNAUTHENTICATED
            until(lambda role=role: run.strangers(role, "call") >= NUM_STRANGERS, "they are counted")  # type: ignore[misc]
        for role in run.workers:
            flood(run.http_place(role), iter([b"GET /metrics HTTP/1.1\r\nA:" + b"a" * 100_000]), preface=False)
            until(lambda role=role: run.strangers(role, "malformed") > 0, "it is counted")  # type: ignore[misc]
        run.goes_on("strangers")


def test_a_compression_bomb_is_refused_even_with_the_token(run: Besieged) -> None:
    for role, method in METHODS.items():
        code = code_of(run.grpc_place(role), method, bytes(BOMB_BYTES), TOKEN, compression=grpc.Compression.Gzip)
        assert code is grpc.StatusCode.UNIMPLEMENTED, "our messages are never compressed"
        run.check_memory(role)
    run.goes_on("bombs")


CROWD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
host, port, number, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
held = []
for each in range(number):
    try:
        held.append(socket.create_connection((host, port), 30, (f"127.1.{each // 4000}.1", 0)))
        held[-1].sendall(first)
    except OSError:
        pass
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", PREFACE], ids=["silent", "of http/2"])
def test_ten_thousand_connections_block_no_worker(run: Besieged, first: bytes) -> None:
    # The crowd has to have a file for each, as the worker has.
    number = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 1000)
    crowded = [run.grpc_place(role) for role in METHODS] + [run.http_place(role) for role in ("coordinator", "trainer")]
    for place in crowded:
        host, port = place
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, host, str(port), str(number), first.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert crowd.stdout is not None
            assert int(crowd.stdout.readline()) > number // 2, place
            run.goes_on(f"a crowd at {place}")
            assert fetch(f"http://{host}:{HTTP_PORT}/metrics")
        finally:
            crowd.communicate(b"")
    run.check_memory("crowds")
    for role in run.workers:
        until(lambda role=role: len(os.listdir(f"/proc/{run.workers[role].pid}/fd")) < 500, "they are let go")  # type: ignore[misc]
