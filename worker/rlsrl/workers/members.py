"""The roster: the workers of an experiment as the coordinator knows them, the newest at each index.

``Leases`` alone decide which of them are present. This module adds what the workers report of themselves.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from rlsrl.api.role_names import TRAINER
from rlsrl.api.roles import STREAMS
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.coordination import WorkerState
from rlsrl.workers.leases import Claim, Lease, Leases
from rlsrl.workers.status import Member, MemberReport, main_wait, without_credit


class Members:
    """The newest worker at each index. A member is present while it holds its lease, and gone afterwards."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._members: dict[tuple[str, int], Member] = {}

    def holds_index(self, claim: Claim, lease: Lease) -> bool:
        """Return whether the claiming process is the newest at that index already: it rejoins."""
        before = self._members.get((lease.role, lease.index))
        return before is not None and before.instance == claim.instance

    def register(self, hello: pb.Hello, claim: Claim, lease: Lease) -> None:
        """Make the worker the newest at its index. A worker that rejoins keeps its last report."""
        before = self._members.get((lease.role, lease.index))
        report = former = MemberReport()
        if before is not None and self.holds_index(claim, lease):
            report, former = before.report, before.former
        elif before is not None:
            former = before.report if before.report.stats else before.former  # one that ended early knew nothing
        self._members[lease.role, lease.index] = Member(
            role=claim.role,
            index=lease.index,
            incarnation=lease.incarnation,
            attempt=claim.attempt,
            instance=claim.instance,
            pid=hello.pid,
            host=hello.host,
            endpoints=dict(hello.endpoints),
            report=report,
            former=former,
            heard_at=lease.heard_at,
            present=True,
            waiting_since=lease.heard_at,
        )

    def update(self, claim: Claim, report: MemberReport, now: float) -> None:
        """Note the report of the member with that claim."""
        assert claim.index is not None, "the claim of a member has an index"
        member = self._members[claim.role, claim.index]
        if self._needs_no_more_samples:
            report = without_credit(report)
        waits_for = main_wait(report)
        since = member.waiting_since if waits_for == member.waits_for else now
        self._members[claim.role, claim.index] = replace(
            member, report=report, heard_at=now, waits_for=waits_for, waiting_since=since
        )

    @property
    def _needs_no_more_samples(self) -> bool:
        trainers = [each for each in self._members.values() if each.role == TRAINER and self._is_present(each)]
        return bool(trainers) and all(each.report.needs_no_more_samples for each in trainers)

    def addresses(self, role: str) -> dict[int, str]:
        """Return the address of each present member of the role that serves streams, by index."""
        return {
            index: member.endpoints[STREAMS]
            for (member_role, index), member in self._members.items()
            if member_role == role and STREAMS in member.endpoints and self._is_present(member)
        }

    def any_exiting(self, instances: Container[str]) -> bool:
        """Return whether one of the members with these instances has reported that it exits."""
        return any(
            member.report.state is WorkerState.EXITING
            for member in self._members.values()
            if member.instance in instances
        )

    def for_status(self) -> list[Member]:
        """Return all members as the status document needs them."""
        holders = {lease.instance for lease in self._leases.holders}
        return [replace(member, present=member.instance in holders) for member in self._members.values()]

    def _is_present(self, member: Member) -> bool:
        return self._leases.holder(member.instance) is not None
