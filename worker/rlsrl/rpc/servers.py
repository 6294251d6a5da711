"""The server's end of a gRPC connection: settings, and the token checked before anything else."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from rlsrl.rpc.auth import token_matches
from rlsrl.rpc.channels import AUTHORIZATION
from rlsrl.rpc.settings import ChannelOptions, shared_options, validate_address
from rlsrl.rpc.tls import Tls

MAX_CONNECTIONS = 16_384
"""Connections that a server holds at most: for each of 4096 workers two that stand and some that come and go."""
HANDSHAKE_SECONDS = 10.0
"""How long a connection may take until it speaks HTTP/2, TLS included."""
IDLE_SECONDS = 30.0
"""How long a connection without a call is held."""
MAX_STREAMS = 64
"""Calls of one connection at a time; more wait at the client. Ours make one."""


class AddressTaken(OSError):
    """Another process serves that address."""


def new_server(
    token: str, *, max_calls: int | None = None, on_unauthenticated: Callable[[], None] = lambda: None
) -> aio.Server:
    """A server in the running event loop that answers UNAUTHENTICATED to every call without the token.

    ``on_unauthenticated`` is called for each of those; calls beyond ``max_calls`` at once get RESOURCE_EXHAUSTED.
    """
    return aio.server(
        interceptors=[TokenInterceptor(token, on_unauthenticated)],
        options=_options(),
        maximum_concurrent_rpcs=max_calls,
    )


def bind(server: aio.Server, address: str, tls: Tls | None = None) -> str:
    """Listen on ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free one. Returns the address bound.

    With ``tls`` only clients with a certificate of its authorities get as far as showing a token.

    Raises:
        AddressTaken: somebody else listens there.
        ValueError: the address has neither form.
    """
    validate_address(address)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise AddressTaken(f"cannot listen on {address}: is another process of this run alive?") from error
    host, _, _ = address.rpartition(":")
    return address if address.startswith("unix-abstract:") else f"{host}:{port}"


class TokenInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses calls that do not show the token, before their method is looked up or a message is read."""

    def __init__(self, token: str, on_unauthenticated: Callable[[], None]) -> None:
        self._token = token
        self._on_unauthenticated = on_unauthenticated

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == AUTHORIZATION]
        if len(shown) == 1 and isinstance(shown[0], str):
            scheme, _, token = shown[0].partition(" ")
            if scheme == "Bearer" and token_matches(token, self._token):
                return await continuation(handler_call_details)
        self._on_unauthenticated()
        return _REFUSAL


async def _refuse(requests: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> Any:  # noqa: ARG001
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call shows no token, or not this experiment's")


_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)
"""A stream on both sides, so that it answers at once whatever the method is: it waits for no message."""


def _options() -> ChannelOptions:
    return [
        *shared_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # A client that probes often, as ours do, is no attacker.
        ("grpc.http2.max_ping_strikes", 0),
        # Two servers on one port would each get half of the workers.
        ("grpc.so_reuseport", 0),
        # Strangers get as far as here without a token. Half of the files are left to those who have one.
        (
            "grpc.max_allowed_incoming_connections",
            min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        ),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_SECONDS)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]
