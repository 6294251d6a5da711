"""Leases of worker indices: each rule by example, then the invariants under any order of events."""

import json
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlsrl.workers.leases import Claim, Lease, LeaseRefusal, Leases, Wait

LEASE_SECONDS = 10.0
CAPACITY = {"actor": 3, "trainer": 2}


@pytest.fixture
def leases() -> Leases:
    return Leases(lease_seconds=LEASE_SECONDS, capacity=CAPACITY)


def lease(leases: Leases, instance: str, now: float = 0.0, **claim: object) -> Lease:
    answer = leases.lease(Claim(**{"role": "actor", "instance": instance} | claim), now)  # type: ignore[arg-type]
    assert isinstance(answer, Lease), answer
    return answer


def refused(leases: Leases, instance: str, now: float = 0.0, **claim: object) -> str:
    answer = leases.lease(Claim(**{"role": "actor", "instance": instance} | claim), now)  # type: ignore[arg-type]
    assert isinstance(answer, LeaseRefusal), answer
    return answer.reason


def place(lease: Lease) -> tuple[int, int]:
    return lease.index, lease.incarnation


def after_restart(leases: Leases, now: float) -> Leases:
    value = json.loads(json.dumps(leases.to_json()))
    return Leases.from_json(value, lease_seconds=LEASE_SECONDS, capacity=CAPACITY, now=now)


def test_workers_get_the_lowest_free_index_of_their_role(leases: Leases) -> None:
    assert [place(lease(leases, name)) for name in "abc"] == [(0, 0), (1, 0), (2, 0)]
    assert place(lease(leases, "t", role="trainer")) == (0, 0)
    leases.release("b")
    assert place(lease(leases, "d")) == (1, 1)


def test_a_second_request_returns_the_same_lease(leases: Leases) -> None:
    assert place(lease(leases, "a")) == place(lease(leases, "a", 5.0)) == (0, 0)
    assert leases.holder("a") is not None
    assert len(leases.holders) == 1


def test_a_full_role_waits_until_an_index_is_free(leases: Leases) -> None:
    for name in "abc":
        lease(leases, name)
    assert isinstance(leases.lease(Claim(role="actor", instance="d"), 0.0), Wait)
    leases.release("b")
    assert place(lease(leases, "d")) == (1, 1)


def test_heartbeats_keep_a_lease_and_silence_ends_it(leases: Leases) -> None:
    lease(leases, "a", 0.0)
    lease(leases, "b", 0.0)
    assert leases.heartbeat("a", 8.0)
    assert [each.instance for each in leases.expire(LEASE_SECONDS, listening_since=0.0)] == []
    assert [each.instance for each in leases.expire(LEASE_SECONDS + 1, listening_since=0.0)] == ["b"]
    assert not leases.heartbeat("b", 12.0)
    assert place(lease(leases, "c", 12.0)) == (1, 1)


def test_silence_counts_only_while_the_coordinator_listens(leases: Leases) -> None:
    lease(leases, "a", 0.0)
    assert leases.expire(100.0, listening_since=95.0) == ()
    assert len(leases.expire(106.0, listening_since=95.0)) == 1


def test_a_frozen_worker_keeps_its_lease_if_the_index_was_not_leased_again(leases: Leases) -> None:
    lease(leases, "a")
    leases.expire(100.0, listening_since=0.0)
    assert place(lease(leases, "a", 101.0, index=0, incarnation=0)) == (0, 0)


def test_a_worker_whose_index_was_leased_again_is_refused(leases: Leases) -> None:
    lease(leases, "a")
    leases.expire(100.0, listening_since=0.0)
    assert place(lease(leases, "b", 100.0)) == (0, 1)
    assert "another process has leased" in refused(leases, "a", 101.0, index=0, incarnation=0)
    leases.release("b")
    assert "another process has leased" in refused(leases, "a", 102.0, index=0, incarnation=0)


def test_a_restarted_coordinator_knows_its_holders_and_waits_for_them(leases: Leases) -> None:
    lease(leases, "a")
    lease(leases, "b")
    restarted = after_restart(leases, now=1000.0)
    assert place(lease(restarted, "new", 1001.0)) == (2, 0)
    assert place(lease(restarted, "b", 1001.0, index=1, incarnation=0)) == (1, 0)
    assert [each.instance for each in restarted.expire(1010.5, listening_since=1000.0)] == ["a"]


def test_a_coordinator_without_a_stored_roster_accepts_uncontested_claims(leases: Leases) -> None:
    assert place(lease(leases, "a", index=1, incarnation=7)) == (1, 7)
    leases.release("a")
    assert place(lease(leases, "b")) == (0, 0)
    assert place(lease(leases, "c")) == (1, 8)
    assert "another process has leased" in refused(leases, "d", index=0, incarnation=3)


def test_a_claim_of_a_held_index_by_another_instance_is_refused(leases: Leases) -> None:
    lease(leases, "a")
    leases.release("a")
    assert "another process has leased" in refused(leases, "b", index=0, incarnation=0)


def test_the_next_container_of_a_pod_takes_over_its_lease_at_once(leases: Leases) -> None:
    first = lease(leases, "a", role="actor", process="pod/1/0")
    other = lease(leases, "b", role="actor", process="pod/2/0")
    again = lease(leases, "c", role="actor", process="pod/1/0")
    assert (again.index, again.incarnation) == (first.index, first.incarnation + 1)
    assert leases.holder("a") is None
    assert leases.holder("b") == other
    lease(leases, "d")
    assert [held.instance for held in leases.holders] == ["c", "b", "d"], (
        "a worker without a process identity succeeds no other"
    )
    lease(leases, "e", role="trainer", process="pod/2/0")
    assert leases.holder("b") == other, "another role is another process"


