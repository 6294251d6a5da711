"""What the model says of an experiment, put together: speed, what limits it, and what each change of it would bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rlsrl.api.spec import ExperimentSpec
from rlsrl.sizing.advice import Change, Tried, changes
from rlsrl.sizing.ceilings import Ceiling, ceilings
from rlsrl.sizing.costs import Costs
from rlsrl.sizing.limits import broken_limits
from rlsrl.sizing.simulation import Outcome, Stuck, simulate
from rlsrl.sizing.traffic import Traffic, traffic
from rlsrl.sizing.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of one workload."""

    workload: Workload
    outcome: Outcome
    ceilings: Sequence[Ceiling]
    """The lowest first."""
    traffic: dict[str, Traffic]
    """Of one worker, by role."""
    broken_limits: Sequence[str]
    """What cannot work like this."""

    @property
    def env_steps_a_second(self) -> float:
        """Transitions trained."""
        return self.outcome.env_steps_a_second


def forecast(workload: Workload, costs: Costs) -> Forecast:
    """What the model says.

    Raises:
        Stuck: the experiment cannot make progress as it is.
    """
    outcome = simulate(workload, costs)
    return Forecast(
        workload=workload,
        outcome=outcome,
        ceilings=ceilings(workload, costs),
        traffic=traffic(workload, outcome.rates),
        broken_limits=broken_limits(workload, costs),
    )


def try_out(spec: ExperimentSpec, costs: Costs, *, changed: Callable[[Change], Workload | None]) -> list[Tried]:
    """What changes of the experiment would bring, the fastest first. Those that could not work are left out.

    ``changed`` makes a change; None where the spec does not allow it.
    """
    tried = []
    for change in changes(spec):
        workload = changed(change)
        if workload is None or broken_limits(workload, costs):
            continue
        with suppress(Stuck):
            tried.append(Tried(change=change, env_steps_a_second=simulate(workload, costs).env_steps_a_second))
    return sorted(tried, key=lambda each: -each.env_steps_a_second)
