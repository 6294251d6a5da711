"""Leases of indices, the part of the roster that outlives a coordinator: which process holds which index. Pure.

A worker's identity in the experiment is (role, index, incarnation). The worker's seeds and environments and the
detection of duplicates depend on the identity, so two processes must never share one. Each new lease of an index raises
the index's incarnation. The instance that held a lease may claim it again until another instance gets the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A worker's request when it joins."""

    role: str
    instance: str
    """UUID of the process's life."""
    index: int | None = None
    """With an incarnation: the index of an earlier lease. Without: the index that the worker needs, a trainer's rank.
    None: the lowest free index."""
    incarnation: int | None = None
    attempt: int = 0
    """The trainer gang's attempt; 0 for other roles. Claims of an older attempt are refused."""
    process: str = ""
    """The name of the process (``rlsrl.runtime.identity``). Of two instances with the same name, the earlier is
    dead."""


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
    """False once the lease was released or expired: the index is free, and the incarnation is not used again."""
    heard_at: float
    """The time of the holder's last message, in seconds on the coordinator's clock."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """No index is free, or the one that the worker needs is not: claim again when an index is freed or added."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaseRefusal:
    """The claim is invalid: claiming again does not help."""

    reason: str


class Leases:
    """The leases of all roles."""

    def __init__(self, *, lease_seconds: float, capacity: Mapping[str, int]) -> None:
        """Start without leases.

        Args:
            lease_seconds: silence after which a lease expires.
            capacity: the number of indices of each role. Claims of other roles are refused.
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
        """The number of indices of each role."""
        return self._capacity

    def resize(self, capacity: Mapping[str, int]) -> None:
        """Change the number of indices of the roles. A holder of an index beyond it keeps it until it leaves."""
        self._capacity = dict(capacity)

    @property
    def holders(self) -> tuple[Lease, ...]:
        """The leases that are held, in the order of role and index."""
        return tuple(self._leases[key] for key in sorted(self._leases) if self._leases[key].held)

    def holder(self, instance: str) -> Lease | None:
        """Return the lease that the instance holds, or None."""
        return next((lease for lease in self._leases.values() if lease.held and lease.instance == instance), None)

    def of_process(self, process: str) -> Lease | None:
        """Return the lease of the process with that name, or the last one that it held; None if it never had one."""
        found = [lease for lease in self._leases.values() if lease.process == process]
        return max(found, key=lambda lease: (lease.held, lease.heard_at), default=None)

    def knows(self, role: str, index: int) -> bool:
        """Return whether the index was ever leased."""
        return (role, index) in self._leases

    def lease(self, claim: Claim, now: float) -> Lease | Wait | LeaseRefusal:
        """Decide on a claim. The caller must make ``to_json`` durable before it sends a lease to the worker.

        A holder that claims again gets the same lease.
        """
        if claim.role not in self._capacity:
            return LeaseRefusal(
                reason=f"this experiment has no role {claim.role!r}; its roles are {', '.join(self.roles)}"
            )
        seen = max((lease.attempt for lease in self._of(claim.role)), default=0)
        if claim.attempt < seen:
            return LeaseRefusal(reason=f"{claim.role} attempt {claim.attempt} was succeeded by attempt {seen}")
        if (held := self.holder(claim.instance)) is not None:
            return self._claim_held(held, claim, now)
        self._release_predecessor(claim)
        if claim.index is None:
            return self._claim_lowest_free(claim, now)
        if claim.incarnation is not None:
            return self._reclaim(claim, claim.index, claim.incarnation, now)
        return self._claim_index(claim, claim.index, now)

    def heartbeat(self, instance: str, now: float) -> bool:
        """Renew the instance's lease. Return False if the instance holds no lease and must claim again."""
        if (lease := self.holder(instance)) is None:
            return False
        self._put(replace(lease, heard_at=now))
        return True

    def release(self, instance: str) -> Lease | None:
        """End the instance's lease and return it, or None. Call it for a worker that left or died."""
        if (lease := self.holder(instance)) is not None:
            self._put(replace(lease, held=False))
        return lease

    def expire(self, now: float, listening_since: float) -> tuple[Lease, ...]:
        """End the leases whose holders were silent for ``lease_seconds``, and return them.

        Time before ``listening_since`` does not count: the coordinator was not listening.
        """
        silent = tuple(
            lease for lease in self.holders if now - max(lease.heard_at, listening_since) > self._lease_seconds
        )
        for lease in silent:
            self._put(replace(lease, held=False))
        return silent

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads."""
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
        """Return the leases that an earlier coordinator wrote, each with ``heard_at`` set to ``now``.

        Raises:
            KeyError, TypeError, ValueError: the value is not such a document.
        """
        restored = cls(lease_seconds=lease_seconds, capacity=capacity)
        for role, leases in value["roles"].items():
            for index, lease in leases.items():
                restored._put(
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
        return restored

    def _release_predecessor(self, claim: Claim) -> None:
        """End the lease of an earlier process with the same name: that process is dead."""
        for lease in self.holders if claim.process else ():
            if (lease.role, lease.process) == (claim.role, claim.process):
                self._put(replace(lease, held=False))

    def _claim_held(self, held: Lease, claim: Claim, now: float) -> Lease | LeaseRefusal:
        same = claim.role == held.role and claim.index in (None, held.index)
        if not same or claim.incarnation not in (None, held.incarnation):
            return LeaseRefusal(
                reason=f"this process is {held.role} {held.index} already, incarnation {held.incarnation}"
            )
        return self._put(replace(held, heard_at=now))

    def _claim_lowest_free(self, claim: Claim, now: float) -> Lease | Wait:
        taken = {lease.index for lease in self._of(claim.role) if lease.held}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        if index >= self._capacity[claim.role]:
            return Wait(reason=f"every {claim.role} index is held")
        return self._new(claim, index, now)

    def _claim_index(self, claim: Claim, index: int, now: float) -> Lease | Wait | LeaseRefusal:
        if index < 0:
            return LeaseRefusal(reason=f"{claim.role} index {index} is below 0")
        if index >= (capacity := self._capacity[claim.role]):  # A new pod may be here before the edit that added it.
            return Wait(reason=f"{claim.role} index {index} is not below {capacity}, the number of workers so far")
        before = self._leases.get((claim.role, index))
        if before is not None and before.held and before.attempt >= claim.attempt:
            return Wait(reason=f"{claim.role} {index} of attempt {before.attempt} is held by another process")
        return self._new(claim, index, now)

    def _reclaim(self, claim: Claim, index: int, incarnation: int, now: float) -> Lease | LeaseRefusal:
        """Return the lease that the instance had, unless another instance got the index since."""
        before = self._leases.get((claim.role, index))
        was_holder = before is not None and (before.instance, before.incarnation) == (claim.instance, incarnation)
        # A coordinator without a volume starts without the leases of the one before.
        unknown = before is None or (before.incarnation < incarnation and not before.held)
        if not (was_holder or unknown):
            assert before is not None, "an index without a lease is unknown"
            return LeaseRefusal(
                reason=f"another process has leased {claim.role} {index} (incarnation {before.incarnation}) since the "
                f"last message of this one (incarnation {incarnation})"
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
