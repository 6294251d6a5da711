"""Values of environments as JSON: arrays, spaces, observations, actions and ``info``. Both ends use it.

An array is ``{"$array": BASE64, "dtype": "<f4", "shape": [2]}``: the raw bytes in C order. So values that are not
finite survive, and images stay small. Where the space is known, nested lists are accepted as well. A float that is not
finite is ``{"$float": "NaN"}``, ``"Infinity"`` or ``"-Infinity"``. Tuples are lists.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium

ARRAY, DTYPE, SHAPE, FLOAT = "$array", "dtype", "shape", "$float"
_KINDS = "biuf"
"""Kinds of dtypes that travel: bool, integers and floats."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LEFT_OUT = object()
"""Stands for a value that has no JSON form."""


class CodecError(ValueError):
    """A value is not of the protocol. The text says which and why."""


def encode(value: Any) -> Any:
    """Return the value as JSON. Parts of it that have no JSON form are left out; alone, such a value becomes None."""
    encoded = _encoded(value)
    return None if encoded is _LEFT_OUT else encoded


def decode(value: Any) -> Any:
    """Return the value of ``encode``; its tuples are lists.

    Raises:
        CodecError: an array or a float is malformed.
    """
    if isinstance(value, Mapping):
        if ARRAY in value:
            return _decoded_array(value)
        if FLOAT in value:
            return _decoded_float(value)
        return {name: decode(member) for name, member in value.items()}
    return [decode(member) for member in value] if isinstance(value, list) else value


def decode_number(value: Any) -> Any:
    """Return a number that may be not finite; any other value as it is."""
    return _decoded_float(value) if isinstance(value, Mapping) and FLOAT in value else value


