"""The trainer's end of live weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import structlog
from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.parameters.encoding import check_parameters
from rlsrl.parameters.names import check_policy
from rlsrl.parameters.protocols import Corrupt, ParameterError, ParameterPublisher, Parameters, SourceClosed
from rlsrl.parameters.service.failures import error_of
from rlsrl.parameters.service.messages import live_description_messages, live_version_messages, version_from_proto
from rlsrl.parameters.service.transfers import TransferStub
from rlsrl.rpc.channels import token_metadata
from rlsrl.rpc.reconnect import ReconnectingCall
from rlsrl.rpc.tls import Tls
from rlsrl.runtime.coordination import describe

CONFIRMATION_SECONDS = 20.0
"""How long a sent version may stay unconfirmed before the publisher opens a new connection."""

_log = structlog.stdlib.get_logger(__name__)


class LivePublisher(ParameterPublisher):
    """Sends the newest version to the coordinator, from its own thread, and again after the coordinator restarts.

    One version is in transit at a time. Versions that are published meanwhile are skipped, except the newest.
    """

    def __init__(
        self, address: str, token: str, policy: str, description: Mapping[str, Any], *, tls: Tls | None = None
    ) -> None:
        """Publish under the name ``policy``. The first ``publish`` connects.

        Args:
            address: of the coordinator.
            token: of the experiment.
            policy: the policy's name.
            description: JSON of any length; readers get it from ``ParameterSource.description``.
            tls: for a coordinator that requires certificates.

        Raises:
            ValueError: policy or address is invalid.
            TypeError: the description is not JSON.
        """
        self._description = live_description_messages(check_policy(policy), description)
        self._metadata = token_metadata(token)
        self._changed = threading.Condition(threading.Lock())
        # Guarded by _changed:
        self._newest: Parameters | None = None
        self._stream = ReconnectingCall(
            address, tls=tls, name="live-publisher", changed=self._changed, converse=self._converse
        )

    @override
    def publish(self, parameters: Parameters) -> None:
        # Never waits for the coordinator. Keeps a reference to the arrays.
        check_parameters(parameters)
        with self._changed:
            if self._stream.is_closed:
                raise SourceClosed("the publisher is closed")
            if (failure := self._stream.failure) is not None:
                kind = type(failure) if isinstance(failure, ParameterError) else ParameterError
                raise kind(f"publishing has failed: {failure}") from failure
            if self._newest is not None and parameters.version <= self._newest.version:
                raise ValueError(
                    f"version {parameters.version} is not newer than {self._newest.version}, which was published before"
                )
            is_first = self._newest is None
            self._newest = parameters
            self._changed.notify_all()
        if is_first:
            self._stream.start()

    @override
    def close(self) -> None:
        # Versions that the coordinator has not confirmed may never reach a reader.
        self._stream.close()

    def _converse(self, channel: grpc.Channel) -> bool:
        """Publish over one connection until it ends; return whether the coordinator confirmed a version.

        Raises:
            Exception: the coordinator's refusal, where another attempt would not help.
        """
        progress = _Progress()
        call = TransferStub(channel).publish(self._messages(progress), metadata=self._metadata)
        with self._stream.reading(call):
            try:
                for published in call:
                    with self._changed:
                        progress.confirmed = version_from_proto(published.version)
                        self._changed.notify_all()
            except grpc.RpcError as failed:
                if not self._stream.is_closed:
                    _log.info("publishing_interrupted", reason=describe(failed))
                    error = error_of(failed)
                    if error is not None and not isinstance(error, Corrupt):  # the next attempt repairs corruption
                        _log.warning("publishing_failed", error=repr(error))
                        raise error from failed
            finally:
                with self._changed:
                    progress.ended = True
                    self._changed.notify_all()
        return progress.confirmed is not None

    def _messages(self, progress: _Progress) -> Iterator[bytes]:
        """Yield the messages of one stream. gRPC iterates in its own thread, at the pace of its flow control."""
        yield from self._description
        sent: Version | None = None
        while (parameters := self._next_to_send(progress, sent)) is not None:
            yield from live_version_messages(parameters)
            sent = parameters.version

    def _next_to_send(self, progress: _Progress, sent: Version | None) -> Parameters | None:
        """Wait until ``sent`` is confirmed and newer parameters exist; return them, or None if the stream has ended."""
        with self._changed:
            if self._changed.wait_for(lambda: progress.ended or progress.confirmed == sent, CONFIRMATION_SECONDS):
                self._changed.wait_for(
                    lambda: progress.ended or (self._newest is not None and self._newest.version != sent)
                )
                return None if progress.ended else self._newest
        self._stream.reconnect()
        return None


class _Progress:
    """How far one stream has come. Guarded by the publisher's lock."""

    def __init__(self) -> None:
        self.confirmed: Version | None = None
        self.ended = False
