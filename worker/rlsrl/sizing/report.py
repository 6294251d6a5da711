"""The lines that ``rlsrl size`` prints for a forecast. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlsrl.sizing.advice import REMEDIES, Tried, is_advised, limiting
from rlsrl.sizing.demands import ROLES
from rlsrl.sizing.forecast import Forecast
from rlsrl.sizing.workload import EnvironmentSpeed, Hardware

UNLIMITED = "-"
BITS_A_GIGABIT = 1e9


def speed_line(name: str, forecast: Forecast) -> str:
    """Return the speed of the experiment."""
    steps = _rate(forecast.estimate.train_steps_a_second)
    return f"{name}: about {forecast.env_steps_a_second:,.0f} env steps/s, {steps} training steps/s"


def hardware_line(hardware: Hardware) -> str:
    """Return the processors and links that the workers run on."""
    if hardware.cores is not None:
        return f"one machine, {hardware.cores:g} cores that all workers share"
    gigabits = hardware.bandwidth * 8 / BITS_A_GIGABIT
    return f"each worker is a pod with one core and a link of {gigabits:g} Gbit/s"


def environment_line(environment: EnvironmentSpeed, source: str) -> str:
    """Return the time of one environment step, and where it comes from."""
    waits = f" and {_micro(environment.wait_seconds)} of waiting" if environment.wait_seconds else ""
    return f"environment: {_micro(environment.step_seconds)}{waits} a step ({source})"


def limit_lines(forecast: Forecast) -> Iterator[str]:
    """Yield what cannot work, what limits the speed, and what helps."""
    for broken in forecast.broken_limits:
        yield f"cannot work: {broken}"
    lowest = forecast.ceilings[0]
    limit = limiting(forecast.env_steps_a_second, lowest)
    part = f"network link of each {lowest.role}" if lowest.part == "network" else lowest.part
    share = forecast.env_steps_a_second / lowest.env_steps_a_second
    if limit:
        yield f"limited by: {part}, at {share:.0%} of the ceiling"
    else:
        yield f"limited by: workers wait for each other; nearest to its ceiling is {part}, at {share:.0%}"
    yield f"what helps: {REMEDIES[limit]}"


def role_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """Return a table: a header, then one row per role."""
    by_role = {ceiling.role: ceiling for ceiling in reversed(forecast.ceilings) if ceiling.part in ROLES.values()}
    counts = forecast.workload.workers_by_role
    rows: list[tuple[str, ...]] = [("role", "workers", "busy", "ceiling", "messages/s", "MB/s in", "MB/s out")]
    for role, busy in forecast.estimate.busy.items():
        traffic = forecast.traffic[role]
        ceiling = by_role[role].env_steps_a_second
        rows.append(
            (
                role,
                f"{counts[role]:,}",
                f"{busy:.0%}",
                UNLIMITED if math.isinf(ceiling) else f"{ceiling:,.0f}",
                f"{traffic.messages:,.0f}",
                _megabytes(traffic.bytes_in),
                _megabytes(traffic.bytes_out),
            )
        )
    return rows


def advice_lines(tried: Sequence[Tried], env_steps_a_second: float) -> Iterator[str]:
    """Yield the effect of each change: first the changes that are advised, then the others."""
    advised = [result for result in tried if is_advised(result, env_steps_a_second)]
    if not advised:
        yield "no change that was tried helps"
    for result in advised:
        note = f" ({result.change.note})" if result.change.note else ""
        effect = "saves workers" if result.change.saves else "helps"
        yield f"{effect}: {result.change.options}  {_gain(result, env_steps_a_second)}{note}"
    if others := [result for result in tried if result not in advised]:
        listed = ", ".join(f"{' '.join(other.change.overrides)} {_gain(other, env_steps_a_second)}" for other in others)
        yield f"does not help: {listed}"


def _gain(tried: Tried, env_steps_a_second: float) -> str:
    return f"{tried.env_steps_a_second / env_steps_a_second - 1:+.0%}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:,.3g} ms"
