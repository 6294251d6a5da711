"""Compare the model of ``rlsrl size`` with real runs: predict each of them from a fit to all others.

    python benchmarks/scaling.py                  # measure (40 minutes), fit, predict, print what saturates
    python benchmarks/scaling.py --keep           # and keep the points, and the costs that `rlsrl size` uses
    python benchmarks/scaling.py --points FILE    # with the points of FILE; measures and adds what it lacks

The grid is 1, 2 and 4 actors x 0, 1 and 2 policy workers x 1 and 2 trainer ranks x a fast and a slow environment. A few
more settings each have one feature: compiled training steps, environment threads, an evaluator, a lent core, replay.
Every setting is run once before any is run again. The model is fitted by least squares to the logarithm of transitions
a second, with the cores that other programs left to the run: to all points but one, which gives the prediction of that
one, and to all points, which gives the costs. The exit status is 1 if a prediction is off by more than 15 %, or if
other programs used more than 3 % of the machine beside a run. Points and costs are kept if the machine was quiet and
the costs describe the points better than those that they replace. Last it predicts the benchmarks with replay, whose
settings no point has, and compares with their kept figures, where these are of such a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from results import kept_rate, write
from scaling_fit import MeasuredRate, fit
from scaling_points import (
    ENVIRONMENTS,
    FEATURES,
    GRID,
    LANES,
    NUM_STEPS,
    QUIET_CORES,
    Point,
    Sample,
    Setting,
    measure,
)
from workloads import REPLAY_WORKLOADS

from rlsrl.api.load import load_text
from rlsrl.api.spec import ExperimentSpec, RLExperiment
from rlsrl.envs.factory import EnvironmentSource, environment_spec
from rlsrl.policies.effort import NetworkEffort
from rlsrl.policies.products import Product
from rlsrl.runs.text_table import columns
from rlsrl.sizing.costs import MEASURED, Costs, MeasuredCosts, measured_costs
from rlsrl.sizing.environment import measure_environment
from rlsrl.sizing.estimate import estimate
from rlsrl.sizing.forecast import forecast
from rlsrl.sizing.report import limit_lines, role_rows
from rlsrl.sizing.workload import EnvironmentSpeed, Hardware, Workload, workload_of
from rlsrl.workers.build.common import effort_of, environment_source

ALLOWED = 0.15
"""Largest error of a prediction."""
FREE = (
    "lane_seconds",
    "program_call_seconds",
    "ask_seconds",
    "answer_seconds",
    "evaluation_seconds",
    "hop_seconds",
    "wake_seconds",
    "shared_slot_seconds",
    "step_seconds",
    "minibatch_seconds",
    "reduce_seconds",
    "reduce_wait_seconds",
    "full_load_speed",
    "crowded_speed",
)
"""Costs that the grid depends on. The others keep their values, which were measured in other ways."""
FREE_WITH_FEATURES = (
    *FREE,
    "acting_mac_seconds",
    "compiled_minibatch_seconds",
    "compiled_row_seconds",
    "training_mac_seconds",
    "onednn_mac_seconds",
    "bfloat16_mac_seconds",
    "trained_weight_seconds",
    "replay_step_seconds",
    "priority_row_seconds",
)
SCALES = (100, 1_000, 10_000)
ROOT = Path(__file__).parents[1]
POINTS = ROOT / "docs" / "benchmarks" / "scaling.json"
COSTS = ROOT / "worker" / "rlsrl" / "sizing" / MEASURED
POD = Hardware(bandwidth=10e9 / 8, hop_seconds=50e-6)
"""A pod of a fleet: one core, 10 Gbit/s, 50 us one way."""
FLEET_STEP_SECONDS = 0.002
FLEET_MINIBATCHES = 4
"""Minibatches of a batch, for every size of the fleet."""
NATURE_CNN = NetworkEffort(
    num_weights=1_688_000, products=[Product(macs=9.4e6, dense=False)], acting_macs=9.4e6, exported=False
)
FRAME_BYTES = 4 * 84 * 84
GPU_ROW_SECONDS = 5e-6
"""Time of a transition on a GPU that trains the network above. This and the next figure are assumptions."""
GPU_ACTING_MAC_SECONDS = 5e-13
MAX_ACTORS = 4096
"""The most actors that a spec allows."""
ACTORS_A_HELPER = 20
"""Actors of each policy worker or buffer worker, where they are the remedy."""
ACTORS_A_RANK = 50


def workloads(
    settings: Sequence[Setting], cores: Sequence[float], speeds: Mapping[str, EnvironmentSpeed]
) -> list[Workload]:
    """Return each setting as the model sees it, with the cores that are available to it."""
    return [
        _workload(setting, speeds[setting.environment], Hardware(cores=available))
        for setting, available in zip(settings, cores, strict=True)
    ]


def _workload(setting: Setting, speed: EnvironmentSpeed, hardware: Hardware) -> Workload:
    return _workload_of(load_text(json.dumps(setting.document())).spec, speed, hardware)


def _workload_of(spec: ExperimentSpec, speed: EnvironmentSpeed, hardware: Hardware) -> Workload:
    env_spec = environment_spec(environment_source(spec.worker_environment))
    network = effort_of(spec, env_spec)
    return workload_of(spec, env_spec, environment=speed, network=network, hardware=hardware)


def _source(environment: str) -> EnvironmentSource:
    spec = load_text(json.dumps(Setting(environment=environment, actors=1).document())).spec
    return environment_source(spec.worker_environment)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Costs fitted to all points, and the largest errors."""

    costs: Costs
    from_others: float
    """Of the prediction of a point from all others."""
    with_all: float
    """Of the fitted costs."""
    before: float
    """Of the costs that the package has."""


