"""The server: one thread runs the event loop, and the owner's threads take batches and answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import structlog
from typing_extensions import override

from rlsrl.data.inference import InferenceLayout
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import ControlMessages, ConversationServer, ServerStream
from rlsrl.rpc.tls import Tls
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.wire import InferenceMessageKind, LaneMessages
from rlsrl.streams.handshake import PeerRefused
from rlsrl.streams.inference import Answers, InferenceBatch, InferenceServer, OnArrival, PendingRequest, RequestQueue

HEARTBEAT_SECONDS = 1.0
"""How often the server shows each client that its event loop runs."""

_log = structlog.get_logger(__name__)


class GrpcInferenceServer(InferenceServer):
    """Serves clients over gRPC."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        layout: InferenceLayout,
        on_refused: Callable[[str], None],
        on_unauthenticated: Callable[[], None] = lambda: None,
        tls: Tls | None = None,
    ) -> None:
        """Serve ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free port.

        Args:
            address: where to listen.
            token: the experiment's token. Clients must show it.
            layout: of requests and results. A client with another layout is refused.
            on_refused: called in the server's thread for each refused client, with the kind: ``layout``, ``protocol``
                or ``malformed``. gRPC itself refuses messages over 64 MiB.
            on_unauthenticated: called in the server's thread for each call without the token.
            tls: certificates. With them, clients must have certificates, too.

        Raises:
            AddressTaken: another process listens there.
            ValueError: the address has neither form.
        """
        self._layout = layout
        self._on_refused = on_refused
        self._messages = LaneMessages(layout)
        self._queue = RequestQueue()
        self._on_arrival: OnArrival | None = None
        self._is_call_planned = False
        """Whether ``_on_arrival`` will be called after the requests that have arrived are queued."""
        self._server = ConversationServer(
            address,
            token=token,
            tls=tls,
            method=wire.METHOD,
            converse=self._converse,
            on_unauthenticated=on_unauthenticated,
            control=ControlMessages(
                farewell=wire.note(InferenceMessageKind.LEAVING),
                heartbeat=wire.note(InferenceMessageKind.ALIVE),
                heartbeat_seconds=HEARTBEAT_SECONDS,
            ),
        )

    @property
    def address(self) -> str:
        """Where clients connect, with the port that was taken."""
        return self._server.address

    @override
    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        return self._queue.next_batch(max_size, timeout, self._deliver)

    @override
    def call_on_arrival(self, take: Callable[[], None] | None, afterwards: Callable[[], None] = lambda: None) -> None:
        """Register callbacks; see ``InferenceServer.call_on_arrival``. They run in the event loop's thread."""
        self._on_arrival = None if take is None else OnArrival(take, afterwards)

    @override
    def wake(self) -> None:
        self._queue.wake()
        self._server.run_on_loop(self._plan_call)

    @override
    def close(self) -> None:
        """Stop serving; see ``InferenceServer.close``. Earlier answers are still sent, which takes up to a second."""
        self._queue.close()
        self._server.close()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a batch."""
        return len(self._queue)

    def _deliver(self, pending: Sequence[PendingRequest], answers: Answers) -> None:
        """Encode the answers in the caller's thread, and wake the event loop once for the whole batch."""
        if isinstance(answers, Exception):
            text = f"{type(answers).__name__}: {answers}"[:1000].encode()
            messages = [wire.note(InferenceMessageKind.FAILURE, text, number=request.number) for request in pending]
        else:
            pairs = zip(pending, answers, strict=True)
            messages = [self._messages.result(request.number, result) for request, result in pairs]
        clients = (cast("ServerStream", request.client) for request in pending)
        self._server.send(zip(clients, messages, strict=True), answers=1)

    async def _converse(self, client: ServerStream) -> None:
        """Serve one client from its hello to the end of its stream."""
        first = await client.read()
        if first is None:
            return
        try:
            hello = wire.read_hello(first, self._layout)
        except PeerRefused as refusal:
            client.send(self._refusal(refusal.kind, str(refusal)))
            return
        client.send(wire.note(InferenceMessageKind.WELCOME))
        try:
            await self._read_requests(client)
        except Malformed as error:
            client.send(self._refusal("malformed", str(error), name=hello.name))
        finally:
            self._queue.drop(client)

    async def _read_requests(self, client: ServerStream) -> None:
        while (message := await client.read()) is not None:
            header = wire.read(message)
            self._queue.put(client, header.number, self._messages.read_request(header))
            self._plan_call()
            await client.wait_for_window()

    def _plan_call(self) -> None:
        if self._on_arrival is not None and not self._is_call_planned:
            self._is_call_planned = True
            self._server.run_later(self._call)

    def _call(self) -> None:
        self._is_call_planned = False
        if (on_arrival := self._on_arrival) is not None:
            on_arrival.take()
            # The answers have just woken the writers, so this runs after them.
            self._server.run_later(on_arrival.afterwards)

    def _refusal(self, kind: str, text: str, name: str = "") -> bytes:
        """Count and log a refused client; return the message that refuses it."""
        _log.warning("client_refused", kind=kind, client=name, reason=text)
        self._on_refused(kind)
        return wire.note(InferenceMessageKind.REFUSED, text.encode())