@pytest.mark.parametrize("claim", [{"index": 1}, {"index": 0, "incarnation": 1}, {"role": "trainer"}])
def test_a_holder_cannot_claim_another_index(leases: Leases, claim: dict[str, object]) -> None:
    lease(leases, "a")
    assert "is actor 0 already, incarnation 0" in refused(leases, "a", **claim)


def test_a_rank_of_a_later_attempt_takes_over_and_the_earlier_is_fenced(leases: Leases) -> None:
    assert place(lease(leases, "a", role="trainer", index=0, attempt=1)) == (0, 0)
    assert place(lease(leases, "b", role="trainer", index=0, attempt=2)) == (0, 1)
    assert not leases.heartbeat("a", 1.0)
    for claim in ({"index": 0, "incarnation": 0}, {"index": 1}):
        assert "succeeded by attempt 2" in refused(leases, "a", role="trainer", attempt=1, **claim)
    assert "succeeded by attempt 2" in refused(after_restart(leases, 0.0), "c", role="trainer", attempt=1, index=1)


def test_a_rank_of_the_same_attempt_waits_for_the_present_holder(leases: Leases) -> None:
    lease(leases, "a", role="trainer", index=1, attempt=1)
    waiting = Claim(role="trainer", instance="b", index=1, attempt=1)
    assert isinstance(leases.lease(waiting, 0.0), Wait)
    leases.release("a")
    assert place(lease(leases, "b", role="trainer", index=1, attempt=1)) == (1, 1)


def test_a_pod_that_an_edit_adds_waits_until_the_coordinator_has_the_edit(leases: Leases) -> None:
    claim = Claim(role="trainer", instance="a", index=2, attempt=1)
    assert leases.lease(claim, 0.0) == Wait(reason="trainer index 2 is not below 2, the number of workers so far")
    leases.resize({**CAPACITY, "trainer": 3})
    assert place(lease(leases, "a", role="trainer", index=2, attempt=1)) == (2, 0)


def test_an_index_below_0_is_refused(leases: Leases) -> None:
    assert "below 0" in refused(leases, "a", role="trainer", index=-1, attempt=1)


def test_a_role_that_does_not_exist_is_refused_with_those_that_do(leases: Leases) -> None:
    assert refused(leases, "a", role="actr") == "this experiment has no role 'actr'; its roles are actor, trainer"


@pytest.mark.parametrize(
    "edit",
    [
        lambda value: value.pop("roles"),
        lambda value: value["roles"].update(actor=[]),
        lambda value: value["roles"]["actor"].update(x={}),
        lambda value: value["roles"]["actor"]["0"].pop("instance"),
    ],
)
def test_an_invalid_roster_document_is_refused(leases: Leases, edit: Callable[[dict[str, object]], object]) -> None:
    lease(leases, "a")
    value = leases.to_json()
    edit(value)
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        Leases.from_json(value, lease_seconds=1.0, capacity=CAPACITY, now=0.0)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Workers join, fall silent, return and leave; coordinators die and restart from the stored document.

    ``welcomed`` has the (index, incarnation) of each worker's last welcome, until the worker leaves or is refused.
    """

    instances = st.sampled_from([f"i{number}" for number in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leases = Leases(lease_seconds=LEASE_SECONDS, capacity=CAPACITY)
        self.welcomed: dict[str, tuple[int, int]] = {}
        self.first_holders: dict[tuple[int, int], str] = {}
        self.last_incarnation: dict[int, int] = {}

    @rule(instance=instances)
    def join(self, instance: str) -> None:
        free = set(range(CAPACITY["actor"])) - {held.index for held in self.leases.holders}
        known = instance in self.welcomed
        index, incarnation = self.welcomed.get(instance, (None, None))
        claim = Claim(role="actor", instance=instance, index=index, incarnation=incarnation)
        held = self.leases.holder(instance)
        answer = self.leases.lease(claim, self.now)
        if isinstance(answer, Wait):
            assert not known
            assert not free
        elif isinstance(answer, LeaseRefusal):
            assert known, "a new worker gets an index or waits for one"
            del self.welcomed[instance]
        else:
            if known:
                assert place(answer) == (index, incarnation)
            elif held is not None:
                assert answer.incarnation == held.incarnation
            else:
                assert answer.index == min(free), "the lowest free index"
                assert answer.incarnation > self.last_incarnation.get(answer.index, -1), "incarnations rise"
                self.last_incarnation[answer.index] = answer.incarnation
            assert self.first_holders.setdefault(place(answer), instance) == instance, (
                "no other instance ever had this index and incarnation"
            )
            self.welcomed[instance] = place(answer)

    @rule(instance=instances)
    def heartbeat(self, instance: str) -> None:
        assert self.leases.heartbeat(instance, self.now) == (self.leases.holder(instance) is not None)

    @precondition(lambda self: self.welcomed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.welcomed)))
        self.leases.release(instance)
        del self.welcomed[instance]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        alive = {held.instance for held in self.leases.holders if self.now - held.heard_at <= LEASE_SECONDS}
        self.leases.expire(self.now, listening_since=0.0)
        assert {held.instance for held in self.leases.holders} == alive

    @rule()
    def coordinator_restarts(self) -> None:
        before = [(held.instance, place(held)) for held in self.leases.holders]
        self.leases = after_restart(self.leases, self.now)
        assert [(held.instance, place(held)) for held in self.leases.holders] == before

    @invariant()
    def one_holder_an_index_and_one_index_a_holder(self) -> None:
        holders = self.leases.holders
        assert len({held.index for held in holders}) == len({held.instance for held in holders}) == len(holders)

    @invariant()
    def every_holder_has_the_last_incarnation_of_its_index(self) -> None:
        for held in self.leases.holders:
            assert held.incarnation == self.last_incarnation[held.index]


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
