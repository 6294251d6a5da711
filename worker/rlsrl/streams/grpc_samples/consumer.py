"""The consumer: the event loop's thread moves messages, and the thread that calls ``receive`` decides.

Messages wait in an inbox until ``receive`` is called. The in-process test double shares this ``InboxConsumer``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import ConversationServer, ServerStream
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.streams.consumer_core import (
    CHECKS_PER_TIMEOUT,
    ConsumerMessage,
    ConsumerOptions,
    CoreConsumer,
    InvalidMessage,
    Post,
    ProducerConnection,
    ProducerMessage,
)
from rlsrl.streams.credits import Credit
from rlsrl.streams.grpc_samples import wire
from rlsrl.streams.grpc_samples.wire import SampleMessageKind
from rlsrl.streams.handshake import PeerRefused, Welcome, refusal_to_json

MAX_CONNECTIONS = 320
"""Open connections, admitted or not. Further calls are refused."""

HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""How long a connection may take to send its hello."""


class InboxConsumer(CoreConsumer):
    """A ``SampleConsumer`` whose transport calls ``deliver`` for each message.

    Connections, dead producers and time-outs are handled only inside ``receive``: call it in a loop.
    """

    def __init__(self, options: ConsumerOptions, *, changed: threading.Condition) -> None:
        """``changed`` guards the consumer. It is notified of each message and of ``close``."""
        super().__init__(options, changed)
        self._changed = changed
        self._inbox: deque[tuple[ProducerConnection, ProducerMessage]] = deque()

    @override
    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        """Return filled slots; see ``SampleConsumer.receive``. A message, ``close`` or the timeout ends the wait.

        After ``close`` it still returns the slots that were acknowledged before.
        """
        deadline = self._now() + timeout
        with self._changed:
            while not self._closed:
                self._serve()
                if self._core.has_arrivals or (now := self._now()) >= deadline:
                    break
                self._changed.wait(max(0.0, min(deadline, self._core.next_duty) - now))
            return self._core.hand_out(max_items)

    def _serve(self) -> None:
        """Handle the messages that have arrived and do what is due. The lock is held."""
        while self._inbox:
            connection, message = self._inbox.popleft()
            self._core.handle(connection, message)
        self._core.attend(self._now())
        self._core.issue()

    def deliver(self, connection: ProducerConnection, message: ProducerMessage) -> None:
        """Put a message into the inbox. Messages of an ended connection are ignored. Any thread may call it."""
        with self._changed:
            if not connection.has_ended:
                self._inbox.append((connection, message))
                self._changed.notify_all()

    @override
    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for connection, _ in self._inbox:
                connection.has_ended = True
            self._core.close()
            self._changed.notify_all()


