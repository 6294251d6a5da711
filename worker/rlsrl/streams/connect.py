"""Which transport an endpoint is of, by its form: an address of gRPC has a colon, a name in shared memory has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlsrl.rpc.tls import Tls
from rlsrl.streams.grpc_samples import GrpcSampleConsumer, GrpcSampleProducer
from rlsrl.streams.shared_memory import SharedMemoryConsumer, SharedMemoryProducer


def producer_for(
    endpoint: str, *, find: Callable[[str], str | None], tls: Tls | None
) -> Callable[..., SharedMemoryProducer | GrpcSampleProducer]:
    """Makes the end that fills slots: ``unix-abstract:NAME``, ``HOST:PORT`` and ``roster:ROLE/INDEX`` are reached by
    gRPC, wherever ``find`` says that they are, with the certificates of ``tls``, if there are any."""
    return partial(GrpcSampleProducer, find=find, tls=tls) if ":" in endpoint else SharedMemoryProducer


def consumer_for(
    endpoint: str, *, tls: Tls | None, on_unauthenticated: Callable[[], None]
) -> Callable[..., SharedMemoryConsumer | GrpcSampleConsumer]:
    """Makes the end that grants; see ``producer_for``. ``on_unauthenticated`` hears of each call without the token."""
    return (
        partial(GrpcSampleConsumer, tls=tls, on_unauthenticated=on_unauthenticated)
        if ":" in endpoint
        else SharedMemoryConsumer
    )
