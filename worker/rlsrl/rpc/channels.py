"""The client's end of a gRPC connection: open a channel, end a call. Every call carries the token as metadata.

gRPC leaks a call that was cancelled but not read to its end. ``end_call`` and ``end_aio_call`` do both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from grpc import aio

from rlsrl.rpc.settings import ChannelOptions, shared_options, validate_address
from rlsrl.rpc.tls import Tls

AUTHORIZATION = "authorization"
"""Metadata key of the token. The value is ``Bearer TOKEN``."""

END_SECONDS = 5.0
"""How long a cancelled call may take to end. It only has to return from gRPC's core."""

RESOLVE_SECONDS = 4.0
"""How long one attempt to resolve a host name may take: two queries, 2 s apart."""

_FINAL_CODES = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED})
"""Status codes that another attempt cannot change."""

CallMetadata = tuple[tuple[str, str], ...]
"""Metadata of a call."""


@dataclass(frozen=True, kw_only=True)
class CallTarget:
    """Where a call goes, and how the client identifies itself there."""

    address: str
    """``unix-abstract:NAME`` or ``HOST:PORT``."""
    token: str = field(repr=False)
    """The experiment's token."""
    tls: Tls | None = None
    """Certificates, for servers that require them."""


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


def is_final(error: BaseException | None) -> bool:
    """Return whether a call ended with a status that another attempt cannot change."""
    # A call's RpcError is also the call.
    return isinstance(error, grpc.RpcError) and cast("grpc.Call", error).code() in _FINAL_CODES


def end_call(call: grpc.CallIterator[Any]) -> None:
    """Cancel a call, unless it has ended, and read it to its end."""
    cancel_call(call)
    with contextlib.suppress(grpc.RpcError):
        deque(call, maxlen=0)


async def end_aio_call(call: Any) -> None:
    """End a call as ``end_call`` does, on the event loop."""
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
        async for _ in call:
            pass


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
        # By default gRPC repeats a DNS query for 13 s, from the same port. If connection tracking leads that port to a
        # DNS pod that is gone, as after a drain, all repetitions are lost. A new attempt has a new port.
        ("grpc.dns_ares_query_timeout", round(1000 * RESOLVE_SECONDS)),
        # Channels of one process must not share a connection: closing one channel would not close the connection.
        ("grpc.use_local_subchannel_pool", 1),
        # Callers retry. gRPC's own retries were seen to leave a call without a connection forever, in one of a thousand
        # calls that reached a closing server.
        ("grpc.enable_retries", 0),
    ]