class GrpcSampleConsumer(InboxConsumer):
    """Serves producers over gRPC. The arrays of its slots are read-only.

    Connections, dead producers and time-outs are handled only inside ``receive``: call it in a loop. Between calls only
    a few messages of each producer are held.
    """

    def __init__(
        self,
        address: str,
        options: ConsumerOptions,
        *,
        tls: Tls | None = None,
        on_unauthenticated: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free port.

        With ``tls``, producers must have certificates, too. ``on_unauthenticated`` is called on the event loop for each
        call without the token, which ``counters`` has as ``refused_token``. gRPC itself refuses messages over 64 MiB
        and ends the connection, which ``counters`` has as ``dismissed`` or ``gone``.

        Raises:
            AddressTaken: another process listens there.
            ValueError: the address has neither form.
        """
        super().__init__(options, changed=threading.Condition())
        # Twice between two checks, so that one late message does not count as silence.
        self._show_life_within = options.peer_timeout / CHECKS_PER_TIMEOUT / 2
        self._on_unauthenticated = on_unauthenticated
        self._server = ConversationServer(
            address,
            token=options.token,
            tls=tls,
            method=wire.METHOD,
            converse=self._converse,
            max_conversations=MAX_CONNECTIONS,
            on_unauthenticated=self._count_unauthenticated,
        )

    @property
    def address(self) -> str:
        """Where producers connect, with the port that was taken."""
        return self._server.address

    @property
    def touches(self) -> Mapping[ProducerId, int]:
        """The last ``GrpcSampleProducer.touches`` that arrived from each connected producer."""
        with self._lock:
            return self._core.progress

    @override
    def close(self) -> None:
        """Stop serving. Producers see the end of their connection and look for the next consumer.

        Takes up to a second if a producer does not end its call. Idempotent. Not for use in a signal handler.
        """
        super().close()
        self._server.close()

    # What follows runs on the event loop.

    def _count_unauthenticated(self) -> None:
        self._on_unauthenticated()
        with self._lock:
            self._core.count_refusal(PeerRefused("token", "a call without this experiment's token"))

    async def _converse(self, stream: ServerStream) -> None:
        """Deliver a producer's messages, from its hello to the end of its stream."""
        connection = _GrpcConnection(self._server, stream, self._show_life_within)
        loop = asyncio.get_running_loop()
        timeout = loop.call_later(HANDSHAKE_TIMEOUT_SECONDS, stream.end, "no hello came in time")
        try:
            while (raw := await stream.read()) is not None:
                timeout.cancel()
                if self._deliver_raw(connection, raw):
                    await stream.wait_for_window()
        finally:
            timeout.cancel()
            self.deliver(connection, None)

    def _deliver_raw(self, connection: _GrpcConnection, raw: bytes) -> bool:
        """Deliver one message; return whether the core will answer it."""
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
                raise Malformed(f"a {message.kind.name} from a producer; allowed are HELLO, POST and ALIVE")
        except Malformed as error:
            self.deliver(connection, InvalidMessage(str(error)))
        return True


class _GrpcConnection(ProducerConnection):
    """A producer's call. The event loop sets ``touches``; everything else belongs to the thread of ``receive``."""

    def __init__(self, server: ConversationServer, stream: ServerStream, show_life_within: float) -> None:
        super().__init__()
        self.touches = 0
        self._server = server
        self._stream = stream
        self._show_life_within = show_life_within
        self._layout: SlotLayout | None = None

    @override
    def allocate(self, layout: SlotLayout, num_slots: int) -> None:
        # Nothing to allocate: each post brings its own memory.
        try:
            wire.check_fits(layout)
        except ConfigurationError as error:
            raise PeerRefused("capacity", str(error)) from error
        self._layout = layout

    @override
    def check_body(self, post: Post) -> None:
        assert self._layout is not None, "admitted"
        nbytes = 0 if post.body is None else post.body.nbytes
        if nbytes != self._layout.nbytes:
            raise ValueError(f"a body of {nbytes} bytes; a slot has {self._layout.nbytes}")

    @override
    def arrays(self, post: Post) -> dict[str, NDArray[Any]]:
        assert self._layout is not None, "admitted"
        return self._layout.view(post.body)

    @property
    @override
    def progress(self) -> int:
        return self.touches

    @override
    def send(self, message: ConsumerMessage) -> None:
        # A credit answers no message of the producer; everything else answers one.
        self._server.send([(self._stream, self._encoded(message))], answers=int(not isinstance(message, Credit)))

    def _encoded(self, message: ConsumerMessage) -> bytes:
        if isinstance(message, Credit):
            return wire.note(SampleMessageKind.CREDIT, message.slot, message.order, *message.min_version)
        if isinstance(message, Welcome):
            milliseconds = round(1000 * self._show_life_within)
            return wire.handshake(SampleMessageKind.WELCOME, message.to_json(), milliseconds)
        if isinstance(message, PeerRefused):
            return wire.handshake(SampleMessageKind.REFUSED, refusal_to_json(message))
        return wire.note(SampleMessageKind.ACK, message)

    @override
    def hang_up(self, reason: str) -> None:
        self._server.end(self._stream, reason)