def decode_element(space: gymnasium.Space[Any], value: Any) -> Any:
    """Return an observation or an action of ``space`` from its JSON.

    A value that does not fit the space is returned unchanged: the caller checks it.

    Raises:
        CodecError: an array or a number is malformed.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        return {
            name: decode_element(space.spaces[name], member) if name in space.spaces else decode(member)
            for name, member in value.items()
        }
    if isinstance(space, spaces.Tuple) and isinstance(value, list) and len(value) == len(space.spaces):
        return tuple(decode_element(part, member) for part, member in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Discrete):
        return decode(value)
    if isinstance(value, Mapping) and ARRAY in value:
        return _decoded_array(value)
    if isinstance(value, list | int | float) and isinstance(
        space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        return _array_of_numbers(value, np.dtype(space.dtype))
    return decode(value)


def encode_space(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """Return a space as JSON.

    Raises:
        CodecError: no protocol of rlsrl has such a space.
    """
    from gymnasium import spaces

    match space:
        case spaces.Box():
            bounds = {"low": _bound(space.low), "high": _bound(space.high)}
            return {"type": "Box", **bounds, SHAPE: list(space.shape), DTYPE: np.dtype(space.dtype).str}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            numbers = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
            return {"type": "MultiDiscrete", **numbers, DTYPE: np.dtype(space.dtype).str}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": np.asarray(space.n).tolist()}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [encode_space(part) for part in space.spaces]}
        case spaces.Dict():
            members = [[name, encode_space(part)] for name, part in space.spaces.items()]
            return {"type": "Dict", "spaces": members}
    raise CodecError(f"{space} cannot be sent; allowed: Box, Discrete, MultiDiscrete, MultiBinary, Tuple, Dict")


def decode_space(value: Any) -> gymnasium.Space[Any]:
    """Return the space of ``encode_space``. The members of a Dict are pairs; an object is accepted as well.

    Raises:
        CodecError: the value describes no space of the protocol.
    """
    try:
        return _decoded_space(value)
    except CodecError:
        raise
    except (KeyError, TypeError, ValueError, AssertionError, AttributeError) as error:
        raise CodecError(f"{str(value)[:200]} is not a space: {type(error).__name__}: {error}") from error


def _decoded_space(value: Any) -> gymnasium.Space[Any]:
    from gymnasium import spaces

    match value["type"]:
        case "Box":
            shape, dtype = tuple(map(int, value[SHAPE])), _dtype(value[DTYPE])
            low, high = (np.broadcast_to(_array(value[name], dtype), shape).copy() for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "Discrete":
            return spaces.Discrete(int(value["n"]), start=int(value.get("start", 0)))
        case "MultiDiscrete":
            dtype = _dtype(value.get(DTYPE, "<i8"))
            start = value.get("start")
            start = None if start is None else np.asarray(start, dtype)
            return spaces.MultiDiscrete(np.asarray(value["nvec"], dtype), dtype.type, start=start)
        case "MultiBinary":
            size = value["n"]
            return spaces.MultiBinary(int(size) if isinstance(size, int) else list(map(int, size)))
        case "Tuple":
            return spaces.Tuple([_decoded_space(part) for part in value["spaces"]])
        case "Dict":
            members = value["spaces"]
            pairs = members.items() if isinstance(members, Mapping) else members
            return spaces.Dict({str(name): _decoded_space(part) for name, part in pairs})
    raise CodecError(f"space type {value['type']!r}; allowed: Box, Discrete, MultiDiscrete, MultiBinary, Tuple, Dict")


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: _name_of(value)}
    if isinstance(value, np.generic):
        return _encoded(value.item()) if value.dtype.kind in _KINDS + "U" else _LEFT_OUT
    if isinstance(value, np.ndarray):
        return _encoded_array(value) if value.dtype.kind in _KINDS else _encoded(value.tolist())
    if isinstance(value, Mapping):
        members = ((str(name), _encoded(member)) for name, member in value.items())
        return {name: member for name, member in members if member is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [None if (member := _encoded(each)) is _LEFT_OUT else member for each in value]
    return _LEFT_OUT


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _encoded_array(array: NDArray[Any]) -> dict[str, Any]:
    raw = np.ascontiguousarray(array).tobytes()
    return {ARRAY: base64.b64encode(raw).decode("ascii"), DTYPE: array.dtype.str, SHAPE: list(array.shape)}


def _decoded_array(value: Mapping[str, Any]) -> NDArray[Any]:
    try:
        raw = base64.b64decode(value[ARRAY], validate=True)
        flat: NDArray[Any] = np.frombuffer(raw, _dtype(value[DTYPE]))
        # A copy: environments and wrappers may write into what they get.
        return flat.reshape(tuple(map(int, value[SHAPE]))).copy()
    except CodecError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"an array is malformed: {type(error).__name__}: {error}") from error


def _decoded_float(value: Mapping[str, Any]) -> float:
    try:
        return _NOT_FINITE[value[FLOAT]]
    except (KeyError, TypeError) as error:
        raise CodecError(f"{FLOAT} is {value[FLOAT]!r}; allowed: {', '.join(_NOT_FINITE)}") from error


def _array(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(value, Mapping) and ARRAY in value:
        return _decoded_array(value)
    return np.asarray(decode(value), dtype)


def _array_of_numbers(value: Any, dtype: np.dtype[Any]) -> Any:
    try:
        return np.asarray(decode(value), dtype)
    except (TypeError, ValueError, OverflowError):
        return decode(value)


def _dtype(name: Any) -> np.dtype[Any]:
    """Return a dtype of numbers: others, such as objects, are refused."""
    try:
        dtype = np.dtype(str(name))
    except TypeError as error:
        raise CodecError(f"dtype {name!r} is unknown") from error
    if dtype.kind not in _KINDS:
        raise CodecError(f"dtype {name!r} holds no numbers")
    return dtype


def _bound(bound: NDArray[Any]) -> Any:
    """Return a bound of a Box: one number if all entries are equal."""
    first = bound.flat[0] if bound.size else bound.dtype.type(0)
    return _encoded(first) if bool(np.all(bound == first)) else _encoded_array(bound)
