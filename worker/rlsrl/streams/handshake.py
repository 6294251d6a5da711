"""How a producer introduces itself and what a consumer answers, whatever carries the two messages.

Both are JSON objects, read field by field: they come from a socket that anybody on the machine (or network) can reach.
The protocol's version and the token are looked at before anything else.
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
"""Raised with every change of a message; both ends must have the same."""

MAX_LANES = 1 << 16
"""Lanes of one slot that a consumer allocates memory for."""

MAX_SLOTS = 64
"""Slots of one producer, those it brings with it included."""

Posted = tuple[int, int]
"""(sequence, num_transitions) of a slot that was posted and not acknowledged."""

RefusalKind = Literal["malformed", "protocol", "token", "layout", "incarnation", "capacity"]


class PeerRefused(Exception):
    """The consumer will not have this producer; the text names both sides' values and is sent to it."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Who a producer is and what it still holds from before this connection."""

    producer: ProducerId
    layout: SlotLayout
    unacknowledged: tuple[Posted, ...] = ()
    """What this incarnation posted and will post again, ascending."""
    num_in_hand: int = 0
    """Slots being filled under a credit of a former connection: they will be posted over this one."""
    progress: ProducerProgress = field(default_factory=ProducerProgress)
    """This index's account with the consumer, as its ledger has it."""

    def to_json(self, token: str) -> dict[str, Any]:
        """The message, with the token that admits it."""
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
        """Read and judge a producer's message.

        Raises:
            PeerRefused: it is not for us; nothing of it was believed.
        """
        protocol, shown = message.get("protocol"), message.get("token")
        if protocol != PROTOCOL:
            raise PeerRefused("protocol", f"protocol {PROTOCOL} here, {str(protocol)[:20]} there")
        if not isinstance(shown, str) or not token_matches(shown, token):
            raise PeerRefused("token", "the token shown is not this experiment's")
        try:
            hello = cls._read(message)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise PeerRefused("malformed", f"malformed handshake: {error!r}"[:200]) from error
        if hello.layout.step_digest != layout_digest:
            raise PeerRefused("layout", f"slot layout {layout_digest} here, {hello.layout.step_digest} there")
        if not 1 <= hello.layout.num_lanes <= MAX_LANES:
            raise PeerRefused("layout", f"at most {MAX_LANES} lanes a slot here, {hello.layout.num_lanes} there")
        return hello

    @classmethod
    def _read(cls, message: Mapping[str, Any]) -> Self:
        producer = ProducerId(_integer(message["index"]), _integer(message["incarnation"]))
        hello = cls(
            producer=producer,
            layout=SlotLayout.from_json(message["layout"]),
            unacknowledged=_posted(message["unacknowledged"]),
            num_in_hand=_integer(message["num_in_hand"]),
            progress=_progress(message, producer),
        )
        if hello.unacknowledged and hello.unacknowledged[0][0] <= hello.progress.sequence:
            raise ValueError(f"slots up to {hello.progress.sequence} are acknowledged and not acknowledged")
        if len(hello.unacknowledged) + hello.num_in_hand > MAX_SLOTS:
            raise ValueError(f"over {MAX_SLOTS} slots held")
        return hello


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """What an admitted producer is told. What former lives of it left is settled with it."""

    mark: int
    """The highest sequence the consumer has taken from this incarnation, -1 for none: those slots are acknowledged."""
    num_slots: int
    claims: tuple[int, ...]
    """Orders of the credits for what the producer brings: unacknowledged slots above the mark in order of sequence,
    then those in hand; the i-th stands for slot i."""

    def to_json(self) -> dict[str, Any]:
        """The message."""
        return {"protocol": PROTOCOL, "mark": self.mark, "num_slots": self.num_slots, "claims": list(self.claims)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any], *, stream: str) -> Self:
        """Read the answer of the named stream's consumer.

        Raises:
            HandshakeRefused: it said no, or speaks another version of the protocol.
            StreamError: it makes no sense.
        """
        if "refused" in message:
            raise HandshakeRefused(f"sample stream {stream}: the consumer refused this producer: {message['refused']}")
        if message.get("protocol") != PROTOCOL:
            raise HandshakeRefused(
                f"sample stream {stream}: protocol {PROTOCOL} here, {message.get('protocol')} at the consumer"
            )
        try:
            return cls(
                mark=int(message["mark"]),
                num_slots=_integer(message["num_slots"]),
                claims=tuple(_integer(order) for order in message["claims"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise StreamError(f"sample stream {stream}: the consumer's answer makes no sense: {error!r}") from error


def refusal_to_json(refusal: PeerRefused) -> dict[str, Any]:
    """The message that tells a producer why not."""
    return {"protocol": PROTOCOL, "refused": str(refusal)}


def _progress(message: Mapping[str, Any], producer: ProducerId) -> ProducerProgress:
    inherited, sequence, acknowledged = message["account"]
    left = tuple(
        (_integer(life), _integer(number), _integer(count), _boolean(withdrawn))
        for life, number, count, withdrawn in message["left"]
    )
    if any(later[:2] <= earlier[:2] for earlier, later in pairwise(left)):
        raise ValueError("what former lives left is not ascending")
    if left and left[-1][0] >= producer.incarnation:
        raise ValueError(f"former life {left[-1][0]} is not below {producer.incarnation}")
    progress = ProducerProgress(
        inherited=_integer(inherited),
        sequence=_integer(sequence, least=-1),
        acknowledged=_integer(acknowledged),
        left=left,
        restored=_boolean(message["restored"]),
    )
    if progress.acknowledged < progress.inherited:
        raise ValueError(f"an account that went from {progress.inherited} to {progress.acknowledged}")
    return progress


def _integer(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} is not an integer from {least} to 2**62 - 1")
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is not true or false")
    return value


def _posted(value: Any) -> tuple[Posted, ...]:
    entries = tuple((_integer(sequence), _integer(transitions)) for sequence, transitions in value)
    if any(later[0] <= earlier[0] for earlier, later in pairwise(entries)):
        raise ValueError("sequences are not ascending")
    return entries
