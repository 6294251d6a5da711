"""The cost of each act of the system: one record of numbers, measured on a named machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import Any, Self

MEASURED = "measured.json"
"""This package's data file with the measured costs, the machine and the date."""

SPEEDS = ("full_load_speed", "crowded_speed")
"""Costs that are a core's speed, as a share of its speed alone."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one core that does nothing else, unless the field says otherwise."""

    lane_seconds: float
    """An actor writes one step of one environment into the slot. The environment's own step is not part of it."""
    program_call_seconds: float
    """One evaluation of an exported network, independent of its size and of the number of rows. An actor that asks a
    policy worker pays the same once a step for its bookkeeping."""
    torch_call_seconds: float
    """One evaluation by torch, for a network that is not exported."""
    acting_mac_seconds: float
    """One multiply-add of a forward pass."""
    ask_seconds: float
    """An actor sends a request to a policy worker and reads the answer, over gRPC."""
    answer_seconds: float
    """A policy worker reads a request and sends the answer."""
    evaluation_seconds: float
    """A policy worker forms a batch of requests and hands out the results. The evaluation itself is not part of it."""
    hop_seconds: float
    """One-way wall time of a message between two idle processes; no processor time."""
    wake_seconds: float
    """Wall time from the end of an environment's wait until the actor runs again; no processor time."""
    shared_slot_seconds: float
    """At each end: a slot, its acknowledgement and its credit through shared memory."""
    grpc_slot_seconds: float
    """At each end: the same over gRPC."""
    copied_byte_seconds: float
    """A trainer or a buffer worker copies one byte out of a slot and into a batch."""
    grpc_byte_seconds: float
    """At each end: one byte over gRPC, including the copies between user space and kernel."""
    credit_scan_seconds: float
    """``CreditBook.issue`` looks at one connected producer, for each credit."""
    step_seconds: float
    """A training step beside its minibatches: returns and advantages, statistics, the new version, credits."""
    replay_step_seconds: float
    """The same with replay, without returns and advantages."""
    minibatch_seconds: float
    """One eager minibatch, independent of its size: calls of torch."""
    row_seconds: float
    """One transition of an eager minibatch, beside the network: losses, gathering."""
    compiled_minibatch_seconds: float
    """One compiled minibatch, independent of its size."""
    compiled_row_seconds: float
    """One transition of a compiled minibatch, beside the network."""
    drawn_row_seconds: float
    """A trainer draws one transition from its replay store, without the bytes of it."""
    priority_row_seconds: float
    """The same by priority takes so much longer, the new priority included."""
    training_mac_seconds: float
    """One multiply-add of a forward pass of dense layers by MKL, with the backward pass that belongs to it."""
    onednn_mac_seconds: float
    """The same of a convolution, and of large products of compiled dense layers: by oneDNN."""
    bfloat16_mac_seconds: float
    """The same of any layer in bfloat16."""
    trained_weight_seconds: float
    """One weight of a minibatch: its gradient, the optimizer, target networks."""
    join_seconds: float
    """Wall time in which the threads of a minibatch wait for each other, if it has several."""
    reduce_seconds: float
    """One collective call of several ranks, at each rank."""
    reduce_wait_seconds: float
    """A rank waits for the other ranks in one collective call; no processor time."""
    reduced_byte_seconds: float
    """One byte of the gradient that the ranks add up, at each rank."""
    load_seconds: float
    """An actor or a policy worker takes new weights from shared memory."""
    transfer_seconds: float
    """At each end: one gRPC message of at most 1 MiB of weights, without the cost of its bytes."""
    heartbeat_seconds: float
    """The coordinator answers one heartbeat."""
    lease_scan_seconds: float
    """The coordinator looks at one lease, for each heartbeat."""
    full_load_speed: float
    """A core's speed while all other cores of its machine are busy, as a share of its speed alone."""
    crowded_speed: float
    """A core's speed while one process more than the machine has cores wants to compute, as a share of its speed
    alone: processes take turns, find the core's caches full of another's data, and wake up late."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} {value} must be finite and 0 or above")
        for name in SPEEDS:
            if not 0 < (speed := getattr(self, name)) <= 1:
                raise ValueError(f"{name} {speed} must be above 0 and at most 1")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the costs of a JSON object that has a number for each field.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, or its value is not a valid number.
        """
        return cls(**{field.name: float(value[field.name]) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Costs and their origin."""

    machine: str
    date: str
    source: str
    """How the costs were measured."""
    costs: Costs

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value of the data file."""
        return {**asdict(self), "costs": {name: float(f"{value:.3g}") for name, value in asdict(self.costs).items()}}


def measured_costs() -> MeasuredCosts:
    """Return the costs that the package comes with."""
    value = json.loads(resources.files(__package__).joinpath(MEASURED).read_bytes())
    return MeasuredCosts(
        machine=value["machine"],
        date=value["date"],
        source=value["source"],
        costs=Costs.from_json(value["costs"]),
    )
