"""The messages of a replay stream, and their encoding.

A message is a record of numbers and texts, as JSON in the header, and of arrays in the body, whose layout follows from
the kind of the message and its number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.specs import Arrays, ArraySpec, digest
from rlsrl.rpc.codec import Malformed, MessageLayout, split
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES

METHOD = "/rlsrl.replay/Serve"
"""The only call: a stream in both directions."""
PROTOCOL = 1
"""Version of the messages. Raise it with every change: both ends must have the same version."""

_ROW = "row/"
"""Begins the names of drawn fields."""
_ROWS_BYTES = MAX_MESSAGE_BYTES // 8
"""Bytes of the rows of one message, unless a single row has more: other messages need not wait long for its end."""


@dataclass(frozen=True, kw_only=True)
class ReplayMessage:
    """A message. ``arrays`` of a subclass is its body; other fields are JSON values."""


@dataclass(frozen=True, kw_only=True)
class ShardContent(ReplayMessage):
    """What a shard holds. Part of every report of a shard."""

    mass: int
    """The sum of the rows' weights: see ``Draws.mass``."""
    num_transitions: int
    """Transitions held."""


@dataclass(frozen=True, kw_only=True)
class ShardHello(ShardContent):
    """The shard's first message."""

    index: int
    """Of the shard's buffer worker."""
    digest: str
    """``ReplayCodec.digest``."""
    life: int
    """Which content this is: another number after what it held was lost."""
    env_steps: int
    """Env steps stored in that life."""
    lanes: int
    """Lanes that actors were granted over a former connection and whose slots have not arrived."""


@dataclass(frozen=True, kw_only=True)
class Stored(ShardContent):
    """A slot was stored."""

    env_steps: int
    """Env steps stored in the shard's life, the slot's among them."""
    lanes: int
    """Lanes of the slot."""
    attempt: int
    """Attempt of the oldest action's version."""
    step: int
    """Step of the oldest action's version."""
    num_rows: int
    """Bytes of the text."""
    arrays: Arrays
    """``episodes``: JSON text, uint8 [num_rows]."""

    @classmethod
    def text(cls, episodes: EndedEpisodes) -> NDArray[np.uint8]:
        """Return the text of the episodes that ended in the slot."""
        return np.frombuffer(json.dumps(vars(episodes)).encode(), np.uint8)

    @property
    def episodes(self) -> EndedEpisodes:
        """The episodes that ended in the slot.

        Raises:
            Malformed: the text says something else.
        """
        try:
            found = EndedEpisodes(**json.loads(self.arrays["episodes"].tobytes()))
            numbers = [*found.returns, *found.lengths, *chain.from_iterable(found.info.values())]
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise Malformed(f"Stored.episodes cannot be read: {error}") from error
        if any(type(number) not in (int, float) for number in numbers) or len(found.returns) != len(found.lengths):
            raise Malformed("Stored.episodes have no number where one is needed")
        return found


@dataclass(frozen=True, kw_only=True)
class Rows(ShardContent):
    """Rows that were drawn, or a part of them. Without a row: the shard has nothing to draw from."""

    step: int
    """As in the request."""
    trial: int
    """As in the request."""
    mean_age: float
    """See ``DrawnRows.mean_age``."""
    num_rows: int
    """N."""
    arrays: Arrays
    """``key`` int64 [N], ``share`` float64 [N] of the shard's own draws, and each field of the rows [N, ...]."""


@dataclass(frozen=True, kw_only=True)
class Settled(ShardContent):
    """The shard has learned what became of a step's rows."""

    step: int
    """The training step."""
    num_trained: int
    """Transitions that were trained for the first time; 0 if this repeats an earlier message."""


@dataclass(frozen=True, kw_only=True)
class Alive(ReplayMessage):
    """The shard's main thread works."""


@dataclass(frozen=True, kw_only=True)
class RankWelcome(ReplayMessage):
    """The rank's answer to a hello."""

    step: int
    """The last training step. What was trained after it was rolled back."""
    show_life_seconds: float
    """Longest time between two messages of the shard."""


@dataclass(frozen=True, kw_only=True)
class Grant(ReplayMessage):
    """Allow the shard's actors to fill lanes: see ``SampleConsumer.grant``."""

    lanes: int
    room: int
    attempt: int
    """Attempt of ``min_version``."""
    step: int
    """Step of ``min_version``."""


@dataclass(frozen=True, kw_only=True)
class DrawRequest(ReplayMessage):
    """Draw rows. It changes nothing, so it may be repeated."""

    step: int
    """The training step before the one that the rows are for."""
    trial: int
    """Which draw for that step: after the death of a shard its rows are drawn anew from the others."""
    num_rows: int
    seed: int
    """Of the rank's draws."""


