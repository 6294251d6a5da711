"""The outgoing half of one worker's Join stream, on the coordinator's side."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable

import structlog
from grpc import aio

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.heartbeat_queue import MAX_RECORDS
from rlsrl.workers.learning_curve import CurveRow
from rlsrl.workers.leases import Claim
from rlsrl.workers.worker_messages import JoinContext

MAX_QUEUED = 256
"""Messages queued for one worker. A worker that reads so slowly delays its own answers."""
_SETTINGS, _ROWS_ACK = "settings", "rows_ack"
"""Keys among the pending messages. No role has these names."""


class WorkerStream:
    """Queues messages for one worker and sends them in a task of its own, so that a slow worker delays no other."""

    def __init__(
        self,
        context: JoinContext,
        claim: Claim,
        follows: tuple[str, ...],
        *,
        peers: Callable[[str], pb.CoordinatorMessage],
        settings: Callable[[Claim], pb.CoordinatorMessage],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """Start the sending task.

        Args:
            context: the call.
            claim: the worker's claim, with index and incarnation.
            follows: the roles whose addresses the worker gets.
            peers: returns the message with the present addresses of a role.
            settings: returns the message with the present live settings of the worker with a claim.
            log: for events.
        """
        self.context = context
        self.claim = claim
        self.follows = follows
        self.worker = f"{claim.role}-{claim.index}"
        self.unwritten: deque[CurveRow] = deque(maxlen=MAX_RECORDS)
        """The worker's rows that the disk has not taken yet. The worker keeps no more than these either."""
        self._peers = peers
        self._settings = settings
        self._log = log
        self._pending: dict[str, Callable[[], pb.CoordinatorMessage]] = {}
        """Makes the newest message of each kind that the worker has an old one of. Several changes cost one message."""
        self._closed = False
        self._queue: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue(MAX_QUEUED)
        """None only wakes the sending task."""
        self._sending = asyncio.create_task(self._send_queued())

    async def send(self, message: pb.CoordinatorMessage) -> None:
        """Queue a message. Waits while the queue is full, for as long as the stream lives."""
        await self._queue.put(message)

    def send_peers(self, *roles: str) -> None:
        """Send the addresses of these roles as they are when the queue is empty."""
        self._pending.update({role: functools.partial(self._peers, role) for role in roles})
        self._wake()

    def send_settings(self) -> None:
        """Send the worker's live settings as they are when the queue is empty."""
        self._pending[_SETTINGS] = functools.partial(self._settings, self.claim)
        self._wake()

    def acknowledge_rows(self, sequence: int) -> None:
        """Tell the worker that its rows up to this one are stored."""
        message = pb.CoordinatorMessage(records_ack=pb.RecordsAck(sequence=sequence))
        self._pending[_ROWS_ACK] = lambda: message
        self._wake()

    async def close(self) -> None:
        """Send what is queued and end the sending task. On a broken stream the task has ended already."""
        self._closed = True
        self._wake()
        await self._sending

    def _wake(self) -> None:
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def _send_queued(self) -> None:
        try:
            while not (self._closed and self._queue.empty()):
                if (message := await self._queue.get()) is not None:
                    await self.context.write(message)
                while self._pending and self._queue.empty():
                    _, newest = self._pending.popitem()
                    await self.context.write(newest())
        except aio.BaseError as error:
            self._log.info("stream_broke", worker=self.worker, error=repr(error))
