"""The roster keeps the newest worker at each index, and what the one before it had last reported."""

from __future__ import annotations

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.workers.leases import Claim, Lease, Leases
from rlsrl.workers.members import Members
from rlsrl.workers.status import Member, MemberReport

LEASE_SECONDS = 5.0
TRAINED = MemberReport(stats={"train_steps": 9.0})


class Roster:
    """One trainer's index."""

    def __init__(self) -> None:
        self._leases = Leases(lease_seconds=LEASE_SECONDS, capacity={"trainer": 1})
        self._members = Members(self._leases)
        self._now = 0.0

    def join(self, instance: str) -> Claim:
        """Let a process join, after the lease of the one before has ended. A process may join again."""
        self._now += 2 * LEASE_SECONDS
        self._leases.expire(self._now, 0.0)
        claim = Claim(role="trainer", instance=instance, index=0)
        lease = self._leases.lease(claim, self._now)
        assert isinstance(lease, Lease)
        self._members.register(pb.Hello(role="trainer", instance=instance), claim, lease)
        return claim

    def report(self, claim: Claim, report: MemberReport) -> None:
        """Send a heartbeat."""
        self._members.update(claim, report, self._now)

    @property
    def member(self) -> Member:
        """The newest worker at the index."""
        (member,) = self._members.for_status()
        return member


def test_a_new_process_has_the_last_report_of_the_one_before() -> None:
    roster = Roster()
    roster.report(roster.join("a"), TRAINED)
    assert roster.member.former == MemberReport()
    roster.join("b")
    assert (roster.member.report, roster.member.former) == (MemberReport(), TRAINED)


def test_a_process_that_rejoins_keeps_both_reports() -> None:
    roster = Roster()
    roster.report(roster.join("a"), TRAINED)
    own = MemberReport(stats={"train_steps": 3.0})
    roster.report(roster.join("b"), own)
    roster.join("b")
    assert (roster.member.report, roster.member.former) == (own, TRAINED)


def test_a_process_that_ended_before_it_reported_anything_is_passed_over() -> None:
    roster = Roster()
    roster.report(roster.join("a"), TRAINED)
    roster.join("b")
    roster.join("c")
    assert roster.member.former == TRAINED
