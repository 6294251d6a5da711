"""What workers and the coordinator say to each other, as plain records, and a client to watch and command with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar, cast

import grpc
from google.protobuf.message import Message

from rlsrl.rpc.channels import open_channel, token_metadata
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorStub

BREAK_SECONDS = 0.1
"""Between two tries of a call that was cut off."""

Reply = TypeVar("Reply", bound=Message)


class WorkerState(StrEnum):
    """What a worker is doing with its life."""

    CONFIGURING = "configuring"
    RUNNING = "running"
    PAUSED = "paused"
    EXITING = "exiting"

    def to_proto(self) -> pb.WorkerState.ValueType:
        """The message's enum value."""
        return pb.WorkerState.Value(f"WORKER_STATE_{self.name}")

    @classmethod
    def from_proto(cls, value: pb.WorkerState.ValueType) -> Self | None:
        """The state in a message; None for unspecified and for values this version does not know."""
        return cls.__members__.get(_short_name(pb.WorkerState, value, "WORKER_STATE_"))


class CommandKind(StrEnum):
    """What a worker can be told."""

    START = "start"
    PAUSE = "pause"
    EXIT = "exit"

    def to_proto(self) -> pb.Command.Kind.ValueType:
        """The message's enum value."""
        return pb.Command.Kind.Value(f"KIND_{self.name}")

    @classmethod
    def from_proto(cls, value: pb.Command.Kind.ValueType) -> Self | None:
        """The kind in a message; None for unspecified and for values this version does not know."""
        return cls.__members__.get(_short_name(pb.Command.Kind, value, "KIND_"))


@dataclass(frozen=True, kw_only=True)
class Command:
    """One order to a worker."""

    kind: CommandKind

    def to_proto(self) -> pb.Command:
        """As a message."""
        return pb.Command(kind=self.kind.to_proto())

    @classmethod
    def from_proto(cls, message: pb.Command) -> Self | None:
        """The command in a message; None for a kind this version does not know."""
        kind = CommandKind.from_proto(message.kind)
        return None if kind is None else cls(kind=kind)


class CoordinatorUnavailable(Exception):
    """The coordinator did not answer, or refused to; the text says which."""


class CoordinatorClient:
    """Asks the coordinator and commands workers through it. Any thread may call it; each call has its own timeout.

    What a coordinator's end cuts off is asked of the next one, so that a command may be passed on twice. That is no
    rare case: of a channel by which nobody calls, gRPC may see only at the next call that its server has gone.
    """

    def __init__(self, address: str, token: str, tls: Tls | None = None) -> None:
        """Uses the certificates that ``tls`` has now.

        Raises:
            ValueError: the address is neither ``unix-abstract:NAME`` nor ``HOST:PORT``.
        """
        self._channel = open_channel(address, tls)
        self._stub = CoordinatorStub(self._channel)
        self._metadata = token_metadata(token)

    def status(self, timeout: float) -> dict[str, Any]:
        """The experiment as the coordinator sees it (``rlsrl.workers.status`` says how). Waits for a coordinator.

        Raises:
            CoordinatorUnavailable: no answer within ``timeout`` seconds, or the token is wrong.
        """
        reply = self._call(self._stub.Status, pb.StatusRequest(), timeout)
        status: dict[str, Any] = json.loads(reply.json)
        return status

    def send(self, role: str, command: Command, *, index: int | None = None, timeout: float) -> int:
        """Pass a command to a role's workers, or to the one with that index; returns to how many it was passed.

        Raises:
            CoordinatorUnavailable: no answer within ``timeout`` seconds, or the token is wrong.
        """
        request = pb.CommandRequest(role=role, index=index, command=command.to_proto())
        return self._call(self._stub.Send, request, timeout).num_workers

    def close(self) -> None:
        """Close the connection; calls that wait fail."""
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: Message, timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                return method(request, timeout=left, metadata=self._metadata, wait_for_ready=True)
            except grpc.RpcError as error:
                if not _is_cut_off(error) or time.monotonic() + BREAK_SECONDS >= deadline:
                    raise CoordinatorUnavailable(describe(error)) from error
                time.sleep(BREAK_SECONDS)
            except ValueError as error:  # what gRPC raises of a channel that was closed
                raise CoordinatorUnavailable("this client was closed") from error


def _is_cut_off(error: grpc.RpcError) -> bool:
    """Whether a call that would wait for a connection had one, and lost it."""
    return cast("grpc.Call", error).code() is grpc.StatusCode.UNAVAILABLE


def describe(error: grpc.RpcError) -> str:
    """A failed call in a few words: status code and details."""
    call = cast("grpc.Call", error)  # what gRPC raises from a call is both
    return f"{call.code().name}: {call.details()}"


def _short_name(enum: Any, value: int, prefix: str) -> str:
    return enum.Name(value).removeprefix(prefix) if value in enum.values() else ""
