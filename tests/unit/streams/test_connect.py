"""The form of an endpoint selects the transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import ActorLedger, LedgerPage, TrainerLedger
from rlsrl.streams.connect import open_sample_consumer, open_sample_producer
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.grpc_samples.consumer import GrpcSampleConsumer
from rlsrl.streams.grpc_samples.producer import GrpcSampleProducer
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.shared_memory.consumer import SharedMemoryConsumer
from rlsrl.streams.shared_memory.producer import SharedMemoryProducer
from rlsrl.testing.stream_bench import SharedMemoryTransport, TcpTransport, UnixTransport, small_layout

LAYOUT = small_layout()


@pytest.mark.parametrize(
    ("endpoint", "transport"),
    [
        ("rlsrl-0123-samples-trainer-0", SharedMemoryProducer),
        ("unix-abstract:rlsrl-0123-samples-trainer-0", GrpcSampleProducer),
        ("10.0.0.1:7001", GrpcSampleProducer),
        ("roster:trainer/0", GrpcSampleProducer),
    ],
)
def test_a_producers_endpoint_selects_its_transport(tmp_path: Path, endpoint: str, transport: type) -> None:
    with LedgerPage.open(tmp_path / "actor-0.page", "actor", 0) as page:
        options = ProducerOptions(token="t", layout=LAYOUT, producer_id=ProducerId(0, 0), ledger=ActorLedger(page))
        producer = open_sample_producer(endpoint, options, find=str, tls=None)
        assert type(producer) is transport
        producer.close()


@pytest.mark.parametrize(
    ("endpoint", "transport"),
    [
        (SharedMemoryTransport().new_address(), SharedMemoryConsumer),
        (UnixTransport().new_address(), GrpcSampleConsumer),
        (TcpTransport().new_address(), GrpcSampleConsumer),
    ],
    ids=["shared memory", "unix socket", "TCP"],
)
def test_a_consumers_endpoint_selects_its_transport(tmp_path: Path, endpoint: str, transport: type) -> None:
    with LedgerPage.open(tmp_path / "trainer-0.page", "trainer", 0) as page:
        options = ConsumerOptions(token="t", layout_digest=LAYOUT.step_digest, ledger=TrainerLedger(page))
        consumer = open_sample_consumer(endpoint, options, tls=None, on_unauthenticated=lambda: None)
        assert type(consumer) is transport
        consumer.close()
