"""The end that answers: one thread runs grpc's event loop, the owner's threads take batches and answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import structlog

from rlsrl.data.inference import InferenceLayout
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import ConversationServer, ServerStream
from rlsrl.rpc.tls import Tls
from rlsrl.streams.grpc_inference import wire
from rlsrl.streams.grpc_inference.wire import InferenceMessageKind, LaneMessages
from rlsrl.streams.handshake import PeerRefused
from rlsrl.streams.inference import Answers, InferenceBatch, OnArrival, PendingRequest, RequestQueue

HEARTBEAT_SECONDS = 1.0
"""How often each client hears that the event loop turns."""

_log = structlog.get_logger(__name__)


class GrpcInferenceServer:
    """Serves clients over gRPC; implements ``InferenceServer``."""

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
        """Serve ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free one.

        Args:
            address: where to listen.
            token: what clients have to show.
            layout: what requests and results look like; clients of another layout are refused.
            on_refused: called, from the server's thread, with the kind of what was refused: ``layout``, ``protocol`` or
                ``malformed``. Messages over 64 MiB gRPC refuses before they get here.
            on_unauthenticated: called, from the server's thread, for each call without the token.
            tls: certificates, where clients have to have one too.

        Raises:
            AddressTaken: somebody else listens there.
            ValueError: the address has neither form.
        """
        self._layout = layout
        self._on_refused = on_refused
        self._messages = LaneMessages(layout)
        self._queue = RequestQueue()
        self._clients: set[ServerStream] = set()
        self._on_arrival: OnArrival | None = None
        self._is_due = False
        """Whether it will be called once all that has come was put into the queue."""
        self._server = ConversationServer(
            address,
            token=token,
            tls=tls,
            method=wire.METHOD,
            converse=self._converse,
            farewell=wire.note(InferenceMessageKind.LEAVING),
            on_unauthenticated=on_unauthenticated,
            heartbeat=(wire.note(InferenceMessageKind.ALIVE), HEARTBEAT_SECONDS),
        )

    @property
    def address(self) -> str:
        """Where clients find it; with the port that was taken."""
        return self._server.address

    def next_batch(self, max_size: int, timeout: float) -> InferenceBatch | None:
        """See ``InferenceServer.next_batch``."""
        return self._queue.next_batch(max_size, timeout, self._deliver)

    def call_on_arrival(self, take: Callable[[], None] | None, afterwards: Callable[[], None] = lambda: None) -> None:
        """See ``InferenceServer.call_on_arrival``; the thread is the event loop's."""
        self._on_arrival = None if take is None else OnArrival(take, afterwards)

    def wake(self) -> None:
        """See ``InferenceServer.wake``."""
        self._server.post(self._arrived)

    def close(self) -> None:
        """See ``InferenceServer.close``. Answers given before are sent; takes up to a second."""
        self._queue.close()
        self._server.close()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch to be taken."""
        return len(self._queue)

    @property
    def num_clients(self) -> int:
        """Clients that are connected."""
        return len(self._clients)

    def _deliver(self, pending: Sequence[PendingRequest], answers: Answers) -> None:
        """Encode in the caller's thread; one wake-up of the event loop for the whole batch."""
        if isinstance(answers, Exception):
            text = f"{type(answers).__name__}: {answers}"[:1000].encode()
            messages = [wire.note(InferenceMessageKind.FAILURE, text, number=each.number) for each in pending]
        else:
            pairs = zip(pending, answers, strict=True)
            messages = [self._messages.result(each.number, result) for each, result in pairs]
        clients = (cast("ServerStream", each.client) for each in pending)
        self._server.send(zip(clients, messages, strict=True), answers=1)

    async def _converse(self, client: ServerStream) -> None:
        """Serve one client from its hello to the end of its stream."""
        first = await client.read()
        if first is None:
            return
        try:
            hello = wire.judge_hello(first, self._layout)
        except PeerRefused as refusal:
            client.send(self._refusal(refusal.kind, str(refusal)))
            return
        client.send(wire.note(InferenceMessageKind.WELCOME))
        self._clients.add(client)
        try:
            await self._read_requests(client)
        except Malformed as error:
            client.send(self._refusal("malformed", str(error), name=hello.name))
        finally:
            self._clients.discard(client)
            self._queue.drop(client)

    async def _read_requests(self, client: ServerStream) -> None:
        while (message := await client.read()) is not None:
            header = wire.read(message)
            self._queue.put(client, header.number, self._messages.read_request(header))
            self._arrived()
            await client.wait_for_window()

    def _arrived(self) -> None:
        if self._on_arrival is not None and not self._is_due:
            self._is_due = True
            self._server.soon(self._call)

    def _call(self) -> None:
        self._is_due = False
        if (on_arrival := self._on_arrival) is not None:
            on_arrival.take()
            self._server.soon(on_arrival.afterwards)  # behind the writers, whom the answers have just woken

    def _refusal(self, kind: str, text: str, name: str = "") -> bytes:
        _log.warning("client_refused", kind=kind, client=name, reason=text)
        self._on_refused(kind)
        return wire.note(InferenceMessageKind.REFUSED, text.encode())
