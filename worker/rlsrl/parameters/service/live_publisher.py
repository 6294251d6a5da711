"""The trainer's end of live weights."""

from __future__ import annotations

import contextlib
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
from rlsrl.rpc.channels import cancel_call, end_call, open_channel, token_metadata
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.runtime.coordination import describe

CONFIRMATION_SECONDS = 20.0
"""How long a version that was sent may stay unconfirmed before the connection is made anew."""
_FIRST_BACK_OFF_SECONDS = 0.1
_MAX_BACK_OFF_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
"""How long a cancelled call may take to end: it only has to come back from gRPC's core."""

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
        self._address = validate_address(address)
        self._tls = tls
        self._changed = threading.Condition(threading.Lock())
        # Guarded by _changed:
        self._newest: Parameters | None = None
        self._confirmed: Version | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._call: grpc.CallIterator[pb.Published] | None = None
        self._thread = threading.Thread(target=self._run, name="live-publisher", daemon=True)
        self._thread.start()

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
            if self._closed:
                raise SourceClosed("the publisher is closed")
            if self._failure is not None:
                kind = type(self._failure) if isinstance(self._failure, ParameterError) else ParameterError
                raise kind(f"publishing has failed: {self._failure}") from self._failure
            if self._newest is not None and parameters.version <= self._newest.version:
                raise ValueError(
                    f"version {parameters.version} is not newer than {self._newest.version}, which was published before"
                )
            self._newest = parameters
            self._changed.notify_all()

    def close(self) -> None:
        """Stop sending; what the coordinator has not confirmed may never arrive. Idempotent."""
        with self._changed:
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            cancel_call(call)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        """One stream after another until ``close``. Waits for the first version, then for the coordinator's answers."""
        back_off = _FIRST_BACK_OFF_SECONDS
        try:
            self._await_first_version()
            while not self._closed:
                confirmed_some = self._converse()
                back_off = _FIRST_BACK_OFF_SECONDS if confirmed_some else min(2 * back_off, _MAX_BACK_OFF_SECONDS)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, back_off)
        except BaseException as failure:  # noqa: BLE001 - raised by publish(), in the thread that can act on it
            with self._changed:
                self._failure = failure
            _log.warning("publishing_failed", error=repr(failure))

    def _await_first_version(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closed)

    def _converse(self) -> bool:
        """One connection, until it ends for whatever reason; returns whether it confirmed a version.

        Raises:
            The coordinator's refusal, where trying again would not help.
        """
        with contextlib.closing(open_channel(self._address, self._tls)) as channel:
            return self._converse_over(channel)

    def _converse_over(self, channel: grpc.Channel) -> bool:
        publish = channel.stream_stream(
            f"/{TRANSFERS}/Publish", request_serializer=None, response_deserializer=pb.Published.FromString
        )
        stream = _Stream()
        call = publish(self._messages(stream), metadata=self._metadata)
        with self._changed:
            self._call = call
            if self._closed:
                cancel_call(call)
        try:
            for published in call:
                with self._changed:
                    self._confirmed = stream.confirmed = version_from_proto(published.version)
                    self._changed.notify_all()
        except grpc.RpcError as failed:
            if not self._closed:
                _log.info("publishing_interrupted", reason=describe(failed))
                error = error_of(failed)
                if error is not None and not isinstance(error, Corrupt):  # which the next try mends
                    raise error from failed
        finally:
            with self._changed:
                stream.ended = True
                self._changed.notify_all()
            end_call(call)
        return stream.confirmed is not None

    def _messages(self, stream: _Stream) -> Iterator[bytes]:
        """What goes up one stream; gRPC takes it in a thread of its own, and may wait for room in between."""
        yield from self._description
        sent: Version | None = None
        while (parameters := self._next_to_send(stream, sent)) is not None:
            yield from version_messages(parameters)
            sent = parameters.version

    def _next_to_send(self, stream: _Stream, sent: Version | None) -> Parameters | None:
        """The newest parameters, once what was sent is confirmed and there are newer ones; None at the stream's end."""
        with self._changed:
            if not self._changed.wait_for(lambda: stream.ended or stream.confirmed == sent, CONFIRMATION_SECONDS):
                if self._call is not None:
                    cancel_call(self._call)
                return None
            self._changed.wait_for(lambda: stream.ended or (self._newest is not None and self._newest.version != sent))
            return None if stream.ended else self._newest


class _Stream:
    """How far one stream has come."""

    def __init__(self) -> None:
        self.confirmed: Version | None = None
        self.ended = False
