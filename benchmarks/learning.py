"""Check that rlsrl learns as well as the single file, with the settings of the throughput benchmark.

    python benchmarks/learning.py cartpole

Both get equal environments, networks and settings, and one seed per run. CartPole compares the environment steps to a
mean return of 475: the ratio of the medians with its bootstrap interval. Seeds are added until that decides, or until
the interval is narrow enough. As a negative control, rlsrl with a slowed trainer and an almost unbounded lag must fail
the same check. HalfCheetah compares the median returns after a million steps, Pong the mean returns after as many. With
replay the figure is the number of environment steps to a mean return of episodes without exploration; the control makes
a twentieth of the updates. A run whose trainer is slowed, and one in which a worker of each role is killed, have to
learn alike, too. With ``--hold`` the single file itself is held against Stable-Baselines3 by the same check; these runs
are stored in ``learning-NAME-single-file.json``.

Each run is stored in ``docs/benchmarks/learning-NAME.json`` when it ends, and is not repeated: an interrupted
comparison continues, and a run that another comparison made with equal inputs counts. After a change of rlsrl's
learning, use ``--restart``, which first removes rlsrl's runs. No figure depends on time, so other work on the machine
does not matter.

The exit status is 0 if rlsrl learns alike, 1 if it does not or if that is not decided, and 2 if a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
from contestants import PEERS, Contestant, ContestantFailed, Evaluations, Progress, Rlsrl, Setting
from figures import RLSRL, SINGLE_FILE, STABLE_BASELINES3
from hindrances import KILLED_ROLES, SLICE_SECONDS, SLOWED, STEPS_BETWEEN_KILLS, killed, slow_trainer
from learning_verdicts import COVERAGE, Verdict, mean_verdict, ratio_of_medians
from machine import REPOSITORY
from results import FOLDER, kept, log, write
from turns import ended_by_signals, whole_run
from workloads import WORKLOADS, ReplayWorkload, Workload

HINDERED = "rlsrl, hindered"
"""The negative control, which the check must find worse."""
FEWER = 20
"""With replay the control makes so many times fewer updates."""
LARGEST_LAG = 64
"""The largest lag that a spec allows."""
KEPT_AS = "learning-"
Series = Mapping[int, float]
"""The figure of each seed."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of a comparison."""

    verdict: Verdict
    why: str
    needs_seeds: bool
    """Whether it is not decided in so wide an interval that it says little."""

    def __str__(self) -> str:
        return f"{self.why}: {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The workload of both programs, the number of seeds, and the criterion."""

    workload: Workload
    seeds: int
    """Seeds of each program at first."""
    most_seeds: int
    """Most seeds for a narrow interval."""
    run_seconds: float
    """A run that takes longer has failed."""
    has_control: bool = False
    """Whether the negative control runs, too."""
    greedy_goal: float | None = None
    """Mean return, without exploration, that ends the figure. The workload has such evaluations."""
    hindered: Callable[[Path], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    """What happens to rlsrl's runs, given their folder."""
    narrow: float = 1.0
    """Factor between the bounds of an interval that is narrow enough without a decision."""
    mean_above: float | None = None
    """Lower bound of the mean return, for too few seeds for an interval. None: intervals are compared."""

    @property
    def what(self) -> str:
        """A run's figure, in words."""
        if self.greedy_goal is not None:
            every, episodes = self.workload.evaluations
            return (
                f"env steps to a mean return of {self.greedy_goal:g} in {episodes} episodes without exploration, "
                f"played every {every:,} env steps; at most {self.workload.total_steps:,}"
            )
        if (goal := self.workload.goal) is not None:
            return f"env steps to a mean return of {goal:g}"
        return f"mean return of the last 100 episodes after {self.workload.total_steps:,} env steps"

    def figure(self, progress: Progress, *, total_steps: int) -> float:
        """Return the figure of a run of ``total_steps``. If it misses its goal, it counts as if the last reached it."""
        if (wanted := self.greedy_goal) is not None:
            reached = (steps for steps, mean in progress.evaluations if mean >= wanted)
            return min(next(reached, math.inf), float(total_steps))
        if self.workload.goal is not None:
            return progress.points[-1][1]
        return_mean = progress.return_means[-1]
        if return_mean is None:
            raise ContestantFailed("a run of that length has to end an episode")
        return return_mean

    def is_reached(self, evaluations: Evaluations) -> bool:
        """Return whether evaluations have reached ``greedy_goal``, which decides a run's figure."""
        assert self.greedy_goal is not None, "without it none do"
        return any(mean >= self.greedy_goal for _, mean in evaluations)

    @property
    def judged_by(self) -> Sequence[Any]:
        """What decides figures besides the programs' inputs. Empty without evaluations, where all is among these."""
        if self.greedy_goal is None:
            return ()
        return (self.what, self.hindered.__name__, KILLED_ROLES, STEPS_BETWEEN_KILLS)

    @property
    def worse(self) -> Verdict:
        """The verdict on a program that learns worse: it takes more steps to a goal, or has a lower return."""
        return "lower" if self.workload.goal is None and self.greedy_goal is None else "higher"

    def judge(self, mine: Series, theirs: Series) -> Judgement:
        """Compare the first program's learning with the second's."""
        first, second = [*mine.values()], [*theirs.values()]
        seeds = f"{len(first)} and {len(second)} seeds"
        if self.mean_above is not None:
            why = (
                f"means {statistics.mean(first):.2f} and {statistics.mean(second):.2f} of {seeds}; the first has to be "
                f"above {self.mean_above:g}, and above the second less its deviation of {statistics.stdev(second):.2f}"
            )
            return Judgement(verdict=mean_verdict(first, second, above=self.mean_above), why=why, needs_seeds=False)
        interval = ratio_of_medians(first, second)
        why = (
            f"medians {statistics.median(first):,.1f} and {statistics.median(second):,.1f} of {seeds}, ratio "
            f"{interval.ratio:.3f}, {COVERAGE:.0%} interval {interval.low:.3f} to {interval.high:.3f}"
        )
        needs_seeds = interval.verdict == "not decided" and interval.high > self.narrow * interval.low
        return Judgement(verdict=interval.verdict, why=why, needs_seeds=needs_seeds)


def _replay(name: str) -> ReplayWorkload:
    workload = WORKLOADS[name]
    assert isinstance(workload, ReplayWorkload)
    # Several runs beside each other share the cores, and the defaults of the spec are what is compared.
    return replace(workload, double=True, trainer_threads=1)


_DQN = Comparison(
    workload=replace(_replay("D1"), evaluate_every=1000, evaluation_episodes=20, total_steps=50_000),
    seeds=20,
    most_seeds=60,
    run_seconds=900.0,
    greedy_goal=475.0,
    narrow=1.8,
    has_control=True,
)
_PENDULUM = replace(
    _replay("S1"),
    env_id="Pendulum-v1",
    num_envs=4,
    num_steps=8,
    learning_rate=1e-3,
    evaluate_every=500,
    evaluation_episodes=10,
)
COMPARISONS: Mapping[str, Comparison] = {
    "cartpole": Comparison(
        workload=replace(WORKLOADS["W1"], goal=475.0, total_steps=1_000_000),
        seeds=20,
        most_seeds=100,
        run_seconds=1200.0,
        has_control=True,
    ),
    "cartpole-recurrent": Comparison(
        workload=replace(WORKLOADS["M1"], goal=475.0, total_steps=2_000_000),
        seeds=20,
        most_seeds=60,
        run_seconds=1800.0,
        narrow=1.8,
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
    "cartpole-dqn": _DQN,
    "cartpole-dqn-slowed": replace(_DQN, has_control=False, hindered=slow_trainer),
    "cartpole-dqn-killed": replace(_DQN, has_control=False, hindered=killed),
    **{
        f"pendulum-{name}": Comparison(
            workload=replace(_PENDULUM, name=f"pendulum-{name}", algorithm=name, total_steps=20_000),
            seeds=20,
            most_seeds=40,
            run_seconds=900.0,
            greedy_goal=-200.0,
            narrow=1.8,
        )
        for name in ("sac", "td3")
    },
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One side of the comparison."""

    name: str
    contestant: Contestant
    workload: Workload
    at_once: int
    """Runs at the same time."""
    setting: Setting = ()
    """How it uses the machine."""
    hindered: Callable[[Path], contextlib.AbstractContextManager[None]] = field(
        default=lambda _: contextlib.nullcontext()
    )
    judged_by: Sequence[Any] = ()
    """What decides its figures besides its inputs, as JSON values."""

    @property
    def digest(self) -> str:
        """Digest of all inputs of its runs except the seed. Runs with different digests are not comparable.

        The code is not part of the digest: each run names its commit.
        """
        how = [self.setting or None, SLOWED, SLICE_SECONDS]
        inputs = [self.name, self.contestant.inputs(self.workload, seed=0), how, dict(self.contestant.versions)]
        inputs += self.judged_by
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


class Runs:
    """The finished runs, in a file that threads may add to. Runs in files beside it count, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def series(self, program: Program) -> dict[int, float]:
        """Return the figures of a program's seeds, of runs with its present digest. Its own file's come first."""
        figures: dict[int, float] = {}
        for path in (*sorted(self._path.parent.glob(f"{KEPT_AS}*.json")), self._path):
            found = (kept(path.stem, path.parent) or {"programs": {}})["programs"].get(program.name, {})
            if found.get("digest") == program.digest:
                figures |= {int(seed): run["figure"] for seed, run in found["runs"].items()}
        return figures

    def add(self, program: Program, seed: int, run: Mapping[str, Any]) -> None:
        """Keep one more run. Thread-safe."""
        with self._lock:
            programs = self._kept()["programs"]
            if programs.get(program.name, {}).get("digest") != program.digest:
                programs[program.name] = {"digest": program.digest, "runs": {}}
            programs[program.name]["runs"][str(seed)] = run
            write(self._path, {"programs": programs})  # without the verdict, which was about other runs

    def forget(self, name: str) -> None:
        """Remove a program's runs, and the verdict on them."""
        with self._lock:
            programs = self._kept()["programs"]
            programs.pop(name, None)
            write(self._path, {"programs": programs})

    def judge(self, verdicts: Mapping[str, Any]) -> None:
        """Keep the verdict."""
        with self._lock:
            write(self._path, {**self._kept(), **verdicts})

    def _kept(self) -> dict[str, Any]:
        return kept(self._path.stem, self._path.parent) or {"programs": {}}


def programs_of(comparison: Comparison) -> tuple[Program, Program]:
    """Return (rlsrl, the single file)."""
    single = next(peer for peer in PEERS if peer.name == SINGLE_FILE)
    return (
        Program(
            name=RLSRL,
            contestant=Rlsrl(),
            workload=comparison.workload,
            at_once=1,  # it uses all cores
            hindered=comparison.hindered,
            judged_by=comparison.judged_by,
        ),
        Program(
            name=SINGLE_FILE,
            contestant=single,
            workload=comparison.workload,
            at_once=os.cpu_count() or 1,
            setting=single.settings(comparison.workload)[0],  # its own process alone, with one thread
            judged_by=replace(comparison, hindered=Comparison.hindered).judged_by,
        ),
    )


def programs_held(comparison: Comparison) -> tuple[Program, Program]:
    """Return (the single file, Stable-Baselines3), both without double Q-learning, which the latter does not have."""
    _, single = programs_of(comparison)
    other = next(peer for peer in PEERS if peer.name == STABLE_BASELINES3)
    workload = comparison.workload
    if isinstance(workload, ReplayWorkload) and workload.algorithm == "dqn":
        plain = replace(workload, double=False)
        single = replace(single, name=f"{SINGLE_FILE}, plain", workload=plain)
    setting = other.settings(comparison.workload)[0]
    return single, replace(single, name=other.name, contestant=other, setting=setting)


def control_of(comparison: Comparison) -> Program:
    """Return the negative control: rlsrl with a slow trainer and the largest lag, or with few updates.

    With few updates its runs are longer: one that never reaches the goal counts as its length.
    """
    if isinstance(comparison.workload, ReplayWorkload):
        fewer = replace(
            comparison.workload,
            updates_per_env_step=comparison.workload.updates_per_env_step / FEWER,
            total_steps=2 * comparison.workload.total_steps,
        )
        return Program(name=HINDERED, contestant=Rlsrl(), workload=fewer, at_once=1, judged_by=comparison.judged_by)
    workload = replace(comparison.workload, max_policy_lag=LARGEST_LAG)
    return Program(name=HINDERED, contestant=Rlsrl(), workload=workload, at_once=1, hindered=slow_trainer)


def make_runs(comparison: Comparison, program: Program, seeds: Sequence[int], runs: Runs) -> Series:
    """Make the runs that are not kept yet; return the figures of all.

    Raises:
        ContestantFailed: a run did not train correctly. Runs beside it have ended and are kept.
    """
    is_over = threading.Event()

    def make(seed: int) -> None:
        commit = machine.described(REPOSITORY)["commit"]
        progress = whole_run(
            program.contestant,
            program.workload,
            program.setting,
            seed=seed,
            seconds=comparison.run_seconds,
            hindered=program.hindered,
            wanted=lambda: not is_over.is_set(),
            enough=comparison.is_reached if comparison.greedy_goal is not None else None,
        )
        figure = comparison.figure(progress, total_steps=program.workload.total_steps)
        curve = [(steps, mean) for (_, steps), mean in zip(progress.points, progress.return_means, strict=True)]
        played = {"evaluations": progress.evaluations} if progress.evaluations else {}
        runs.add(program, seed, {"figure": figure, "commit": commit, "curve": _thinned(curve), **played})
        log(f"{program.name:16} seed {seed:3}: {figure:,.1f}")

    made = runs.series(program)
    with ThreadPoolExecutor(max_workers=program.at_once) as pool:
        try:
            for _ in pool.map(make, [seed for seed in seeds if seed not in made]):
                pass
        except KeyboardInterrupt:
            is_over.set()  # do not wait for runs that take hours
            raise
    every = runs.series(program)
    return {seed: every[seed] for seed in seeds}


def compare(
    name: str, *, restart: bool = False, folder: Path = FOLDER, comparisons: Mapping[str, Comparison] = COMPARISONS
) -> bool:
    """Make runs until the comparison is decided or the seeds are used up; return whether it has the wanted result.

    The wanted result: rlsrl learns alike, and the control worse. With ``restart`` rlsrl's kept runs are removed first.
    """
    comparison = comparisons[name]
    runs = Runs(folder / f"{KEPT_AS}{name}.json")
    for forgotten in (RLSRL, HINDERED) if restart else ():
        runs.forget(forgotten)
    rlsrl, single = programs_of(comparison)
    log(f"{name}: {comparison.what}")
    found, theirs = decide(comparison, rlsrl, single, runs)
    verdict = _kept_verdict(comparison, found)
    if not comparison.has_control:
        runs.judge(verdict)
        return found.verdict == "alike"
    replays = isinstance(comparison.workload, ReplayWorkload)
    slow = f"a trainer that takes {SLOWED} times as long, a lag of up to {LARGEST_LAG} steps"
    log(f"{HINDERED}: {f'a {FEWER}th of the updates' if replays else slow}")
    few = range(1, comparison.seeds + 1)
    control = comparison.judge(make_runs(comparison, control_of(comparison), few, runs), theirs)
    is_worse = control.verdict == comparison.worse
    log(f"{control}: {'as expected' if is_worse else 'NOT WORSE, SO THE CHECK PROVES NOTHING'}")
    runs.judge({**verdict, "control": asdict(control)})
    return found.verdict == "alike" and is_worse


def hold(name: str, *, folder: Path = FOLDER, comparisons: Mapping[str, Comparison] = COMPARISONS) -> bool:
    """Compare the single file with Stable-Baselines3; return whether they learn alike. Their runs are kept, too."""
    comparison = comparisons[name]
    single, other = programs_held(comparison)
    log(f"{name}: {comparison.what}; {single.name} and {other.name}")
    runs = Runs(folder / f"{KEPT_AS}{name}-single-file.json")
    found, _ = decide(comparison, single, other, runs)
    runs.judge(_kept_verdict(comparison, found))
    return found.verdict == "alike"


def decide(comparison: Comparison, mine: Program, theirs: Program, runs: Runs) -> tuple[Judgement, Series]:
    """Make runs until it is decided or the seeds are used up; return the judgement and the second program's figures."""
    num_seeds = comparison.seeds
    for program in (mine, theirs):
        program.contestant.install()
    while True:
        seeds = range(1, num_seeds + 1)
        first, second = (make_runs(comparison, program, seeds, runs) for program in (mine, theirs))
        found = comparison.judge(first, second)
        log(str(found))
        if not found.needs_seeds or num_seeds >= comparison.most_seeds:
            return found, second
        num_seeds = min(2 * num_seeds, comparison.most_seeds)


def _kept_verdict(comparison: Comparison, found: Judgement) -> dict[str, Any]:
    return {
        "what": comparison.what,
        **asdict(found),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.described(REPOSITORY),
    }


def _thinned(curve: Sequence[tuple[float, float | None]], most: int = 200) -> Sequence[tuple[float, float | None]]:
    """Return at most ``most`` points, the last among them."""
    every = -(-len(curve) // most)
    return [*curve[:-1:every], curve[-1]]


def main() -> int:
    """Compare, keep and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--restart", action="store_true", help="remove rlsrl's kept runs first, after a change of its learning"
    )
    instead.add_argument("--hold", action="store_true", help="hold the single file against Stable-Baselines3")
    arguments = parser.parse_args()
    ended_by_signals()
    try:
        if arguments.hold:
            return 0 if hold(arguments.comparison) else 1
        return 0 if compare(arguments.comparison, restart=arguments.restart) else 1
    except ContestantFailed as error:
        print(f"learning: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
