"""The messages of a gRPC inference stream: ``rlsrl.rpc.codec`` messages with one fixed header.

The token is in the call's metadata and is checked first. Then the client sends its layout, and the server answers with
a welcome, or with a refusal that has both layouts. After that both ends know shapes and dtypes, so a message carries
only its number of lanes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.rpc.codec import Malformed, MessageLayout, encode, split
from rlsrl.streams.handshake import PeerRefused

PROTOCOL = 1
"""Version of the messages. Raise it with every change: both ends must have the same version."""

METHOD = "/rlsrl.inference/Converse"
"""The only call: a stream in both directions."""

MAX_LANES = 1 << 16
"""Most lanes of one request."""

_HEADER = struct.Struct("<BxxxIQqq")
"""Kind, lanes, number, attempt and step. In a request they are of ``min_version``, in a result of the weights. Text may
follow."""
_STATE = "state/"
"""Prefix of the paths of recurrent state in a message."""
_DISTRIBUTION = "distribution"
_CACHED_LAYOUTS = 32


class InferenceMessageKind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    """The last message. The text says why."""
    REQUEST = 4
    RESULT = 5
    FAILURE = 6
    """Sent instead of a result. The text is that of the error."""
    ALIVE = 7
    """The server's event loop runs, but there is no answer yet."""
    LEAVING = 8
    """The server closes: connect to another."""


class InferenceMessage(NamedTuple):
    """A message with its decoded header."""

    kind: InferenceMessageKind
    num_lanes: int
    number: int
    version: Version
    text: bytes
    body: memoryview


class ClientHello(NamedTuple):
    """A client's first message."""

    name: str
    layout: InferenceLayout


def read(message: bytes) -> InferenceMessage:
    """Decode a message's header.

    Raises:
        Malformed: the header is not of this stream.
    """
    header, body = split(message)
    if len(header) < _HEADER.size:
        raise Malformed(f"a header of {len(header)} bytes; it has at least {_HEADER.size}")
    kind, num_lanes, number, attempt, step = _HEADER.unpack_from(header)
    try:
        known = InferenceMessageKind(kind)
    except ValueError as error:
        raise Malformed(f"message kind {kind} is unknown") from error
    return InferenceMessage(known, num_lanes, number, Version(attempt, step), header[_HEADER.size :], body)


def note(kind: InferenceMessageKind, text: bytes = b"", *, number: int = 0) -> bytes:
    """Return a message without arrays."""
    return encode(_HEADER.pack(kind, 0, number, 0, 0) + text)


def hello(name: str, layout: InferenceLayout) -> bytes:
    """Return a client's first message."""
    return note(InferenceMessageKind.HELLO, _json({"protocol": PROTOCOL, "name": name, "layout": layout.to_json()}))


def read_hello(message: bytes, layout: InferenceLayout) -> ClientHello:
    """Decode and check a client's first message.

    Raises:
        PeerRefused: the message is malformed, or has another protocol version or layout.
    """
    try:
        first = read(message)
        value = json.loads(first.text) if first.kind is InferenceMessageKind.HELLO else {}
        protocol = value["protocol"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PeerRefused("malformed", f"malformed handshake: {error!r}"[:200]) from error
    if protocol != PROTOCOL:
        raise PeerRefused("protocol", f"protocol {PROTOCOL} at the server, {str(protocol)[:20]} at the client")
    try:
        theirs = ClientHello(str(value["name"])[:80], InferenceLayout.from_json(value["layout"]))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise PeerRefused("malformed", f"malformed handshake: {error!r}"[:200]) from error
    if theirs.layout.digest != layout.digest:
        raise PeerRefused("layout", f"({layout}) at the server, ({theirs.layout}) at the client")
    return theirs


class LaneMessages:
    """Encodes and decodes the requests and results of one layout."""

    def __init__(self, layout: InferenceLayout) -> None:
        state = {f"{_STATE}{path}": spec for path, spec in layout.state.items()}
        distribution = ArraySpec(shape=(layout.distribution_size,), dtype="float32")
        self._state = {path: f"{_STATE}{path}" for path in layout.state}
        self._observation = tuple(layout.observation)
        # A client chooses its number of lanes: an unbounded cache could exhaust the memory.
        self._request = lru_cache(_CACHED_LAYOUTS)(lambda lanes: _with_lanes({**layout.observation, **state}, lanes))
        self._result = lru_cache(_CACHED_LAYOUTS)(
            lambda lanes: _with_lanes({_DISTRIBUTION: distribution, **state}, lanes)
        )

    def request(self, number: int, request: RolloutRequest) -> bytes:
        """Encode a request.

        Raises:
            Malformed: its arrays are not of the layout.
            MessageTooLong: the request is too large for a message.
        """
        num_lanes = request.num_lanes
        if not 1 <= num_lanes <= MAX_LANES:
            raise Malformed(f"a request of {num_lanes} lanes; allowed are 1 to {MAX_LANES}")
        header = _HEADER.pack(InferenceMessageKind.REQUEST, num_lanes, number, *request.min_version)
        state = {name: request.state[path] for path, name in self._state.items()}
        return self._request(num_lanes).encode(header, {**request.observation, **state})

    def read_request(self, message: InferenceMessage) -> RolloutRequest:
        """Decode a request. Its arrays are read-only.

        Raises:
            Malformed: the message is not a request of this layout.
        """
        if message.kind is not InferenceMessageKind.REQUEST or not 1 <= message.num_lanes <= MAX_LANES:
            raise Malformed(
                f"a {message.kind.name} of {message.num_lanes} lanes; expected a REQUEST of 1 to {MAX_LANES}"
            )
        arrays = self._request(message.num_lanes).view(message.body)
        return RolloutRequest(
            observation={path: arrays[path] for path in self._observation},
            state={path: arrays[name] for path, name in self._state.items()},
            min_version=message.version,
        )

    def result(self, number: int, result: RolloutResult) -> bytes:
        """Encode a result.

        Raises:
            Malformed: its arrays are not of the layout.
            MessageTooLong: the result is too large for a message.
        """
        num_lanes = len(result.distribution)
        header = _HEADER.pack(InferenceMessageKind.RESULT, num_lanes, number, *result.version)
        state = {name: result.state[path] for path, name in self._state.items()}
        return self._result(num_lanes).encode(header, {_DISTRIBUTION: result.distribution, **state})

    def read_result(self, message: InferenceMessage, num_lanes: int) -> RolloutResult:
        """Decode the result for a request of ``num_lanes``. Its arrays are read-only.

        Raises:
            Malformed: the message is not a result of this layout and number of lanes.
        """
        if message.num_lanes != num_lanes:
            raise Malformed(f"a result of {message.num_lanes} lanes for a request of {num_lanes}")
        arrays = self._result(num_lanes).view(message.body)
        return RolloutResult(
            distribution=arrays[_DISTRIBUTION],
            state={path: arrays[name] for path, name in self._state.items()},
            version=message.version,
        )


def _with_lanes(specs: Mapping[str, ArraySpec], num_lanes: int) -> MessageLayout:
    return MessageLayout(
        {path: ArraySpec(shape=(num_lanes, *spec.shape), dtype=spec.dtype) for path, spec in specs.items()}
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
