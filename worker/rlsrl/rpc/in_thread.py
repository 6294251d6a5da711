"""The client's end of a conversation that has no thread: it goes on while its owner waits, and stands still otherwise.

``Conversation`` (``rlsrl.rpc.conversations``) hands every message from thread to thread, and each of them wants the
interpreter. Here the owner's own thread turns the event loop of grpc.aio for as long as it waits for something. Of what
comes meanwhile gRPC's core takes note, in a thread that never wants the interpreter: it answers pings and keeps
messages until they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from rlsrl.rpc.channels import Metadata, open_aio_channel
from rlsrl.rpc.tls import Tls

_of_thread = threading.local()


class WaitingLoop:
    """An event loop that turns only while its thread waits for it. Only that thread uses it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._turned = 0.0
        """Seconds, up to the last turn's end."""
        self._began: float | None = None
        """The present turn, on the loop's clock."""
        self._until = 0.0
        """When the present turn ends, or the last one would have."""
        self._alarm: asyncio.TimerHandle | None = None
        """Ends a turn. It outlives those that are stopped, which most are: one more each turn would cost as much as
        the rest of it."""

    @staticmethod
    def of_this_thread() -> WaitingLoop:
        """The thread's one: grpc keeps every loop that it has seen, so that each more would be kept for good."""
        loop: WaitingLoop | None = getattr(_of_thread, "loop", None)
        if loop is None:
            loop = _of_thread.loop = WaitingLoop()
        return loop

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have that done while the loop turns. The caller keeps the task."""
        return self._loop.create_task(work)

    def turn(self, seconds: float) -> None:
        """Turn for so long, or until ``stop``."""
        began = self._began = self._loop.time()
        self._until = began + seconds
        if self._alarm is None or self._alarm.when() > self._until:
            self._set_alarm()
        try:
            self._loop.run_forever()
        finally:
            self._began = None
            self._turned += self._loop.time() - began

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._until, self._ring)

    def _ring(self) -> None:
        """The alarm is due: the present turn is over, or has begun since it was set and has time left."""
        assert self._alarm is not None, "it rings"
        is_over = self._alarm.when() >= self._until
        self._alarm = None
        if is_over:
            self._loop.stop()
        else:
            self._set_alarm()

    def stop(self) -> None:
        """``turn`` ends once all that is ready now was dealt with; nothing happens if it does not turn."""
        if self._loop.is_running():
            self._loop.stop()

    def turned(self) -> float:
        """For how many seconds it has turned, ever: a clock that stands still while nobody can hear anything."""
        return self._turned if self._began is None else self._turned + self._loop.time() - self._began


class InThreadConversation:
    """One call over a channel of its own, from its first message until it is over; of its loop's thread."""

    def __init__(
        self,
        loop: WaitingLoop,
        address: str,
        method: str,
        *,
        metadata: Metadata,
        tls: Tls | None,
        first: bytes,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Connect and send the first message, as soon as the loop turns; otherwise as ``Conversation``.

        Args:
            loop: on which all of it happens, the callbacks too.
            address, method, metadata, tls, first, on_message: see there.
            on_end: see there; ``cancel``, too, ends it with None. gRPC says INTERNAL in place of the server's own
                status where a message was on its way: whoever tries again is told sooner or later.
        """
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing = deque([first])
        self._is_ending = False
        self._is_cancelled = False
        self._call: Any = None
        self._writer: asyncio.Task[None] | None = None
        """Sends what is there, and ends: of a call one write at a time may be under way."""
        self._task = loop.begin(self._converse(address, method, metadata, tls))

    def send(self, message: bytes) -> None:
        """Send a message after those before it; in a conversation that is over it goes nowhere."""
        self._outgoing.append(message)
        self._write_on()

    def end(self) -> None:
        """Send nothing more: the server ends the call after it has read what was sent. Idempotent."""
        self._is_ending = True
        self._write_on()

    def cancel(self) -> None:
        """End the call now. Idempotent."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def over(self) -> None:
        """Wait until it is."""
        await self._task

    async def _converse(self, address: str, method: str, metadata: Metadata, tls: Tls | None) -> None:
        error: Exception | None = None
        try:
            if not self._is_cancelled:
                await self._receive(address, method, metadata, tls)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
        except Exception as raised:  # noqa: BLE001 - told to the owner, who judges
            error = raised
        self._on_end(error)

    async def _receive(self, address: str, method: str, metadata: Metadata, tls: Tls | None) -> None:
        async with open_aio_channel(address, tls) as channel:
            begin: Any = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
            call = self._call = begin(metadata=metadata)
            self._write_on()
            try:
                # Not by `read`, which gives up what has come once a write has failed.
                async for message in call:
                    self._on_message(message)
            finally:
                call.cancel()  # nothing happens to one that is over
                with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
                    async for _ in call:  # one that is dropped half read leaks
                        pass
                if self._writer is not None:
                    self._writer.cancel()  # a write waits for a connection even when the call is over
                    await asyncio.wait([self._writer])

    def _write_on(self) -> None:
        """Have sent what is there, unless that is under way."""
        if self._call is not None and not self._task.done() and (self._writer is None or self._writer.done()):
            self._writer = self._loop.begin(self._write(self._call))

    async def _write(self, call: Any) -> None:
        try:
            while self._outgoing:
                await call.write(self._outgoing.popleft())
            if self._is_ending:
                await call.done_writing()
        except (asyncio.CancelledError, asyncio.InvalidStateError, grpc.RpcError):
            return  # the call is over: who reads it is told why
