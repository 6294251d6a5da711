"""The workers of an experiment as the coordinator knows them: the newest at each index, present or gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlsrl.api.roles import STREAMS
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.workers.leases import Claim, Lease, Leases
from rlsrl.workers.status import Member, MemberReport


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """The newest worker at a (role, index): its lease, its process and its last report."""

    claim: Claim
    """Its lease, in the form in which it would claim the lease again."""
    index: int
    incarnation: int
    pid: int
    host: str
    endpoints: Mapping[str, str]
    report: MemberReport
    heard_at: float
    """The time of its last message, in seconds on the coordinator's clock."""


class Members:
    """The newest worker at each index. A member is present while it holds its lease."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._members: dict[tuple[str, int], MemberState] = {}

    def holds_index(self, claim: Claim, lease: Lease) -> bool:
        """Return whether the claiming process is the newest at that index already: it rejoins."""
        before = self._members.get((lease.role, lease.index))
        return before is not None and before.claim.instance == claim.instance

    def register(self, hello: pb.Hello, claim: Claim, lease: Lease) -> MemberState:
        """Make the worker the newest at its index. A worker that rejoins keeps its last report."""
        before = self._members.get((lease.role, lease.index))
        member = MemberState(
            claim=replace(claim, index=lease.index, incarnation=lease.incarnation),
            index=lease.index,
            incarnation=lease.incarnation,
            pid=hello.pid,
            host=hello.host,
            endpoints=dict(hello.endpoints),
            report=before.report if before is not None and self.holds_index(claim, lease) else MemberReport(),
            heard_at=lease.heard_at,
        )
        self._members[lease.role, lease.index] = member
        return member

    def update(self, claim: Claim, report: MemberReport, now: float) -> None:
        """Note the report of the member with that claim."""
        assert claim.index is not None, "the claim of a member has an index"
        member = self._members[claim.role, claim.index]
        self._members[claim.role, claim.index] = replace(member, report=report, heard_at=now)

    def addresses(self, role: str) -> dict[int, str]:
        """Return the address of each present member of the role that serves streams, by index."""
        return {
            index: member.endpoints[STREAMS]
            for (member_role, index), member in self._members.items()
            if member_role == role and STREAMS in member.endpoints and self._is_present(member)
        }

    def for_status(self) -> list[Member]:
        """Return all members as the status document needs them."""
        return [
            Member(
                role=member.claim.role,
                index=member.index,
                incarnation=member.incarnation,
                attempt=member.claim.attempt,
                pid=member.pid,
                host=member.host,
                endpoints=member.endpoints,
                report=member.report,
                heard_at=member.heard_at,
                present=self._is_present(member),
            )
            for member in self._members.values()
        ]

    def _is_present(self, member: MemberState) -> bool:
        return self._leases.holder(member.claim.instance) is not None
