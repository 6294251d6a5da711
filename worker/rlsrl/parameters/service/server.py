"""The parameter service: the coordinator, which alone mounts the volume, serves stored and live weights over gRPC.

One event loop answers all calls. Blocking work (the disk, checksums of large arrays) runs in threads, so a slow upload,
a slow disk or a slow reader delays no other call. The service stores an upload only after all of it has arrived.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from grpc import aio
from typing_extensions import override

from rlsrl.parameters.encoding import (
    decode_header,
    decode_parameters,
    decode_state,
    encode_parameters,
    encode_state,
)
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.parameters.service.failures import TransferRefused, failure_of
from rlsrl.parameters.service.live_server import LiveWeights
from rlsrl.parameters.service.messages import (
    info_to_proto,
    newer_than_from_proto,
    resume_point_to_proto,
    unusable_to_proto,
    version_from_proto,
    version_to_proto,
)
from rlsrl.parameters.service.transfers import (
    MAX_TRANSFER_BYTES,
    Transfer,
    add_transfers,
    cut,
    receive_on_server,
)
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.rpc.v1.parameters_pb2_grpc import ParametersServicer, add_ParametersServicer_to_server

MAX_CALL_SECONDS = 3600.0
"""Longest deadline that a call may state. It bounds how long a call can hold memory and threads."""
NUM_READERS = 8
"""Threads for reads, which may wait for a disk."""
NUM_WRITERS = 4
"""Threads for writes, which may wait for each other."""

T = TypeVar("T")
Context = aio.ServicerContext[Any, Any]


class ParameterService(ParametersServicer):
    """Serves a ``ParameterDB`` and live weights. All methods run on one event loop; the database runs in threads."""

    def __init__(
        self,
        db: ParameterDB,
        *,
        log: structlog.stdlib.BoundLogger,
        on_refused: Callable[[str], None],
        max_transfer_bytes: int = MAX_TRANSFER_BYTES,
    ) -> None:
        """Prepare to serve.

        Args:
            db: the stored versions. Threads call it.
            log: gets one event for each unexpected error.
            on_refused: called with the kind of error for each call that ends with an error.
            max_transfer_bytes: limit of one version or state; a larger one is refused.
        """
        self._db = db
        self._log = log
        self._on_refused = on_refused
        self._max_nbytes = max_transfer_bytes
        self._reading = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="parameter-reads")
        self._writing = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="parameter-writes")
        self._live = LiveWeights(max_transfer_bytes=max_transfer_bytes)

    def add_to(self, server: aio.Server) -> None:
        """Let a server answer the service's calls."""
        add_ParametersServicer_to_server(self, server)
        add_transfers(server, upload=self._upload, download=self._download, publish=self._publish, watch=self._watch)

    def close(self) -> None:
        """End the threads, after their current work. Call it after the server has stopped."""
        for pool in (self._reading, self._writing):
            pool.shutdown(cancel_futures=True)

    @override
    async def Versions(self, request: pb.VersionsRequest, context: Context) -> AsyncIterator[pb.VersionInfo]:
        """Answer with the stored versions, oldest first."""
        for info in await self._read(context, lambda: [*map(info_to_proto, self._db.versions(request.policy))]):
            yield info

    @override
    async def Policies(self, request: pb.PoliciesRequest, context: Context) -> pb.PoliciesReply:
        """Answer with the names of the stored policies."""
        return pb.PoliciesReply(policies=await self._read(context, self._db.policies))

    @override
    async def Tag(self, request: pb.TagRequest, context: Context) -> pb.Stored:
        """Tag a version."""
        await self._write(context, lambda: self._db.tag(request.policy, request.ref, *request.tags))
        return pb.Stored()

    @override
    async def Annotate(self, request: pb.AnnotateRequest, context: Context) -> pb.Stored:
        """Add to a version's metadata."""

        def annotate() -> None:
            self._db.annotate(request.policy, version_from_proto(request.version), json.loads(request.metadata))

        await self._write(context, annotate)
        return pb.Stored()

    @override
    async def Prune(self, request: pb.PruneRequest, context: Context) -> pb.PruneReply:
        """Remove old versions and answer with them."""
        removed = await self._write(context, lambda: self._db.prune(request.policy, keep_last=request.keep_last))
        return pb.PruneReply(versions=map(version_to_proto, removed))

    @override
    async def ResumePoint(self, request: pb.ResumePointRequest, context: Context) -> pb.ResumePointReply:
        """Answer with the version that training resumes from, and the newer ones."""
        return resume_point_to_proto(await self._read(context, lambda: self._db.resume_point(request.policy)))

    @override
    async def Damage(self, request: pb.DamageRequest, context: Context) -> pb.DamageReply:
        """Answer with the versions that fail verification."""
        damage = await self._read(context, lambda: self._db.damage(request.policy))
        return pb.DamageReply(versions=unusable_to_proto(damage))

    async def _upload(self, requests: AsyncIterator[bytes], context: Context) -> pb.Stored:  # noqa: ARG002
        transfer = await self._guard(context, self._receive(context))
        await self._write(context, lambda: self._store(transfer.header, transfer.content()))
        return pb.Stored()

    async def _receive(self, context: Context) -> Transfer[pb.Upload]:
        """Return the upload, once all of it has arrived."""
        _require_deadline(context)
        transfers = receive_on_server(context, pb.Upload, max_nbytes=self._max_nbytes)
        transfer = await anext(transfers, None)
        if transfer is None or await anext(transfers, None) is not None:
            raise TransferRefused("an upload is exactly one transfer")
        return transfer

    def _store(self, header: pb.Upload, data: bytes) -> None:
        source = f"upload to {header.policy!r}"
        if header.content == pb.CONTENT_PARAMETERS:
            if not 0 <= header.state_nbytes < max(len(data), 1):
                raise TransferRefused(f"an upload of {len(data)} bytes, {header.state_nbytes} of them a state")
            data, saved = data[: len(data) - header.state_nbytes], data[len(data) - header.state_nbytes :]
            self._db.push(
                header.policy,
                decode_parameters(data, source),
                tags=header.tags,
                metadata=decode_header(data, source).metadata,
                state=decode_state(saved, source) if saved else None,
            )
        elif header.content == pb.CONTENT_STATE:
            self._db.save_state(header.policy, decode_state(data, source))
        else:
            raise TransferRefused("an upload is of parameters or of a state")

    async def _download(self, request: pb.DownloadRequest, context: Context) -> AsyncIterator[bytes]:
        data = await self._read(context, lambda: self._load(request, context))
        header = pb.Download(nbytes=None if data is None else len(data))
        for message in cut(header, data or b""):
            yield message

    def _load(self, request: pb.DownloadRequest, context: Context) -> bytes | None:
        _require_deadline(context)
        if request.content == pb.CONTENT_PARAMETERS:
            parameters = self._db.get(request.policy, request.ref, newer_than_from_proto(request))
            return None if parameters is None else encode_parameters(parameters, created_at=0.0, metadata={})
        if request.content == pb.CONTENT_STATE:
            state = self._db.load_state(request.policy, request.ref)
            return None if state is None else encode_state(state)
        raise TransferRefused("a download is of parameters or of a state")

    async def _publish(self, requests: AsyncIterator[bytes], context: Context) -> None:  # noqa: ARG002
        await self._guard(context, self._live.receive_versions(context))

    async def _watch(self, request: pb.WatchRequest, context: Context) -> None:
        newer_than = newer_than_from_proto(request)
        await self._guard(context, self._live.send_versions(request.policy, newer_than, context))

    async def _read(self, context: Context, work: Callable[[], T]) -> T:
        return await self._guard(context, asyncio.get_running_loop().run_in_executor(self._reading, work))

    async def _write(self, context: Context, work: Callable[[], T]) -> T:
        return await self._guard(context, asyncio.get_running_loop().run_in_executor(self._writing, work))

    async def _guard(self, context: Context, work: Awaitable[T]) -> T:
        """Do a part of a call. Its error ends the call; the client raises the same error."""
        try:
            return await work
        except aio.BaseError:  # the stream broke: the client cannot receive the error
            raise
        except Exception as error:  # noqa: BLE001 - the client raises it
            failure = failure_of(error)
            self._on_refused(failure.kind)
            if not failure.expected:
                self._log.exception("parameter_call_failed")
            await context.abort(failure.code, failure.text, failure.metadata)


def _require_deadline(context: Context) -> None:
    """Refuse a transfer without a deadline: it could hold its bytes in memory forever."""
    remaining = context.time_remaining()
    if remaining is None or remaining > MAX_CALL_SECONDS:
        raise TransferRefused(f"a transfer states a deadline of at most {MAX_CALL_SECONDS:.0f} seconds")
