"""A run with TLS while its certificates are replaced, and open streams in the meantime."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import grpc
import pytest

from rlsrl.api.placement import COORDINATOR_PORT, STREAMS_PORT
from rlsrl.data.slots import ProducerId, Slot
from rlsrl.data.version import Version
from rlsrl.rpc.channels import open_channel, token_metadata
from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE, TLS_NAME_VARIABLE
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorStub
from rlsrl.streams.grpc_inference import wire as inference_wire
from rlsrl.streams.grpc_samples import wire as samples_wire
from rlsrl.testing.certificates import PEER_NAME, Authority, MountedSecret
from rlsrl.testing.inference_bench import (
    DrivenClient,
    InferenceBench,
    TlsInferenceTransport,
    answer_of,
    request,
    serve,
)
from rlsrl.testing.pods import TOKEN, Pods
from rlsrl.testing.stream_bench import NUM_LANES, StreamBench, TlsTransport, fill, value_of
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: encrypted}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 1, environments: 4, rolloutLength: 16}
  policyWorkers: {replicas: 1}
  bufferWorkers: {replicas: 1}
  evaluators: {replicas: 1, environments: 1, episodesPerEnvironment: 1}
  parameters: {everySteps: 20}
  stop: {trainSteps: 1000000}
"""
V1 = Version(1, 0)


