"""A forecast in words: what ``rlsrl size`` prints. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlsrl.sizing.advice import REMEDIES, Tried, is_advised, limiting
from rlsrl.sizing.ceilings import ROLES
from rlsrl.sizing.forecast import Forecast
from rlsrl.sizing.workload import EnvironmentSpeed, Place

UNLIMITED = "-"
BITS_A_GIGABIT = 1e9


def speed_line(name: str, forecast: Forecast) -> str:
    """How fast the experiment trains."""
    outcome = forecast.outcome
    return (
        f"{name}: about {outcome.env_steps_a_second:,.0f} env steps/s, {_rate(outcome.train_steps_a_second)} training "
        "steps/s"
    )


def place_line(place: Place) -> str:
    """What the workers run on."""
    if place.cores is not None:
        return f"on one machine, {place.cores:g} cores that all workers share"
    gigabits = place.bandwidth * 8 / BITS_A_GIGABIT
    return f"each worker a pod with a core of its own and a link of {gigabits:g} Gbit/s"


def environment_line(environment: EnvironmentSpeed, source: str) -> str:
    """How fast the environment is, and who says so."""
    waits = f", and {_micro(environment.wait_seconds)} that it waits" if environment.wait_seconds else ""
    return f"environment: {_micro(environment.step_seconds)} a step{waits} ({source})"


def limit_lines(forecast: Forecast) -> Iterator[str]:
    """What limits, what helps, and what cannot work at all."""
    for broken in forecast.broken_limits:
        yield f"cannot work: {broken}"
    lowest = forecast.ceilings[0]
    limit = limiting(forecast.env_steps_a_second, lowest)
    what = f"network link of each {lowest.role}" if lowest.part == "network" else lowest.part
    share = forecast.env_steps_a_second / lowest.env_steps_a_second
    nothing = "" if limit else "waiting for each other; nothing is used up, the nearest is "
    yield f"limited by: {nothing}{what}, at {share:.0%} of what is possible there"
    yield f"what helps: {REMEDIES[limit]}"


def role_rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """A table: a header, then a row a role."""
    could_carry = {ceiling.role: ceiling for ceiling in reversed(forecast.ceilings) if ceiling.part in ROLES.values()}
    workload = forecast.workload
    counts = {
        "actor": workload.num_actors,
        "policy": workload.num_policy_workers,
        "buffer": workload.num_buffer_workers,
        "trainer": workload.num_trainers,
        "coordinator": 1,
    }
    rows: list[tuple[str, ...]] = [("role", "workers", "busy", "could carry", "messages/s", "MB/s in", "MB/s out")]
    for role, busy in forecast.outcome.busy.items():
        traffic = forecast.traffic[role]
        ceiling = could_carry[role].env_steps_a_second
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
    """What changes would bring: those that pay, then the others."""
    pays = [each for each in tried if is_advised(each, env_steps_a_second)]
    if not pays:
        yield "no change that was tried pays"
    for each in pays:
        note = f" ({each.change.note})" if each.change.note else ""
        what = "spares" if each.change.spares else "pays"
        yield f"{what}: {each.change.options}  {_gain(each, env_steps_a_second)}{note}"
    if others := [each for each in tried if each not in pays]:
        listed = ", ".join(f"{' '.join(each.change.overrides)} {_gain(each, env_steps_a_second)}" for each in others)
        yield f"does not pay: {listed}"


def _gain(tried: Tried, env_steps_a_second: float) -> str:
    return f"{tried.env_steps_a_second / env_steps_a_second - 1:+.0%}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:,.3g} ms"
