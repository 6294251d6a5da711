"""Whether rlsrl learns as well as the single file, with the settings that its throughput is measured with.

    python benchmarks/learning.py cartpole

Both get the same environments, networks and settings, and a seed a run. CartPole: environment steps to a mean return
of 475, the ratio of the medians with its bootstrap interval; seeds are added until that is narrow enough. Runs of rlsrl
whose trainer is slowed down, with the lag of the weights as good as unbounded, must fail the same check, or it shows
nothing. HalfCheetah: the ratio of the median returns after a million steps. Pong: the mean return after as many.

Each run is kept in ``docs/benchmarks/learning-NAME.json`` once it is over, and not made again: whoever was interrupted
goes on. A change of how rlsrl learns takes ``--anew``, which forgets its runs first. No figure is a matter of time, so
that other work on the machine does no harm.

Ends with 0 if rlsrl learns alike, and 1 if not, or if that is not decided.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
from contestants import PEERS, RUN, Contestant, ContestantFailed, Progress, Rlsrl
from figures import RLSRL, SINGLE_FILE
from learning_verdicts import COVERAGE, Verdict, mean_verdict, ratio_of_medians
from machine import REPOSITORY
from results import FOLDER, kept, say, write
from turns import ended_by_signals, whole_run
from workloads import WORKLOADS, Workload

HINDERED = "rlsrl, hindered"
"""The negative control: what the check has to find worse."""
SLOWED = 5
"""How many times as long its trainer takes."""
LARGEST_LAG = 64
"""The most that a spec may allow."""
SETTINGS = {SINGLE_FILE: ("--vector", "sync", "--threads", "1")}
SLICE_SECONDS = 0.05
KEPT_AS = "learning-"
Series = Mapping[int, float]
"""What each seed came to."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a comparison came to."""

    verdict: Verdict
    why: str

    def __str__(self) -> str:
        return f"{self.why}: {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is trained by both, how often, and how what comes of it is judged."""

    workload: Workload
    seeds: int
    """Of each to begin with."""
    most_seeds: int
    """That are tried for a narrow interval."""
    run_seconds: float
    """A run that takes longer has failed."""
    has_control: bool = False
    """Whether hindered runs are made, too."""
    mean_above: float | None = None
    """With too few seeds for an interval: what the mean return has to be above; None: intervals are compared."""

    @property
    def what(self) -> str:
        """The figure of a run, in words."""
        if (goal := self.workload.goal) is not None:
            return f"env steps to a mean return of {goal:g}"
        return f"mean return of the last 100 episodes after {self.workload.total_steps:,} env steps"

    def figure(self, told: Progress) -> float:
        """What a run came to. One that does not reach its goal counts as if it had with its last step."""
        if self.workload.goal is not None:
            return told.points[-1][1]
        return_mean = told.return_means[-1]
        if return_mean is None:
            raise ContestantFailed("a run of that length has to end an episode")
        return return_mean

    @property
    def worse(self) -> Verdict:
        """What is found of somebody who learns worse: more steps to a goal, or a lower return."""
        return "lower" if self.workload.goal is None else "higher"

    def judge(self, mine: Series, theirs: Series) -> Judgement:
        """How the first learns beside the second."""
        first, second = [*mine.values()], [*theirs.values()]
        seeds = f"{len(first)} and {len(second)} seeds"
        if self.mean_above is not None:
            why = (
                f"means {statistics.mean(first):.2f} and {statistics.mean(second):.2f} of {seeds}; the first has to be "
                f"above {self.mean_above:g}, and above the second less its deviation of {statistics.stdev(second):.2f}"
            )
            return Judgement(verdict=mean_verdict(first, second, above=self.mean_above), why=why)
        interval = ratio_of_medians(first, second)
        why = (
            f"medians {statistics.median(first):,.1f} and {statistics.median(second):,.1f} of {seeds}, ratio "
            f"{interval.ratio:.3f}, {COVERAGE:.0%} interval {interval.low:.3f} to {interval.high:.3f}"
        )
        return Judgement(verdict=interval.verdict, why=why)


