"""The handshake of a sample stream on every transport: the producer's hello and the consumer's welcome or refusal.

The messages are JSON objects. Each field is checked: the socket is open to everyone on the machine or network. The
protocol version and the token are checked before the other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Self

from rlsrl.data.slots import ProducerId, SlotLayout
from rlsrl.rpc.auth import token_matches
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.protocols import HandshakeRefused, StreamError

PROTOCOL = 3
"""Version of the messages. Raise it with every change: both ends must have the same version."""

MAX_LANES = 1 << 16
"""Most lanes of one slot."""

MAX_SLOTS = 64
"""Most slots of one producer, with the slots that it brings from a former connection."""

UnacknowledgedSlot = tuple[int, int]
"""(sequence, num_transitions) of a slot that was posted and not acknowledged."""

RefusalKind = Literal["malformed", "protocol", "token", "layout", "incarnation", "capacity"]


class PeerRefused(Exception):
    """This end refuses its peer. The text has the values of both ends and is sent to the peer."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The producer's first message: its identity and the slots that it holds from former connections."""

    producer: ProducerId
    layout: SlotLayout
    unacknowledged: tuple[UnacknowledgedSlot, ...] = ()
    """Slots that this incarnation posted and will post again, ascending."""
    num_in_hand: int = 0
    """Slots that are being filled under a credit of a former connection. They will be posted over this one."""
    progress: ProducerProgress = field(default_factory=ProducerProgress)
    """This index's progress with the consumer, from the producer's ledger."""

    def to_json(self, token: str) -> dict[str, Any]:
        """Return the message, with the token."""
        return {
            "protocol": PROTOCOL,
            "token": token,
            "index": self.producer.index,
            "incarnation": self.producer.incarnation,
            "layout": self.layout.to_json(),
            "unacknowledged": [list(entry) for entry in self.unacknowledged],
            "num_in_hand": self.num_in_hand,
            "account": [self.progress.inherited, self.progress.sequence, self.progress.acknowledged],
            "left": [list(entry) for entry in self.progress.left],
            "restored": self.progress.restored,
        }

    @classmethod
    def from_json(cls, message: Mapping[str, Any], *, token: str, layout_digest: str) -> Self:
        """Decode and check a producer's message.

        Raises:
            PeerRefused: a field is invalid, or does not match this consumer.
        """
        protocol, shown = message.get("protocol"), message.get("token")
        if protocol != PROTOCOL:
            raise PeerRefused("protocol", f"protocol {PROTOCOL} at the consumer, {str(protocol)[:20]} at the producer")
        if not isinstance(shown, str) or not token_matches(shown, token):
            raise PeerRefused("token", "the token is not this experiment's")
        try:
            hello = cls._read(message)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise PeerRefused("malformed", f"malformed handshake: {error!r}"[:200]) from error
        if hello.layout.step_digest != layout_digest:
            raise PeerRefused(
                "layout", f"slot layout {layout_digest} at the consumer, {hello.layout.step_digest} at the producer"
            )
        if not 1 <= hello.layout.num_lanes <= MAX_LANES:
            raise PeerRefused("layout", f"{hello.layout.num_lanes} lanes a slot; allowed are 1 to {MAX_LANES}")
        return hello

    @classmethod
    def _read(cls, message: Mapping[str, Any]) -> Self:
        producer = ProducerId(_integer(message["index"]), _integer(message["incarnation"]))
        hello = cls(
            producer=producer,
            layout=SlotLayout.from_json(message["layout"]),
            unacknowledged=_unacknowledged(message["unacknowledged"]),
            num_in_hand=_integer(message["num_in_hand"]),
            progress=_progress(message, producer),
        )
        if hello.unacknowledged and hello.unacknowledged[0][0] <= hello.progress.sequence:
            raise ValueError(f"slot {hello.unacknowledged[0][0]} is both acknowledged and unacknowledged")
        if len(hello.unacknowledged) + hello.num_in_hand > MAX_SLOTS:
            raise ValueError(f"more than {MAX_SLOTS} slots held")
        return hello


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The answer to an admitted producer. It also says that the slots of the producer's former lives are settled."""

    mark: int
    """Highest sequence taken from this incarnation, or -1. Slots up to it are acknowledged."""
    num_slots: int
    claims: tuple[int, ...]
    """Orders of the credits for the slots that the producer brings: unacknowledged slots above the mark by sequence,
    then slots in hand. The i-th credit is for slot i."""

    def to_json(self) -> dict[str, Any]:
        """Return the message."""
        return {"protocol": PROTOCOL, "mark": self.mark, "num_slots": self.num_slots, "claims": list(self.claims)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any], *, stream: str) -> Self:
        """Decode the consumer's answer. ``stream`` stands in error messages.

        Raises:
            HandshakeRefused: the consumer refused, or has another protocol version.
            StreamError: the answer is invalid.
        """
        if "refused" in message:
            raise HandshakeRefused(f"sample stream {stream}: the consumer refused this producer: {message['refused']}")
        if message.get("protocol") != PROTOCOL:
            theirs = message.get("protocol")
            raise HandshakeRefused(
                f"sample stream {stream}: protocol {PROTOCOL} at the producer, {theirs} at the consumer"
            )
        try:
            return cls(
                mark=int(message["mark"]),
                num_slots=_integer(message["num_slots"]),
                claims=tuple(_integer(order) for order in message["claims"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise StreamError(f"sample stream {stream}: the consumer's answer is invalid: {error!r}") from error


def refusal_to_json(refusal: PeerRefused) -> dict[str, Any]:
    """Return the message that refuses a producer."""
    return {"protocol": PROTOCOL, "refused": str(refusal)}


def _progress(message: Mapping[str, Any], producer: ProducerId) -> ProducerProgress:
    inherited, sequence, acknowledged = message["account"]
    left = tuple(
        (_integer(life), _integer(number), _integer(count), _boolean(withdrawn))
        for life, number, count, withdrawn in message["left"]
    )
    if any(later[:2] <= earlier[:2] for earlier, later in pairwise(left)):
        raise ValueError("the slots of former lives are not ascending")
    if left and left[-1][0] >= producer.incarnation:
        raise ValueError(f"former incarnation {left[-1][0]} is not below {producer.incarnation}")
    progress = ProducerProgress(
        inherited=_integer(inherited),
        sequence=_integer(sequence, least=-1),
        acknowledged=_integer(acknowledged),
        left=left,
        restored=_boolean(message["restored"]),
    )
    if progress.acknowledged < progress.inherited:
        raise ValueError(f"an account cannot go back from {progress.inherited} to {progress.acknowledged}")
    return progress


def _integer(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} is not an integer from {least} to 2**62 - 1")
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is not true or false")
    return value


def _unacknowledged(value: Any) -> tuple[UnacknowledgedSlot, ...]:
    entries = tuple((_integer(sequence), _integer(transitions)) for sequence, transitions in value)
    if any(later[0] <= earlier[0] for earlier, later in pairwise(entries)):
        raise ValueError("the sequences are not ascending")
    return entries
