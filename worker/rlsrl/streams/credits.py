"""Who may fill which slot: the bookkeeping of a sample stream's consumer, without sockets, threads or clocks.

A transport tells the book what happened (a producer connected, a slot arrived, memory was released, a producer went)
and asks which credits to send. Lanes are the unit of account::

    granted + returned by the gone = issued + allowance

A credit is issued only if the whole slot fits into the allowance: lanes beyond what is granted would be older than the
policy lag allows by the time they are trained. What is left over waits for the next grant. So whoever grants has to
grant enough ahead for whole slots to fit (``ExperimentSpec.least_policy_lag``).

Among producers with a free slot the one that was issued a credit longest ago comes first, then the lowest index:
neither the order nor the moment in which memory came back matters as long as there is some. So a batch is spread over
all producers, also after one of them was away, and a fleet that answers in another order is granted in the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsrl.data.version import INITIAL, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The right to fill one slot."""

    order: int
    """Place in the order of granting, unique over the book's life."""
    connection: int
    """Who holds it: the transport's number of a connection, never used twice."""
    slot: int
    """Which of that connection's slots."""
    num_lanes: int
    """Lanes of that slot."""
    min_version: Version
    """The oldest weights it may be acted with."""


class UnknownCredit(Exception):
    """A slot came under a credit that its sender does not hold."""


@dataclass(kw_only=True, slots=True)
class _Holder:
    """One connected producer."""

    index: int
    num_lanes: int
    free: list[int]
    """Slots that may carry a new credit."""
    unreleased: set[int] = field(default_factory=set)
    """Slots received and still being read."""
    num_outstanding: int = 0
    last_order: int = -1
    """Order of the newest credit it was issued."""

    @property
    def precedence(self) -> tuple[int, int]:
        """The lowest comes first."""
        return self.last_order, self.index


class CreditBook:
    """Lanes granted, credits outstanding and slots free. Not thread-safe: the transport holds a lock."""

    def __init__(self, *, expected_producers: int = 0) -> None:
        """Issue nothing before ``expected_producers`` are connected at once, or ``open`` is called."""
        self._expected_producers = expected_producers
        self._is_open = expected_producers <= 0
        self._allowance = 0
        self._min_version = INITIAL
        self._next_order = 0
        self._holders: dict[int, _Holder] = {}
        self._outstanding: dict[int, Credit] = {}

    @property
    def allowance(self) -> int:
        """Lanes granted and not yet issued; negative while more lanes were claimed than granted."""
        return self._allowance

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Orders of the credits whose slots have not been received, ascending."""
        return tuple(self._outstanding)

    @property
    def is_open(self) -> bool:
        """Whether credits are issued: the expected producers came, or are not waited for any longer."""
        return self._is_open

    def has_credit(self, connection: int) -> bool:
        """Whether that connection owes a slot."""
        return self._holders[connection].num_outstanding > 0

    def open(self) -> None:
        """Stop waiting for producers that have not come."""
        self._is_open = True

    def connect(
        self, connection: int, *, index: int, num_lanes: int, num_slots: int, num_claims: int
    ) -> tuple[Credit, ...]:
        """A producer came with ``num_slots`` slots; credits for those it brings with it.

        The first ``num_claims`` slots are for what the producer filled, or began to fill, under a credit of a former
        connection. They are credits like others (an order of their own, outstanding until received, given to others if
        the producer goes) and are taken off the allowance, but nobody granted them and any weights will do.
        """
        claimed = range(num_claims)
        holder = _Holder(index=index, num_lanes=num_lanes, free=[*range(num_claims, num_slots)])
        self._holders[connection] = holder
        claims = tuple(self._issue_to(connection, holder, slot, INITIAL) for slot in claimed)
        if len(self._holders) >= self._expected_producers:
            self._is_open = True
        return claims

    def disconnect(self, connection: int) -> tuple[Credit, ...]:
        """A producer went. Its credits, in order, are void and their lanes may be issued to others."""
        del self._holders[connection]
        void = tuple(credit for credit in self._outstanding.values() if credit.connection == connection)
        for credit in void:
            del self._outstanding[credit.order]
            self._allowance += credit.num_lanes
        return void

    def grant(self, num_lanes: int, min_version: Version) -> None:
        """Allow that many more lanes; every credit from now on asks for the newest version granted with."""
        if num_lanes < 0:
            raise ValueError(f"cannot grant {num_lanes} lanes")
        self._allowance += num_lanes
        self._min_version = max(self._min_version, min_version)

    def receive(self, connection: int, *, order: int, slot: int) -> Credit:
        """A filled slot came; its memory is in use until ``release``.

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
        """A received slot's memory is free again; nothing happens if its producer went meanwhile."""
        holder = self._holders.get(connection)
        if holder is None:
            return
        if slot not in holder.unreleased:
            raise ValueError(f"slot {slot} of connection {connection} is not one that was received: released twice?")
        holder.unreleased.remove(slot)
        holder.free.append(slot)

    def issue(self) -> list[Credit]:
        """The credits to send now, in order. Looks at every producer for each of them."""
        issued: list[Credit] = []
        while self._is_open:
            ready = [
                (number, holder)
                for number, holder in self._holders.items()
                if holder.free and holder.num_lanes <= self._allowance
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
