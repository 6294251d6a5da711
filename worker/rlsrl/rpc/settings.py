"""Addresses, message limits and keepalive settings of both ends of a gRPC connection."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Longest message that both ends accept. gRPC's default limit of 4 MiB is too short for weights."""

KEEPALIVE_SECONDS = 2.0
"""Interval of the probes on a silent connection."""
PEER_TIMEOUT_SECONDS = 5.0
"""A peer that does not answer a probe for this long counts as dead. gRPC's core answers probes without Python, so a
busy training thread or a held GIL does not look like death. A stopped process or a cut network does."""


class AddressTaken(OSError):
    """Another process listens at that address, or no port is free."""


ChannelOptions = list[tuple[str, int | str]]
"""gRPC's channel arguments."""


def shared_options() -> ChannelOptions:
    """Return the options of both ends.

    Keepalive needs ``grpc.http2.ping_timeout_ms`` to detect a frozen peer. Without it, a connection with data in
    transit stays open for about a minute, whatever the keepalive timeout is.
    """
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", round(PEER_TIMEOUT_SECONDS * 1000)),
        ("grpc.http2.ping_timeout_ms", round(PEER_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Allow uncompressed messages only: ours are never compressed, and no client can send a decompression bomb.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def validate_address(address: str) -> str:
    """Return the address, after a check that it is ``unix-abstract:NAME`` or ``HOST:PORT``.

    Raises:
        ValueError: the address has neither form; the text shows both.
    """
    scheme, colon, name = address.partition(":")
    if scheme == "unix-abstract" and name:
        return address
    host, colon, port = address.rpartition(":")
    if host and colon and port.isascii() and port.isdigit() and int(port) <= 65535 and not host.startswith("unix"):
        return address
    raise ValueError(f"address {address!r} is neither unix-abstract:NAME nor HOST:PORT")
