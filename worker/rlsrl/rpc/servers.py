"""The server's end of a gRPC connection: settings, and the check of the token before anything else."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
import structlog
from grpc import aio
from typing_extensions import override

from rlsrl.api.tokens import reading_token
from rlsrl.rpc.auth import token_matches
from rlsrl.rpc.channels import AUTHORIZATION
from rlsrl.rpc.settings import AddressTaken, ChannelOptions, shared_options, validate_address
from rlsrl.rpc.tls import Tls

MAX_CONNECTIONS = 16_384
"""Most connections of a server: two permanent ones and some short ones for each of 4096 workers."""
HANDSHAKE_SECONDS = 10.0
"""How long a connection may take until its HTTP/2 handshake is complete, including TLS."""
IDLE_SECONDS = 30.0
"""How long a connection without a call stays open."""
MAX_STREAMS = 64
"""Most concurrent calls of one connection; further calls wait at the client. Our clients make one."""


def new_server(
    token: str,
    *,
    reads: Collection[str] = (),
    max_calls: int | None = None,
    on_unauthenticated: Callable[[], None] = lambda: None,
) -> aio.Server:
    """Return a server in the running event loop that answers UNAUTHENTICATED to every call without the token.

    Each such call also calls ``on_unauthenticated``. More than ``max_calls`` concurrent calls get RESOURCE_EXHAUSTED.
    The ``reading_token`` is enough for the methods ``reads``, full names such as ``/package.Service/Method``.
    """
    return aio.server(
        interceptors=[TokenInterceptor(token, on_unauthenticated, reads=reads)],
        options=_options(),
        maximum_concurrent_rpcs=max_calls,
    )


def bind(server: aio.Server, address: str, tls: Tls | None = None) -> str:
    """Listen at ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 means any free port. Return the bound address.

    With ``tls``, only clients with a certificate of the trusted authorities can connect and send a token.

    Raises:
        AddressTaken: another process listens there.
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


LOG_SECONDS = 60.0
"""Least time between two log lines about refused calls of one server."""


class TokenInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses calls without the token, before the server looks up the method or reads a message."""

    def __init__(self, token: str, on_unauthenticated: Callable[[], None], *, reads: Collection[str] = ()) -> None:
        self._token = token
        self._reading_token = reading_token(token)
        self._reads = frozenset(reads)
        self._on_unauthenticated = on_unauthenticated
        self._refusals = _RefusalLog()

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Continue the call, or answer UNAUTHENTICATED."""
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == AUTHORIZATION]
        if len(shown) == 1 and isinstance(shown[0], str):
            scheme, _, token = shown[0].partition(" ")
            if scheme == "Bearer" and self._allows(token, handler_call_details.method):
                return await continuation(handler_call_details)
        self._on_unauthenticated()
        reason = "it has another token" if shown else "it has no token"
        return self._refusals.handler(handler_call_details.method, reason)

    def _allows(self, token: str, method: str) -> bool:
        if token_matches(token, self._token):
            return True
        return method in self._reads and token_matches(token, self._reading_token)


class _RefusalLog:
    """Logs refused calls: at most one line in ``LOG_SECONDS``, because any client in the network can call."""

    def __init__(self) -> None:
        self._log = structlog.stdlib.get_logger("rpc")
        self._next_at = -math.inf
        self._unlogged = 0

    def handler(self, method: str, reason: str) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that refuses a call of any method at once, without waiting for a message."""

        async def refuse(requests: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> Any:  # noqa: ARG001
            self._note(method, reason, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call has no token, or not this experiment's")

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _note(self, method: str, reason: str, peer: str) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._unlogged += 1
            return
        self._log.warning("call_refused", peer=peer, method=method, reason=reason, unlogged_before=self._unlogged)
        self._next_at, self._unlogged = now + LOG_SECONDS, 0


def _options() -> ChannelOptions:
    return [
        *shared_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # Our clients probe often; this is not an attack.
        ("grpc.http2.max_ping_strikes", 0),
        # Two servers on one port would each get half of the workers.
        ("grpc.so_reuseport", 0),
        # Clients without a token can connect, too. Half of the file descriptors stay free for other uses.
        (
            "grpc.max_allowed_incoming_connections",
            min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        ),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_SECONDS)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]
