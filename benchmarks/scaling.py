"""Does the model of ``rlsrl size`` say what is measured? Fits it on half of a grid of real runs, predicts the rest.

    python benchmarks/scaling.py                  # measure (half an hour), fit, predict, say what saturates
    python benchmarks/scaling.py --keep           # and keep the points, and the costs that `rlsrl size` uses
    python benchmarks/scaling.py --points FILE    # with the points of FILE, which is written if it is not there

The grid is 1, 2 and 4 actors x 0, 1 and 2 policy workers x 1 and 2 trainer ranks x a fast and a slow environment.
Every setting is run once before any is run again. The model is fitted by least squares to the logarithm of transitions
a second of every other point; it is told how much of the machine other programs used. Ends with 1 if a prediction of
one of the others is off by more than 15 %, or if other programs used more than 3 % of the machine beside runs: such
points are no result, and are not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from results import write
from scaling_points import GRID, LANES, NUM_STEPS, QUIET_CORES, STEP_SECONDS, Point, Setting, environment_of, measure

from rlsrl.api.load import load_text
from rlsrl.cli.text import columns
from rlsrl.envs.factory import EnvironmentSource, environment_spec
from rlsrl.policies.effort import NetworkEffort, network_effort
from rlsrl.sizing.costs import MEASURED, Costs, MeasuredCosts, measured_costs
from rlsrl.sizing.environment import measure_environment
from rlsrl.sizing.fit import Measured, fit
from rlsrl.sizing.forecast import forecast
from rlsrl.sizing.report import limit_lines, role_rows
from rlsrl.sizing.simulation import simulate
from rlsrl.sizing.workload import EnvironmentSpeed, Place, Workload, workload_of

ALLOWED = 0.15
"""How far off a prediction may be."""
FREE = (
    "lane_seconds",
    "program_call_seconds",
    "ask_seconds",
    "answer_seconds",
    "evaluation_seconds",
    "hop_seconds",
    "shared_slot_seconds",
    "step_seconds",
    "minibatch_seconds",
    "reduce_seconds",
    "full_load_speed",
)
"""Costs that the grid says something of; the others keep what they were measured to be otherwise."""
SCALES = (100, 1_000, 10_000)
ROOT = Path(__file__).parents[1]
POINTS = ROOT / "docs" / "benchmarks" / "scaling.json"
COSTS = ROOT / "worker" / "rlsrl" / "sizing" / MEASURED
POD = Place(bandwidth=10e9 / 8, hop_seconds=50e-6)
"""Of a fleet, each worker a pod: 10 Gbit/s, 50 us each way."""
FLEET_STEP_SECONDS = 0.002
FLEET_MINIBATCHES = 4
"""In a batch, however large the fleet."""
NATURE_CNN = NetworkEffort(num_weights=1_688_000, forward_macs=9.4e6, acting_macs=9.4e6, exported=False)
FRAME_BYTES = 4 * 84 * 84
GPU_ROW_SECONDS = 5e-6
"""Of a GPU that trains that network, a transition: an assumption, as is the next."""
GPU_ACTING_MAC_SECONDS = 5e-13
MAX_ACTORS = 4096
"""What a spec takes."""
ACTORS_A_HELPER = 20
"""Of a policy worker or a buffer worker, where they are the remedy."""
ACTORS_A_RANK = 50


def workloads(
    settings: Sequence[Setting], cores: Sequence[float], speeds: Mapping[str, EnvironmentSpeed]
) -> list[Workload]:
    """What the model takes each setting for, with so many cores left to it."""
    env_spec = environment_spec(_source("fast"))
    network = _network()
    return [
        workload_of(
            load_text(json.dumps(setting.document(wall_seconds=1.0))).spec,
            env_spec,
            environment=speeds[setting.environment],
            network=network,
            place=Place(cores=each),
        )
        for setting, each in zip(settings, cores, strict=True)
    ]


def _source(environment: str) -> EnvironmentSource:
    return EnvironmentSource(**environment_of(environment))


def _network() -> NetworkEffort:
    from rlsrl.api.spec import PolicySpec
    from rlsrl.workers.build.common import torch_policy

    return network_effort(torch_policy(PolicySpec().network, environment_spec(_source("fast")), seed=1))


def compare(points: Sequence[Point], speeds: Mapping[str, EnvironmentSpeed]) -> tuple[Costs, float]:
    """Fit to every other point, print all; the costs, and the largest error of a point that was not fitted to."""
    machine_cores = float(os.cpu_count() or 1)
    cores = [max(0.5, machine_cores - point.others) for point in points]
    seen = workloads([point.setting for point in points], cores, speeds)
    measured = [
        Measured(workload=workload, env_steps_a_second=point.fps) for workload, point in zip(seen, points, strict=True)
    ]
    costs = fit(measured[::2], measured_costs().costs, FREE)
    rows = [("setting", "measured", "spread", "others", "model", "error", "")]
    worst = 0.0
    for number, (point, workload) in enumerate(zip(points, seen, strict=True)):
        predicted = simulate(workload, costs).env_steps_a_second
        error = predicted / point.fps - 1
        if number % 2:
            worst = max(worst, abs(error))
        rows.append(
            (
                str(point.setting),
                f"{point.fps:,.0f}",
                f"{point.spread:.0%}",
                f"{point.others:.2f}",
                f"{predicted:,.0f}",
                f"{error:+.1%}",
                "predicted" if number % 2 else "fitted",
            )
        )
    print(columns(rows))
    print(f"largest error of a prediction: {worst:.1%}; allowed: {ALLOWED:.0%}")
    return costs, worst


def show_costs(costs: Costs) -> None:
    before = asdict(measured_costs().costs)
    rows = [("cost", "before", "fitted")]
    rows += [(name, f"{before[name]:.3g}", f"{value:.3g}") for name, value in asdict(costs).items() if name in FREE]
    print(columns(rows))


def show_scales(costs: Costs) -> None:
    """What saturates in a fleet, and what it comes to with the remedies."""
    with_gpus = replace(
        costs, training_mac_seconds=0.0, row_seconds=GPU_ROW_SECONDS, acting_mac_seconds=GPU_ACTING_MAC_SECONDS
    )
    for number in SCALES:
        for kind, fleet, used in (("small", _small(number), costs), ("images", _images(number), with_gpus)):
            for title, workload in (("as it is", fleet), ("with remedies", _remedied(fleet))):
                found = forecast(workload, used)
                print(f"\n{number:,} actors, {kind}, {title}: {_shape(workload)}")
                print(f"about {found.env_steps_a_second:,.0f} env steps/s")
                print("\n".join([*limit_lines(found), columns(role_rows(found))]))


def _small(num_actors: int) -> Workload:
    """Pods whose environments compute for 2 ms a step, and a small network that actors evaluate themselves."""
    document = Setting(environment="fast", ranks=1, policy_workers=0, actors=1).document(wall_seconds=1.0)
    one = workload_of(
        load_text(json.dumps(document)).spec,
        environment_spec(_source("fast")),
        environment=EnvironmentSpeed(step_seconds=FLEET_STEP_SECONDS),
        network=_network(),
        place=POD,
    )
    return replace(
        one,
        actor_lanes=[LANES] * num_actors,
        batch_lanes=LANES * num_actors,
        minibatch_size=LANES * NUM_STEPS * num_actors // FLEET_MINIBATCHES,
    )


def _images(num_actors: int) -> Workload:
    """The same with stacks of four frames of 84 x 84 and the network of Mnih et al. (2015), on GPUs: one policy worker
    for a hundred actors.
    """
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
    """Buffer workers between actors and trainers; where links are short, more policy workers and ranks; in a large
    fleet policy workers, which alone need weights then.
    """
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
    """Write the points, and the costs that the package comes with."""
    write(POINTS, document)
    print(f"written: {POINTS}, {COSTS}")
    source = "fitted by benchmarks/scaling.py; what its grid says nothing of was timed by itself"
    fitted = MeasuredCosts(machine=document["machine"], date=document["date"], source=source, costs=costs)
    write(COSTS, fitted.to_json())


def measured_document(repeats: int, window_seconds: float) -> dict[str, Any]:
    """The whole grid, and the environments by themselves."""
    speeds = {name: measure_environment(_source(name)) for name in STEP_SECONDS}
    points = measure(GRID, repeats=repeats, window_seconds=window_seconds)
    return {
        "machine": _machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "environments": {name: asdict(speed) for name, speed in speeds.items()},
        "points": [point.to_json() for point in points],
    }


def _machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()}-core {models[0].partition(': ')[2] if models else platform.machine()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window-seconds", type=float, default=6.0)
    parser.add_argument("--points", type=Path, help="the points of this file, which is written if it is not there")
    parser.add_argument("--keep", action="store_true", help="keep points and costs, if they are a result")
    arguments = parser.parse_args()
    if arguments.points is not None and arguments.points.exists():
        document = json.loads(arguments.points.read_text())
    else:
        document = measured_document(arguments.repeats, arguments.window_seconds)
        if arguments.points is not None:
            write(arguments.points, document)
            print(f"written: {arguments.points}")
    points = [Point.from_json(point) for point in document["points"]]
    speeds = {name: EnvironmentSpeed(**speed) for name, speed in document["environments"].items()}
    costs, worst = compare(points, speeds)
    show_costs(costs)
    show_scales(costs)
    is_quiet = all(point.is_quiet for point in points)
    if not is_quiet:
        print(f"\nno result: other programs used more than {QUIET_CORES:.2f} cores beside some runs")
    if arguments.keep and is_quiet and worst <= ALLOWED:
        keep(document, costs)
    return 0 if is_quiet and worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
