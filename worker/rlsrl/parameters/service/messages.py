"""Records of the store as messages, and back."""

from __future__ import annotations

import json

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.rpc.v1 import parameters_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2 import Version as VersionMessage


def version_to_proto(version: Version) -> VersionMessage:
    """As a message."""
    return VersionMessage(attempt=version.attempt, step=version.step)


def version_from_proto(message: VersionMessage) -> Version:
    """What ``version_to_proto`` made."""
    return Version(message.attempt, message.step)


def info_to_proto(info: VersionInfo) -> pb.VersionInfo:
    """As a message, without the policy, which whoever asked knows."""
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
    """What ``info_to_proto`` made."""
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
