"""Throughput against peers in the same run, interleaved: ``make bench W=W1``.

Everybody trains the same workload in turn, several times over. What counts is environment steps whose training is
finished, per second of a window after the start is over. The processor time that nobody of the contestant's used is
watched: a turn in which others used more than QUIET of the machine is no result, and its round is tried again.

Peers are measured in their fastest setting, which short turns before find. The table is kept in docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from contestants import PEERS, SINGLE_FILE, STABLE_BASELINES3, Contestant, Point, Rlsrl
from workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "results"
QUIET = 0.05
"""The most of the machine's processor time that others may have used during a turn."""
TRIES = 5
START_SECONDS = 240.0
TRIAL_SECONDS = 6.0
"""Of a turn that only finds a peer's fastest setting."""
END_SECONDS = 90.0
SLOWER_COUNTS = 0.9
"""The single file counts as a peer if it is at least so fast as Stable-Baselines3."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One contestant, measured once."""

    contestant: str
    setting: str
    env_steps_per_second: float
    others: float
    """The share of the machine's processor time that was not the contestant's."""
    own: float
    """The share that was."""
    megabytes: float
    """Resident at the end of the window, all its processes: shared pages count for each."""
    profile: dict[str, dict[str, float]]
    """By role, what its threads did or waited for, as shares of time; of rlsrl alone."""


def main() -> int:
    """Measure; prints the table and keeps it. Returns 0 for a result, 1 if no run was quiet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, default %(default)s")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants, to look at; nothing is kept then")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    contestants: list[Contestant] = [Rlsrl(), *PEERS]
    if arguments.only:
        contestants = [each for each in contestants if each.name in arguments.only]
    print(f"{workload.name}: {workload.title}", flush=True)
    chosen = {each.name: fastest_setting(each, workload) for each in contestants}
    rounds, quiet = [], True
    for number in range(arguments.repeats):
        turns, is_quiet = round_of(contestants, chosen, workload, number)
        rounds.append(turns)
        quiet = quiet and is_quiet
    if arguments.only:
        return 0
    told = result(workload, rounds, quiet)
    print(told_as_text(told))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{workload.name}.json").write_text(json.dumps(told, indent=1) + "\n")
    return 0 if quiet else 1


def fastest_setting(contestant: Contestant, workload: Workload) -> Sequence[str]:
    """Of those that it has, by a short turn of each."""
    settings = contestant.settings(workload)
    if len(settings) == 1:
        return settings[0]
    seconds = max(TRIAL_SECONDS, workload.window_seconds / 3)
    trials = [(turn(contestant, setting, workload, seconds).env_steps_per_second, setting) for setting in settings]
    for speed, setting in sorted(trials, reverse=True):
        print(f"  {contestant.name:20s} {' '.join(setting):32s} {speed:10,.0f} steps/s", flush=True)
    return max(trials)[1]


def round_of(
    contestants: Sequence[Contestant], chosen: dict[str, Sequence[str]], workload: Workload, number: int
) -> tuple[list[Turn], bool]:
    """One turn of each, and whether all were quiet; the last of ``TRIES`` if none was."""
    for attempt in range(1, TRIES + 1):
        # Nobody is always the first: the machine's speed drifts.
        order = list(itertools.islice(itertools.cycle(contestants), number, number + len(contestants)))
        turns = [turn(each, chosen[each.name], workload, workload.window_seconds) for each in order]
        for each in turns:
            print(
                f"  round {number + 1}.{attempt}  {each.contestant:20s} {each.env_steps_per_second:10,.0f} steps/s"
                f"  used {each.own:4.0%} of the machine, others {each.others:4.1%}",
                flush=True,
            )
        if all(each.others <= QUIET for each in turns):
            return turns, True
    return turns, False


def turn(contestant: Contestant, setting: Sequence[str], workload: Workload, seconds: float) -> Turn:
    """Start it, let it come to speed, watch it for so long, end it.

    Raises:
        RuntimeError: it ended by itself, or did not begin to train in time.
    """
    with tempfile.TemporaryDirectory(prefix="rlsrl-bench-") as name:
        folder = Path(name)
        command = contestant.command(workload, setting, folder)
        with (folder / "out").open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **contestant.environment()},
                start_new_session=True,
            )
        try:
            _await_first(contestant, process, folder)
            time.sleep(workload.warm_seconds)
            before, began = Usage.now(process.pid), time.time()
            time.sleep(seconds)
            after, ended = Usage.now(process.pid), time.time()
            profile = _profile(folder)
            points = contestant.progress(folder)
        finally:
            _end(process)
        if process.poll() not in (0, 130, -signal.SIGINT, -signal.SIGTERM):
            raise RuntimeError(f"{contestant.name}: {(folder / 'out').read_text(errors='replace')[-2000:]}")
    own = (after.own - before.own) / (after.all - before.all)
    busy = (after.busy - before.busy) / (after.all - before.all)
    return Turn(
        contestant=contestant.name,
        setting=" ".join(setting),
        env_steps_per_second=speed(points, began, ended),
        own=own,
        others=max(0.0, busy - own),
        megabytes=after.megabytes,
        profile=profile,
    )


def speed(points: Sequence[Point], began: float, ended: float) -> float:
    """Steps per second between the first and the last point within the window.

    Raises:
        RuntimeError: there are not two.
    """
    inside = [point for point in points if began <= point[0] <= ended]
    if len(inside) < 2:
        raise RuntimeError(f"{len(inside)} iterations within {ended - began:.0f} s: the window is too short")
    (first, steps), (last, more) = inside[0], inside[-1]
    return (more - steps) / (last - first)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor seconds until now, of all cores together."""

    all: float
    busy: float
    own: float
    megabytes: float

    @classmethod
    def now(cls, pid: int) -> Usage:
        """Of the machine, and of a process with all that it started."""
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        own = resident = 0.0
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
                # Children that have ended and were waited for count, too.
                own += times.user + times.system + times.children_user + times.children_system
                resident += process.memory_info().rss
            except psutil.Error:
                continue
        total = sum(fields)
        idle = fields[3] + fields[4]
        return cls(all=total / tick, busy=(total - idle) / tick, own=own, megabytes=resident / 1e6)


