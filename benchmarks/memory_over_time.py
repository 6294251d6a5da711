"""Whether a run's memory stays what it is: one workload for an hour, every process looked at.

    python benchmarks/memory_over_time.py W1

Prints for each role, and for all together, what it held and how that grew, with the growth's 95 % interval; what is
kept stands in ``docs/benchmarks/memory-NAME.json``. A role whose interval is above zero grows.

Ends with 0 if nothing grows, and 1 if something does.
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
from contestants import RUN, ContestantFailed, Rlsrl, last_words
from machine import REPOSITORY
from results import FOLDER, say, write
from turns import ended_by_signals, started
from workloads import WORKLOADS, Workload

ALL = "all"
KEPT_AS = "memory-"
WATCHED = ("W1", "R1")
"""Those of which the report tells."""
LOOK_SECONDS = 10.0
PARTS = 12
"""The medians of so many stretches of time are what a line is laid through: looks that follow each other are alike."""
T_95 = 2.228
"""Of Student's distribution with ``PARTS - 2`` degrees of freedom, two-sided."""
Look = Mapping[str, float]
"""Megabytes by role."""
Roles = Mapping[str, Sequence[int]]
"""The processes of each."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Of one role's memory."""

    megabytes: float
    """In the middle."""
    per_hour: float
    error: float
    """Half of the 95 % interval of ``per_hour``."""

    @property
    def grows(self) -> bool:
        """Whether it is more than noise."""
        return self.per_hour - self.error > 0.0


def growth(seconds: Sequence[float], megabytes: Sequence[float]) -> Growth:
    """The line through the medians of ``PARTS`` stretches, by least squares.

    Raises:
        ValueError: there are fewer looks than that.
    """
    if len(seconds) < PARTS:
        raise ValueError(f"{len(seconds)} looks are too few: {PARTS} are needed")
    times = np.array([np.mean(part) for part in np.array_split(np.asarray(seconds), PARTS)])
    medians = np.array([np.median(part) for part in np.array_split(np.asarray(megabytes), PARTS)])
    centred = times - times.mean()
    slope = float(centred @ medians / (centred @ centred))
    rest = medians - medians.mean() - slope * centred
    error = float(np.sqrt(rest @ rest / (PARTS - 2) / (centred @ centred)))
    return Growth(megabytes=statistics.median(megabytes), per_hour=3600.0 * slope, error=3600.0 * T_95 * error)


def roles_of(run_folder: Path) -> Roles:
    """Who works at this moment."""
    status = json.loads((run_folder / "status.json").read_text())
    return {role: [worker["pid"] for worker in workers] for role, workers in status["roles"].items()}


def look_at(roles: Roles, pid: int) -> Look:
    """What each role's processes have written, and ``ALL`` of the run; shared memory counts once among them."""
    looks = {role: sum(machine.written_megabytes_of(each) for each in pids) for role, pids in roles.items()}
    return {**looks, ALL: machine.written_megabytes_of(pid)}


def watch(workload: Workload, *, warm_seconds: float, seconds: float) -> dict[str, Any]:
    """Run it for so long, and tell.

    Raises:
        ContestantFailed: it did not train as it should, or a worker was replaced: the new one has another memory.
        ValueError: that is not long enough for ``PARTS`` looks.
    """
    if seconds < PARTS * LOOK_SECONDS:
        raise ValueError(f"{seconds:.0f} seconds are too few: {PARTS} looks take {PARTS * LOOK_SECONDS:.0f}")
    contestant, described = Rlsrl(), machine.described(REPOSITORY)
    times: list[float] = []
    looks: list[Look] = []
    with started(contestant, workload, (), seed=1) as running:
        running.await_training()
        time.sleep(warm_seconds)
        began, roles = time.monotonic(), roles_of(running.folder / RUN)
        while (now := time.monotonic() - began) < seconds:
            times.append(now)
            looks.append(look_at(roles, running.process.pid))
            time.sleep(LOOK_SECONDS)
            if (found := roles_of(running.folder / RUN)) != roles:
                raise ContestantFailed(f"workers were {roles} and are {found}")
            if running.process.poll() is not None:
                raise ContestantFailed(f"it ended by itself:\n{last_words(running.folder)}")
        points = contestant.progress(running.folder).points
    steps = points[-1][1]
    growths = {role: growth(times, [each[role] for each in looks]) for role in looks[0]}
    return {
        "workload": workload.name,
        "minutes": round(seconds / 60),
        "env_steps": steps,
        "growths": {role: asdict(each) | {"grows": each.grows} for role, each in growths.items()},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "experiment": workload.experiment()["spec"],
        "looks": {role: [round(each[role], 2) for each in looks] for role in looks[0]},
    }


def main() -> int:
    """Watch, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-minutes", type=float, default=5.0, help="before the first look")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    ended_by_signals()
    try:
        told = watch(workload, warm_seconds=60 * args.warm_minutes, seconds=60 * args.minutes)
    except (ContestantFailed, ValueError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    say(f"{workload.name}: {told['env_steps']:,.0f} env steps")
    for role, each in told["growths"].items():
        grown = f"{each['per_hour']:+.2f} MB an hour, +- {each['error']:.2f}"
        say(f"{role:12} {each['megabytes']:8,.1f} MB  {grown}: {'grows' if each['grows'] else 'flat'}")
    path = FOLDER / f"{KEPT_AS}{workload.name}.json"
    write(path, told)
    say(f"kept in {path}")
    return 1 if any(each["grows"] for each in told["growths"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