class Rotation:
    """One Secret for all workers, and the three edits that change its authority."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = Authority.new(folder), Authority.new(folder)
        self.secret = MountedSecret(folder / "tls", self.old.issue(), self.old)

    def steps(self) -> Iterator[str]:
        self.secret.put(self.old.issue(), self.old)
        yield "renewed"
        self.secret.put(self.old.issue(), self.old, self.new)
        yield "both trusted"
        self.secret.put(self.new.issue(), self.old, self.new)
        yield "the new one's shown"
        self.secret.put(self.new.issue(), self.new)
        yield "the old one gone"


@pytest.fixture
def rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rotation:
    rotation = Rotation(tmp_path)
    monkeypatch.setenv(TLS_FOLDER_VARIABLE, str(rotation.secret.folder))
    monkeypatch.setenv(TLS_NAME_VARIABLE, PEER_NAME)
    return rotation


@pytest.mark.slow
def test_training_continues_while_certificates_are_replaced_and_plain_connections_are_refused(
    tmp_path: Path, rotation: Rotation
) -> None:
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, tmp_path, stack, secret=rotation.secret)
        told = pods.resolved
        hosts = {}
        workers = {}
        for role, config, arguments in (
            ("coordinator", told.coordinator, ()),
            ("policy", told.configs["policy"], ()),
            ("buffer", told.configs["buffer"], ()),
            ("trainer", told.trainer, ("--attempt", "1")),
            ("actor", told.actor, ()),
            ("evaluator", told.configs["evaluator"], ()),
        ):
            workers[role], hosts[role] = pods.start(role, config, *arguments)

        def goes_on(what: str) -> None:
            steps = pods.train_steps()
            until(lambda: pods.train_steps() > steps + 3, f"training steps: {what}")

        goes_on("over TLS")
        for step in rotation.steps():
            goes_on(step)
        assert all(process.poll() is None for process in workers.values()), "no worker was restarted"

        # New workers have certificates of an authority that no worker knew at the beginning.
        for role in ("actor", "buffer"):
            workers[role].kill()
            workers[role].wait(DEADLINE_SECONDS)
            workers[role], hosts[role] = pods.start(role, told.configs[role])
        until(lambda: pods.place("buffer", 0) == f"{hosts['buffer']}:{STREAMS_PORT}", "the buffer worker's successor")
        goes_on("with successors")

        for role, port, method in (
            ("coordinator", COORDINATOR_PORT, "/rlsrl.rpc.v1.Coordinator/Status"),
            ("policy", STREAMS_PORT, inference_wire.METHOD),
            ("buffer", STREAMS_PORT, samples_wire.METHOD),
            ("trainer", STREAMS_PORT, samples_wire.METHOD),
        ):
            assert code_in_the_clear(f"{hosts[role]}:{port}", method) is grpc.StatusCode.UNAVAILABLE, role
        late = MountedSecret(tmp_path / "late", rotation.old.issue(), rotation.new).tls()
        with closing(open_channel(told.coordinator.coordinator_address, late)) as channel:
            call = CoordinatorStub(channel).Status.future(pb.StatusRequest(), metadata=token_metadata(TOKEN))
            assert call.exception(DEADLINE_SECONDS).code() is grpc.StatusCode.UNAVAILABLE, "of the old authority"


def test_a_coordinator_with_certificates_refuses_plain_connections(tmp_path: Path, rotation: Rotation) -> None:
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, tmp_path, stack, secret=rotation.secret)
        _, host = pods.start("coordinator", pods.resolved.coordinator)
        until(lambda: listens(host, COORDINATOR_PORT), "it serves")
        with closing(open_channel(f"{host}:{COORDINATOR_PORT}")) as channel:
            call = CoordinatorStub(channel).Status.future(pb.StatusRequest(), metadata=token_metadata(TOKEN))
            failure = call.exception(DEADLINE_SECONDS)
        assert failure is not None
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        assert pods.status()["totals"]


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def code_in_the_clear(address: str, method: str) -> grpc.StatusCode:
    with closing(open_channel(address)) as channel:
        call = channel.stream_stream(method)(iter([b""]), metadata=token_metadata(TOKEN), timeout=DEADLINE_SECONDS)
        return call.code()


def test_a_sample_stream_neither_loses_nor_duplicates_slots_while_certificates_are_replaced(
    tmp_path: Path, rotation: Rotation
) -> None:
    bench = StreamBench(TlsTransport(), tmp_path)
    try:
        consumer, producer = bench.consumer(), bench.producer()
        values = iter(range(100))
        taken: list[Slot] = []

        def post_some() -> None:
            for _ in range(3):
                consumer.grant(NUM_LANES, V1)
                producer.post(fill(bench.acquire(consumer, producer), next(values)))
                (slot,) = bench.take(consumer, 1)
                taken.append(slot)
                assert value_of(slot) == slot.sequence
                consumer.release(slot)

        post_some()
        for number, _ in enumerate(rotation.steps(), 1):
            post_some()
            newcomer = bench.producer(number)
            bench.connect(consumer, newcomer)
            newcomer.close()
            bench.until(consumer, lambda: consumer.producers == (ProducerId(0, 0),))
            assert consumer.counters["connected"] == 1 + number, "the first connection stands"

        # A consumer that comes up now knows the new authority alone; the producer finds it.
        consumer.close()
        consumer = bench.consumer()
        bench.connect(consumer, producer)
        post_some()
        assert [slot.sequence for slot in taken if slot.producer and slot.producer.index == 0] == [*range(len(taken))]
        assert bench.balance().unsettled == 0
    finally:
        bench.close()


def test_every_request_is_answered_once_while_certificates_are_replaced(rotation: Rotation) -> None:
    bench = InferenceBench(TlsInferenceTransport())
    try:
        server, client = bench.server(), bench.client()
        stop = threading.Event()
        serving = threading.Thread(target=serve, args=(server, stop))
        serving.start()
        try:
            values = iter(range(1000))

            def ask_some(asker: DrivenClient) -> None:
                asked = [(value, asker.submit(request(value))) for value in islice(values, 5)]
                for value, future in asked:
                    assert answer_of(future.result(DEADLINE_SECONDS)) == value

            ask_some(client)
            for number, _ in enumerate(rotation.steps(), 1):
                ask_some(client)
                ask_some(bench.client(home=number))
        finally:
            stop.set()
            serving.join(DEADLINE_SECONDS)
    finally:
        bench.close()
