"""Who holds which index of a role, and for how long. Pure: the coordinator tells it the time and keeps its document.

A worker's identity in the experiment is (role, index, incarnation): its seeds, its environments and the consumer's
duplicate detection derive from it, so two processes must never have the same. Each NEW lease of an index raises the
index's incarnation; the instance that holds a lease may claim it again for as long as nobody else was given the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a worker asks for when it joins."""

    role: str
    instance: str
    """UUID of the process's life."""
    index: int | None = None
    """With an incarnation: the lease it was given before. Without: the index it must have, as a trainer's rank. None:
    the lowest free one."""
    incarnation: int | None = None
    attempt: int = 0
    """The trainer gang's attempt; 0 for other roles. Claims of an older attempt than the role has seen are refused."""
    process: str = ""
    """The name of the process (see ``rlsrl.runtime.identity``): of two instances with one name the earlier is dead."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One worker's right to an index."""

    role: str
    index: int
    incarnation: int
    instance: str
    attempt: int
    process: str
    held: bool = True
    """False once it was given back or ran out: the index is free, and the incarnation will not come again."""
    heard_at: float
    """When the holder last gave a sign of life, in seconds on the coordinator's clock."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Not now: ask again once an index of the role is free."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaseRefusal:
    """Never: asking again will not help."""

    reason: str


class Leases:
    """The leases of all roles."""

    def __init__(self, *, lease_seconds: float, capacity: Mapping[str, int]) -> None:
        """An empty roster.

        Args:
            lease_seconds: silence after which an index is free for others.
            capacity: how many indices each role has; claims of other roles are refused.
        """
        self._lease_seconds = lease_seconds
        self._capacity = dict(capacity)
        self._leases: dict[tuple[str, int], Lease] = {}

    @property
    def roles(self) -> tuple[str, ...]:
        """The experiment's roles."""
        return tuple(sorted(self._capacity))

    @property
    def capacity(self) -> Mapping[str, int]:
        """How many workers each role has when all are there."""
        return self._capacity

    def resize(self, capacity: Mapping[str, int]) -> None:
        """Roles have another number of indices from now on. Who holds one beyond it keeps it until it leaves."""
        self._capacity = dict(capacity)

    @property
    def holders(self) -> tuple[Lease, ...]:
        """The leases that are held, by role and index."""
        return tuple(self._leases[key] for key in sorted(self._leases) if self._leases[key].held)

    def holder(self, instance: str) -> Lease | None:
        """The lease that instance holds."""
        return next((lease for lease in self._leases.values() if lease.held and lease.instance == instance), None)

    def lease(self, claim: Claim, now: float) -> Lease | Wait | LeaseRefusal:
        """Decide on a claim. The caller makes ``to_json`` durable before it tells the worker of a lease.

        Asking twice is harmless: the instance that holds a lease is given the same again.
        """
        if claim.role not in self._capacity:
            return LeaseRefusal(reason=f"this experiment has no {claim.role!r}, only {', '.join(self.roles)}")
        seen = max((lease.attempt for lease in self._of(claim.role)), default=0)
        if claim.attempt < seen:
            return LeaseRefusal(reason=f"{claim.role} attempt {claim.attempt} was succeeded by attempt {seen}")
        if (held := self.holder(claim.instance)) is not None:
            return self._again(held, claim, now)
        self._bury(claim)
        if claim.index is None:
            return self._lowest_free(claim, now)
        if claim.incarnation is not None:
            return self._reclaim(claim, claim.index, claim.incarnation, now)
        return self._fixed(claim, claim.index, now)

    def heartbeat(self, instance: str, now: float) -> bool:
        """The instance is alive. False if it holds no lease (any more): it has to claim it again."""
        if (lease := self.holder(instance)) is None:
            return False
        self._put(replace(lease, heard_at=now))
        return True

    def release(self, instance: str) -> Lease | None:
        """The instance left or is known to be dead: its index is free. Returns what it held."""
        if (lease := self.holder(instance)) is not None:
            self._put(replace(lease, held=False))
        return lease

    def expire(self, now: float, listening_since: float) -> tuple[Lease, ...]:
        """Free the leases whose holders were silent for ``lease_seconds``; returns them.

        Time before ``listening_since`` does not count: nobody was there to hear the holders then.
        """
        silent = tuple(
            lease for lease in self.holders if now - max(lease.heard_at, listening_since) > self._lease_seconds
        )
        for lease in silent:
            self._put(replace(lease, held=False))
        return silent

    def to_json(self) -> dict[str, Any]:
        """What must outlive the coordinator, as a JSON value that ``from_json`` reads back."""
        roles: dict[str, dict[str, Any]] = {}
        for role, index in sorted(self._leases):
            lease = self._leases[role, index]
            roles.setdefault(role, {})[str(index)] = {
                "incarnation": lease.incarnation,
                "instance": lease.instance,
                "attempt": lease.attempt,
                "process": lease.process,
                "held": lease.held,
            }
        return {"roles": roles}

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, lease_seconds: float, capacity: Mapping[str, int], now: float
    ) -> Self:
        """The roster a coordinator left behind; its holders count as heard of ``now``.

        Raises:
            KeyError, TypeError, ValueError: the value is no roster.
        """
        roster = cls(lease_seconds=lease_seconds, capacity=capacity)
        for role, leases in value["roles"].items():
            for index, lease in leases.items():
                roster._put(
                    Lease(
                        role=str(role),
                        index=int(index),
                        incarnation=int(lease["incarnation"]),
                        instance=str(lease["instance"]),
                        attempt=int(lease["attempt"]),
                        process=str(lease["process"]),
                        held=bool(lease["held"]),
                        heard_at=now,
                    )
                )
        return roster

    def _bury(self, claim: Claim) -> None:
        """Free what the claimant's predecessor held, in the same place and by now dead."""
        for lease in self.holders if claim.process else ():
            if (lease.role, lease.process) == (claim.role, claim.process):
                self._put(replace(lease, held=False))

    def _again(self, held: Lease, claim: Claim, now: float) -> Lease | LeaseRefusal:
        same = claim.role == held.role and claim.index in (None, held.index)
        if not same or claim.incarnation not in (None, held.incarnation):
            return LeaseRefusal(
                reason=f"this process is {held.role} {held.index} already, incarnation {held.incarnation}"
            )
        return self._put(replace(held, heard_at=now))

    def _lowest_free(self, claim: Claim, now: float) -> Lease | Wait:
        taken = {lease.index for lease in self._of(claim.role) if lease.held}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        if index >= self._capacity[claim.role]:
            return Wait(reason=f"every {claim.role} index is held")
        return self._new(claim, index, now)

    def _fixed(self, claim: Claim, index: int, now: float) -> Lease | Wait | LeaseRefusal:
        if not 0 <= index < self._capacity[claim.role]:
            return LeaseRefusal(reason=f"{claim.role} indices are below {self._capacity[claim.role]}; {index} is not")
        before = self._leases.get((claim.role, index))
        if before is not None and before.held and before.attempt >= claim.attempt:
            return Wait(reason=f"{claim.role} {index} of attempt {before.attempt} is held by another process")
        return self._new(claim, index, now)

    def _reclaim(self, claim: Claim, index: int, incarnation: int, now: float) -> Lease | LeaseRefusal:
        """The instance says it was given this lease before; so it was, unless somebody else has had it since."""
        before = self._leases.get((claim.role, index))
        mine = before is not None and (before.instance, before.incarnation) == (claim.instance, incarnation)
        forgotten = before is None or (before.incarnation < incarnation and not before.held)
        if not (mine or forgotten):
            assert before is not None, "an index nobody had is forgotten"
            return LeaseRefusal(
                reason=f"{claim.role} {index} was given to another process (incarnation {before.incarnation}) "
                f"since this one (incarnation {incarnation}) was last heard of"
            )
        return self._put(_lease(claim, index, incarnation, now))

    def _new(self, claim: Claim, index: int, now: float) -> Lease:
        before = self._leases.get((claim.role, index))
        return self._put(_lease(claim, index, 0 if before is None else before.incarnation + 1, now))

    def _of(self, role: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.role == role]

    def _put(self, lease: Lease) -> Lease:
        self._leases[lease.role, lease.index] = lease
        return lease


def _lease(claim: Claim, index: int, incarnation: int, now: float) -> Lease:
    return Lease(
        role=claim.role,
        index=index,
        incarnation=incarnation,
        instance=claim.instance,
        attempt=claim.attempt,
        process=claim.process,
        heard_at=now,
    )