COMPARISONS = {
    "cartpole": Comparison(
        workload=replace(WORKLOADS["W1"], goal=475.0, total_steps=1_000_000),
        seeds=20,
        most_seeds=100,
        run_seconds=1200.0,
        has_control=True,
    ),
    "halfcheetah": Comparison(
        workload=replace(WORKLOADS["W3"], total_steps=1_000_000), seeds=10, most_seeds=30, run_seconds=3600.0
    ),
    "pong": Comparison(
        workload=replace(WORKLOADS["W2"], total_steps=1_000_000),
        seeds=3,
        most_seeds=3,
        run_seconds=4 * 3600.0,
        mean_above=-18.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of those who are compared, as it is run here."""

    name: str
    contestant: Contestant
    workload: Workload
    at_once: int
    """Runs beside each other."""
    hindered: Callable[[Path], contextlib.AbstractContextManager[None]] = field(
        default=lambda _: contextlib.nullcontext()
    )

    @property
    def digest(self) -> str:
        """Of all that its runs are told but the seed: of two that differ, neither says anything of the other. The code
        is no part of it: each run says of which commit it is."""
        how = [SETTINGS.get(self.name), SLOWED, SLICE_SECONDS]
        told = [self.name, self.contestant.told(self.workload, seed=0), how, dict(self.contestant.versions)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


class Runs:
    """Those that are over, in a file, which others may add to meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def series(self, program: Program) -> dict[int, float]:
        """What each seed of a program came to, as it is now."""
        found = self._kept()["programs"].get(program.name, {})
        if found.get("digest") != program.digest:
            return {}
        return {int(seed): run["figure"] for seed, run in found["runs"].items()}

    def add(self, program: Program, seed: int, run: Mapping[str, Any]) -> None:
        """One more; any thread may."""
        with self._lock:
            programs = self._kept()["programs"]
            if programs.get(program.name, {}).get("digest") != program.digest:
                programs[program.name] = {"digest": program.digest, "runs": {}}
            programs[program.name]["runs"][str(seed)] = run
            write(self._path, {"programs": programs})  # what was judged before was of fewer runs, or of others

    def forget(self, name: str) -> None:
        """A program's runs, which say nothing any more; nor does what was judged of them."""
        with self._lock:
            programs = self._kept()["programs"]
            programs.pop(name, None)
            write(self._path, {"programs": programs})

    def judge(self, verdicts: Mapping[str, Any]) -> None:
        """Keep what came of it all."""
        with self._lock:
            write(self._path, {**self._kept(), **verdicts})

    def _kept(self) -> dict[str, Any]:
        return kept(self._path.stem, self._path.parent) or {"programs": {}}


def programs_of(comparison: Comparison) -> tuple[Program, Program]:
    """(rlsrl, the single file)."""
    single = next(peer for peer in PEERS if peer.name == SINGLE_FILE)
    return (
        Program(name=RLSRL, contestant=Rlsrl(), workload=comparison.workload, at_once=1),  # it uses all cores
        Program(
            name=SINGLE_FILE,
            contestant=single,
            workload=comparison.workload,
            at_once=os.cpu_count() or 1,  # it has one thread
        ),
    )


def control_of(comparison: Comparison) -> Program:
    """rlsrl with a slow trainer whom nothing keeps its actors in step with."""
    workload = replace(comparison.workload, max_policy_lag=LARGEST_LAG)
    return Program(name=HINDERED, contestant=Rlsrl(), workload=workload, at_once=1, hindered=slow_trainer)


def make_runs(comparison: Comparison, program: Program, seeds: Sequence[int], runs: Runs) -> Series:
    """Make those that are not kept yet; returns all.

    Raises:
        ContestantFailed: one did not train as it should; those beside it have ended and are kept.
    """
    is_over = threading.Event()

    def make(seed: int) -> None:
        commit = machine.described(REPOSITORY)["commit"]
        told = whole_run(
            program.contestant,
            program.workload,
            SETTINGS.get(program.name, ()),
            seed=seed,
            seconds=comparison.run_seconds,
            hindered=program.hindered,
            wanted=lambda: not is_over.is_set(),
        )
        figure = comparison.figure(told)
        curve = [(steps, mean) for (_, steps), mean in zip(told.points, told.return_means, strict=True)]
        runs.add(program, seed, {"figure": figure, "commit": commit, "curve": _thinned(curve)})
        say(f"{program.name:16} seed {seed:3}: {figure:,.1f}")

    made = runs.series(program)
    with ThreadPoolExecutor(max_workers=program.at_once) as pool:
        try:
            for _ in pool.map(make, [seed for seed in seeds if seed not in made]):
                pass
        except KeyboardInterrupt:
            is_over.set()  # whoever is interrupted does not wait for runs that take hours
            raise
    every = runs.series(program)
    return {seed: every[seed] for seed in seeds}


def compare(
    name: str, *, anew: bool = False, folder: Path = FOLDER, comparisons: Mapping[str, Comparison] = COMPARISONS
) -> bool:
    """Make runs until it is decided, or enough were tried; whether rlsrl learns alike, and the control worse.

    With ``anew`` rlsrl's kept runs are forgotten first.
    """
    comparison = comparisons[name]
    runs = Runs(folder / f"{KEPT_AS}{name}.json")
    for forgotten in (RLSRL, HINDERED) if anew else ():
        runs.forget(forgotten)
    rlsrl, single = programs_of(comparison)
    single.contestant.install()
    say(f"{name}: {comparison.what}")
    num_seeds = comparison.seeds
    while True:
        seeds = range(1, num_seeds + 1)
        mine, theirs = (make_runs(comparison, program, seeds, runs) for program in (rlsrl, single))
        found = comparison.judge(mine, theirs)
        say(str(found))
        if found.verdict != "not decided" or num_seeds >= comparison.most_seeds:
            break
        num_seeds = min(2 * num_seeds, comparison.most_seeds)
    told = {
        "what": comparison.what,
        **asdict(found),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.described(REPOSITORY),
    }
    if not comparison.has_control:
        runs.judge(told)
        return found.verdict == "alike"
    say(f"{HINDERED}: a trainer that takes {SLOWED} times as long, a lag of up to {LARGEST_LAG} steps")
    few = range(1, comparison.seeds + 1)
    control = comparison.judge(make_runs(comparison, control_of(comparison), few, runs), theirs)
    say(f"{control}: {'as it has to be' if control.verdict == comparison.worse else 'SO THE CHECK SHOWS NOTHING'}")
    runs.judge({**told, "control": asdict(control)})
    return (found.verdict, control.verdict) == ("alike", comparison.worse)


@contextlib.contextmanager
def slow_trainer(folder: Path) -> Iterator[None]:
    """A run's trainer works one part of the time in ``SLOWED``, from when it is there until the body ends."""
    over = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(folder / RUN / "status.json", over), name="slow-trainer")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow_down(status: Path, over: threading.Event) -> None:
    """Stop and continue the trainer in turns."""
    while not over.wait(SLICE_SECONDS):
        if (pid := _trainer(status)) is not None:
            break
    else:
        return
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait((SLOWED - 1) * SLICE_SECONDS)
            os.kill(pid, signal.SIGCONT)
            over.wait(SLICE_SECONDS)


def _trainer(status: Path) -> int | None:
    """Its process, once it trains."""
    try:
        told = json.loads(status.read_text())
    except FileNotFoundError:
        return None
    workers = told["roles"].get("trainer", [])
    return workers[0]["pid"] if workers and workers[0]["stats"].get("train_steps", 0) else None


def _thinned(curve: Sequence[tuple[float, float | None]], most: int = 200) -> Sequence[tuple[float, float | None]]:
    """At most so many points, the last among them."""
    every = -(-len(curve) // most)
    return [*curve[:-1:every], curve[-1]]


def main() -> int:
    """Compare, keep, say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--anew", action="store_true", help="forget rlsrl's kept runs first: it learns otherwise now")
    arguments = parser.parse_args()
    ended_by_signals()
    try:
        return 0 if compare(arguments.comparison, anew=arguments.anew) else 1
    except ContestantFailed as error:
        print(f"learning: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
