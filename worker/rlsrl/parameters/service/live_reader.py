"""An actor's end of live weights, where it shares no memory with the trainer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.names import check_policy
from rlsrl.parameters.protocols import (
    Corrupt,
    ParameterError,
    Parameters,
    SourceClosed,
    SourceRefused,
    SourceTimeout,
)
from rlsrl.parameters.service.failures import TransferRefused, error_of
from rlsrl.parameters.service.live import read_version
from rlsrl.parameters.service.messages import version_to_proto
from rlsrl.parameters.service.transfers import MAX_TRANSFER_BYTES, TRANSFERS, Assembly, open_message, parse_header
from rlsrl.rpc.channels import token_metadata
from rlsrl.rpc.reconnect import ReconnectingCall
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.runtime.coordination import describe

_log = structlog.stdlib.get_logger(__name__)


class LiveReader:
    """A ``ParameterSource`` over gRPC. Any thread may call anything.

    A thread of its own receives versions as the coordinator pushes them and keeps the newest; it finds a coordinator
    that was away by itself. Versions never move back.
    """

    def __init__(
        self,
        address: str,
        token: str,
        policy: str,
        *,
        tls: Tls | None = None,
        max_transfer_bytes: int = MAX_TRANSFER_BYTES,
    ) -> None:
        """Connects by itself, whenever there is a coordinator; with ``tls``, to one that wants certificates.

        Raises:
            ValueError: policy or address cannot be one.
        """
        self._address = address
        self._policy = check_policy(policy)
        self._max_nbytes = max_transfer_bytes
        self._metadata = token_metadata(token)
        self._changed = threading.Condition(threading.Lock())
        # Guarded by _changed:
        self._description: dict[str, Any] | None = None
        self._newest: Parameters | None = None
        self._problem = "nobody answered"
        self._stream = ReconnectingCall(
            address, tls=tls, name="live-reader", changed=self._changed, converse=self._converse
        )
        self._stream.start()

    def description(self, timeout: float) -> dict[str, Any]:
        """See ``ParameterSource``. It is there once a publisher has published its first version."""
        with self._changed:
            self._wait_for(lambda: self._description is not None, timeout)
            assert self._description is not None, "just waited for"  # noqa: S101 - an invariant of our own
            return self._description

    def get(self, newer_than: Version | None = None) -> Parameters | None:
        """See ``ParameterSource``. Never waits for anything."""
        with self._changed:
            self._check()
            newest = self._newest
            return None if newest is None or (newer_than is not None and newest.version <= newer_than) else newest

    def wait(self, min_version: Version, timeout: float) -> Parameters:
        """See ``ParameterSource``."""
        with self._changed:
            self._wait_for(lambda: self._newest is not None and self._newest.version >= min_version, timeout)
            assert self._newest is not None, "just waited for"  # noqa: S101 - an invariant of our own
            return self._newest

    def close(self) -> None:
        """See ``ParameterSource``."""
        self._stream.close()

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        self._changed.wait_for(
            lambda: condition() or self._stream.is_closed or self._stream.failure is not None, timeout
        )
        self._check()
        if not condition():
            raise SourceTimeout(f"nothing came from the coordinator at {self._address} in time: {self._problem}")

    def _check(self) -> None:
        if self._stream.is_closed:
            raise SourceClosed("the reader is closed")
        failure = self._stream.failure
        if isinstance(failure, SourceRefused):
            raise SourceRefused(str(failure)) from failure
        if failure is not None:
            raise ParameterError("the thread that receives weights has died") from failure

    def _converse(self, channel: grpc.Channel) -> bool:
        """Receive over one connection until it ends; return whether it delivered good transfers only, and at least one.

        Raises:
            SourceRefused: the coordinator's refusal, where another attempt would not help.
        """
        watch = channel.unary_stream(
            f"/{TRANSFERS}/Watch", request_serializer=pb.WatchRequest.SerializeToString, response_deserializer=None
        )
        newest = self._newest
        request = pb.WatchRequest(
            policy=self._policy, newer_than=None if newest is None else version_to_proto(newest.version)
        )
        call = watch(request, metadata=self._metadata)
        received_some = False
        with self._stream.reading(call):
            try:
                messages = iter(call)
                for message in messages:
                    self._take(message, messages)
                    received_some = True
            except grpc.RpcError as failed:
                self._problem = describe(failed)
                if not self._stream.is_closed and (error := error_of(failed)) is not None:
                    raise SourceRefused(str(error)) from error
            except (TransferRefused, Corrupt) as error:
                received_some = False  # an immediate retry would receive the same bytes
                self._problem = str(error)
                _log.warning("live_weights_spoilt", error=str(error))
        return received_some

    def _take(self, first: bytes, rest: Iterator[bytes]) -> None:
        """Receive one transfer and keep what it carries."""
        head, chunk = open_message(first)
        header = parse_header(pb.Live, head)
        assembly = Assembly(header.nbytes, chunk, max_nbytes=self._max_nbytes)
        while not assembly.complete:
            assembly.add_message(next(rest, b""))
        if header.WhichOneof("kind") == "version":
            self._keep(read_version(header.version, assembly))
        else:
            description = json.loads(assembly.content())
            with self._changed:
                self._description = description
                self._changed.notify_all()

    def _keep(self, parameters: Parameters) -> None:
        with self._changed:
            # A coordinator that was started anew may hear from an older publisher first.
            if self._newest is None or parameters.version > self._newest.version:
                self._newest = parameters
                self._changed.notify_all()
