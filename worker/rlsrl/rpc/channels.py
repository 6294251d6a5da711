"""The client's end of a gRPC connection. Who shows the token: every call, as metadata."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import grpc
from grpc import aio

from rlsrl.rpc.settings import ChannelOptions, shared_options, validate_address
from rlsrl.rpc.tls import Tls

AUTHORIZATION = "authorization"
"""Metadata key of the token; its value is ``Bearer TOKEN``."""

Metadata = tuple[tuple[str, str], ...]
"""Call metadata."""


def token_metadata(token: str) -> Metadata:
    """What a call must carry to be served."""
    return ((AUTHORIZATION, f"Bearer {token}"),)


def open_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """A channel to ``unix-abstract:NAME`` or ``HOST:PORT``; it connects, and reconnects after any outage, by itself.

    Returns at once. The caller closes it. Calls made with ``wait_for_ready`` wait for the connection within their own
    deadline. A channel keeps the certificates that it was made with: with ``tls``, make one for each try.

    Raises:
        ValueError: the address has neither form.
    """
    if tls is None:
        return grpc.insecure_channel(validate_address(address), options=_options(tls))
    return grpc.secure_channel(validate_address(address), tls.channel_credentials(), options=_options(tls))


def open_aio_channel(address: str, tls: Tls | None = None) -> aio.Channel:
    """As ``open_channel``, for the event loop that runs."""
    if tls is None:
        return aio.insecure_channel(validate_address(address), options=_options(tls))
    return aio.secure_channel(validate_address(address), tls.channel_credentials(), options=_options(tls))


def end_call(call: grpc.CallIterator[Any]) -> None:
    """Cancel a call and read it to its end: one that is dropped half-read leaks."""
    cancel_call(call)
    with contextlib.suppress(grpc.RpcError):
        deque(call, maxlen=0)


def cancel_call(call: grpc.CallIterator[Any]) -> None:
    """Wake whoever reads the call; it ends for them with an error. From any thread."""
    call.cancel()  # type: ignore[no-untyped-call]  # so it is in the stubs


def _options(tls: Tls | None) -> ChannelOptions:
    return [
        *shared_options(),
        *([] if tls is None else [("grpc.ssl_target_name_override", tls.peer_name)]),
        # Tried again after 0.1 s, then ever slower up to 1 s: an outage costs at most about a second on top.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Despite its name this is the deadline of ONE attempt to connect; the default of 20 s hangs on a frozen peer,
        # and one as short as the back-off never gets through on a starved machine.
        ("grpc.min_reconnect_backoff_ms", 2000),
        # Channels in one process must not share a connection: closing one would not close it.
        ("grpc.use_local_subchannel_pool", 1),
        # Whoever calls tries again. gRPC's own tries were seen to leave a call on no connection for good, once in a
        # thousand that met a server as it closed.
        ("grpc.enable_retries", 0),
    ]
