"""Endpoints find their transport."""

from __future__ import annotations

import pytest

from rlsrl.streams.connect import consumer_for, producer_for
from rlsrl.streams.grpc_samples import GrpcSampleConsumer, GrpcSampleProducer
from rlsrl.streams.shared_memory import SharedMemoryConsumer, SharedMemoryProducer


@pytest.mark.parametrize(
    ("endpoint", "producer", "consumer"),
    [
        ("rlsrl-0123-samples-trainer-0", SharedMemoryProducer, SharedMemoryConsumer),
        ("unix-abstract:rlsrl-0123-samples-trainer-0", GrpcSampleProducer, GrpcSampleConsumer),
        ("trainer-0.trainer:7001", GrpcSampleProducer, GrpcSampleConsumer),
    ],
)
def test_the_form_of_an_endpoint_is_its_transport(endpoint: str, producer: type, consumer: type) -> None:
    assert producer_for(endpoint) is producer
    assert consumer_for(endpoint) is consumer
