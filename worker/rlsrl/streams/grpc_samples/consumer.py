"""The end that grants: an event loop's thread carries messages, the owner's thread decides in ``receive``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Self

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import ConversationServer, ServerStream
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.streams.consumer_core import LOOKS_PER_TIMEOUT
from rlsrl.streams.credits import Credit
from rlsrl.streams.grpc_samples import wire
from rlsrl.streams.grpc_samples.wire import SampleMessageKind
from rlsrl.streams.handshake import PeerRefused, Welcome, refusal_to_json
from rlsrl.streams.inbox import ConsumerMessage, InboxConsumer, InvalidMessage, Post, ProducerConnection
from rlsrl.streams.protocols import ConsumerLedger

MAX_CONNECTIONS = 320
"""Connections at once, of whatever state; more are turned away."""

HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""How long a connection may take to introduce itself."""


class GrpcSampleConsumer(InboxConsumer):
    """Serves producers over gRPC; implements ``SampleConsumer``. Slots' arrays are read-only.

    Nothing is decided by itself: connections, deaths and time-outs are dealt with in the thread that calls ``receive``,
    so call it again and again. Messages of producers that nobody receives wait, a few of each.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        layout_digest: str,
        ledger: ConsumerLedger,
        slots_per_producer: int = 2,
        peer_timeout: float = 10.0,
        expected_producers: int = 0,
        startup_timeout: float = 30.0,
        tls: Tls | None = None,
        on_unauthenticated: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Serve ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free one.

        With ``tls`` producers have to have certificates too. The other arguments are those of ``SharedMemoryConsumer``.
        ``counters`` has ``refused_token`` for calls without the token, of which ``on_unauthenticated`` hears; messages
        over 64 MiB gRPC itself refuses, and ends the connection: ``dismissed`` or ``gone``.

        Raises:
            AddressTaken: somebody else listens there.
            ValueError: an argument is out of range.
        """
        super().__init__(
            token=token,
            layout_digest=layout_digest,
            ledger=ledger,
            slots_per_producer=slots_per_producer,
            peer_timeout=peer_timeout,
            expected_producers=expected_producers,
            startup_timeout=startup_timeout,
            clock=clock,
            changed=threading.Condition(),
        )
        # Twice between two looks, so that one which is late is not taken for silence.
        self._show_life_within = peer_timeout / LOOKS_PER_TIMEOUT / 2
        self._on_unauthenticated = on_unauthenticated
        self._server = ConversationServer(
            address,
            token=token,
            tls=tls,
            method=wire.METHOD,
            converse=self._converse,
            max_conversations=MAX_CONNECTIONS,
            on_unauthenticated=self._count_unauthenticated,
        )

    @property
    def address(self) -> str:
        """Where producers find it; with the port that was taken."""
        return self._server.address

    @property
    def touches(self) -> Mapping[ProducerId, int]:
        """The last sign of life that came of each connected producer, as ``GrpcSampleProducer.touches`` counts."""
        with self._changed:
            return {self._core.producer_of(number): each.progress for number, each in self._connections.items()}

    def close(self) -> None:
        """See ``SampleConsumer.close``. Producers see the end of their connection and look for the next consumer.

        Takes up to a second where a producer does not leave. Not from a signal handler.
        """
        super().close()
        self._server.close()

    # What follows runs on the event loop.

    def _count_unauthenticated(self) -> None:
        self._on_unauthenticated()
        with self._changed:
            self._core.refused(PeerRefused("token", "a call showed no token, or not this experiment's"))

    async def _converse(self, stream: ServerStream) -> None:
        """Bring a producer's messages in, from its hello to the end of its stream."""
        connection = _GrpcConnection(self._server, stream, self._show_life_within)
        loop = asyncio.get_running_loop()
        patience = loop.call_later(HANDSHAKE_TIMEOUT_SECONDS, stream.end, "no introduction came in time")
        try:
            while (raw := await stream.read()) is not None:
                patience.cancel()
                if self._bring(connection, raw):
                    await stream.wait_for_window()
        finally:
            patience.cancel()
            self.deliver(connection, None)

    def _bring(self, connection: _GrpcConnection, raw: bytes) -> bool:
        """Take a message in; whether it is to be answered."""
        try:
            message = wire.read(raw)
            if message.kind is SampleMessageKind.ALIVE:
                connection.touches = message.words[0]
                return False
            if message.kind is SampleMessageKind.POST:
                self.deliver(connection, Post(*message.words, message.body))
            elif message.kind is SampleMessageKind.HELLO:
                self.deliver(connection, wire.read_handshake(message))
            else:
                raise Malformed(f"a {message.kind.name} came from a producer")
        except Malformed as error:
            self.deliver(connection, InvalidMessage(str(error)))
        return True


class _GrpcConnection(ProducerConnection):
    """A connection. ``touches`` is the event loop's, what ``ProducerConnection`` has the owner's thread's."""

    def __init__(self, server: ConversationServer, stream: ServerStream, show_life_within: float) -> None:
        super().__init__()
        self.touches = 0
        self._server = server
        self._stream = stream
        self._show_life_within = show_life_within
        self._layout: SlotLayout | None = None

    def allocate(self, layout: SlotLayout, num_slots: int) -> Self:
        """Messages bring their own memory."""
        try:
            wire.check_fits(layout)
        except ConfigurationError as error:
            raise PeerRefused("capacity", str(error)) from error
        self._layout = layout
        self.slots = [{} for _ in range(num_slots)]
        return self

    def fill(self, post: Post) -> None:
        assert self._layout is not None, "admitted before it is posted over"
        body = post.body
        if body is None or body.nbytes != self._layout.nbytes:
            raise ValueError(
                f"a body of {0 if body is None else body.nbytes} bytes, where {self._layout.nbytes} are due"
            )
        if 0 <= post.place < len(self.slots):  # otherwise no credit is found for it
            self.slots[post.place] = self._layout.view(body)

    def emptied(self, place: int) -> None:
        self.slots[place] = {}

    @property
    def progress(self) -> int:
        return self.touches

    def tell(self, answer: ConsumerMessage) -> None:
        solicited = not isinstance(answer, Credit)
        self._server.send([(self._stream, self._encoded(answer))], answers=int(solicited))

    def hang_up(self, reason: str) -> None:
        self._server.end(self._stream, reason)

    def _encoded(self, answer: ConsumerMessage) -> bytes:
        if isinstance(answer, Credit):
            return wire.note(SampleMessageKind.CREDIT, answer.slot, answer.order, *answer.min_version)
        if isinstance(answer, Welcome):
            return wire.handshake(SampleMessageKind.WELCOME, answer.to_json(), round(1000 * self._show_life_within))
        if isinstance(answer, PeerRefused):
            return wire.handshake(SampleMessageKind.REFUSED, refusal_to_json(answer))
        return wire.note(SampleMessageKind.ACK, answer)
