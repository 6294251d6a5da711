"""Stores rows of workers and of programs that follow the run in the learning curve, in the coordinator's event loop."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import structlog
from grpc import aio
from typing_extensions import override

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import RowsServicer
from rlsrl.workers.learning_curve import CurveRow, LearningCurve
from rlsrl.workers.worker_messages import MalformedMessage, program_rows_of
from rlsrl.workers.worker_stream import WorkerStream


class RowWriter:
    """Stores the workers' rows of the learning curve. While the disk fails, each sweep tries again."""

    def __init__(self, curve: LearningCurve, log: structlog.stdlib.BoundLogger) -> None:
        self._curve = curve
        self._log = log
        self._is_failing = False
        """Whether the disk did not take the last rows."""
        self.num_rows = 0
        """Rows stored."""

    def write(self, stream: WorkerStream) -> None:
        """Store the rows that have come by this stream, and acknowledge them."""
        try:
            self.append(stream.unwritten)
        except OSError:
            if not self._is_failing:  # Once: the worker keeps the rows, and a full disk may stay full for hours.
                self._log.exception("rows_not_written")
            self._is_failing = True
            return
        self._is_failing = False
        stream.acknowledge_rows(stream.unwritten[-1].sequence)
        stream.unwritten.clear()

    def append(self, rows: Sequence[CurveRow]) -> None:
        """Store the new ones of these rows.

        Raises:
            OSError: the disk failed or is full; none of the rows is kept.
        """
        self.num_rows += self._curve.append(rows)


class RowService(RowsServicer):
    """Stores the rows of programs that follow the run."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows

    @override
    async def Add(
        self, request: pb.ProgramRows, context: aio.ServicerContext[pb.ProgramRows, pb.ProgramRowsReply]
    ) -> pb.ProgramRowsReply:
        """Store the rows; those that are stored already are left out."""
        try:
            self._rows.append(program_rows_of(request))
        except MalformedMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the rows cannot be written: {error}")
        return pb.ProgramRowsReply()
