"""An actor's end of live weights, for actors that share no memory with the trainer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.parameters.names import check_policy
from rlsrl.parameters.protocols import (
    Corrupt,
    ParameterError,
    Parameters,
    ParameterSource,
    SourceClosed,
    SourceRefused,
    SourceTimeout,
)
from rlsrl.parameters.service.failures import TransferRefused, error_of
from rlsrl.parameters.service.messages import newer_than_to_proto, read_live_version
from rlsrl.parameters.service.transfers import MAX_TRANSFER_BYTES, Transfer, TransferStub, receive
from rlsrl.rpc.channels import token_metadata
from rlsrl.rpc.reconnect import ReconnectingCall
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.runtime.coordination import describe

_log = structlog.stdlib.get_logger(__name__)


class LiveReader(ParameterSource):
    """A ``ParameterSource`` over gRPC. Any thread may call any method.

    Its own thread receives the versions that the coordinator pushes, keeps the newest, and reconnects after an outage.
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
        """Start the thread, which connects as soon as a coordinator answers.

        Args:
            address: of the coordinator.
            token: of the experiment.
            policy: the policy's name.
            tls: for a coordinator that requires certificates.
            max_transfer_bytes: limit of one version.

        Raises:
            ValueError: policy or address is invalid.
        """
        self._address = address
        self._policy = check_policy(policy)
        self._max_nbytes = max_transfer_bytes
        self._metadata = token_metadata(token)
        self._changed = threading.Condition(threading.Lock())
        # Guarded by _changed:
        self._description: dict[str, Any] | None = None
        self._newest: Parameters | None = None
        self._problem = "the coordinator has not answered"
        self._stream = ReconnectingCall(
            address, tls=tls, name="live-reader", changed=self._changed, converse=self._converse
        )
        self._stream.start()

    @override
    def description(self, timeout: float) -> dict[str, Any]:
        # The description arrives with the publisher's first version.
        with self._changed:
            self._wait_for(lambda: self._description is not None, timeout)
            assert self._description is not None, "just waited for"
            return self._description

    @override
    def get(self, newer_than: Version | None = None) -> Parameters | None:
        with self._changed:
            self._check()
            newest = self._newest
            return None if newest is None or (newer_than is not None and newest.version <= newer_than) else newest

    @override
    def wait(self, min_version: Version, timeout: float) -> Parameters:
        with self._changed:
            self._wait_for(lambda: self._newest is not None and self._newest.version >= min_version, timeout)
            assert self._newest is not None, "just waited for"
            return self._newest

    @override
    def close(self) -> None:
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
        """Receive over one connection until it ends; return whether at least one transfer came, and all were valid.

        Raises:
            SourceRefused: the coordinator's refusal, where another attempt would not help.
        """
        newest = self._newest
        request = pb.WatchRequest(
            policy=self._policy, newer_than=newer_than_to_proto(None if newest is None else newest.version)
        )
        call = TransferStub(channel).watch(request, metadata=self._metadata)
        has_received = False
        with self._stream.reading(call):
            try:
                for transfer in receive(call, pb.Live, max_nbytes=self._max_nbytes):
                    self._keep(transfer)
                    has_received = True
            except grpc.RpcError as failed:
                self._problem = describe(failed)
                if not self._stream.is_closed and (error := error_of(failed)) is not None:
                    raise SourceRefused(str(error)) from error
            except (TransferRefused, Corrupt) as error:
                has_received = False  # an immediate retry would receive the same bytes
                self._problem = str(error)
                _log.warning("live_weights_spoilt", error=str(error))
        return has_received

    def _keep(self, transfer: Transfer[pb.Live]) -> None:
        """Store what a transfer carries, if it is newer than what is stored."""
        if transfer.header.WhichOneof("kind") != "version":
            description = json.loads(transfer.content())
            with self._changed:
                self._description = description
                self._changed.notify_all()
            return
        parameters = read_live_version(transfer)
        with self._changed:
            # After a restart, a coordinator may serve an older publisher first.
            if self._newest is None or parameters.version > self._newest.version:
                self._newest = parameters
                self._changed.notify_all()
