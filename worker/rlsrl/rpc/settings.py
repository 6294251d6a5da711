"""Addresses, message limits and liveness settings that both ends of a gRPC connection share."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A longer message is refused at either end; gRPC's own receive limit of 4 MiB is too short for weights."""

KEEPALIVE_SECONDS = 2.0
"""A silent connection is probed this often."""
PEER_TIMEOUT_SECONDS = 5.0
"""A peer that leaves a probe unanswered this long is gone. Probes are answered below Python, so a long GIL hold or a
busy training thread does not look like death; a stopped process or a cut network does."""

ChannelOptions = list[tuple[str, int | str]]
"""gRPC's channel arguments."""


def shared_options() -> ChannelOptions:
    """What both ends set.

    ``grpc.http2.ping_timeout_ms`` is what makes keepalive see a frozen peer: without it a connection with data in
    flight stays up for about a minute, whatever the keepalive timeout says.
    """
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", round(PEER_TIMEOUT_SECONDS * 1000)),
        ("grpc.http2.ping_timeout_ms", round(PEER_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Of gRPC's message encodings the plain one alone: none of ours is compressed, and nobody can send a bomb.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def validate_address(address: str) -> str:
    """The address itself, if it is ``unix-abstract:NAME`` or ``HOST:PORT``.

    Raises:
        ValueError: it is neither; the text shows both forms.
    """
    scheme, colon, name = address.partition(":")
    if scheme == "unix-abstract" and name:
        return address
    host, colon, port = address.rpartition(":")
    if host and colon and port.isascii() and port.isdigit() and int(port) <= 65535 and not host.startswith("unix"):
        return address
    raise ValueError(f"address {address!r} is neither unix-abstract:NAME nor HOST:PORT")
