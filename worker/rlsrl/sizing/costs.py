"""What the model takes each act of the system to cost: one record of numbers, measured on a named machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import Any, Self

MEASURED = "measured.json"
"""The data file of this package with the costs that were measured, the machine and the date."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds are those of one core that does nothing else, unless it says otherwise."""

    lane_seconds: float
    """Of an actor, a step of one environment: what is written into the slot, beside the environment's own step."""
    program_call_seconds: float
    """An evaluation of an exported network, whatever its size and the number of rows; also what an actor does once a
    step for all its environments."""
    torch_call_seconds: float
    """The same by torch, for a network that is not exported."""
    acting_mac_seconds: float
    """A multiplication with addition of a forward pass."""
    ask_seconds: float
    """Of an actor, a request to a policy worker and its answer, over gRPC."""
    answer_seconds: float
    """Of a policy worker, the same."""
    evaluation_seconds: float
    """Of a policy worker, a batch of requests: what its threads hand to each other, beside the evaluation itself."""
    hop_seconds: float
    """One way of a message between two processes while both do nothing: wall time, no processor."""
    shared_slot_seconds: float
    """At each end, a slot, its acknowledgement and its credit through shared memory."""
    grpc_slot_seconds: float
    """At each end, the same over gRPC."""
    copied_byte_seconds: float
    """A byte that a trainer or a buffer worker copies out of a slot and into a batch."""
    grpc_byte_seconds: float
    """At each end, a byte over gRPC, copies between user and kernel included."""
    credit_scan_seconds: float
    """Of who grants credits, for each credit: a look at one connected producer (``CreditBook.issue``)."""
    step_seconds: float
    """A trainer's step beside its minibatches: returns and advantages, statistics, the new version, credits."""
    minibatch_seconds: float
    """A minibatch, whatever its size: calls of torch."""
    training_mac_seconds: float
    """A multiplication with addition of a forward pass, with the backward pass that belongs to it."""
    row_seconds: float
    """A transition of a minibatch beside the network: losses, gathering."""
    reduce_seconds: float
    """Each rank, one collective call of several ranks."""
    reduced_byte_seconds: float
    """Each rank, a byte of the gradient that is averaged."""
    load_seconds: float
    """Of who acts, taking new weights from shared memory."""
    transfer_seconds: float
    """At each end, a gRPC message of 1 MiB or less that carries weights, checksums apart."""
    heartbeat_seconds: float
    """Of the coordinator, a heartbeat."""
    lease_scan_seconds: float
    """Of the coordinator, for each heartbeat: a look at one lease (``Roster.holder``)."""
    full_load_speed: float
    """How fast a core is while all others of its machine are busy, too, as a share of its speed alone."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} {value} must be a time, 0 or above")
        if not 0 < self.full_load_speed <= 1:
            raise ValueError(f"full_load_speed {self.full_load_speed} must be above 0 and at most 1")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read a JSON object with a number for each field.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, or is no such number.
        """
        return cls(**{field.name: float(value[field.name]) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Costs, and where they come from."""

    machine: str
    date: str
    source: str
    """How they were measured."""
    costs: Costs

    def to_json(self) -> dict[str, Any]:
        """The JSON value that the data file holds."""
        return {**asdict(self), "costs": {name: float(f"{value:.3g}") for name, value in asdict(self.costs).items()}}


def measured_costs() -> MeasuredCosts:
    """What the package comes with."""
    value = json.loads(resources.files(__package__).joinpath(MEASURED).read_bytes())
    return MeasuredCosts(
        machine=value["machine"],
        date=value["date"],
        source=value["source"],
        costs=Costs.from_json(value["costs"]),
    )
