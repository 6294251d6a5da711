"""The client's end of a conversation without a thread: it makes progress only while its owner waits.

``Conversation`` (``rlsrl.rpc.conversations``) passes every message between threads, and each thread needs the GIL. Here
the owner's own thread runs grpc.aio's event loop while it waits. At other times gRPC's core, whose threads do not need
the GIL, answers pings and stores incoming messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from rlsrl.rpc.channels import CallTarget, end_aio_call, open_aio_channel, token_metadata

_of_thread = threading.local()


class WaitingLoop:
    """An event loop that runs only while its thread waits. Only that thread uses it, but for ``wake``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._seconds_run = 0.0
        """Seconds of all finished runs."""
        self._began: float | None = None
        """Start of the current run, on the loop's clock; None between two runs."""
        self._until = 0.0
        """Deadline of the current or last run."""
        self._alarm: asyncio.TimerHandle | None = None
        """Ends a run at its deadline. Most runs are stopped earlier, and then the next run uses the same alarm: a new
        alarm for each run would double the run's cost."""

    @staticmethod
    def of_this_thread() -> WaitingLoop:
        """Return this thread's only loop. gRPC never releases a loop that it has used, so more loops would leak."""
        loop: WaitingLoop | None = getattr(_of_thread, "loop", None)
        if loop is None:
            loop = _of_thread.loop = WaitingLoop()
        return loop

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine, which runs while the loop runs. The caller must keep a reference to the task."""
        return self._loop.create_task(work)

    def run_for(self, seconds: float) -> None:
        """Run for ``seconds``, or until ``stop``."""
        began = self._began = self._loop.time()
        self._until = began + seconds
        if self._alarm is None or self._alarm.when() > self._until:
            self._set_alarm()
        try:
            self._loop.run_forever()
        finally:
            self._began = None
            self._seconds_run += self._loop.time() - began

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._until, self._on_alarm)

    def _on_alarm(self) -> None:
        """End the current run if its deadline has passed; else set the alarm again, for the current run."""
        assert self._alarm is not None, "the alarm is due"
        is_over = self._alarm.when() >= self._until
        self._alarm = None
        if is_over:
            self._loop.stop()
        else:
            self._set_alarm()

    def stop(self) -> None:
        """End the current run after everything that is ready now. No effect if the loop does not run."""
        if self._loop.is_running():
            self._loop.stop()

    def wake(self) -> None:
        """End the present run, or the next one at its start. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def seconds_run(self) -> float:
        """Return the seconds of all runs: a clock that stops while no message can be received."""
        return self._seconds_run if self._began is None else self._seconds_run + self._loop.time() - self._began

    async def sleep(self, seconds: float) -> None:
        """Wait until the loop has run for ``seconds``."""
        until = self.seconds_run() + seconds
        while (remaining := until - self.seconds_run()) > 0:
            await asyncio.sleep(remaining)


class InThreadConversation:
    """One call over its own channel, from the first message to the end. Only the loop's thread uses it."""

    def __init__(
        self,
        loop: WaitingLoop,
        target: CallTarget,
        method: str,
        *,
        first: bytes,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Connect and send the first message as soon as the loop runs. Otherwise as ``Conversation``.

        Args:
            loop: runs everything, including the callbacks.
            target, method, first, on_message: see ``Conversation``.
            on_end: see ``Conversation``; after ``close`` it gets None, too. If a message was in transit, gRPC reports
                INTERNAL instead of the server's status. A later attempt then gets the server's status.
        """
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing = deque([first])
        self._is_ending = False
        self._is_cancelled = False
        self._call: Any = None
        self._writer: asyncio.Task[None] | None = None
        """Sends the waiting messages, then ends. gRPC allows one write at a time."""
        self._grace: asyncio.Task[None] | None = None
        """Cancels the call after ``close``, unless the server ends it before."""
        self._task = loop.create_task(self._converse(target, method))

    def send(self, message: bytes) -> None:
        """Send a message, in order. After the conversation's end the message is discarded."""
        self._outgoing.append(message)
        self._start_writer()

    def close(self, grace: float = 0.0) -> None:
        """End the call while the loop runs, as ``Conversation.close`` does. Idempotent. ``wait_for_end`` waits.

        ``grace`` counts only the seconds that the loop runs.
        """
        if grace <= 0:
            self._cancel()
        elif self._grace is None and not self._task.done():
            self._is_ending = True
            self._start_writer()
            self._grace = self._loop.create_task(self._cancel_after(grace))

    async def wait_for_end(self) -> None:
        """Wait for the conversation's end."""
        await self._task

    async def _cancel_after(self, seconds: float) -> None:
        await self._loop.sleep(seconds)
        self._cancel()

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def _converse(self, target: CallTarget, method: str) -> None:
        error: Exception | None = None
        try:
            if not self._is_cancelled:
                await self._receive(target, method)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
        except Exception as raised:  # noqa: BLE001 - the owner gets it through on_end
            error = raised
        await _stop(self._grace)
        self._on_end(error)

    async def _receive(self, target: CallTarget, method: str) -> None:
        async with open_aio_channel(target.address, target.tls) as channel:
            begin: Any = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
            call = self._call = begin(metadata=token_metadata(target.token))
            self._start_writer()
            try:
                # Not with `read`, which discards received messages after a failed write.
                async for message in call:
                    self._on_message(message)
            finally:
                await end_aio_call(call)
                await _stop(self._writer)  # a write waits for a connection even after the call's end

    def _start_writer(self) -> None:
        """Start sending the waiting messages, unless the writer runs already."""
        if self._call is not None and not self._task.done() and (self._writer is None or self._writer.done()):
            self._writer = self._loop.create_task(self._write(self._call))

    async def _write(self, call: Any) -> None:
        try:
            while self._outgoing:
                await call.write(self._outgoing.popleft())
            if self._is_ending:
                await call.done_writing()
        except (asyncio.CancelledError, asyncio.InvalidStateError, grpc.RpcError):
            return  # the call has ended: its reader gets the reason


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
