"""Endpoints find their transport."""

from __future__ import annotations

from functools import partial

import pytest

from rlsrl.streams.connect import consumer_for, producer_for
from rlsrl.streams.grpc_samples import GrpcSampleConsumer, GrpcSampleProducer
from rlsrl.streams.shared_memory import SharedMemoryConsumer, SharedMemoryProducer


@pytest.mark.parametrize(
    ("endpoint", "producer", "consumer"),
    [
        ("rlsrl-0123-samples-trainer-0", SharedMemoryProducer, SharedMemoryConsumer),
        ("unix-abstract:rlsrl-0123-samples-trainer-0", GrpcSampleProducer, GrpcSampleConsumer),
        ("10.0.0.1:7001", GrpcSampleProducer, GrpcSampleConsumer),
        ("roster:trainer/0", GrpcSampleProducer, GrpcSampleConsumer),
    ],
)
def test_the_form_of_an_endpoint_is_its_transport(endpoint: str, producer: type, consumer: type) -> None:
    for made, wanted in (
        (producer_for(endpoint, find=str, tls=None), producer),
        (consumer_for(endpoint, tls=None, on_unauthenticated=lambda: None), consumer),
    ):
        assert made is wanted or (isinstance(made, partial) and made.func is wanted)
