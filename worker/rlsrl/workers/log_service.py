"""The coordinator's log service: serves the kept logs, and keeps what the coordinator itself prints."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import grpc
from grpc import aio
from typing_extensions import override

from rlsrl.api.role_names import COORDINATOR
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import LogsServicer
from rlsrl.runtime.printed_text import PrintedText
from rlsrl.workers.kept_logs import KeptLogs, LogCopies, LogName, chosen, last_lines

COLLECT_SECONDS = 1.0
"""Seconds between two looks at what the coordinator printed."""
COPY_SECONDS = 300.0
"""Seconds between two writes of the copies in the bucket. An orderly end of the coordinator writes them as well, so
only a lost node costs the text since the last write. A hundred workers then cause a request every three seconds."""


class LogService(LogsServicer):
    """Serves Read. ``run`` must run beside it, in the same event loop. Files and objects are read in threads."""

    def __init__(self, logs: KeptLogs, *, copies: LogCopies | None, printed: PrintedText | None) -> None:
        """Serve ``logs``.

        ``copies`` are those in the bucket of a run without a volume. ``printed`` collects what this process prints;
        None where another program keeps it.
        """
        self._logs = logs
        self._copies = copies
        self._printed = printed
        self._process = str(uuid.uuid4())
        self._is_restored = copies is None

    @override
    async def Read(
        self, request: pb.LogsRequest, context: aio.ServicerContext[pb.LogsRequest, pb.WorkerLog]
    ) -> AsyncIterator[pb.WorkerLog]:
        """Send the chosen logs, each in one message."""
        index = request.index if request.HasField("index") else None
        tail = request.tail if request.HasField("tail") else None
        try:
            for name in chosen(self._logs.names(), role=request.role or None, index=index):
                text = await asyncio.to_thread(self._logs.read, name)
                yield pb.WorkerLog(role=name.role, index=name.index, text=last_lines(text, tail))
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the logs cannot be read: {error}")

    async def run(self) -> None:
        """Keep the coordinator's own log, and copies of all logs in the bucket, until cancelled."""
        if self._copies is not None:
            await asyncio.to_thread(self._copies.restore)
            self._is_restored = True
        loop = asyncio.get_running_loop()
        copied_at = loop.time()
        while True:
            await asyncio.sleep(COLLECT_SECONDS)
            self._collect()
            if loop.time() - copied_at >= COPY_SECONDS:
                await self._copy()
                copied_at = loop.time()

    async def flush(self) -> None:
        """Keep the text until now, before the end. A failing store does not delay the end for long."""
        self._collect()
        await self._copy()

    def _collect(self) -> None:
        if self._printed is not None and (parts := self._printed.parts(after=-1, is_last=True)):
            self._logs.append(LogName(COORDINATOR, 0), self._process, parts)
            self._printed.acknowledge(parts[-1].sequence)

    async def _copy(self) -> None:
        if self._copies is not None and self._is_restored:  # Before, a copy would replace the earlier text.
            await asyncio.to_thread(self._copies.write)
