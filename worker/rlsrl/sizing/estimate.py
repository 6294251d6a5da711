"""How fast an experiment trains: the time from one training step to the next, in closed form.

With a policy lag of at least one step, all workers work at the same time, each on another batch. They begin together,
when a training step has ended and its credits are granted, and the next step ends when the last of them is done. Where
they share a machine, the processes that have something to compute share its cores equally (processor sharing, Kleinrock
1967), so that short demands delay long ones. With a single batch in flight (``Workload.batches_in_flight``),
gathering and training take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsrl.sizing.costs import Costs
from rlsrl.sizing.demands import Demand, Part, demands, slot_seconds
from rlsrl.sizing.traffic import Rates
from rlsrl.sizing.work import Work
from rlsrl.sizing.workload import Workload

BISECTIONS = 60
MAX_STRETCH = 1e6
TRAINING: Sequence[Part] = ("trainers", "coordinator")
"""The parts that work on a batch once it is gathered."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected speed of an experiment."""

    env_steps_a_second: float
    """Transitions trained."""
    train_steps_a_second: float
    busy: dict[str, float]
    """Share of the time that a worker of a role computes, by role."""
    rates: Rates


def estimate(workload: Workload, costs: Costs) -> Estimate:
    """Return the expected speed of an experiment that is under way."""
    work = Work(workload=workload, costs=costs)
    found = demands(work)
    seconds = _cycle_seconds(work, found)
    busy = {demand.role: min(1.0, demand.computing / seconds) for demand in found if demand.part != "network"}
    busy["coordinator"] = min(1.0, busy["coordinator"] * work.attention() + work.heartbeats())
    versions = 0.0 if workload.shared_memory else workload.versions_a_batch / seconds
    return Estimate(
        env_steps_a_second=workload.batch_transitions / seconds,
        train_steps_a_second=workload.num_train_steps / seconds,
        busy=busy,
        rates=Rates(slots=workload.batch_slots / seconds, versions=versions),
    )


def shared_seconds(
    found: Sequence[Demand],
    *,
    cores: float,
    full_load_speed: float = 1.0,
    crowded_speed: float | None = None,
    always_busy: int = 0,
) -> float:
    """Return when the last worker is done, if all begin together and share the cores equally.

    Args:
        found: What the workers have to do.
        cores: Cores that they share; infinite where each worker has its own.
        full_load_speed: A core's speed while all cores are busy, as a share of its speed alone.
        crowded_speed: The same while one process more than there are cores wants to compute; by default
            ``full_load_speed``.
        always_busy: Other processes that compute all the time.
    """
    speeds = (full_load_speed, full_load_speed if crowded_speed is None else min(full_load_speed, crowded_speed))
    left = [(demand, 1.0) for demand in found if demand.seconds]
    elapsed = 0.0
    while left:
        running = [demand for demand, _ in left]
        stretch, idle = _stretch(running, cores, speeds, always_busy)
        seconds = [_seconds(demand, stretch, idle) for demand in running]
        step = min(share * full for (_, share), full in zip(left, seconds, strict=True))
        elapsed += step
        left = [
            (demand, share - step / full)
            for (demand, share), full in zip(left, seconds, strict=True)
            if share * full > step
        ]
    return elapsed


def _cycle_seconds(work: Work, found: Sequence[Demand]) -> float:
    workload = work.workload
    machine = {
        "cores": float("inf") if workload.hardware.cores is None else workload.hardware.cores,
        "full_load_speed": work.costs.full_load_speed,
        "crowded_speed": work.costs.crowded_speed,
    }
    always_busy = 0 if workload.hardware.cores is None else workload.num_evaluators
    in_flight = workload.batches_in_flight
    latency = _latency_seconds(work, found) / in_flight
    if in_flight > 1:
        return max(latency, shared_seconds(found, always_busy=always_busy, **machine))
    training = [demand for demand in found if demand.part in TRAINING]
    gathering = [demand for demand in found if demand.part not in TRAINING]
    phases = (shared_seconds(phase, always_busy=always_busy, **machine) for phase in (gathering, training))
    return max(latency, sum(phases) + 2 * work.hop_seconds)


def _latency_seconds(work: Work, found: Sequence[Demand]) -> float:
    """Return how long one batch takes from its first step to its weights, if nothing delays it."""
    workload = work.workload
    together = workload.batches_a_slot
    slots = max(workload.ring_size, together * workload.batch_slots / workload.num_actors)
    fill = sum(slot_seconds(work)) * slots / together
    behind = sum(demand.seconds for demand in found if demand.part in TRAINING)
    return fill + behind + 2 * work.hop_seconds


def _stretch(
    running: Sequence[Demand], cores: float, speeds: tuple[float, float], always_busy: int
) -> tuple[float, float]:
    """Return by which factor computing takes longer, and how many cores are idle.

    ``speeds``: a core's speed when all cores are busy, and when one process more wants to compute.
    """
    full_load_speed, crowded_speed = speeds

    def occupied(stretch: float) -> float:
        shares = (demand.core_seconds / (demand.computing * stretch + demand.waiting) for demand in running)
        return sum(shares) + always_busy / stretch

    wanted = occupied(1.0)
    if wanted <= cores:
        load = (wanted - 1) / (cores - 1) if wanted > 1 else 0.0
        return 1 / (1 - (1 - full_load_speed) * load), cores - wanted
    low, high = 1.0, MAX_STRETCH
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if occupied(middle) > cores else (low, middle)
    crowd = min(1.0, wanted - cores)
    return high / (full_load_speed + (crowded_speed - full_load_speed) * crowd), 0.0


def _seconds(demand: Demand, stretch: float, idle: float) -> float:
    helpers = min(1.0, idle) if demand.shares_microbatches else 0.0
    return demand.computing * stretch / (1 + helpers) + demand.waiting