@dataclass(frozen=True, kw_only=True)
class Settle(ReplayMessage):
    """Learn what became of the rows of a training step."""

    step: int
    num_rows: int
    """N."""
    arrays: Arrays
    """``key`` int64 [N], ``is_trained`` bool [N], ``error`` float32 [N] with NaN for rows without an error."""


@dataclass(frozen=True, kw_only=True)
class RunIsOver(ReplayMessage):
    """No later life of the rank uses what the shard holds."""


FROM_SHARD = (ShardHello, Stored, Rows, Settled, Alive)
FROM_RANK = (RankWelcome, Grant, DrawRequest, Settle, RunIsOver)

_BODIES: Mapping[type[ReplayMessage], Mapping[str, ArraySpec]] = {
    Stored: {"episodes": ArraySpec(shape=(), dtype="uint8")},
    Settle: {
        "key": ArraySpec(shape=(), dtype="int64"),
        "is_trained": ArraySpec(shape=(), dtype="bool"),
        "error": ArraySpec(shape=(), dtype="float32"),
    },
}
_DRAWN = {"key": ArraySpec(shape=(), dtype="int64"), "share": ArraySpec(shape=(), dtype="float64")}
_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "bool": (bool,)}


class ReplayCodec:
    """Encodes and decodes the messages of a stream whose rows have the same fields."""

    def __init__(self, row: Mapping[str, ArraySpec], settings: Any) -> None:
        """Use the fields of a row, without the axis of rows; ``settings``: JSON values that both ends must share."""
        self._row = {_ROW + name: spec for name, spec in row.items()}
        fields_of_row = [[name, spec.to_json()] for name, spec in row.items()]
        self.digest = digest([PROTOCOL, fields_of_row, settings])
        """Both ends must have the same."""
        self.row_bytes = sum(spec.nbytes for spec in (_DRAWN | self._row).values())
        """Bytes of a row in a message. Must be at most ``MAX_MESSAGE_BYTES``, with room for the header."""
        self.rows_per_message = max(1, _ROWS_BYTES // self.row_bytes)
        """Most rows of one message."""

    def rows(self, arrays: Arrays, *, key: NDArray[np.int64], share: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        """Return the arrays of ``Rows``."""
        return {"key": key, "share": share, **{_ROW + name: array for name, array in arrays.items()}}

    @property
    def no_rows(self) -> dict[str, NDArray[Any]]:
        """The arrays of ``Rows`` without a row."""
        return {name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in (_DRAWN | self._row).items()}

    def fields_of(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the fields of the rows. Undoes ``rows``."""
        return {name.removeprefix(_ROW): arrays[name] for name in self._row}

    def encode(self, message: ReplayMessage) -> bytes:
        """Return the bytes of a message.

        Raises:
            Malformed: an array does not fit its layout.
            MessageTooLong: a single row is too large.
        """
        values = dict(vars(message))
        arrays = values.pop("arrays", {})
        header = json.dumps({"kind": type(message).__name__, **values}, separators=(",", ":")).encode()
        return self._layout(type(message), values.get("num_rows", 0)).encode(header, arrays)

    def decode(self, raw: bytes, kinds: tuple[type[ReplayMessage], ...]) -> ReplayMessage:
        """Return the message of one of these kinds. Its arrays are read-only views.

        Raises:
            Malformed: the bytes are no such message.
        """
        header, body = split(raw)
        try:
            values = json.loads(header)
            kind = next(each for each in kinds if each.__name__ == values["kind"])
        except (ValueError, RecursionError, TypeError, KeyError, StopIteration) as error:
            allowed = ", ".join(each.__name__ for each in kinds)
            raise Malformed(f"a message has no known kind; allowed: {allowed}") from error
        del values["kind"]
        wanted = {each.name: str(each.type) for each in fields(kind) if each.name != "arrays"}
        for name, type_name in wanted.items():
            if type(values.get(name)) not in _TYPES[type_name]:
                raise Malformed(f"{kind.__name__}.{name} is {values.get(name)!r}, not {type_name}")
        if values.keys() != wanted.keys() or values.get("num_rows", 0) < 0:
            raise Malformed(f"a {kind.__name__} has {', '.join(values)}; allowed are {', '.join(wanted)}")
        has_arrays = any(each.name == "arrays" for each in fields(kind))
        arrays = self._layout(kind, values.get("num_rows", 0)).view(body)
        return kind(**values, **({"arrays": arrays} if has_arrays else {}))

    def _layout(self, kind: type[ReplayMessage], num_rows: int) -> MessageLayout:
        body = _DRAWN | self._row if kind is Rows else _BODIES.get(kind, {})
        return MessageLayout(
            {name: ArraySpec(shape=(num_rows, *spec.shape), dtype=spec.dtype) for name, spec in body.items()}
        )
