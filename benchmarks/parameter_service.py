"""Compare the parameter service with a bare socket in one run. Only the ratio is meaningful.

    python benchmarks/parameter_service.py [--megabytes 32] [--rounds 5]

The server is another process. "socket" moves the same bytes over a unix socket to another process. "live" lasts from
``publish`` until a reader has the version. "push" and "get" include checksums, and "push" the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np

from rlsrl.api.process_environment import PROCESS_ENVIRONMENT
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.parameters.service import LivePublisher, LiveReader, ServiceParameterDB
from rlsrl.testing.process_driver import DrivenProcess

TOKEN = "token"
POLICY = "default"


def drain(connection: socket.socket, nbytes: int) -> None:
    """Receive messages of ``nbytes`` and answer each with one byte."""
    buffer = bytearray(1 << 20)
    while True:
        left = nbytes
        while left:
            received = connection.recv_into(buffer)
            if not received:
                return
            left -= received
        connection.send(b".")


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.update(PROCESS_ENVIRONMENT)  # the workers' gRPC settings
    vector = np.random.default_rng(0).random(arguments.megabytes * 250_000, dtype=np.float32)
    payload = vector.tobytes()

    here, there = socket.socketpair()
    peer = multiprocessing.get_context("spawn").Process(target=drain, args=(there, len(payload)), daemon=True)
    peer.start()
    there.close()

    def bare() -> None:
        here.sendall(payload)
        here.recv(1)

    bare()  # the peer is up
    rates: dict[str, list[float]] = {name: [] for name in ("socket", "live", "push", "get")}
    address = f"unix-abstract:rlsrl-benchmark-{uuid.uuid4()}"
    with tempfile.TemporaryDirectory() as folder, closing(DrivenProcess("rlsrl.testing.parameter_process")) as server:
        server.call("serve", address=address, token=TOKEN, folder=folder)
        with (
            closing(ServiceParameterDB(address, TOKEN)) as db,
            closing(LivePublisher(address, TOKEN, POLICY, {})) as publisher,
            closing(LiveReader(address, TOKEN, POLICY)) as reader,
        ):
            for step in range(arguments.rounds):
                parameters = Parameters(version=Version(1, step), vector=vector, layout="layout")

                def live(parameters: Parameters = parameters) -> None:
                    publisher.publish(parameters)
                    reader.wait(parameters.version, 60.0)

                works: dict[str, Callable[[], object]] = {
                    "socket": bare,
                    "live": live,
                    "push": partial(db.push, POLICY, parameters),
                    "get": lambda: db.get(POLICY),
                }
                for name, work in works.items():
                    rates[name].append(arguments.megabytes / seconds(work))
                db.prune(POLICY, keep_last=1)
    here.close()
    peer.join()
    base = statistics.median(rates["socket"])
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{name:8}{rate:8.0f} MB/s {rate / base:6.2f} x socket")


if __name__ == "__main__":
    main()
