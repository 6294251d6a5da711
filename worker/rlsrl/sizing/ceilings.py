"""The rate that each part of an experiment could carry if nothing else limited it: the bottleneck law.

In a closed network no station does more than one over its demand (Denning and Buzen 1978, "The operational analysis of
queueing network models"). A role whose workers each take D seconds a batch lets at most 1 / D batches a second through,
and a machine of c cores at most c over the sum of all demands. The lowest ceiling says what saturates first.
``rlsrl.sizing.estimate`` says how near to it the experiment comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsrl.sizing.costs import Costs
from rlsrl.sizing.demands import Demand, Part, demands
from rlsrl.sizing.work import Work
from rlsrl.sizing.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The highest rate of one part."""

    part: Part
    env_steps_a_second: float
    """Infinite if the part has nothing to do."""
    role: str
    """The role whose workers or links these are; ``all`` for a machine."""


def ceilings(workload: Workload, costs: Costs) -> list[Ceiling]:
    """Return all ceilings, the lowest first."""
    found = demands(Work(workload=workload, costs=costs))
    result = [
        Ceiling(part=demand.part, role=demand.role, env_steps_a_second=_rate(workload, demand.seconds))
        for demand in found
    ]
    if (cores := workload.hardware.cores) is not None:
        available = _available_cores(found, cores, workload.num_evaluators) * costs.full_load_speed
        seconds = sum(demand.core_seconds for demand in found) / available
        result.append(Ceiling(part="machine", role="all", env_steps_a_second=_rate(workload, seconds)))
    return sorted(result, key=lambda ceiling: ceiling.env_steps_a_second)


def _available_cores(found: list[Demand], cores: float, num_evaluators: int) -> float:
    """Return the most cores that evaluators leave to the others: each evaluator always has an equal share."""
    others = sum(demand.workers for demand in found if demand.computing)
    return cores - num_evaluators * min(1.0, cores / (others + num_evaluators))


def _rate(workload: Workload, seconds: float) -> float:
    return workload.batch_transitions / seconds if seconds else float("inf")