def compare(points: Sequence[Point], speeds: Mapping[str, EnvironmentSpeed]) -> Compared:
    """Predict each point from all others and print all."""
    machine_cores = float(os.cpu_count() or 1)
    cores = [max(0.5, machine_cores - point.others) for point in points]
    modelled = workloads([point.setting for point in points], cores, speeds)
    measured = [
        MeasuredRate(workload=workload, env_steps_a_second=point.fps)
        for workload, point in zip(modelled, points, strict=True)
    ]
    free = FREE_WITH_FEATURES if any(point.setting.feature for point in points) else FREE
    start = measured_costs().costs
    costs = fit(measured, start, free)
    rows = [("setting", "measured", "spread", "others", "predicted", "error", "error with all")]
    errors, errors_with_all, errors_before = [], [], []
    for number, (point, workload) in enumerate(zip(points, modelled, strict=True)):
        others = fit([*measured[:number], *measured[number + 1 :]], start, free)
        predicted, known, before = (estimate(workload, found).env_steps_a_second for found in (others, costs, start))
        errors.append(predicted / point.fps - 1)
        errors_with_all.append(known / point.fps - 1)
        errors_before.append(before / point.fps - 1)
        rows.append(
            (
                str(point.setting),
                f"{point.fps:,.0f}",
                f"{point.spread:.0%}",
                f"{point.others:.2f}",
                f"{predicted:,.0f}",
                f"{errors[-1]:+.1%}",
                f"{errors_with_all[-1]:+.1%}",
            )
        )
    print(columns(rows))
    for name, found in (("from the other points", errors), ("with costs fitted to all points", errors_with_all)):
        sizes = [abs(error) for error in found]
        print(f"{name}: largest error {max(sizes):.1%}, mean {fmean(sizes):.1%}; allowed: {ALLOWED:.0%}")
    from_others, with_all, before = (max(map(abs, found)) for found in (errors, errors_with_all, errors_before))
    return Compared(costs=costs, from_others=from_others, with_all=with_all, before=before)


def show_costs(costs: Costs) -> None:
    before = asdict(measured_costs().costs)
    rows = [("cost", "before", "fitted")]
    fitted = {name: value for name, value in asdict(costs).items() if name in FREE_WITH_FEATURES}
    rows += [(name, f"{before[name]:.3g}", f"{value:.3g}") for name, value in fitted.items()]
    print(columns(rows))


def show_benchmarks(costs: Costs) -> None:
    """Print the predicted speed of the benchmarks with replay, and the figures that are kept of them."""
    rows = [("benchmark", "measured", "predicted", "error")]
    hardware = Hardware(cores=float(os.cpu_count() or 1))
    for name, workload in REPLAY_WORKLOADS.items():
        spec = RLExperiment.model_validate(workload.experiment()).spec
        speed = measure_environment(environment_source(spec.worker_environment))
        predicted = estimate(_workload_of(spec, speed, hardware), costs).env_steps_a_second
        measured = kept_rate(name)
        beside = ("", "") if measured is None else (f"{measured:,.0f}", f"{predicted / measured - 1:+.1%}")
        rows.append((name, beside[0], f"{predicted:,.0f}", beside[1]))
    print("\n" + columns(rows))


def show_scales(costs: Costs) -> None:
    """Print what saturates in fleets of pods, and their speed with the remedies."""
    with_gpus = replace(
        costs,
        onednn_mac_seconds=0.0,
        trained_weight_seconds=0.0,
        row_seconds=GPU_ROW_SECONDS,
        acting_mac_seconds=GPU_ACTING_MAC_SECONDS,
    )
    for number in SCALES:
        for kind, fleet, used in (("small", _small(number), costs), ("images", _images(number), with_gpus)):
            for title, workload in (("as it is", fleet), ("with remedies", _remedied(fleet))):
                found = forecast(workload, used)
                print(f"\n{number:,} actors, {kind}, {title}: {_shape(workload)}")
                print(f"about {found.env_steps_a_second:,.0f} env steps/s")
                print("\n".join([*limit_lines(found), columns(role_rows(found))]))


