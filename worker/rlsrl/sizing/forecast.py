"""Everything that the model says about an experiment: speed, bottleneck, and the effect of each change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsrl.api.spec import ExperimentSpec
from rlsrl.sizing.advice import SpecChange, Tried, changes
from rlsrl.sizing.ceilings import Ceiling, ceilings
from rlsrl.sizing.costs import Costs
from rlsrl.sizing.estimate import Estimate, estimate
from rlsrl.sizing.limits import broken_limits
from rlsrl.sizing.traffic import Traffic, traffic
from rlsrl.sizing.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of one workload."""

    workload: Workload
    estimate: Estimate
    ceilings: Sequence[Ceiling]
    """The lowest first."""
    traffic: dict[str, Traffic]
    """Of one worker, by role."""
    broken_limits: Sequence[str]
    """What cannot work, one line each."""

    @property
    def env_steps_a_second(self) -> float:
        """Transitions trained."""
        return self.estimate.env_steps_a_second


def forecast(workload: Workload, costs: Costs) -> Forecast:
    """Return the forecast of a workload."""
    estimated = estimate(workload, costs)
    return Forecast(
        workload=workload,
        estimate=estimated,
        ceilings=ceilings(workload, costs),
        traffic=traffic(workload, estimated.rates),
        broken_limits=broken_limits(workload, costs),
    )


def try_out(spec: ExperimentSpec, costs: Costs, *, changed: Callable[[SpecChange], Workload | None]) -> list[Tried]:
    """Return the effect of each change, the fastest first. Changes that cannot work are left out.

    Args:
        changed: Returns the workload with a change, or None if the spec does not allow the change.
    """
    tried = []
    for change in changes(spec):
        workload = changed(change)
        if workload is not None and not broken_limits(workload, costs):
            tried.append(Tried(change=change, env_steps_a_second=estimate(workload, costs).env_steps_a_second))
    return sorted(tried, key=lambda result: -result.env_steps_a_second)
