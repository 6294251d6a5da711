"""The rank's end: a server for its shards. The event loop's thread moves messages, other threads take and send them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import ConversationServer, ServerStream
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.streams.grpc_replay.messages import FROM_SHARD, METHOD, Alive, ReplayCodec, ReplayMessage, ShardHello, Stored

MAX_CONNECTIONS = 320
"""Open connections, admitted or not. Further calls are refused."""
LIFE_SIGNS = 8
"""Messages of a live shard within the peer time-out, at least."""

_log = structlog.get_logger(__name__)


class _Connection:
    """The call of an admitted shard."""

    def __init__(self, stream: ServerStream, index: int, heard: float) -> None:
        self.stream = stream
        self.index = index
        self.heard = heard
        """When its last message came."""


class ShardServer:
    """Serves the shards of a rank. ``take`` returns their messages in order, each shard's hello first.

    Any thread may call any method.
    """

    def __init__(
        self,
        address: str,
        codec: ReplayCodec,
        *,
        shards: Iterable[int],
        lives: Mapping[int, int] | None = None,
        token: str,
        tls: Tls | None = None,
        peer_timeout: float,
        on_unauthenticated: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Serve ``unix-abstract:NAME`` or ``HOST:PORT``; port 0 takes a free port.

        Args:
            address: Where to listen.
            codec: The stream's messages.
            shards: The indices of the shards that are to connect.
            lives: By index, the newest life of each shard of which a former life of the rank heard; None: of no shard.
            token: The experiment's token. Shards must show it.
            tls: Certificates, if shards must have some, too.
            peer_timeout: Seconds of silence after which a shard counts as dead, also one that has never connected.
            on_unauthenticated: Called on the event loop for each call without the token.
            clock: For the silence.

        Raises:
            AddressTaken: another process listens there.
            ValueError: the address has neither form.
        """
        self.show_life_seconds = peer_timeout / LIFE_SIGNS
        """Longest time between two messages of a shard."""
        self._codec = codec
        self._peer_timeout = peer_timeout
        self._now = (clock or SystemClock()).monotonic
        self._began = self._now()
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._awaited = {*shards}
        """Those that have not connected, until they count as dead."""
        self._lives = dict(lives or {})
        """By the shard's index: its newest life that was heard."""
        self._connections: dict[int, _Connection] = {}
        """By the shard's index."""
        self._inbox: list[tuple[int, ReplayMessage | None]] = []
        self._closed = False
        self._server = ConversationServer(
            address,
            token=token,
            tls=tls,
            method=METHOD,
            converse=self._converse,
            max_conversations=MAX_CONNECTIONS,
            on_unauthenticated=on_unauthenticated,
        )
        self.address = self._server.address
        """Where shards connect, with the port that was taken."""

    def wait(self, timeout: float) -> None:
        """Wait for a message, ``close`` or the timeout (seconds). End the connections of silent shards first.

        Call it in a loop.
        """
        with self._changed:
            for connection in [*self._connections.values()]:
                if self._now() - connection.heard > self._peer_timeout:
                    self._end(connection, f"no message for {self._peer_timeout} s")
            if self._awaited and self._now() - self._began > self._peer_timeout:
                self._give_up_awaited()
            self._changed.wait_for(lambda: self._inbox or self._closed, timeout)

    def take(self) -> Sequence[tuple[int, ReplayMessage | None]]:
        """Return (index of the shard, message) of all that has come since the last call.

        None: its connection has ended, or it has not connected for ``peer_timeout`` seconds.
        """
        with self._changed:
            taken, self._inbox = self._inbox, []
            return taken

    def send(self, shard: int, message: ReplayMessage) -> None:
        """Send a message to the shard with that index. No effect if it is not connected."""
        with self._changed:
            connection = self._connections.get(shard)
        if connection is not None:
            self._server.send([(connection.stream, self._codec.encode(message))])

    def close(self) -> None:
        """Stop serving, after all messages were sent. Shards connect again, and find the next life. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close()

    def _end(self, connection: _Connection, reason: str) -> None:
        """End an admitted connection. The lock is held."""
        if self._connections.get(connection.index) is connection:
            del self._connections[connection.index]
            self._put(connection.index, None)
            _log.info("shard_gone", shard=connection.index, reason=reason)
        self._server.end(connection.stream, reason)

    def _give_up_awaited(self) -> None:
        """Report the shards that have not connected as dead. The lock is held."""
        for index in sorted(self._awaited):
            self._put(index, None)
            _log.warning("shard_away", shard=index, reason=f"no connection for {self._peer_timeout} s")
        self._awaited.clear()

    def _put(self, shard: int, message: ReplayMessage | None) -> None:
        self._inbox.append((shard, message))
        self._changed.notify_all()

    # What follows runs on the event loop.

    async def _converse(self, stream: ServerStream) -> None:
        connection: _Connection | None = None
        reason = "the call has ended"
        try:
            while (raw := await stream.read()) is not None:
                message = self._codec.decode(raw, FROM_SHARD)
                if connection is None:
                    connection = self._admitted(stream, message)
                else:
                    self._deliver(connection, message)
        except Malformed as error:
            reason = str(error)
            stream.end(reason)
            _log.warning("shard_refused", reason=reason)
        finally:
            if connection is not None:
                with self._changed:
                    self._end(connection, reason)

    def _admitted(self, stream: ServerStream, hello: ReplayMessage) -> _Connection:
        """Return the connection of a shard, in the place of an earlier one.

        A process on a node that was cut off may connect again after its successor: what it stored since counts nowhere.
        """
        if not isinstance(hello, ShardHello):
            raise Malformed(f"the first message is a {type(hello).__name__}; allowed: ShardHello")
        if hello.digest != self._codec.digest:
            raise Malformed(
                f"shard {hello.index} has rows or settings {hello.digest}, the rank has {self._codec.digest}: both "
                "must run the same spec and version"
            )
        with self._changed:
            if hello.life < (newest := self._lives.get(hello.index, hello.life)):
                raise Malformed(f"shard {hello.index} of life {hello.life} was succeeded by one of life {newest}")
            self._lives[hello.index] = hello.life
            if (former := self._connections.get(hello.index)) is not None:
                self._end(former, "the shard has connected again")
            self._awaited.discard(hello.index)
            connection = self._connections[hello.index] = _Connection(stream, hello.index, self._now())
            self._put(hello.index, hello)
        return connection

    def _deliver(self, connection: _Connection, message: ReplayMessage) -> None:
        if isinstance(message, ShardHello):
            raise Malformed("a second ShardHello")
        if isinstance(message, Stored):
            _ = message.episodes  # Malformed here ends the connection, and later the rank
        with self._changed:
            if self._connections.get(connection.index) is not connection:
                return
            connection.heard = self._now()
            if not isinstance(message, Alive):
                self._put(connection.index, message)