def _small(num_actors: int) -> Workload:
    """Return a fleet whose environments compute for 2 ms a step; its actors evaluate a small network themselves."""
    one = _workload(
        Setting(environment="fast", actors=1), EnvironmentSpeed(step_seconds=FLEET_STEP_SECONDS), hardware=POD
    )
    return replace(
        one,
        actor_lanes=[LANES] * num_actors,
        batch_lanes=LANES * num_actors,
        minibatch_size=LANES * NUM_STEPS * num_actors // FLEET_MINIBATCHES,
    )


def _images(num_actors: int) -> Workload:
    """Return a fleet that plays Atari games with the network of Mnih et al. (2015) on GPUs, a policy worker for each
    100 actors."""
    return replace(
        _small(num_actors),
        network=NATURE_CNN,
        lane_bytes=float((NUM_STEPS + 1) * FRAME_BYTES),
        request_bytes=float(FRAME_BYTES),
        answer_bytes=24.0,
        num_policy_workers=num_actors // 100,
        ring_size=2,
    )


def _remedied(fleet: Workload) -> Workload:
    """Return the fleet with buffer workers; with more policy workers and ranks where links are the limit; and with
    policy workers in a large fleet, so that only they need weights."""
    helpers = fleet.num_actors // ACTORS_A_HELPER
    if fleet.num_policy_workers:
        return replace(
            fleet,
            num_buffer_workers=helpers,
            num_policy_workers=helpers,
            num_trainers=fleet.num_actors // ACTORS_A_RANK,
        )
    asks = fleet.num_actors > MAX_ACTORS
    return replace(
        fleet,
        num_buffer_workers=helpers,
        num_policy_workers=helpers if asks else 0,
        ring_size=2 if asks else 1,
    )


def _shape(workload: Workload) -> str:
    return (
        f"{workload.actor_lanes[0]} environments each x {workload.rollout_length} steps, {workload.num_policy_workers} "
        f"policy workers, {workload.num_buffer_workers} buffer workers, {workload.num_trainers} ranks, a batch of "
        f"{workload.batch_lanes:,} environments in minibatches of {workload.minibatch_size:,}"
    )


def keep(document: Mapping[str, Any], costs: Costs) -> None:
    """Write the points and the package's costs."""
    write(POINTS, document)
    print(f"written: {POINTS}, {COSTS}")
    source = "fitted by benchmarks/scaling.py; costs that its grid does not depend on were timed one by one"
    fitted = MeasuredCosts(machine=document["machine"], date=document["date"], source=source, costs=costs)
    write(COSTS, fitted.to_json())


def measured_document(document: Mapping[str, Any], repeats: int, window_seconds: float) -> dict[str, Any]:
    """Return the document with all settings and environments; measure what it lacks.

    Raises:
        ValueError: it is another machine's.
    """
    if document and document["machine"] != _machine():
        raise ValueError(f"the points are from a {document['machine']}, and this is a {_machine()}")
    speeds = dict(document.get("environments", {}))
    for name in ENVIRONMENTS:
        if name not in speeds:
            speeds[name] = asdict(measure_environment(_source(name)))
    known: dict[Setting, Sequence[Sample]] = dict.fromkeys((*GRID, *FEATURES), ())
    known |= {point.setting: point.samples for point in map(Point.from_json, document.get("points", []))}
    points = measure(known, repeats=repeats, window_seconds=window_seconds)
    return {
        "machine": _machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "environments": speeds,
        "points": [point.to_json() for point in points],
    }


def _machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()}-core {models[0].partition(': ')[2] if models else platform.machine()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window-seconds", type=float, default=6.0)
    parser.add_argument("--points", type=Path, help="use this file's points; the missing ones are measured and added")
    parser.add_argument("--keep", action="store_true", help="keep points and costs if these are the better ones")
    arguments = parser.parse_args()
    found = arguments.points is not None and arguments.points.exists()
    document = measured_document(
        json.loads(arguments.points.read_text()) if found else {}, arguments.repeats, arguments.window_seconds
    )
    if arguments.points is not None:
        write(arguments.points, document)
        print(f"written: {arguments.points}")
    points = [Point.from_json(point) for point in document["points"]]
    speeds = {name: EnvironmentSpeed(**speed) for name, speed in document["environments"].items()}
    compared = compare(points, speeds)
    show_costs(compared.costs)
    show_benchmarks(compared.costs)
    show_scales(compared.costs)
    is_quiet = all(point.is_quiet for point in points)
    if not is_quiet:
        print(f"\nno result: other programs used more than {QUIET_CORES:.2f} cores beside some runs")
    if arguments.keep and is_quiet and compared.with_all < compared.before:
        keep(document, compared.costs)
    return 0 if is_quiet and compared.from_others <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
