"""Check that a run's memory does not grow: run one workload for an hour and measure all its processes.

    python benchmarks/memory_over_time.py W1

Prints the memory of each role and of the whole run, and its growth with the 95 % interval. A role grows if the interval
is above zero. The result is kept in ``docs/benchmarks/memory-NAME.json``.

The exit status is 0 if nothing grows, 1 if something does, and 2 if the run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import numpy as np
from contestants import RUN, ContestantFailed, Rlsrl, end_of_output
from machine import REPOSITORY
from results import FOLDER, log, write
from turns import ended_by_signals, started
from workloads import WORKLOADS, Workload

ALL = "all"
KEPT_AS = "memory-"
WATCHED = ("W1", "R1")
"""Workloads in the report."""
SAMPLE_SECONDS = 10.0
"""Time between two samples."""
PARTS = 12
"""Time ranges whose medians the line is fitted to: neighbouring samples are not independent."""
T_95 = 2.228
"""Two-sided 95 % quantile of Student's distribution with ``PARTS - 2`` degrees of freedom."""
Sample = Mapping[str, float]
"""Megabytes by role."""
Roles = Mapping[str, Sequence[int]]
"""Process ids by role."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The growth of one role's memory."""

    megabytes: float
    """The median memory."""
    per_hour: float
    error: float
    """Half of the 95 % interval of ``per_hour``."""

    @property
    def grows(self) -> bool:
        """Whether the growth is more than noise."""
        return self.per_hour - self.error > 0.0


def growth(seconds: Sequence[float], megabytes: Sequence[float]) -> Growth:
    """Fit a line to the medians of ``PARTS`` time ranges, by least squares.

    Raises:
        ValueError: there are fewer than ``PARTS`` samples.
    """
    if len(seconds) < PARTS:
        raise ValueError(f"{len(seconds)} samples are too few: {PARTS} are needed")
    times = np.array([np.mean(part) for part in np.array_split(np.asarray(seconds), PARTS)])
    medians = np.array([np.median(part) for part in np.array_split(np.asarray(megabytes), PARTS)])
    centred = times - times.mean()
    slope = float(centred @ medians / (centred @ centred))
    rest = medians - medians.mean() - slope * centred
    error = float(np.sqrt(rest @ rest / (PARTS - 2) / (centred @ centred)))
    return Growth(megabytes=statistics.median(megabytes), per_hour=3600.0 * slope, error=3600.0 * T_95 * error)


def roles_of(run_folder: Path) -> Roles:
    """Return the present processes by role."""
    status = json.loads((run_folder / "status.json").read_text())
    return {role: [worker["pid"] for worker in workers] for role, workers in status["roles"].items()}


def sample_of(roles: Roles, pid: int) -> Sample:
    """Return the memory written by each role's processes, and by the whole run (``ALL``); shared memory counts once."""
    sample = {
        role: sum(machine.written_megabytes_of(process_id) for process_id in pids) for role, pids in roles.items()
    }
    return {**sample, ALL: machine.written_megabytes_of(pid)}


def watch(workload: Workload, *, warm_seconds: float, seconds: float) -> dict[str, Any]:
    """Run a workload for ``seconds`` and return the growth of its memory.

    Raises:
        ContestantFailed: the run did not train correctly, or a worker was replaced by one with other memory.
        ValueError: ``seconds`` is too short for ``PARTS`` samples.
    """
    if seconds < PARTS * SAMPLE_SECONDS:
        raise ValueError(f"{seconds:.0f} seconds are too few: {PARTS} samples take {PARTS * SAMPLE_SECONDS:.0f}")
    contestant, described = Rlsrl(), machine.described(REPOSITORY)
    times: list[float] = []
    samples: list[Sample] = []
    with started(contestant, workload, (), seed=1) as running:
        running.await_training()
        time.sleep(warm_seconds)
        began, roles = time.monotonic(), roles_of(running.folder / RUN)
        while (now := time.monotonic() - began) < seconds:
            times.append(now)
            samples.append(sample_of(roles, running.process.pid))
            time.sleep(SAMPLE_SECONDS)
            if (found := roles_of(running.folder / RUN)) != roles:
                raise ContestantFailed(f"workers were replaced: they were {roles} and are {found}")
            if running.process.poll() is not None:
                raise ContestantFailed(f"it ended by itself:\n{end_of_output(running.folder)}")
        points = contestant.progress(running.folder).points
    steps = points[-1][1]
    growths = {role: growth(times, [sample[role] for sample in samples]) for role in samples[0]}
    return {
        "workload": workload.name,
        "minutes": round(seconds / 60),
        "env_steps": steps,
        "growths": {role: asdict(grown) | {"grows": grown.grows} for role, grown in growths.items()},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "experiment": workload.experiment()["spec"],
        "looks": {role: [round(sample[role], 2) for sample in samples] for role in samples[0]},
    }


def main() -> int:
    """Measure, print and keep; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-minutes", type=float, default=5.0, help="before the first sample")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    ended_by_signals()
    try:
        result = watch(workload, warm_seconds=60 * args.warm_minutes, seconds=60 * args.minutes)
    except (ContestantFailed, ValueError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    log(f"{workload.name}: {result['env_steps']:,.0f} env steps")
    for role, growth_ in result["growths"].items():
        grown = f"{growth_['per_hour']:+.2f} MB an hour, +- {growth_['error']:.2f}"
        log(f"{role:12} {growth_['megabytes']:8,.1f} MB  {grown}: {'grows' if growth_['grows'] else 'flat'}")
    path = FOLDER / f"{KEPT_AS}{workload.name}.json"
    write(path, result)
    log(f"kept in {path}")
    return 1 if any(growth_["grows"] for growth_ in result["growths"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
