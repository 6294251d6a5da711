"""The credits of a sample stream's consumer: which producer may fill which slot. No sockets, threads or clocks.

The consumer reports events (a producer connected or disconnected, a slot arrived or was released) and asks which
credits to send. The unit is the lane::

    granted + revoked = issued + allowance

A credit is issued only if its whole slot fits into the allowance. Lanes beyond the granted ones would exceed the policy
lag when they are trained. The rest of the allowance waits for the next grant, so the rate limiter must grant enough
ahead for whole slots (``ExperimentSpec.least_policy_lag``). At the end of a run no grant follows: the last slot may
exceed the allowance by the ``room`` that the limiter leaves.

A producer that reconnects claims credits for the slots that it has filled or is filling. Claims are issued at once,
beyond the allowance if need be: the allowance is then negative, and later grants fill it first.

Of the producers with a free slot, the one whose last credit is oldest comes first, then the lowest index. The time and
order of releases do not matter. So a batch is spread over all producers, and the order of credits is reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsrl.data.version import INITIAL, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The right to fill one slot."""

    order: int
    """Position in the order of granting, unique in the book."""
    connection: int
    """Number of the holder's connection, never used twice."""
    slot: int
    """Number of the slot on that connection."""
    num_lanes: int
    """Lanes of the slot."""
    min_version: Version
    """Oldest weights that may fill the slot."""


class UnknownCredit(Exception):
    """A slot arrived under a credit that its sender does not hold."""


@dataclass(kw_only=True, slots=True)
class _Holder:
    """One connected producer."""

    index: int
    num_lanes: int
    free: list[int]
    """Slots without a credit, ready for a new one."""
    unreleased: set[int] = field(default_factory=set)
    """Slots that were received and not released."""
    num_outstanding: int = 0
    last_order: int = -1
    """Order of its newest credit; -1 without one."""

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key: the lowest gets the next credit."""
        return self.last_order, self.index


class CreditBook:
    """Granted lanes, outstanding credits and free slots. Not thread-safe: the transport holds a lock."""

    def __init__(self, *, expected_producers: int = 0) -> None:
        """Issue no credit before ``expected_producers`` are connected at the same time, or ``open`` is called."""
        self._expected_producers = expected_producers
        self._is_open = expected_producers <= 0
        self._allowance = 0
        self._room = 0
        self._min_version = INITIAL
        self._next_order = 0
        self._holders: dict[int, _Holder] = {}
        self._outstanding: dict[int, Credit] = {}

    @property
    def allowance(self) -> int:
        """Granted lanes that are not issued. Negative if claims or a last slot were issued beyond it."""
        return self._allowance

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Orders of the credits whose slots were not received, ascending."""
        return tuple(self._outstanding)

    @property
    def is_open(self) -> bool:
        """Whether credits are issued: the expected producers have connected, or ``open`` was called."""
        return self._is_open

    def has_credit(self, connection: int) -> bool:
        """Return whether that connection holds a credit."""
        return self._holders[connection].num_outstanding > 0

    def open(self) -> None:
        """Issue credits without waiting for the expected producers."""
        self._is_open = True

    def connect(
        self, connection: int, *, index: int, num_lanes: int, num_slots: int, num_claims: int
    ) -> tuple[Credit, ...]:
        """Add a producer with ``num_slots`` slots; return its claims: credits for its first ``num_claims`` slots.

        The producer has filled these slots, or began to fill them, under credits of a former connection, which are no
        longer valid. A claim is issued without regard to the allowance, and weights of any version may have filled its
        slot. It is otherwise a credit like others: it reduces the allowance, is outstanding until its slot arrives, and
        is revoked if the producer disconnects.
        """
        holder = _Holder(index=index, num_lanes=num_lanes, free=[*range(num_claims, num_slots)])
        self._holders[connection] = holder
        claims = tuple(self._issue_to(connection, holder, slot, INITIAL) for slot in range(num_claims))
        if len(self._holders) >= self._expected_producers:
            self._is_open = True
        return claims

    def disconnect(self, connection: int) -> tuple[Credit, ...]:
        """Remove a producer and revoke its credits; return them in order. Their lanes can be issued again."""
        del self._holders[connection]
        revoked = tuple(credit for credit in self._outstanding.values() if credit.connection == connection)
        for credit in revoked:
            del self._outstanding[credit.order]
            self._allowance += credit.num_lanes
        return revoked

    def grant(self, num_lanes: int, min_version: Version, room: int = 0) -> None:
        """Add lanes to the allowance. Later credits require the newest ``min_version`` granted so far.

        Until the next grant, a slot that is wider than the allowance may take up to ``room`` lanes more.
        """
        if num_lanes < 0:
            raise ValueError(f"num_lanes is {num_lanes}; it must be at least 0")
        self._allowance += num_lanes
        self._room = room
        self._min_version = max(self._min_version, min_version)

    def receive(self, connection: int, *, order: int, slot: int) -> Credit:
        """Return the credit of a slot that has arrived. The slot is in use until ``release``.

        Raises:
            UnknownCredit: that connection holds no such credit for that slot.
        """
        credit = self._outstanding.get(order)
        if credit is None or credit.connection != connection or credit.slot != slot:
            raise UnknownCredit(f"connection {connection} holds no credit {order} for its slot {slot}")
        del self._outstanding[order]
        holder = self._holders[connection]
        holder.num_outstanding -= 1
        holder.unreleased.add(slot)
        return credit

    def release(self, connection: int, slot: int) -> None:
        """Make a received slot free again. Does nothing if its producer has gone.

        Raises:
            ValueError: the slot was not received, or was released before.
        """
        holder = self._holders.get(connection)
        if holder is None:
            return
        if slot not in holder.unreleased:
            raise ValueError(f"slot {slot} of connection {connection} was not received, or was released before")
        holder.unreleased.remove(slot)
        holder.free.append(slot)

    def issue(self) -> list[Credit]:
        """Issue the credits that fit now; return them in order. Each takes time linear in the number of producers."""
        issued: list[Credit] = []
        while self._is_open and self._allowance > 0:
            ready = [
                (number, holder)
                for number, holder in self._holders.items()
                if holder.free and holder.num_lanes <= self._allowance + self._room
            ]
            if not ready:
                break
            number, holder = min(ready, key=lambda entry: entry[1].precedence)
            issued.append(self._issue_to(number, holder, holder.free.pop(0), self._min_version))
        return issued

    def _issue_to(self, connection: int, holder: _Holder, slot: int, min_version: Version) -> Credit:
        credit = Credit(
            order=self._next_order,
            connection=connection,
            slot=slot,
            num_lanes=holder.num_lanes,
            min_version=min_version,
        )
        self._next_order += 1
        self._outstanding[credit.order] = credit
        self._allowance -= holder.num_lanes
        holder.num_outstanding += 1
        holder.last_order = credit.order
        return credit
