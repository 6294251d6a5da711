"""The stored formats of weights, trainer states and notes. Each contains checksums, so that corruption is detected.

Weights and states are safetensors files; any tool for that format reads their arrays. The header's text fields hold
everything else, and two checksums: ``sha256`` covers the arrays, the version and the layout; ``crc32`` covers the text
fields, so that a listing can verify them without reading the arrays. Notes (tags, annotations, the fence) are JSON with
a checksum. No decoder runs code from data.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.parameters.names import check_version
from rlsrl.parameters.protocols import Corrupt, NonFinite, Parameters, TrainerState
from rlsrl.runtime.errors import damage

HEADER_BYTES = 64 * 1024
"""Bytes at a file's start that hold the header of most files; ``header_size`` returns the exact number."""

STATISTICS = "statistics/"
"""Beginning of the names of the statistics' arrays in a file."""

_PARAMETERS = "rlsrl.parameters.1"
_STATE = "rlsrl.state.1"
_DTYPES = frozenset(
    ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHeader:
    """The text fields of a weights file."""

    version: Version
    created_at: float
    """Unix seconds."""
    num_parameters: int
    metadata: Mapping[str, Any]
    """The metadata of the push."""


def check_json(value: Any, path: str) -> Any:
    """Return a copy of the value as JSON would return it: tuples become lists.

    Raises:
        ValueError: the value contains something that JSON does not have, such as NaN; the text names its path.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON does not have; leave it out or use None")
        return value
    if isinstance(value, list | tuple):
        return [check_json(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}; the keys of a JSON object are strings")
        return {key: check_json(item, f"{path}.{key}") for key, item in value.items()}
    raise ValueError(f"{path} is a {type(value).__name__}; JSON has null, booleans, numbers, strings, lists, objects")


def check_parameters(parameters: Parameters) -> None:
    """Check that parameters may be published.

    Raises:
        NonFinite: a weight or statistic is NaN or infinite.
        ValueError: the vector is not flat float32, the version is negative, or a statistic's dtype is not allowed.
    """
    check_version(parameters.version)
    vector = parameters.vector
    if vector.ndim != 1 or vector.dtype != np.float32:
        raise ValueError(f"a weight vector is flat float32, not {vector.dtype} of shape {vector.shape}")
    for name, array in {"vector": vector, **parameters.statistics}.items():
        _check_dtype(name, array)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NonFinite(f"version {parameters.version}: {name} holds NaN or infinity")


def encode_parameters(parameters: Parameters, *, created_at: float, metadata: Mapping[str, Any]) -> bytes:
    """Return a weights file. The parameters must have passed ``check_parameters``."""
    fields = {
        **_parameter_identity(parameters),
        "created_at": repr(created_at),
        "metadata": json.dumps(check_json(metadata, "metadata")),
        "num_parameters": str(parameters.vector.size),
    }
    return pack(fields, _parameter_arrays(parameters), identity=("format", "version", "layout"))


def decode_parameters(data: bytes, source: str) -> Parameters:
    """Return the parameters in a weights file, complete and verified. The arrays are read-only.

    Raises:
        Corrupt: the bytes are not what was written; the text names ``source``.
    """
    fields, arrays = unpack(data, source, _PARAMETERS, ("version", "layout"))
    try:
        return Parameters(
            version=Version.parse(fields["version"]),
            vector=arrays.pop("vector"),
            layout=fields["layout"],
            statistics={name.removeprefix(STATISTICS): array for name, array in arrays.items()},
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error


def content_digest(parameters: Parameters) -> str:
    """Return a digest of version, layout, weights and statistics. Metadata and time do not change it."""
    return _sha256(_parameter_identity(parameters), _parameter_arrays(parameters))


def header_size(data: bytes) -> int:
    """Return how many bytes ``decode_header`` needs. ``data`` is the file's start, 8 bytes or more."""
    return 8 + int.from_bytes(data[:8], "little")


def decode_header(data: bytes, source: str) -> StoredHeader:
    """Return the text fields of a weights file, from its first ``header_size`` bytes.

    Raises:
        Corrupt: the bytes are not what was written; the text names ``source``.
    """
    return read_header(data, source, _PARAMETERS)


def read_header(data: bytes, source: str, expected_format: str) -> StoredHeader:
    """Return the text fields of a file of that format. See ``decode_header``."""
    fields = _fields(data, source, expected_format)
    try:
        return StoredHeader(
            version=Version.parse(fields["version"]),
            created_at=float(fields["created_at"]),
            num_parameters=int(fields["num_parameters"]),
            metadata=json.loads(fields["metadata"]),
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error


def encode_state(state: TrainerState) -> bytes:
    """Return a state file.

    Raises:
        ValueError: a value is not JSON, or an array's dtype is not allowed.
    """
    for name, array in state.arrays.items():
        _check_dtype(name, array)
    values = json.dumps(check_json(state.values, "values"))
    identity = {"format": _STATE, "version": str(check_version(state.version)), "values": values}
    arrays = {f"arrays/{name}": array for name, array in state.arrays.items()}
    return pack(identity, arrays, identity=tuple(identity))


def check_state_of(state: TrainerState, version: Version) -> TrainerState:
    """Return the state, after a check that it belongs to the version.

    Raises:
        ValueError: the state belongs to another version.
    """
    if state.version != version:
        raise ValueError(f"the state of version {state.version} cannot be pushed with version {version}")
    return state


def decode_state(data: bytes, source: str) -> TrainerState:
    """Return the trainer state in a state file, complete and verified. The arrays are read-only.

    Raises:
        Corrupt: the bytes are not what was written; the text names ``source``.
    """
    fields, arrays = unpack(data, source, _STATE, ("version", "values"))
    try:
        return TrainerState(
            version=Version.parse(fields["version"]),
            arrays={name.removeprefix("arrays/"): array for name, array in arrays.items()},
            values=json.loads(fields["values"]),
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error


def encode_note(value: Any) -> bytes:
    """Return a small JSON file with a checksum. The value must have passed ``check_json``."""
    return json.dumps({"crc32": zlib.crc32(_canonical(value)), "value": value}, indent=2).encode()


def decode_note(data: bytes, source: str) -> Any:
    """Return the value that ``encode_note`` wrote.

    Raises:
        Corrupt: the bytes are not what was written; the text names ``source``.
    """
    try:
        note = json.loads(data)
        value, crc32 = note["value"], note["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error
    if zlib.crc32(_canonical(value)) != crc32:
        raise Corrupt(f"{source}: the checksum does not match")
    return value


def _parameter_identity(parameters: Parameters) -> dict[str, str]:
    return {"format": _PARAMETERS, "version": str(parameters.version), "layout": parameters.layout}


def _parameter_arrays(parameters: Parameters) -> dict[str, NDArray[Any]]:
    statistics = {f"{STATISTICS}{name}": array for name, array in parameters.statistics.items()}
    return {"vector": parameters.vector, **statistics}


def _check_dtype(name: str, array: NDArray[Any]) -> None:
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"array {name!r} has dtype {array.dtype}; allowed are {', '.join(sorted(_DTYPES))}")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _dense(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in C order and little-endian. An array that is both is returned unchanged."""
    return np.require(array, dtype=array.dtype.newbyteorder("<"), requirements="C")


def _sha256(identity: Mapping[str, str], arrays: Arrays) -> str:
    sha256 = hashlib.sha256(_canonical(identity))
    for name in sorted(arrays):
        array = arrays[name]
        sha256.update(_canonical([name, array.dtype.name, list(array.shape)]))
        sha256.update(_dense(array).data)
    return sha256.hexdigest()


def pack(fields: Mapping[str, str], arrays: Arrays, *, identity: tuple[str, ...]) -> bytes:
    """Return a safetensors file with two checksums: of all texts, and of the arrays with the fields ``identity``."""
    checked = {**fields, "sha256": _sha256({name: fields[name] for name in identity}, arrays)}
    crc32 = str(zlib.crc32(_canonical(checked)))
    return save({name: _dense(array) for name, array in arrays.items()}, {**checked, "crc32": crc32})


def _fields(data: bytes, source: str, expected_format: str) -> dict[str, str]:
    try:
        header = json.loads(data[8 : header_size(data)])
        fields = dict(header["__metadata__"])
        crc32 = fields.pop("crc32")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"{source}: no readable header ({damage(error)})") from error
    if str(zlib.crc32(_canonical(fields))) != crc32:
        raise Corrupt(f"{source}: the header's checksum does not match")
    if fields.get("format") != expected_format:
        raise Corrupt(f"{source}: holds {fields.get('format')!r}, not {expected_format!r}")
    return fields


def unpack(
    data: bytes, source: str, expected_format: str, identity: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return the text fields and the read-only arrays of a file that ``pack`` wrote, verified.

    ``identity`` names the fields, besides the format, that the arrays' checksum covers.

    Raises:
        Corrupt: the bytes are not what was written; the text names ``source``.
    """
    fields = _fields(data, source, expected_format)
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise Corrupt(f"{source}: {damage(error)}") from error
    names = {name: fields[name] for name in ("format", *identity)}
    if _sha256(names, arrays) != fields["sha256"]:
        raise Corrupt(f"{source}: the checksum of the arrays does not match")
    for array in arrays.values():
        array.flags.writeable = False
    return fields, arrays