def _await_first(contestant: Contestant, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not contestant.progress(folder):
        if process.poll() is not None or time.monotonic() > deadline:
            said = (folder / "out").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{contestant.name} has not begun to train: {said}")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a user ends it, and then for good, with all that it started."""
    group = process.pid
    process.send_signal(signal.SIGINT if "rlsrl" in str(process.args) else signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    process.wait()


def _profile(folder: Path) -> dict[str, dict[str, float]]:
    try:
        status = json.loads((folder / "run" / "status.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    found = {}
    for role, workers in status.get("roles", {}).items():
        shares = [worker["activity"] for worker in workers if worker.get("activity")]
        names = sorted({name for each in shares for name in each})
        found[role] = {name: round(statistics.mean(each.get(name, 0.0) for each in shares), 3) for name in names}
    return {role: shares for role, shares in found.items() if shares}


def result(workload: Workload, rounds: Sequence[Sequence[Turn]], quiet: bool) -> dict[str, Any]:
    """All that was measured, and what it comes to."""
    ratios = []
    for turns in rounds:
        speeds = {each.contestant: each.env_steps_per_second for each in turns}
        peers = {name: speed for name, speed in speeds.items() if name != Rlsrl.name}
        if peers[SINGLE_FILE.name] < SLOWER_COUNTS * peers[STABLE_BASELINES3.name]:
            del peers[SINGLE_FILE.name]
        ratios.append(speeds[Rlsrl.name] / max(peers.values()))
    return {
        "workload": asdict(workload),
        "quiet": quiet,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "rounds": [[asdict(each) for each in turns] for turns in rounds],
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    text = Path("/proc/cpuinfo").read_text()
    lines = dict(line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in lines.items()}
    known = told.get("flags", "").split()
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in known]
    return {
        "processor": told.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "features": features,
        "python": platform.python_version(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=RESULTS.parents[2], capture_output=True, text=True, check=True).stdout.strip()


def told_as_text(told: dict[str, Any]) -> str:
    """The ratio with its spread, or that there is none."""
    low, high = min(told["ratios"]), max(told["ratios"])
    line = f"{told['workload']['name']}: {told['ratio']:.2f} x the fastest peer, {low:.2f} to {high:.2f}"
    return line if told["quiet"] else f"{told['workload']['name']}: not shown: no quiet run ({line})"


if __name__ == "__main__":
    sys.exit(main())
