"""Builders of the sizing model's inputs: a small workload, and costs that are round numbers or 0."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rlsrl.api.spec import UpdateWork
from rlsrl.policies.effort import NetworkEffort
from rlsrl.policies.products import Product
from rlsrl.sizing.costs import SPEEDS, Costs
from rlsrl.sizing.workload import EnvironmentSpeed, Hardware, ReplayWorkload, Workload

SMALL = Workload(
    environment=EnvironmentSpeed(step_seconds=1e-4),
    network=NetworkEffort(num_weights=9_000, products=[Product(macs=9_000.0)], acting_macs=4_500.0, exported=True),
    hardware=Hardware(cores=2.0),
    shared_memory=True,
    actor_lanes=(8,),
    rollout_length=32,
    batch_lanes=8,
    minibatch_size=256,
    update_work=UpdateWork(),
    epochs=1,
    max_policy_lag=1,
    lane_bytes=2_000.0,
    request_bytes=16.0,
    answer_bytes=8.0,
)
"""One actor with 8 environments and inline inference, beside one trainer, on a machine with two cores."""


REPLAYING = ReplayWorkload(updates_per_env_step=0.5, updates_per_step=16, most_updates_behind=272, row_bytes=40.0)
"""A minibatch for each two transitions, 128 for a rollout of ``SMALL``; gathering leads by two rollouts at most."""

TYPICAL = Costs(
    lane_seconds=2e-6,
    program_call_seconds=1.5e-5,
    torch_call_seconds=9e-5,
    acting_mac_seconds=1e-10,
    ask_seconds=1.3e-4,
    answer_seconds=1.3e-4,
    evaluation_seconds=6e-5,
    hop_seconds=4e-5,
    wake_seconds=4e-5,
    shared_slot_seconds=6e-5,
    grpc_slot_seconds=3e-4,
    copied_byte_seconds=2e-10,
    grpc_byte_seconds=6e-10,
    credit_scan_seconds=1.4e-7,
    step_seconds=1.2e-3,
    replay_step_seconds=1e-3,
    minibatch_seconds=1.4e-3,
    training_mac_seconds=4e-11,
    onednn_mac_seconds=3e-11,
    bfloat16_mac_seconds=2e-11,
    trained_weight_seconds=1e-9,
    row_seconds=8e-7,
    join_seconds=1e-4,
    compiled_minibatch_seconds=3e-4,
    compiled_row_seconds=4e-7,
    drawn_row_seconds=1e-7,
    priority_row_seconds=7e-7,
    reduce_seconds=4e-4,
    reduce_wait_seconds=0.0,
    reduced_byte_seconds=1e-9,
    load_seconds=4e-5,
    transfer_seconds=2e-4,
    heartbeat_seconds=1.2e-4,
    lease_scan_seconds=2e-8,
    full_load_speed=0.9,
    crowded_speed=0.9,
)
"""Typical costs. The package's own costs change with each measurement."""


def workload(**changes: Any) -> Workload:
    """Return ``SMALL`` with changed fields."""
    return replace(SMALL, **changes)


def pods(num_actors: int, **changes: Any) -> Workload:
    """Return a workload of pods: actors with 8 environments each, one batch for all, one core a worker, gRPC."""
    lanes = 8 * num_actors
    fleet = replace(
        SMALL,
        hardware=Hardware(bandwidth=1e9, hop_seconds=5e-5),
        shared_memory=False,
        actor_lanes=(8,) * num_actors,
        batch_lanes=lanes,
        minibatch_size=32 * lanes,
    )
    return replace(fleet, **changes)


def costs(**given: float) -> Costs:
    """Return costs of 0 except the given ones."""
    return Costs(
        **{**dict.fromkeys((field.name for field in fields(Costs)), 0.0), **dict.fromkeys(SPEEDS, 1.0), **given}
    )
