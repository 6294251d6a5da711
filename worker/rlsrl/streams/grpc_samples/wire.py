"""The messages of a gRPC sample stream: ``rlsrl.rpc.codec`` messages with one fixed header.

The body of a post is the slot's memory with its padding. The handshake has agreed on its layout.
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
"""The only call: a stream in both directions."""

_HEADER = struct.Struct("<B7x5q")
_NUM_WORDS = 5
"""Integers after the kind. In a handshake JSON text follows."""
_HEADROOM = 16 + _HEADER.size + ALIGNMENT
"""Most bytes of a post without its body."""
MAX_SLOT_BYTES = MAX_MESSAGE_BYTES - _HEADROOM
"""Bytes of the largest slot that fits into a message."""


class SampleMessageKind(IntEnum):
    """The kind of a message, and the meaning of its integers."""

    HELLO = 1
    """no integers; JSON text follows"""
    WELCOME = 2
    """milliseconds within which the producer must show life; JSON text follows"""
    REFUSED = 3
    """no integers; JSON text follows. It is the last message."""
    CREDIT = 4
    """slot, order, attempt and step of min_version"""
    ACK = 5
    """sequence: the consumer has every slot up to it"""
    POST = 6
    """slot, order of its credit, sequence, num_transitions, the producer's total; the slot's memory is the body"""
    ALIVE = 7
    """the producer's number of touches"""


class SampleMessage(NamedTuple):
    """A message with its decoded header."""

    kind: SampleMessageKind
    words: tuple[int, int, int, int, int]
    text: bytes
    body: memoryview


def read(message: bytes) -> SampleMessage:
    """Decode a message's header.

    Raises:
        Malformed: the header is not of this stream.
    """
    header, body = split(message)
    if len(header) < _HEADER.size:
        raise Malformed(f"a header of {len(header)} bytes; it has at least {_HEADER.size}")
    kind, *words = _HEADER.unpack_from(header)
    try:
        known = SampleMessageKind(kind)
    except ValueError as error:
        raise Malformed(f"message kind {kind} is unknown") from error
    first, second, third, fourth, fifth = words
    return SampleMessage(known, (first, second, third, fourth, fifth), header[_HEADER.size :], body)


def note(kind: SampleMessageKind, *words: int) -> bytes:
    """Return a message of at most five integers."""
    return encode(_header(kind, *words))


def handshake(kind: SampleMessageKind, value: Mapping[str, Any], *words: int) -> bytes:
    """Return a message with a JSON object.

    Raises:
        MessageTooLong: the object is too large for a message.
    """
    return encode(_header(kind, *words) + json.dumps(value, separators=(",", ":")).encode())


def read_handshake(message: SampleMessage) -> dict[str, Any]:
    """Return the JSON object of a message.

    Raises:
        Malformed: the message holds no JSON object.
    """
    try:
        value = json.loads(message.text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a {message.kind.name} holds no JSON") from error
    if not isinstance(value, dict):
        raise Malformed(f"a {message.kind.name} holds no JSON object")
    return value


def post(memory: bytearray, place: int, order: int, sequence: int, num_transitions: int, total: int) -> bytes:
    """Return a slot's message, with a copy of its memory."""
    header = _header(SampleMessageKind.POST, place, order, sequence, num_transitions, total)
    return encode(header, [np.frombuffer(memory, dtype=np.uint8)])


def check_fits(layout: SlotLayout) -> None:
    """Check that a slot of this layout fits into a message.

    Raises:
        ConfigurationError: the slot is too large; the text says which field to change.
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
