"""The credit book: which producer gets the next credit, and that no lane is lost or counted twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlsrl.data.version import INITIAL, Version
from rlsrl.streams.credits import Credit, CreditBook, UnknownCredit

V1, V2 = Version(1, 1), Version(1, 2)


def connect(book: CreditBook, *indices: int, num_lanes: int = 2, num_slots: int = 2) -> None:
    for index in indices:
        book.connect(index, index=index, num_lanes=num_lanes, num_slots=num_slots, num_claims=0)


def holders(issued: list[Credit]) -> list[int]:
    return [credit.connection for credit in issued]


def pass_on(book: CreditBook, credit: Credit) -> None:
    """Receive and release the slot."""
    book.receive(credit.connection, order=credit.order, slot=credit.slot)
    book.release(credit.connection, credit.slot)


def test_credits_are_spread_over_producers_by_index() -> None:
    book = CreditBook()
    connect(book, 2, 0, 1)
    book.grant(12, V1)
    assert holders(book.issue()) == [0, 1, 2, 0, 1, 2]


def test_the_order_does_not_depend_on_which_memory_came_back_first() -> None:
    def second_round(returned: list[int]) -> list[int]:
        book = CreditBook()
        connect(book, 0, 1, 2)
        book.grant(6, V1)
        first = book.issue()
        for index in returned:
            pass_on(book, first[index])
        book.grant(6, V2)
        return holders(book.issue())

    assert second_round([0, 1, 2]) == second_round([2, 1, 0]) == [0, 1, 2]


def test_the_order_does_not_depend_on_the_speed_of_producers() -> None:
    """With a lag of one batch: the order is the same whether or not the fast producer has its second slot back."""

    def third_batch(returned: list[int]) -> list[int]:
        book = CreditBook()
        connect(book, 0, 1)
        book.grant(8, V1)
        first = book.issue()
        for index in returned:
            pass_on(book, first[index])
        book.grant(4, V2)
        return holders(book.issue())

    assert third_batch([0, 1]) == third_batch([1, 3, 0]) == third_batch([0, 2, 1, 3]) == [0, 1]


def test_a_producer_that_was_disconnected_gets_the_next_credits() -> None:
    """A plain queue of free slots would give whole batches to one producer from then on."""
    book = CreditBook()
    connect(book, 0, 1)
    book.grant(4, V1)
    book.issue()
    book.disconnect(1)
    (extra,) = book.issue()
    assert extra.connection == 0
    for order, slot in ((0, 0), (extra.order, extra.slot)):
        book.receive(0, order=order, slot=slot)
        book.release(0, slot)
    book.connect(7, index=1, num_lanes=2, num_slots=2, num_claims=0)
    for _ in range(3):
        book.grant(4, V1)
        batch = book.issue()
        assert sorted(holders(batch)) == [0, 7]
        for credit in batch:
            pass_on(book, credit)


def test_single_credits_rotate() -> None:
    book = CreditBook()
    connect(book, 0, 1, 2)
    served = []
    for _ in range(6):
        book.grant(2, V1)
        (credit,) = book.issue()
        served.append(credit.connection)
        pass_on(book, credit)
    assert served == [0, 1, 2, 0, 1, 2]


def test_lanes_without_a_free_slot_are_kept() -> None:
    book = CreditBook()
    book.grant(6, V1)
    assert book.issue() == []
    connect(book, 0)
    issued = book.issue()
    assert len(issued) == 2
    assert book.allowance == 2
    pass_on(book, issued[0])
    assert holders(book.issue()) == [0]
    assert book.allowance == 0


def test_a_slot_wider_than_the_allowance_waits_and_a_narrower_one_is_issued() -> None:
    book = CreditBook()
    book.connect(0, index=0, num_lanes=5, num_slots=2, num_claims=0)
    book.connect(1, index=1, num_lanes=3, num_slots=2, num_claims=0)
    book.grant(8, V1)
    assert holders(book.issue()) == [0, 1]
    book.grant(3, V1)
    assert holders(book.issue()) == [1]
    book.grant(4, V1)
    assert book.issue() == []
    book.grant(1, V1)
    assert holders(book.issue()) == [0]
    assert book.allowance == 0


def test_the_last_slot_may_exceed_the_allowance_by_the_room() -> None:
    book = CreditBook()
    book.connect(0, index=0, num_lanes=5, num_slots=3, num_claims=0)
    book.grant(7, V1, 2)
    assert holders(book.issue()) == [0], "3 lanes are missing"
    book.grant(0, V2, 3)
    (last,) = book.issue()
    assert (last.min_version, book.allowance) == (V2, -3)
    assert book.issue() == [], "room alone is no reason for a slot"
    book.disconnect(0)
    book.connect(1, index=0, num_lanes=5, num_slots=3, num_claims=0)
    assert len(book.issue()) == 2, "a dead producer's credits are issued again"


def test_every_credit_asks_for_the_newest_version_granted() -> None:
    book = CreditBook()
    book.grant(4, V2)
    book.grant(4, V1)
    connect(book, 0, 1)
    assert {credit.min_version for credit in book.issue()} == {V2}


def test_claims_are_credits_that_come_off_the_allowance() -> None:
    book = CreditBook()
    claims = book.connect(0, index=0, num_lanes=2, num_slots=3, num_claims=2)
    assert [(claim.order, claim.slot, claim.min_version) for claim in claims] == [(0, 0, INITIAL), (1, 1, INITIAL)]
    assert book.outstanding == (0, 1)
    book.grant(4, V1)
    assert book.issue() == []
    book.grant(2, V1)
    assert [(credit.order, credit.slot) for credit in book.issue()] == [(2, 2)]


def test_claims_of_a_dead_producer_are_issued_to_others() -> None:
    book = CreditBook()
    book.connect(0, index=0, num_lanes=2, num_slots=2, num_claims=1)
    connect(book, 1)
    book.grant(2, V1)
    assert book.issue() == []
    assert [credit.order for credit in book.disconnect(0)] == [0]
    assert [(credit.order, credit.connection, credit.min_version) for credit in book.issue()] == [(1, 1, V1)]


def test_no_credit_is_issued_before_the_expected_producers_connect() -> None:
    book = CreditBook(expected_producers=2)
    book.grant(4, V1)
    connect(book, 1)
    assert not book.is_open
    assert book.issue() == []
    connect(book, 0)
    assert holders(book.issue()) == [0, 1]
    book.disconnect(0)
    assert holders(book.issue()) == [1], "an open book stays open"


def test_waiting_for_producers_can_be_ended() -> None:
    book = CreditBook(expected_producers=2)
    book.grant(2, V1)
    connect(book, 5)
    book.open()
    assert holders(book.issue()) == [5]


@pytest.mark.parametrize(
    ("connection", "order", "slot"),
    [(0, 1, 0), (0, 0, 1), (1, 0, 0), (0, -1, 0), (0, 0, 1 << 60)],
    ids=["another's order", "another slot", "another's connection", "no order", "absurd slot"],
)
def test_a_slot_without_its_credit_is_refused(connection: int, order: int, slot: int) -> None:
    book = CreditBook()
    connect(book, 0, 1)
    book.grant(4, V1)
    book.issue()
    with pytest.raises(UnknownCredit):
        book.receive(connection, order=order, slot=slot)
    assert book.outstanding == (0, 1)


def test_a_slot_cannot_be_released_unless_it_was_received() -> None:
    book = CreditBook()
    connect(book, 0)
    with pytest.raises(ValueError, match="released before"):
        book.release(0, 0)


def test_a_negative_grant_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_lanes is -1"):
        CreditBook().grant(-1, V1)


class Stream(RuleBasedStateMachine):
    """Producers connect, die and post; the consumer grants and releases. A simple model is compared at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CreditBook(expected_producers=2)
        self.lanes: dict[int, int] = {}
        self.held: dict[int, Credit] = {}
        self.unreleased: list[Credit] = []
        self.orders: list[int] = []
        self.granted = 0
        self.received = 0
        self.newest = INITIAL
        self.next_connection = 0

    def note(self, issued: list[Credit] | tuple[Credit, ...]) -> None:
        for credit in issued:
            assert credit.order not in self.held
            taken = {(each.connection, each.slot) for each in [*self.held.values(), *self.unreleased]}
            assert (credit.connection, credit.slot) not in taken, "two credits for one memory"
            self.held[credit.order] = credit
            self.orders.append(credit.order)

    def issue(self) -> None:
        issued = self.book.issue()
        assert all(credit.min_version == self.newest for credit in issued)
        self.note(issued)

    @rule(
        index=st.integers(0, 5), num_lanes=st.integers(1, 4), num_slots=st.integers(1, 3), num_claims=st.integers(0, 3)
    )
    def connect(self, index: int, num_lanes: int, num_slots: int, num_claims: int) -> None:
        connection, self.next_connection = self.next_connection, self.next_connection + 1
        self.lanes[connection] = num_lanes
        self.note(
            self.book.connect(
                connection,
                index=index,
                num_lanes=num_lanes,
                num_slots=max(num_slots, num_claims),
                num_claims=num_claims,
            )
        )
        self.issue()

    @rule(num_lanes=st.integers(0, 12), step=st.integers(0, 9), room=st.sampled_from([0, 0, 1, 5]))
    def grant(self, num_lanes: int, step: int, room: int) -> None:
        self.granted += num_lanes
        self.newest = max(self.newest, Version(1, step))
        self.book.grant(num_lanes, Version(1, step), room)
        self.issue()

    @rule()
    def open(self) -> None:
        self.book.open()
        self.issue()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        credit = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        assert self.book.receive(credit.connection, order=credit.order, slot=credit.slot) == credit
        self.received += credit.num_lanes
        self.unreleased.append(credit)
        with pytest.raises(UnknownCredit):
            self.book.receive(credit.connection, order=credit.order, slot=credit.slot)

    @precondition(lambda self: self.unreleased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        credit = self.unreleased.pop(data.draw(st.integers(0, len(self.unreleased) - 1)))
        self.book.release(credit.connection, credit.slot)
        self.issue()

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.lanes)))
        del self.lanes[connection]
        revoked = self.book.disconnect(connection)
        assert {credit.order for credit in revoked} == {
            order for order, credit in self.held.items() if credit.connection == connection
        }
        for credit in revoked:
            del self.held[credit.order]
        self.issue()

    @invariant()
    def lanes_add_up(self) -> None:
        held = sum(credit.num_lanes for credit in self.held.values())
        assert self.book.allowance == self.granted - self.received - held

    @invariant()
    def outstanding_is_what_is_held(self) -> None:
        assert self.book.outstanding == tuple(sorted(self.held))
        for connection in self.lanes:
            assert self.book.has_credit(connection) == any(
                credit.connection == connection for credit in self.held.values()
            )

    @invariant()
    def orders_rise_and_never_repeat(self) -> None:
        assert self.orders == [*range(len(self.orders))]

    @invariant()
    def nothing_that_could_be_issued_is_kept(self) -> None:
        assert self.book.issue() == []


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
