"""One version of live weights as it travels: a header with its checksum, and the arrays in one piece."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Corrupt, Parameters
from rlsrl.parameters.service.messages import version_from_proto, version_to_proto
from rlsrl.parameters.service.transfers import Assembly, cut
from rlsrl.rpc.codec import MessageLayout
from rlsrl.rpc.v1 import parameters_pb2 as pb

_VECTOR = "vector"
_STATISTICS = "statistics/"


def version_messages(parameters: Parameters) -> Iterator[bytes]:
    """The messages that carry these parameters; their arrays are copied when the first is asked for."""
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
    yield from cut(pb.Live(nbytes=len(content), version=version).SerializeToString(), content)


def description_messages(policy: str, description: Mapping[str, Any]) -> list[bytes]:
    """The messages that carry a publisher's description.

    Raises:
        TypeError: it is not JSON.
    """
    content = json.dumps(description, separators=(",", ":")).encode()
    header = pb.Live(nbytes=len(content), description=pb.LiveDescription(policy=policy))
    return [*cut(header.SerializeToString(), content)]


def check_version(header: pb.LiveVersion, received: Assembly) -> Version:
    """The version of a complete transfer.

    Raises:
        Corrupt: it is not what was sent.
    """
    version = version_from_proto(header.version)
    if received.checksum() != header.checksum:
        raise Corrupt(f"version {version} arrived with another checksum than it was sent with")
    return version


def read_version(header: pb.LiveVersion, received: Assembly) -> Parameters:
    """What ``version_messages`` sent, whole and verified; the arrays are read-only.

    Raises:
        Corrupt: it is not what was sent.
    """
    version = check_version(header, received)
    try:
        specs = {str(name): ArraySpec.from_json(spec) for name, spec in json.loads(header.specs).items()}
        arrays = MessageLayout(specs).view(memoryview(received.content()))
        return Parameters(
            version=version,
            vector=arrays.pop(_VECTOR),
            layout=header.layout,
            statistics={name.removeprefix(_STATISTICS): array for name, array in arrays.items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"version {version}: {error!r}") from error
