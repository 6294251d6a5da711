"""The limits of the system, however fast its workers are: connections, message sizes, credits."""

from __future__ import annotations

import math

from rlsrl.rpc.servers import MAX_CONNECTIONS as SERVER_CONNECTIONS
from rlsrl.sizing.costs import Costs
from rlsrl.sizing.work import Work
from rlsrl.sizing.workload import Workload
from rlsrl.streams.grpc_samples.consumer import MAX_CONNECTIONS as GRPC_PRODUCERS
from rlsrl.streams.grpc_samples.wire import MAX_SLOT_BYTES
from rlsrl.streams.shared_memory.consumer import MAX_PRODUCERS as SHARED_PRODUCERS

MAX_HEARTBEAT_SHARE = 0.5
"""Largest share of the coordinator's time for heartbeats. Above it, weights and leases are late."""
FEWER_ACTORS = "fewer actors with more environments each"


def broken_limits(workload: Workload, costs: Costs) -> list[str]:
    """Return what cannot work in this workload, with the cure; one line each."""
    found = (
        _sample_connections(workload),
        _connections(workload),
        _slot_size(workload),
        _credits(workload),
        _heartbeats(workload, costs),
    )
    return [line for line in found if line is not None]


def _sample_connections(workload: Workload) -> str | None:
    allowed = SHARED_PRODUCERS if workload.shared_memory else GRPC_PRODUCERS
    producers = -(-workload.num_actors // (workload.num_buffer_workers or 1))
    if producers <= allowed:
        return None
    consumer = "a buffer worker" if workload.num_buffer_workers else "a trainer"
    cure = f"bufferWorkers.replicas of at least {-(-workload.num_actors // allowed)}"
    return f"{consumer} takes {allowed} connections, and {producers} actors would connect: {cure}"


def _connections(workload: Workload) -> str | None:
    made = workload.num_workers + (0 if workload.shared_memory else workload.num_watchers)
    if made <= SERVER_CONNECTIONS:
        return None
    return f"the coordinator takes {SERVER_CONNECTIONS} connections, and workers would make {made}: {FEWER_ACTORS}"


def _slot_size(workload: Workload) -> str | None:
    nbytes = max(workload.actor_lanes) / workload.ring_size * workload.lane_bytes
    if workload.shared_memory or nbytes <= MAX_SLOT_BYTES:
        return None
    cure = "a smaller actors.rolloutLength, or fewer environments for each actor"
    return f"a rollout has {nbytes / 1e6:.0f} MB, and a message takes {MAX_SLOT_BYTES / 1e6:.0f} MB: {cure}"


def _credits(workload: Workload) -> str | None:
    """A rank grants whole slots, within 1 + ``max_policy_lag`` of its batches; the slots it gets must fill a batch."""
    if workload.replay is not None:  # the spec's own rules for pacing.maxTrainStepsBehind see to that
        return None
    slot_lanes = max(workload.actor_lanes) // workload.ring_size
    most_left_over = slot_lanes - math.gcd(workload.rank_lanes, slot_lanes)
    if workload.max_policy_lag * workload.rank_lanes >= most_left_over:
        return None
    return (
        f"a rollout has {slot_lanes} environments, and a trainer's part of a batch {workload.rank_lanes}: its "
        "credits never cover a batch: a larger pacing.maxPolicyLag or trainers.batchEnvironments"
    )


def _heartbeats(workload: Workload, costs: Costs) -> str | None:
    share = Work(workload=workload, costs=costs).heartbeats()
    if share <= MAX_HEARTBEAT_SHARE:
        return None
    return f"heartbeats of {workload.num_workers} workers take {share:.0%} of the coordinator's core: {FEWER_ACTORS}"
