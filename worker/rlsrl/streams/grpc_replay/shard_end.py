"""The shard's end: a call to its rank, made and repaired inside ``attend``. Its own thread answers the rank."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import grpc
import structlog

from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.channels import CallTarget, is_final
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.conversations import Conversation
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.coordination import describe
from rlsrl.streams.grpc_replay.messages import (
    FROM_RANK,
    METHOD,
    Alive,
    RankWelcome,
    ReplayCodec,
    ReplayMessage,
    ShardHello,
)
from rlsrl.streams.protocols import HandshakeRefused, StreamError

LEAVE_SECONDS = 1.0
"""How long a closing shard waits until its messages have reached the rank."""

_log = structlog.get_logger(__name__)


class ShardConnection:
    """Connects a shard with its rank. One thread calls ``attend``, ``send`` and ``close``."""

    def __init__(
        self,
        endpoint: str,
        codec: ReplayCodec,
        *,
        token: str,
        tls: Tls | None = None,
        find: Callable[[str], str | None] = str,
        hello: Callable[[], ShardHello],
        answers: Callable[[ReplayMessage], Iterable[ReplayMessage]],
        clock: Clock | None = None,
    ) -> None:
        """Prepare to connect.

        Args:
            endpoint: The rank's.
            codec: The stream's messages.
            token: The experiment's token.
            tls: Certificates, if the rank requires them.
            find: Returns the present address of an endpoint, or None without one.
            hello: Returns the first message of a connection. The thread of ``attend`` calls it.
            answers: Returns the answers to a message of the rank. Another thread calls it, one call at a time.
            clock: For retries and signs of life.
        """
        self._endpoint = endpoint
        self._codec = codec
        self._token = token
        self._tls = tls
        self._find = find
        self._hello = hello
        self._answers = answers
        self._now = (clock or SystemClock()).monotonic
        self._back_off = BackOff()
        self._retries_at = -math.inf
        self._shows_life_at = math.inf
        self._show_life_seconds: float | None = None
        """None until the rank has answered."""
        self._lock = threading.Lock()
        """Guards what follows, which both threads use."""
        self._conversation: Conversation | None = None
        self._has_ended = False
        self._error: Exception | None = None
        """That ended the call."""

    @property
    def is_connected(self) -> bool:
        """Whether the rank has answered the hello, as far as is known."""
        return self._conversation is not None and not self._has_ended and self._show_life_seconds is not None

    def attend(self) -> None:
        """Connect if that is due, else show life if that is. Call it often.

        Raises:
            HandshakeRefused: the rank refuses the token, or serves nothing like this.
            StreamError: a message of the rank is invalid, or answering it failed.
        """
        if self._has_ended:
            self._forget_call()
        if self._conversation is None:
            if self._now() >= self._retries_at:
                self._connect()
        elif (seconds := self._show_life_seconds) is not None and self._now() >= self._shows_life_at:
            self._shows_life_at = self._now() + seconds
            self.send(Alive())

    def send(self, message: ReplayMessage) -> None:
        """Send a message. Without a connection it is discarded: the next hello says what has come of it."""
        if (conversation := self._conversation) is not None:
            conversation.send(self._codec.encode(message))

    def close(self) -> None:
        """End the call, after all messages were sent. Idempotent."""
        if (conversation := self._conversation) is not None:
            conversation.close(LEAVE_SECONDS)
            self._conversation = None

    def _connect(self) -> None:
        self._retries_at = self._now() + self._back_off.next_delay()
        if (address := self._find(self._endpoint)) is None:
            return
        self._show_life_seconds, self._shows_life_at = None, -math.inf
        first = self._codec.encode(self._hello())
        with self._lock:  # the first message may come before the constructor has returned
            self._conversation = Conversation(
                CallTarget(address=address, token=self._token, tls=self._tls),
                METHOD,
                first=first,
                on_message=self._answer,
                on_end=self._note_end,
            )

    def _forget_call(self) -> None:
        conversation, error = self._conversation, self._error
        self._conversation, self._error, self._has_ended = None, None, False
        if conversation is not None:
            conversation.close()
        if isinstance(error, grpc.RpcError):
            if is_final(error):
                raise HandshakeRefused(f"replay stream {self._endpoint}: refused: {describe(error)}") from error
            _log.info("rank_gone", endpoint=self._endpoint, reason=describe(error))
        elif error is not None:
            raise StreamError(f"replay stream {self._endpoint}: {error}") from error

    # What follows runs in the conversation's thread.

    def _answer(self, raw: bytes) -> None:
        with self._lock:
            conversation = self._conversation
        message = self._codec.decode(raw, FROM_RANK)
        if isinstance(message, RankWelcome):
            if not message.show_life_seconds > 0:
                raise Malformed(f"show_life_seconds is {message.show_life_seconds}; allowed: above 0")
            self._show_life_seconds = message.show_life_seconds
            self._back_off.reset()
        assert conversation is not None, "set before its first message"
        for answer in self._answers(message):
            conversation.send(self._codec.encode(answer))

    def _note_end(self, error: Exception | None) -> None:
        self._error = error
        self._has_ended = True
