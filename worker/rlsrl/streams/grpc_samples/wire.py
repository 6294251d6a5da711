"""What travels over a gRPC sample stream: ``rlsrl.rpc.codec`` messages with one fixed header.

A post's body is the slot's memory as it is, padding included: its layout was agreed on in the handshake.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from rlsrl.data.slots import SlotLayout
from rlsrl.rpc.codec import ALIGNMENT, Malformed, encode, split
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES
from rlsrl.runtime.errors import ConfigurationError

METHOD = "/rlsrl.samples/Deliver"
"""The one call, a stream both ways."""

_HEADER = struct.Struct("<B7x5q")
_NUM_WORDS = 5
"""Kind and five integers; JSON follows in a handshake."""
_HEADROOM = 16 + _HEADER.size + ALIGNMENT
"""Bytes of a post beside its body, at most."""
MAX_SLOT_BYTES = MAX_MESSAGE_BYTES - _HEADROOM
"""Larger slots do not fit into a message."""


class SampleMessageKind(IntEnum):
    """What a message is, and what its integers say."""

    HELLO = 1
    """JSON follows."""
    WELCOME = 2
    """milliseconds within which the producer is to show life; JSON follows"""
    REFUSED = 3
    """JSON follows; it is the last message."""
    CREDIT = 4
    """slot, order, attempt and step of min_version"""
    ACK = 5
    """sequence: everything up to it is held"""
    POST = 6
    """slot, order of its credit, sequence, num_transitions, the producer's count; the slot's memory is the body"""
    ALIVE = 7
    """how often the producer has shown life"""


class SampleMessage(NamedTuple):
    """A message whose header was read."""

    kind: SampleMessageKind
    words: tuple[int, int, int, int, int]
    text: bytes
    body: memoryview


def read(message: bytes) -> SampleMessage:
    """Read a message's header.

    Raises:
        Malformed: it is none of ours.
    """
    header, body = split(message)
    if len(header) < _HEADER.size:
        raise Malformed(f"a header of {len(header)} bytes is shorter than {_HEADER.size}")
    kind, *words = _HEADER.unpack_from(header)
    try:
        known = SampleMessageKind(kind)
    except ValueError as error:
        raise Malformed(f"no message is of kind {kind}") from error
    first, second, third, fourth, fifth = words
    return SampleMessage(known, (first, second, third, fourth, fifth), header[_HEADER.size :], body)


def note(kind: SampleMessageKind, *words: int) -> bytes:
    """A message of at most five integers."""
    return encode(_header(kind, *words))


def handshake(kind: SampleMessageKind, value: Mapping[str, Any], *words: int) -> bytes:
    """A message of a JSON object.

    Raises:
        MessageTooLong: of an introduction or answer that nobody would take.
    """
    return encode(_header(kind, *words) + json.dumps(value, separators=(",", ":")).encode())


def read_handshake(message: SampleMessage) -> dict[str, Any]:
    """The JSON object of a message.

    Raises:
        Malformed: there is none.
    """
    try:
        value = json.loads(message.text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a {message.kind.name} holds no JSON") from error
    if not isinstance(value, dict):
        raise Malformed(f"a {message.kind.name} holds no JSON object")
    return value


def post(memory: bytearray, place: int, order: int, sequence: int, num_transitions: int, total: int) -> bytes:
    """A slot's message; its memory is copied."""
    header = _header(SampleMessageKind.POST, place, order, sequence, num_transitions, total)
    return encode(header, [np.frombuffer(memory, dtype=np.uint8)])


def check_fits(layout: SlotLayout) -> None:
    """See to it that slots of this layout can be sent.

    Raises:
        ConfigurationError: they are too large; the text says by how much and what to change.
    """
    if layout.nbytes > MAX_SLOT_BYTES:
        mib = 1 << 20
        raise ConfigurationError(
            f"a slot of {layout.num_steps} steps x {layout.num_lanes} lanes has {layout.nbytes / mib:.1f} MiB, and a "
            f"gRPC message at most {MAX_MESSAGE_BYTES // mib} MiB: shorten actors.rolloutLength, or spread the "
            "environments over more actors (actors.replicas)"
        )


def _header(kind: SampleMessageKind, *words: int) -> bytes:
    return _HEADER.pack(kind, *words, *(0,) * (_NUM_WORDS - len(words)))
