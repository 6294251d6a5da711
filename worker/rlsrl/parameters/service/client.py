"""The parameter database of whoever does not reach the store: every call goes to the coordinator's service."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc

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
from rlsrl.parameters.protocols import Parameters, Ref, TrainerState, VersionInfo
from rlsrl.parameters.service.failures import ServiceUnavailable, TransferRefused, error_of
from rlsrl.parameters.service.messages import (
    info_from_proto,
    version_from_proto,
    version_to_proto,
)
from rlsrl.parameters.service.transfers import (
    MAX_TRANSFER_BYTES,
    TRANSFERS,
    Assembly,
    cut,
    open_message,
    parse_header,
)
from rlsrl.rpc.channels import end_call, open_channel, token_metadata
from rlsrl.rpc.reconnect import BackOff
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.rpc.v1.parameters_pb2_grpc import ParametersStub
from rlsrl.runtime.coordination import describe

CALL_SECONDS = 60.0
"""Default deadline of one call, all its tries together."""
LONGEST_WAIT_SECONDS = 20.0
"""How long one call of ``watch`` waits for a version before it asks again."""

T = TypeVar("T")


class ServiceParameterDB:
    """A ``ParameterDB`` in another process. Any thread may call anything.

    Errors are those of the database there, raised here. While nobody answers, a call is made again until its deadline:
    every one of them may be repeated. Of a ``prune`` that was repeated, what the lost answer told is not told again.
    Beside what ``ParameterDB`` names, each method may raise ``ServiceUnavailable`` (an OSError: nobody answered in
    time), ``ServiceRefused`` (another token) and ``TransferRefused`` (over the service's size limit).
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        tls: Tls | None = None,
        call_seconds: float = CALL_SECONDS,
        max_transfer_bytes: int = MAX_TRANSFER_BYTES,
    ) -> None:
        """Connects for each call; with ``tls``, to a service that wants certificates.

        Raises:
            ValueError: the address is neither ``unix-abstract:NAME`` nor ``HOST:PORT``.
        """
        self._address = validate_address(address)
        self._tls = tls
        self._call_seconds = call_seconds
        self._max_nbytes = max_transfer_bytes
        self._metadata = token_metadata(token)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        """Of the calls that are being made."""

    def close(self) -> None:
        """Make no more calls; those that wait end with ``ServiceUnavailable``. Idempotent."""
        with self._lock:
            self._closed.set()
            for connection in self._open:
                connection.close()

    def get(self, policy: str, ref: Ref = LATEST, newer_than: Version | None = None) -> Parameters | None:
        """See ``ParameterReader.get``."""
        request = pb.DownloadRequest(
            content=pb.CONTENT_PARAMETERS, policy=policy, ref=str(ref), newer_than=_optional(newer_than)
        )
        data = self._fetch(request)
        return None if data is None else decode_parameters(data, f"{policy} {ref} from {self._address}")

    def watch(self, policy: str, timeout: float) -> Iterator[Version]:
        """See ``ParameterReader.watch``. The newest stored version comes first, at once.

        Between two versions nothing is open, so a watch may be given up at any time.
        """
        seen: Version | None = None
        deadline = time.monotonic() + timeout
        while True:
            wait = min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT_SECONDS)
            version = self._await(policy, seen, wait)
            if version is not None:
                seen = version
                yield version
                deadline = time.monotonic() + timeout
            elif time.monotonic() >= deadline:
                return

    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        """See ``ParameterDB.push``. What may not be stored is refused here, before it travels."""
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
        self._send(header, data + saved)

    def save_state(self, policy: str, state: TrainerState) -> None:
        """See ``ParameterDB.save_state``."""
        data = encode_state(state)
        self._send(pb.Upload(nbytes=len(data), content=pb.CONTENT_STATE, policy=policy), data)

    def load_state(self, policy: str, ref: Ref = LATEST) -> TrainerState | None:
        """See ``ParameterDB.load_state``."""
        data = self._fetch(pb.DownloadRequest(content=pb.CONTENT_STATE, policy=policy, ref=str(ref)))
        return None if data is None else decode_state(data, f"state of {policy} {ref} from {self._address}")

    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        """See ``ParameterDB.tag``."""
        request = pb.TagRequest(policy=policy, ref=str(ref), tags=tags)
        self._call(lambda service, options: service.stub.Tag(request, **options))

    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        """See ``ParameterDB.annotate``."""
        text = json.dumps(check_json(metadata, "metadata"))
        request = pb.AnnotateRequest(policy=policy, version=version_to_proto(version), metadata=text)
        self._call(lambda service, options: service.stub.Annotate(request, **options))

    def versions(self, policy: str) -> list[VersionInfo]:
        """See ``ParameterDB.versions``."""
        return self.query(policy, {})

    def query(self, policy: str, where: Mapping[str, Any]) -> list[VersionInfo]:
        """See ``ParameterDB.query``."""
        request = pb.QueryRequest(policy=policy, where=json.dumps(check_json(where, "where")))
        infos = self._call(lambda service, options: list(service.stub.Query(request, **options)))
        return [info_from_proto(info, policy) for info in infos]

    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        """See ``ParameterDB.prune``."""
        request = pb.PruneRequest(policy=policy, keep_last=keep_last)
        reply = self._call(lambda service, options: service.stub.Prune(request, **options))
        return [version_from_proto(version) for version in reply.versions]

    def policies(self) -> list[str]:
        """See ``ParameterDB.policies``."""
        reply = self._call(lambda service, options: service.stub.Policies(pb.PoliciesRequest(), **options))
        return list(reply.policies)

    def _await(self, policy: str, newer_than: Version | None, wait: float) -> Version | None:
        request = pb.AwaitRequest(policy=policy, newer_than=_optional(newer_than), seconds=wait)
        reply = self._call(lambda service, options: service.stub.Await(request, **options), wait=wait)
        return version_from_proto(reply.version) if reply.HasField("version") else None

    def _send(self, header: pb.Upload, data: bytes) -> None:
        self._call(
            lambda service, options: service.upload(cut(header.SerializeToString(), data), **options),
        )

    def _fetch(self, request: pb.DownloadRequest) -> bytes | None:
        def download(service: _Connection, options: dict[str, Any]) -> bytes | None:
            call = service.download(request, **options)
            try:
                return self._assemble(call)
            finally:
                end_call(call)

        return self._call(download)

    def _assemble(self, messages: Iterable[bytes]) -> bytes | None:
        """A download's content; None if there is nothing to send.

        Raises:
            TransferRefused: it is not what was announced.
        """
        stream = iter(messages)
        head, chunk = open_message(next(stream, b""))
        header = parse_header(pb.Download, head)
        if not header.HasField("nbytes"):
            return None
        assembly = Assembly(header.nbytes, chunk, max_nbytes=self._max_nbytes)
        for message in stream:
            assembly.add_message(message)
        if not assembly.complete:
            raise TransferRefused(f"a download of {header.nbytes} bytes ended before they were there")
        return assembly.content()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Connection]:
        """A connection of one call's own, made with the certificates of today. Ends with the call, or by ``close``."""
        connection = _Connection(open_channel(self._address, self._tls))
        try:
            with self._lock:
                if self._closed.is_set():
                    raise ServiceUnavailable("closed")
                self._open.add(connection)
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _call(self, call: Callable[[_Connection, dict[str, Any]], T], *, wait: float = 0.0) -> T:
        """Make a call again until it gets through, in the seconds it is given; ``wait`` seconds it may wait there.

        Woken by the answer, by ``close``, or by the deadline.
        """
        deadline = time.monotonic() + self._call_seconds + wait
        back_off = BackOff()
        while True:
            options = {"timeout": max(deadline - time.monotonic(), 0.0), "metadata": self._metadata}
            try:
                with self._connected() as service:
                    return call(service, options)
            except grpc.RpcError as failed:
                if (error := error_of(failed)) is not None:
                    raise error from failed
                problem, cause = describe(failed), failed
            except ValueError as error:
                if not self._closed.is_set():
                    raise
                raise ServiceUnavailable("closed") from error
            delay = back_off.next_delay()
            if time.monotonic() + delay >= deadline or self._closed.wait(delay):
                raise ServiceUnavailable(
                    f"no answer from the parameter service at {self._address}: {problem}"
                ) from cause


class _Connection:
    """The service's calls, over a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.close = channel.close
        self.stub = ParametersStub(channel)
        self.upload = channel.stream_unary(
            f"/{TRANSFERS}/Upload", request_serializer=None, response_deserializer=pb.Stored.FromString
        )
        self.download = channel.unary_stream(
            f"/{TRANSFERS}/Download",
            request_serializer=pb.DownloadRequest.SerializeToString,
            response_deserializer=None,
        )


def _optional(version: Version | None) -> Any:
    return None if version is None else version_to_proto(version)
