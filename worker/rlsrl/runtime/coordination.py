"""The states of workers, and the client that reads the coordinator's status and logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar, cast

import grpc

from rlsrl.rpc.channels import open_channel, token_metadata
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorStub, LogsStub, RowsStub
from rlsrl.runtime.call_board import EnvironmentCall

PROGRAM = "program"
"""Stands for the role in rows of programs that follow a run."""
OWN_PREFIX = "own/"
"""All names of such a program's metrics begin with it, and no other names do."""
BREAK_SECONDS = 0.1
"""Seconds between two attempts of a call that lost its connection."""

Reply = TypeVar("Reply")


class WorkerState(StrEnum):
    """The state of a worker."""

    CONFIGURING = "configuring"
    RUNNING = "running"
    PAUSED = "paused"
    EXITING = "exiting"

    def to_proto(self) -> pb.WorkerState.ValueType:
        """Return the enum value of the message."""
        return pb.WorkerState.Value(f"WORKER_STATE_{self.name}")

    @classmethod
    def from_proto(cls, value: pb.WorkerState.ValueType) -> Self | None:
        """Return the state in a message, or None for a value that this version does not know."""
        return cls.__members__.get(_short_name(pb.WorkerState, value, "WORKER_STATE_"))


@dataclass(frozen=True, kw_only=True)
class WorkerLog:
    """What the workers at one index printed last."""

    role: str
    index: int
    text: bytes
    """UTF-8, except where a cut broke a character."""


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """A row of metrics of a program that follows the run."""

    sequence: int
    """Number of the row, from 0."""
    step: int
    """Training step."""
    wall: float
    """Unix seconds."""
    scalars: Mapping[str, float]
    """By name, which begins with ``OWN_PREFIX``."""


class CoordinatorUnavailable(Exception):
    """The coordinator did not answer or refused the call; the text says which."""


class CoordinatorClient:
    """Reads an experiment's status and logs. Thread-safe; each call has a timeout.

    A call that loses its connection is repeated. That is common: gRPC may notice only at the next call that the server
    of an idle channel is gone.
    """

    def __init__(self, address: str, token: str, tls: Tls | None = None) -> None:
        """Prepare to call, with the certificates that ``tls`` has now.

        Raises:
            ValueError: the address is neither ``unix-abstract:NAME`` nor ``HOST:PORT``.
        """
        self._channel = open_channel(address, tls)
        self._stub = CoordinatorStub(self._channel)
        self._logs = LogsStub(self._channel)
        self._rows = RowsStub(self._channel)
        self._metadata = token_metadata(token)

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the status document (``rlsrl.workers.status``). Waits for a coordinator.

        Raises:
            CoordinatorUnavailable: no answer within ``timeout`` seconds, or the token is wrong.
        """
        reply = self._call(self._stub.Status, pb.StatusRequest(), timeout)
        status: dict[str, Any] = json.loads(reply.json)
        return status

    def logs(self, role: str | None, index: int | None, *, tail: int | None, timeout: float) -> list[WorkerLog]:
        """Return the kept logs of workers, by role and index.

        Args:
            role: only of this role; None: of every role.
            index: only of this index; None: of every index.
            tail: the last lines of each log; None: all.
            timeout: seconds to wait at most.

        Raises:
            CoordinatorUnavailable: no answer within ``timeout`` seconds, or the token is wrong.
        """
        request = pb.LogsRequest(role=role or "", index=index, tail=tail)
        replies = self._call(lambda message, **options: list(self._logs.Read(message, **options)), request, timeout)
        return [WorkerLog(role=reply.role, index=reply.index, text=reply.text) for reply in replies]

    def report_calls(self, process: str, calls: Sequence[EnvironmentCall], *, limit: str, timeout: float) -> None:
        """Report the calls that the process is in, longest first.

        ``limit`` is the field of the limit that the first call has reached, or "".

        Raises:
            CoordinatorUnavailable: no answer within ``timeout`` seconds, or the token is wrong.
        """
        messages = [
            pb.EnvironmentCall(
                first_rank=call.first_rank,
                num_environments=call.num_environments,
                name=call.name,
                seconds=call.seconds,
            )
            for call in calls
        ]
        self._call(self._stub.ReportCalls, pb.CallReport(process=process, calls=messages, limit=limit), timeout)

    def add_rows(self, instance: str, rows: Sequence[ProgramRow], timeout: float) -> None:
        """Store rows, by ascending sequence. A row that was sent before, with the same ``instance``, is stored once.

        Raises:
            CoordinatorUnavailable: no answer within ``timeout`` seconds, or the coordinator does not take the rows.
        """
        records = [
            pb.Record(sequence=row.sequence, step=row.step, wall_time=row.wall, scalars=row.scalars) for row in rows
        ]
        self._call(self._rows.Add, pb.ProgramRows(instance=instance, records=records), timeout)

    def close(self) -> None:
        """Close the connection. Waiting calls fail."""
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: object, timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                return method(request, timeout=left, metadata=self._metadata, wait_for_ready=True)
            except grpc.RpcError as error:
                if not _is_cut_off(error) or time.monotonic() + BREAK_SECONDS >= deadline:
                    raise CoordinatorUnavailable(describe(error)) from error
                time.sleep(BREAK_SECONDS)
            except ValueError as error:  # gRPC raises this for a closed channel
                raise CoordinatorUnavailable("this client was closed") from error


def _is_cut_off(error: grpc.RpcError) -> bool:
    """Return whether the call lost its connection: a call without one waits instead."""
    return cast("grpc.Call", error).code() is grpc.StatusCode.UNAVAILABLE


def describe(error: grpc.RpcError) -> str:
    """Return status code and details of a failed call."""
    call = cast("grpc.Call", error)  # The error of a call is a Call as well.
    return f"{call.code().name}: {call.details()}"


def _short_name(enum: Any, value: int, prefix: str) -> str:
    return enum.Name(value).removeprefix(prefix) if value in enum.values() else ""
