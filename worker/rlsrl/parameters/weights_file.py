"""Files of weights for other programs and other runs: safetensors with each parameter by its name in the network.

A file that rlsrl writes also has the statistics of the normalisation and, as text in its header, the version and its
metadata, with a checksum. A file of another program has named weights alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from rlsrl.data.specs import Arrays
from rlsrl.parameters.encoding import STATISTICS, StoredHeader, check_json, header_size, pack, read_header, unpack
from rlsrl.parameters.layout import NETWORK_KEY, joined, layout_digest, shapes_in, split
from rlsrl.parameters.protocols import Corrupt, Parameters
from rlsrl.runtime.errors import damage

_FORMATS = "rlsrl."
_FORMAT = "rlsrl.weights.1"


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedWeights:
    """The content of a file."""

    tensors: Arrays
    """Float32 weights by the names of the network's parameters."""
    statistics: Arrays
    """``Parameters.statistics``."""
    header: StoredHeader | None
    """The version that rlsrl wrote; None: another program wrote the file."""


def encode_weights(parameters: Parameters, *, created_at: float, metadata: Mapping[str, Any]) -> bytes:
    """Return a file of a version's weights.

    Args:
        parameters: The version.
        created_at: When it was stored, in Unix seconds.
        metadata: Its metadata, with the names and shapes of the weights.

    Raises:
        ValueError: the metadata has no names, or those of other weights.
    """
    if (shapes := shapes_in(metadata)) is None:
        raise ValueError(
            f"version {parameters.version} does not have the names of its weights: an older rlsrl stored it, or it was "
            "removed while it was read"
        )
    arrays = split(parameters.vector, shapes) | {
        f"{STATISTICS}{name}": array for name, array in parameters.statistics.items()
    }
    fields = {
        "format": _FORMAT,
        "version": str(parameters.version),
        "created_at": repr(created_at),
        "metadata": json.dumps(check_json(metadata, "metadata")),
        "num_parameters": str(parameters.vector.size),
    }
    return pack(fields, arrays, identity=("format", "version"))


def decode_weights(data: bytes, source: str) -> NamedWeights:
    """Return the weights in a file of rlsrl, complete and verified, or of another program. Runs no code from data.

    Raises:
        Corrupt: the bytes are no such file, or a weight is no finite floating-point number; the text names ``source``.
    """
    found = _format_of(data, source)
    if not found.startswith(_FORMATS):
        return NamedWeights(tensors=_foreign_tensors(data, source), statistics={}, header=None)
    if found != _FORMAT:
        raise Corrupt(
            f"{source}: has the format {found}, of a parameter store or of a file that an older rlsrl exported; "
            f"`rlsrl params export` writes {_FORMAT}"
        )
    _, arrays = unpack(data, source, _FORMAT, ("version",))
    statistics = {name.removeprefix(STATISTICS): arrays[name] for name in arrays if name.startswith(STATISTICS)}
    header = read_header(data, source, _FORMAT)
    try:
        shapes = shapes_in(header.metadata)
        if shapes is None:
            raise ValueError(f"its metadata has no {NETWORK_KEY!r}")
        tensors = {name: arrays[name] for name in shapes}
    except (KeyError, ValueError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error
    return NamedWeights(tensors=tensors, statistics=statistics, header=header)


def decode_version(data: bytes, source: str) -> tuple[Parameters, StoredHeader]:
    """Return the version in a file of rlsrl.

    Raises:
        Corrupt: the bytes are no such file; the text names ``source``.
    """
    found = decode_weights(data, source)
    if found.header is None:
        raise Corrupt(f"{source}: another program wrote it: it does not say of which version and experiment it is")
    shapes = {name: array.shape for name, array in found.tensors.items()}
    parameters = Parameters(
        version=found.header.version,
        vector=joined(found.tensors, shapes),
        layout=layout_digest(shapes),
        statistics=found.statistics,
    )
    return parameters, found.header


def _format_of(data: bytes, source: str) -> str:
    """Return the format that the header names; empty without one.

    Raises:
        Corrupt: the header cannot be read.
    """
    try:
        return str(json.loads(data[8 : header_size(data)]).get("__metadata__", {}).get("format", ""))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise Corrupt(f"{source}: no readable header ({damage(error)})") from error


def _foreign_tensors(data: bytes, source: str) -> Arrays:
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error
    tensors = {}
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise Corrupt(f"{source}: {name} is {array.dtype}; weights are floating-point numbers")
        with np.errstate(over="ignore"):
            tensors[name] = array.astype(np.float32)
        if not np.isfinite(tensors[name]).all():
            raise Corrupt(f"{source}: {name} holds NaN, infinity or what float32 cannot hold")
    return tensors
