"""The parameter database for processes that do not reach the store: every call goes to the coordinator's service."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.parameters.encoding import (
    check_json,
    check_parameters,
    check_state_of,
    decode_parameters,
    decode_state,
    encode_parameters,
    encode_state,
)
from rlsrl.parameters.names import LATEST, check_policy
from rlsrl.parameters.protocols import ParameterDB, Parameters, Ref, ResumePoint, TrainerState, VersionInfo
from rlsrl.parameters.service.failures import ServiceUnavailable, TransferRefused, error_of
from rlsrl.parameters.service.messages import (
    info_from_proto,
    newer_than_to_proto,
    resume_point_from_proto,
    unusable_from_proto,
    version_from_proto,
    version_to_proto,
)
from rlsrl.parameters.service.transfers import MAX_TRANSFER_BYTES, TransferStub, cut, receive
from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.channels import end_call, open_channel, token_metadata
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.rpc.v1.parameters_pb2_grpc import ParametersStub
from rlsrl.runtime.coordination import describe

CALL_SECONDS = 60.0
"""Default deadline of one call, including all its attempts."""
CHECK_SECONDS = 600.0
"""Deadline of ``damage``, for which the service reads a whole store."""

T = TypeVar("T")


class ServiceParameterDB(ParameterDB):
    """A ``ParameterDB`` in another process. Any thread may call any method.

    The service's database raises its errors here. While the service does not answer, a call is repeated until its
    deadline; repeating any call is safe. If the answer to a ``prune`` is lost, the repeated ``prune`` does not return
    the versions that the first one removed.

    Besides the errors that ``ParameterDB`` names, each method may raise ``ServiceUnavailable`` (an OSError: no answer
    in time), ``ServiceRefused`` (the token is not this experiment's) and ``TransferRefused`` (over the size limit).
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        tls: Tls | None = None,
        call_seconds: float = CALL_SECONDS,
        max_transfer_bytes: int = MAX_TRANSFER_BYTES,
        open_connection: Callable[[], grpc.Channel | None] = lambda: None,
    ) -> None:
        """Store the arguments; each call opens its own connection. ``tls`` is for a service that requires certificates.

        ``open_connection`` returns an open connection to the service, or None. Calls after ``expect_end`` use it:
        if a whole experiment is deleted, the service's address may be gone before the service.

        Raises:
            ValueError: the address is neither ``unix-abstract:NAME`` nor ``HOST:PORT``.
        """
        self._address = validate_address(address)
        self._tls = tls
        self._call_seconds = call_seconds
        self._max_nbytes = max_transfer_bytes
        self._metadata = token_metadata(token)
        self._open_connection = open_connection
        self._give_up_at = math.inf
        """When calls stop waiting for an absent service, in seconds of the monotonic clock."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._channels: set[grpc.Channel] = set()
        """The channels of the calls in progress."""

    def close(self) -> None:
        """Make no more calls; calls in progress raise ``ServiceUnavailable``. Idempotent."""
        with self._lock:
            self._closed.set()
            for channel in self._channels:
                channel.close()

    @override
    def expect_end(self, seconds: float) -> None:
        self._give_up_at = time.monotonic() + seconds

    @override
    def get(self, policy: str, ref: Ref = LATEST, newer_than: Version | None = None) -> Parameters | None:
        request = pb.DownloadRequest(
            content=pb.CONTENT_PARAMETERS, policy=policy, ref=str(ref), newer_than=newer_than_to_proto(newer_than)
        )
        data = self._download(request)
        return None if data is None else decode_parameters(data, f"{policy} {ref} from {self._address}")

    @override
    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        check_policy(policy)
        check_parameters(parameters)
        data = encode_parameters(parameters, created_at=0.0, metadata=check_json(metadata or {}, "metadata"))
        saved = b"" if state is None else encode_state(check_state_of(state, parameters.version))
        header = pb.Upload(
            nbytes=len(data) + len(saved),
            content=pb.CONTENT_PARAMETERS,
            policy=policy,
            tags=tags,
            state_nbytes=len(saved),
        )
        self._upload(header, data + saved)

    @override
    def save_state(self, policy: str, state: TrainerState) -> None:
        data = encode_state(state)
        self._upload(pb.Upload(nbytes=len(data), content=pb.CONTENT_STATE, policy=policy), data)

    @override
    def load_state(self, policy: str, ref: Ref = LATEST) -> TrainerState | None:
        data = self._download(pb.DownloadRequest(content=pb.CONTENT_STATE, policy=policy, ref=str(ref)))
        return None if data is None else decode_state(data, f"state of {policy} {ref} from {self._address}")

    @override
    def resume_point(self, policy: str) -> ResumePoint:
        request = pb.ResumePointRequest(policy=policy)
        reply = self._call(lambda channel, options: ParametersStub(channel).ResumePoint(request, **options))
        return resume_point_from_proto(reply)

    @override
    def damage(self, policy: str) -> Mapping[Version, str]:
        request = pb.DamageRequest(policy=policy)
        reply = self._call(
            lambda channel, options: ParametersStub(channel).Damage(request, **options),
            seconds=max(self._call_seconds, CHECK_SECONDS),
        )
        return unusable_from_proto(reply.versions)

    @override
    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        request = pb.TagRequest(policy=policy, ref=str(ref), tags=tags)
        self._call(lambda channel, options: ParametersStub(channel).Tag(request, **options))

    @override
    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        text = json.dumps(check_json(metadata, "metadata"))
        request = pb.AnnotateRequest(policy=policy, version=version_to_proto(version), metadata=text)
        self._call(lambda channel, options: ParametersStub(channel).Annotate(request, **options))

    @override
    def versions(self, policy: str) -> list[VersionInfo]:
        request = pb.VersionsRequest(policy=policy)
        infos = self._call(lambda channel, options: list(ParametersStub(channel).Versions(request, **options)))
        return [info_from_proto(info, policy) for info in infos]

    @override
    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        request = pb.PruneRequest(policy=policy, keep_last=keep_last)
        reply = self._call(lambda channel, options: ParametersStub(channel).Prune(request, **options))
        return [version_from_proto(version) for version in reply.versions]

    @override
    def policies(self) -> list[str]:
        reply = self._call(lambda channel, options: ParametersStub(channel).Policies(pb.PoliciesRequest(), **options))
        return list(reply.policies)

    def _upload(self, header: pb.Upload, data: bytes) -> None:
        self._call(lambda channel, options: TransferStub(channel).upload(cut(header, data), **options))

    def _download(self, request: pb.DownloadRequest) -> bytes | None:
        """Return the content; None if the service has nothing to send."""

        def download(channel: grpc.Channel, options: dict[str, Any]) -> bytes | None:
            call = TransferStub(channel).download(request, **options)
            try:
                transfers = receive(call, pb.Download, max_nbytes=self._max_nbytes)
                transfer = next(transfers, None)
                if transfer is None or next(transfers, None) is not None:
                    raise TransferRefused("a download is exactly one transfer")
            finally:
                end_call(call)
            return transfer.content() if transfer.header.HasField("nbytes") else None

        return self._call(download)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[grpc.Channel]:
        """Yield a channel for one call, with the current certificates. The end of the call or ``close`` closes it."""
        if self._is_ending and (connection := self._open_connection()) is not None:
            yield connection
            return
        channel = open_channel(self._address, self._tls)
        try:
            with self._lock:
                if self._closed.is_set():
                    raise ServiceUnavailable("closed")
                self._channels.add(channel)
            yield channel
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    @property
    def _is_ending(self) -> bool:
        return self._give_up_at < math.inf

    def _call(self, call: Callable[[grpc.Channel, dict[str, Any]], T], *, seconds: float | None = None) -> T:
        """Repeat a call until the service answers or the deadline passes, ``seconds`` from now.

        Woken by the answer, by ``close``, or by the deadline.
        """
        deadline = time.monotonic() + (self._call_seconds if seconds is None else seconds)
        back_off = BackOff()
        cause: Exception
        while True:
            options = {"timeout": max(deadline - time.monotonic(), 0.0), "metadata": self._metadata}
            try:
                with self._connected() as channel:
                    return call(channel, options)
            except grpc.RpcError as failed:
                if (error := error_of(failed)) is not None:
                    raise error from failed
                problem, cause = describe(failed), failed
            except ValueError as error:
                # gRPC raises a ValueError for a call over a channel that `close`, or another owner, has closed.
                if self._closed.is_set():
                    raise ServiceUnavailable("closed") from error
                if not self._is_ending:
                    raise
                problem, cause = str(error), error
            delay = back_off.next_delay()
            if time.monotonic() + delay >= min(deadline, self._give_up_at) or self._closed.wait(delay):
                raise ServiceUnavailable(
                    f"no answer from the parameter service at {self._address}: {problem}"
                ) from cause
