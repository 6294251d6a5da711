"""Make the end of a sample stream for an endpoint. An endpoint with a colon is gRPC, one without is shared memory."""

from __future__ import annotations

from collections.abc import Callable

from rlsrl.rpc.tls import Tls
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.grpc_samples.consumer import GrpcSampleConsumer
from rlsrl.streams.grpc_samples.producer import GrpcSampleProducer
from rlsrl.streams.producer_core import ProducerOptions
from rlsrl.streams.shared_memory.consumer import SharedMemoryConsumer
from rlsrl.streams.shared_memory.producer import SharedMemoryProducer


def open_sample_producer(
    endpoint: str, options: ProducerOptions, *, find: Callable[[str], str | None], tls: Tls | None
) -> SharedMemoryProducer | GrpcSampleProducer:
    """Return a producer for the consumer at ``endpoint``. It connects when it is used.

    ``find`` and ``tls`` are for gRPC: ``unix-abstract:NAME``, ``HOST:PORT`` or ``roster:ROLE/INDEX``. ``find`` returns
    the address that an endpoint has now.
    """
    if ":" in endpoint:
        return GrpcSampleProducer(endpoint, options, find=find, tls=tls)
    return SharedMemoryProducer(endpoint, options)


def open_sample_consumer(
    endpoint: str, options: ConsumerOptions, *, tls: Tls | None, on_unauthenticated: Callable[[], None]
) -> SharedMemoryConsumer | GrpcSampleConsumer:
    """Return a consumer that serves ``endpoint``.

    ``tls`` and ``on_unauthenticated`` are for gRPC; the latter is called for each call without the token.
    """
    if ":" in endpoint:
        return GrpcSampleConsumer(endpoint, options, tls=tls, on_unauthenticated=on_unauthenticated)
    return SharedMemoryConsumer(endpoint, options)
