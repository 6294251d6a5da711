"""Records as messages, and back: versions, stored versions' descriptions, and live weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Corrupt, Parameters, ResumePoint, VersionInfo
from rlsrl.parameters.service.transfers import Transfer, cut
from rlsrl.rpc.codec import MessageLayout
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2 import Version as VersionMessage

_VECTOR = "vector"
_STATISTICS = "statistics/"


def version_to_proto(version: Version) -> VersionMessage:
    """Return the version as a message."""
    return VersionMessage(attempt=version.attempt, step=version.step)


def version_from_proto(message: VersionMessage) -> Version:
    """Return the version that ``version_to_proto`` wrote."""
    return Version(message.attempt, message.step)


def newer_than_to_proto(version: Version | None) -> VersionMessage | None:
    """Return the value of a request's field ``newer_than``; None leaves the field unset."""
    return None if version is None else version_to_proto(version)


def newer_than_from_proto(request: pb.DownloadRequest | pb.WatchRequest) -> Version | None:
    """Return a request's ``newer_than``, or None if any version will do."""
    return version_from_proto(request.newer_than) if request.HasField("newer_than") else None


def info_to_proto(info: VersionInfo) -> pb.VersionInfo:
    """Return the info as a message. The policy's name is left out: the client named the policy in the request."""
    return pb.VersionInfo(
        version=version_to_proto(info.version),
        tags=info.tags,
        created_at=info.created_at,
        num_parameters=info.num_parameters,
        nbytes=info.nbytes,
        has_state=info.has_state,
        metadata=json.dumps(info.metadata),
    )


def info_from_proto(message: pb.VersionInfo, policy: str) -> VersionInfo:
    """Return the info that ``info_to_proto`` wrote."""
    return VersionInfo(
        policy=policy,
        version=version_from_proto(message.version),
        tags=tuple(message.tags),
        created_at=message.created_at,
        num_parameters=message.num_parameters,
        nbytes=message.nbytes,
        has_state=message.has_state,
        metadata=json.loads(message.metadata),
    )


def unusable_to_proto(unusable: Mapping[Version, str]) -> list[pb.UnusableVersion]:
    """Return versions with what is wrong with each, as messages in the same order."""
    return [
        pb.UnusableVersion(version=version_to_proto(version), reason=reason) for version, reason in unusable.items()
    ]


def unusable_from_proto(messages: Iterable[pb.UnusableVersion]) -> dict[Version, str]:
    """Return the versions that ``unusable_to_proto`` wrote."""
    return {version_from_proto(message.version): message.reason for message in messages}


def resume_point_to_proto(point: ResumePoint) -> pb.ResumePointReply:
    """Return the point as a message."""
    version = None if point.version is None else version_to_proto(point.version)
    return pb.ResumePointReply(version=version, unusable=unusable_to_proto(point.unusable))


def resume_point_from_proto(message: pb.ResumePointReply) -> ResumePoint:
    """Return the point that ``resume_point_to_proto`` wrote."""
    version = version_from_proto(message.version) if message.HasField("version") else None
    return ResumePoint(version=version, unusable=unusable_from_proto(message.unusable))


def live_description_messages(policy: str, description: Mapping[str, Any]) -> list[bytes]:
    """Return the transfer that carries a publisher's description.

    Raises:
        TypeError: the description is not JSON.
    """
    content = json.dumps(description, separators=(",", ":")).encode()
    return [*cut(pb.Live(nbytes=len(content), description=pb.LiveDescription(policy=policy)), content)]


def live_version_messages(parameters: Parameters) -> Iterator[bytes]:
    """Yield the transfer that carries these parameters. The first message copies the arrays."""
    arrays = {_VECTOR: parameters.vector, **{_STATISTICS + key: value for key, value in parameters.statistics.items()}}
    specs = {name: ArraySpec(shape=array.shape, dtype=array.dtype.name) for name, array in arrays.items()}
    layout = MessageLayout(specs)
    content = bytearray(layout.nbytes)
    for name, view in layout.view(memoryview(content)).items():
        np.copyto(view, arrays[name])
    version = pb.LiveVersion(
        version=version_to_proto(parameters.version),
        layout=parameters.layout,
        specs=json.dumps({name: spec.to_json() for name, spec in specs.items()}),
        checksum=zlib.crc32(content),
    )
    yield from cut(pb.Live(nbytes=len(content), version=version), content)


def check_live_version(transfer: Transfer[pb.Live]) -> Version:
    """Return the version that a transfer carries, after a check of its checksum.

    Raises:
        Corrupt: the transfer's content is not what its publisher sent.
    """
    header = transfer.header.version
    version = version_from_proto(header.version)
    if transfer.checksum() != header.checksum:
        raise Corrupt(f"version {version} arrived with another checksum than it was sent with")
    return version


def read_live_version(transfer: Transfer[pb.Live]) -> Parameters:
    """Return the parameters that ``live_version_messages`` sent, complete and verified. The arrays are read-only.

    Raises:
        Corrupt: the transfer's content is not what its publisher sent.
    """
    version = check_live_version(transfer)
    header = transfer.header.version
    try:
        specs = {str(name): ArraySpec.from_json(spec) for name, spec in json.loads(header.specs).items()}
        arrays = MessageLayout(specs).view(memoryview(transfer.content()))
        return Parameters(
            version=version,
            vector=arrays.pop(_VECTOR),
            layout=header.layout,
            statistics={name.removeprefix(_STATISTICS): array for name, array in arrays.items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"version {version}: {error!r}") from error
