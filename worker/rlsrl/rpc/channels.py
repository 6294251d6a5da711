"""The client's end of a gRPC connection. Every call carries the token as metadata."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import grpc
from grpc import aio

from rlsrl.rpc.settings import ChannelOptions, shared_options, validate_address
from rlsrl.rpc.tls import Tls

AUTHORIZATION = "authorization"
"""Metadata key of the token. The value is ``Bearer TOKEN``."""

END_SECONDS = 5.0
"""How long a cancelled call may take to end. It only has to return from gRPC's core."""

CallMetadata = tuple[tuple[str, str], ...]
"""Metadata of a call."""


def token_metadata(token: str) -> CallMetadata:
    """Return the metadata that every call must carry."""
    return ((AUTHORIZATION, f"Bearer {token}"),)


def open_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel to ``unix-abstract:NAME`` or ``HOST:PORT``, at once. The caller must close it.

    The channel connects when a call needs it, and reconnects after an outage. Calls with ``wait_for_ready`` wait for
    the connection within their own deadline. A channel never changes its certificates: with ``tls``, open a new channel
    for each attempt.

    Raises:
        ValueError: the address has neither form.
    """
    if tls is None:
        return grpc.insecure_channel(validate_address(address), options=_options(tls))
    return grpc.secure_channel(validate_address(address), tls.channel_credentials(), options=_options(tls))


def open_aio_channel(address: str, tls: Tls | None = None) -> aio.Channel:
    """Return a channel as ``open_channel`` does, for the running event loop."""
    if tls is None:
        return aio.insecure_channel(validate_address(address), options=_options(tls))
    return aio.secure_channel(validate_address(address), tls.channel_credentials(), options=_options(tls))


def end_call(call: grpc.CallIterator[Any]) -> None:
    """Cancel a call and read it to its end. gRPC leaks a call whose messages are not all read."""
    cancel_call(call)
    with contextlib.suppress(grpc.RpcError):
        deque(call, maxlen=0)


def cancel_call(call: grpc.CallIterator[Any]) -> None:
    """Cancel a call: its reader gets an error. Any thread may call this."""
    call.cancel()  # type: ignore[no-untyped-call]  # untyped in the stubs


def _options(tls: Tls | None) -> ChannelOptions:
    return [
        *shared_options(),
        *([] if tls is None else [("grpc.ssl_target_name_override", tls.peer_name)]),
        # Attempts to connect start 0.1 s apart and slow down to 1 s: they lengthen an outage by about a second at most.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Despite its name, this is the deadline of ONE attempt to connect. The default of 20 s waits too long for a
        # frozen peer; a value as short as the back-off never succeeds on an overloaded machine.
        ("grpc.min_reconnect_backoff_ms", 2000),
        # Channels of one process must not share a connection: closing one channel would not close the connection.
        ("grpc.use_local_subchannel_pool", 1),
        # Callers retry. gRPC's own retries were seen to leave a call without a connection forever, in one of a thousand
        # calls that reached a closing server.
        ("grpc.enable_retries", 0),
    ]
