"""Messages and bytes of each role at given rates: the load of the network and of those that serve many workers."""

from __future__ import annotations

from dataclasses import dataclass

from rlsrl.sizing.workload import Workload

SLOT_MESSAGES = 3
"""A slot, its acknowledgement, the credit for the next slot."""
REQUEST_MESSAGES = 2
"""A request and its answer."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Events of all workers together, in a second or for a batch."""

    slots: float
    """Slots posted."""
    versions: float
    """Versions handed out to all workers that act; 0 where weights go through shared memory."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The mean traffic of one worker of a role. Shared memory counts as messages and bytes, too."""

    messages: float
    """In and out."""
    bytes_in: float
    bytes_out: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            messages=self.messages + other.messages,
            bytes_in=self.bytes_in + other.bytes_in,
            bytes_out=self.bytes_out + other.bytes_out,
        )


def traffic(workload: Workload, rates: Rates) -> dict[str, Traffic]:
    """Return the traffic by role, of the roles that the workload has."""
    return {role: _of_role(role, workload, rates, count) for role, count in workload.workers_by_role.items() if count}


def _of_role(role: str, workload: Workload, rates: Rates, count: int) -> Traffic:
    one = Rates(slots=rates.slots / count, versions=rates.versions)
    beats = 1.0 if role != "coordinator" else float(workload.num_workers)
    found = Traffic(messages=beats * workload.heartbeats_a_second, bytes_in=0.0, bytes_out=0.0)
    slot_bytes = workload.group_lanes * workload.lane_bytes
    if role in ("actor", "buffer"):
        found += _slots(one, bytes_in=0.0, bytes_out=slot_bytes)
    if role in ("buffer", "trainer"):
        found += _slots(one, bytes_in=slot_bytes, bytes_out=0.0)
    if workload.num_policy_workers and role in ("actor", "policy"):
        found += _requests(workload, one, serves=role == "policy")
    if role == ("policy" if workload.num_policy_workers else "actor"):
        found += _versions(workload, one, num_in=1, num_out=0)
    if role == "coordinator":
        found += _versions(workload, one, num_in=1, num_out=workload.num_watchers)
    return found


def _slots(rates: Rates, *, bytes_in: float, bytes_out: float) -> Traffic:
    return Traffic(
        messages=SLOT_MESSAGES * rates.slots, bytes_in=bytes_in * rates.slots, bytes_out=bytes_out * rates.slots
    )


def _requests(workload: Workload, rates: Rates, *, serves: bool) -> Traffic:
    steps = rates.slots * workload.rollout_length
    asked = steps * workload.group_lanes * workload.request_bytes
    answered = steps * workload.group_lanes * workload.answer_bytes
    return Traffic(
        messages=REQUEST_MESSAGES * steps * workload.requests_a_step,
        bytes_in=asked if serves else answered,
        bytes_out=answered if serves else asked,
    )


def _versions(workload: Workload, rates: Rates, *, num_in: int, num_out: int) -> Traffic:
    nbytes = rates.versions * workload.network.weight_bytes
    return Traffic(
        messages=(num_in + num_out) * rates.versions * workload.transfer_messages,
        bytes_in=num_in * nbytes,
        bytes_out=num_out * nbytes,
    )
