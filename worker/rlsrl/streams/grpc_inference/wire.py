"""What travels over a gRPC inference stream: ``rlsrl.rpc.codec`` messages with one fixed header.

The token is in the call's metadata and was checked before anything here is read. Then the client says which layout it
speaks, and the server answers with a welcome or a refusal that names both. Afterwards shapes and dtypes are known, so a
message says only how many lanes it has.
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
"""Raised with every change of a message; both ends must have the same."""

METHOD = "/rlsrl.inference/Converse"
"""The one call, a stream both ways."""

MAX_LANES = 1 << 16
"""Lanes of one request."""

_HEADER = struct.Struct("<BxxxIQqq")
"""Kind, lanes, number, attempt and step (of ``min_version`` in a request, of the weights in a result); text follows."""
_STATE = "state/"
"""Before the paths of recurrent state in a message."""
_DISTRIBUTION = "distribution"
_CACHED_LAYOUTS = 32


class InferenceMessageKind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    """The last message: the text says why."""
    REQUEST = 4
    RESULT = 5
    FAILURE = 6
    """Instead of a result; the text is the error's."""
    ALIVE = 7
    """The server's event loop turns, though it has no answer yet."""
    LEAVING = 8
    """The server closes: ask another."""


class InferenceMessage(NamedTuple):
    """A message whose header was read."""

    kind: InferenceMessageKind
    num_lanes: int
    number: int
    version: Version
    text: bytes
    body: memoryview


class ClientHello(NamedTuple):
    """What a client says first."""

    name: str
    layout: InferenceLayout


def read(message: bytes) -> InferenceMessage:
    """Read a message's header.

    Raises:
        Malformed: it is none of ours.
    """
    header, body = split(message)
    if len(header) < _HEADER.size:
        raise Malformed(f"a header of {len(header)} bytes is shorter than {_HEADER.size}")
    kind, num_lanes, number, attempt, step = _HEADER.unpack_from(header)
    try:
        known = InferenceMessageKind(kind)
    except ValueError as error:
        raise Malformed(f"no message is of kind {kind}") from error
    return InferenceMessage(known, num_lanes, number, Version(attempt, step), header[_HEADER.size :], body)


def note(kind: InferenceMessageKind, text: bytes = b"", *, number: int = 0) -> bytes:
    """A message without arrays."""
    return encode(_HEADER.pack(kind, 0, number, 0, 0) + text)


def hello(name: str, layout: InferenceLayout) -> bytes:
    """How a client introduces itself."""
    return note(InferenceMessageKind.HELLO, _json({"protocol": PROTOCOL, "name": name, "layout": layout.to_json()}))


def judge_hello(message: bytes, layout: InferenceLayout) -> ClientHello:
    """Read a client's first message.

    Raises:
        PeerRefused: it is not for us; nothing of it was believed.
    """
    try:
        introduction = read(message)
        value = json.loads(introduction.text) if introduction.kind is InferenceMessageKind.HELLO else {}
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
    """Requests and results of one layout as messages, and back."""

    def __init__(self, layout: InferenceLayout) -> None:
        state = {f"{_STATE}{path}": spec for path, spec in layout.state.items()}
        distribution = ArraySpec(shape=(layout.distribution_size,), dtype="float32")
        self._state = {path: f"{_STATE}{path}" for path in layout.state}
        self._observation = tuple(layout.observation)
        # A client may choose its number of lanes; keeping a layout for each it ever used would be its to exhaust.
        self._request = lru_cache(_CACHED_LAYOUTS)(lambda lanes: _with_lanes({**layout.observation, **state}, lanes))
        self._result = lru_cache(_CACHED_LAYOUTS)(
            lambda lanes: _with_lanes({_DISTRIBUTION: distribution, **state}, lanes)
        )

    def request(self, number: int, request: RolloutRequest) -> bytes:
        """A request's message.

        Raises:
            Malformed: its arrays are not of the layout.
            MessageTooLong: no server would take it.
        """
        num_lanes = request.num_lanes
        if not 1 <= num_lanes <= MAX_LANES:
            raise Malformed(f"a request has from 1 to {MAX_LANES} lanes, not {num_lanes}")
        header = _HEADER.pack(InferenceMessageKind.REQUEST, num_lanes, number, *request.min_version)
        state = {name: request.state[path] for path, name in self._state.items()}
        return self._request(num_lanes).encode(header, {**request.observation, **state})

    def read_request(self, message: InferenceMessage) -> RolloutRequest:
        """The request in a message; its arrays are read-only.

        Raises:
            Malformed: it is no request of this layout.
        """
        if message.kind is not InferenceMessageKind.REQUEST or not 1 <= message.num_lanes <= MAX_LANES:
            raise Malformed(f"a {message.kind.name} of {message.num_lanes} lanes came where a request is due")
        arrays = self._request(message.num_lanes).view(message.body)
        return RolloutRequest(
            observation={path: arrays[path] for path in self._observation},
            state={path: arrays[name] for path, name in self._state.items()},
            min_version=message.version,
        )

    def result(self, number: int, result: RolloutResult) -> bytes:
        """A result's message.

        Raises:
            Malformed: its arrays are not of the layout.
            MessageTooLong: no client would take it.
        """
        num_lanes = len(result.distribution)
        header = _HEADER.pack(InferenceMessageKind.RESULT, num_lanes, number, *result.version)
        state = {name: result.state[path] for path, name in self._state.items()}
        return self._result(num_lanes).encode(header, {_DISTRIBUTION: result.distribution, **state})

    def read_result(self, message: InferenceMessage, num_lanes: int) -> RolloutResult:
        """The result in a message, for a request of ``num_lanes``; its arrays are read-only.

        Raises:
            Malformed: it is none of this layout.
        """
        if message.num_lanes != num_lanes:
            raise Malformed(f"a result of {message.num_lanes} lanes came for a request of {num_lanes}")
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
