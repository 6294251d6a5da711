"""The trainer's end of live weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.encoding import check_parameters
from rlsrl.parameters.names import check_policy
from rlsrl.parameters.protocols import Corrupt, ParameterError, Parameters, SourceClosed
from rlsrl.parameters.service.failures import error_of
from rlsrl.parameters.service.live import description_messages, version_messages
from rlsrl.parameters.service.messages import version_from_proto
from rlsrl.parameters.service.transfers import TRANSFERS
from rlsrl.rpc.channels import token_metadata
from rlsrl.rpc.reconnect import ReconnectingCall
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.runtime.coordination import describe

CONFIRMATION_SECONDS = 20.0
"""How long a version that was sent may stay unconfirmed before the connection is made anew."""

_log = structlog.stdlib.get_logger(__name__)


class LivePublisher:
    """Sends the newest version to the coordinator, from a thread of its own, and again whenever a coordinator is back.

    One version is on its way at a time. What was published meanwhile is passed over for what is newest then.
    """

    def __init__(
        self, address: str, token: str, policy: str, description: Mapping[str, Any], *, tls: Tls | None = None
    ) -> None:
        """Publish under the name ``policy``. ``description`` is JSON of any length. ``tls`` is for a coordinator that
        wants certificates.

        Raises:
            ValueError: policy or address cannot be one.
            TypeError: the description is not JSON.
        """
        self._description = description_messages(check_policy(policy), description)
        self._metadata = token_metadata(token)
        self._changed = threading.Condition(threading.Lock())
        # Guarded by _changed:
        self._newest: Parameters | None = None
        self._confirmed: Version | None = None
        self._stream = ReconnectingCall(
            address, tls=tls, name="live-publisher", changed=self._changed, converse=self._converse
        )

    @property
    def confirmed(self) -> Version | None:
        """The newest version that a coordinator has said it hands out."""
        with self._changed:
            return self._confirmed

    def publish(self, parameters: Parameters) -> None:
        """Make these the newest parameters. Never waits for the coordinator; keeps the arrays, which must not change.

        Raises:
            NonFinite: a weight or statistic is NaN or infinite; the version before stays the newest.
            ValueError: the version is not newer than the one before.
            StaleAttempt: this gang has been succeeded: the coordinator has refused a version of it.
            SourceClosed: ``close`` was called.
            ParameterError: the coordinator has refused an earlier version, or the sending thread has died.
        """
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

    def close(self) -> None:
        """Stop sending; what the coordinator has not confirmed may never arrive. Idempotent."""
        self._stream.close()

    def _converse(self, channel: grpc.Channel) -> bool:
        """Publish over one connection until it ends; return whether the coordinator confirmed a version.

        Raises:
            Exception: the coordinator's refusal, where another attempt would not help.
        """
        publish = channel.stream_stream(
            f"/{TRANSFERS}/Publish", request_serializer=None, response_deserializer=pb.Published.FromString
        )
        progress = _Progress()
        call = publish(self._messages(progress), metadata=self._metadata)
        with self._stream.reading(call):
            try:
                for published in call:
                    with self._changed:
                        self._confirmed = progress.confirmed = version_from_proto(published.version)
                        self._changed.notify_all()
            except grpc.RpcError as failed:
                if not self._stream.is_closed:
                    _log.info("publishing_interrupted", reason=describe(failed))
                    error = error_of(failed)
                    if error is not None and not isinstance(error, Corrupt):  # which the next try mends
                        _log.warning("publishing_failed", error=repr(error))
                        raise error from failed
            finally:
                with self._changed:
                    progress.ended = True
                    self._changed.notify_all()
        return progress.confirmed is not None

    def _messages(self, progress: _Progress) -> Iterator[bytes]:
        """Yield what one stream sends. gRPC takes it in a thread of its own, and may wait for its window in between."""
        yield from self._description
        sent: Version | None = None
        while (parameters := self._next_to_send(progress, sent)) is not None:
            yield from version_messages(parameters)
            sent = parameters.version

    def _next_to_send(self, progress: _Progress, sent: Version | None) -> Parameters | None:
        """Return the newest parameters once ``sent`` is confirmed and newer ones exist; None at the stream's end."""
        with self._changed:
            if self._changed.wait_for(lambda: progress.ended or progress.confirmed == sent, CONFIRMATION_SECONDS):
                self._changed.wait_for(
                    lambda: progress.ended or (self._newest is not None and self._newest.version != sent)
                )
                return None if progress.ended else self._newest
        self._stream.cancel()
        return None


class _Progress:
    """How far one stream has come. Guarded by the publisher's lock."""

    def __init__(self) -> None:
        self.confirmed: Version | None = None
        self.ended = False
