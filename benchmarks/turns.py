"""One turn: start a contestant as a user does, measure it while it trains, and end it with all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from contestants import OUTPUT, Contestant, ContestantFailed, Evaluations, Progress, Setting, end_of_output
from figures import Turn, speed
from machine import Usage, megabytes_of, shares
from profiles import time_shares
from workloads import Workload

START_SECONDS = 240.0
"""A contestant has to begin training within this time, compilation included."""
END_SECONDS = 90.0
"""A contestant has to end within this time after the signal."""
POLL_SECONDS = 0.2
"""Time between two reads of a contestant's output."""
STRETCH = 3
"""A window may last this many times as long as it should."""
GOAL_SECONDS = 120.0
"""Time limit for the goal. A longer run counts as this long."""
ENDED_WELL = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A started contestant."""

    contestant: Contestant
    process: subprocess.Popen[bytes]
    folder: Path
    began: float
    """Start of the process, in Unix seconds."""

    def until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> bool:
        """Wait for a condition; return whether it held in time.

        Raises:
            ContestantFailed: the process ended first.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            # The last output of an ended process may fulfil the condition.
            if self.process.poll() is not None and not condition():
                output = end_of_output(self.folder)
                raise ContestantFailed(f"{self.contestant.name} ended before {what}:\n{output}")
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def await_training(self) -> None:
        """Wait until the contestant trains and can be measured.

        Raises:
            ContestantFailed: it ended first, or does not begin in time.
        """
        if not self.until(lambda: self.contestant.has_started(self.folder), "it trained", seconds=START_SECONDS):
            output = end_of_output(self.folder)
            raise ContestantFailed(f"{self.contestant.name} has not begun to train in {START_SECONDS:.0f} s:\n{output}")


def throughput_turn(contestant: Contestant, workload: Workload, setting: Setting, *, window_seconds: float) -> Turn:
    """Measure the steps trained a second in a window that begins after the start.

    Raises:
        ContestantFailed: it did not begin to train, ended by itself, or its results are not valid.
    """
    with started(contestant, workload, setting, seed=1) as running:
        running.await_training()
        time.sleep(workload.warm_seconds)
        pid, folder = running.process.pid, running.folder
        first, usage, began = contestant.profile(folder), Usage.now(), time.time()
        _watch(running, began, window_seconds)
        ended, later, last = time.time(), Usage.now(), contestant.profile(folder)
        megabytes, points = megabytes_of(pid), contestant.progress(folder).points
        if running.process.poll() is not None:
            raise ContestantFailed(f"{contestant.name} ended by itself:\n{end_of_output(folder)}")
    own, others = shares(usage, later)
    return Turn(
        contestant=contestant.name,
        figure=speed(points, began, ended),
        others=others,
        own=own,
        megabytes=megabytes,
        more={"setting": " ".join(setting), "profile": time_shares(first, last)},
    )


def goal_turn(contestant: Contestant, workload: Workload, setting: Setting, *, seed: int) -> Turn:
    """Measure the seconds from the start of the process until the workload's goal.

    Raises:
        ContestantFailed: it ended first, or its results are not valid.
    """
    goal = workload.goal
    assert goal is not None, "a workload with a goal"
    with started(contestant, workload, setting, seed=seed) as running:
        usage = Usage.now()

        def reached() -> tuple[float, float] | None:
            progress = contestant.progress(running.folder)
            pairs = zip(progress.points, progress.return_means, strict=True)
            return next((point for point, mean in pairs if mean is not None and mean >= goal), None)

        in_time = running.until(lambda: reached() is not None, "it reached its goal", seconds=GOAL_SECONDS)
        later, point = Usage.now(), reached()
    own, others = shares(usage, later)
    return Turn(
        contestant=contestant.name,
        figure=point[0] - running.began if point is not None else GOAL_SECONDS,
        others=others,
        own=own,
        more={
            "setting": " ".join(setting),
            "seed": seed,
            "reached": in_time,
            "env_steps": None if point is None else point[1],
        },
    )


def whole_run(
    contestant: Contestant,
    workload: Workload,
    setting: Setting,
    *,
    seed: int,
    seconds: float,
    hindered: Callable[[Path], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    wanted: Callable[[], bool] = lambda: True,
    enough: Callable[[Evaluations], bool] | None = None,
) -> Progress:
    """Return the progress of a run that ends at the workload's goal, its last step, or ``enough`` evaluations.

    It is not timed. ``hindered`` gets the run's folder and is active during the run.

    Raises:
        ContestantFailed: it ran for too long, failed, has no valid results, or is not wanted any more.
    """
    if not wanted():
        raise ContestantFailed(f"{contestant.name} is not wanted any more")
    with started(contestant, workload, setting, seed=seed) as running, hindered(running.folder):
        evaluations = contestant.evaluations(workload, running.folder, seed=seed)

        def is_over() -> bool:
            if running.process.poll() is not None or not wanted():
                return True
            return enough is not None and enough(evaluations())

        in_time = running.until(is_over, "it ended", seconds=seconds)
        if not in_time or not wanted():
            why = "is not wanted any more" if in_time else f"has not ended after {seconds:.0f} s"
            raise ContestantFailed(f"{contestant.name} {why}:\n{end_of_output(running.folder)}")
        return replace(contestant.progress(running.folder), evaluations=evaluations())


@contextlib.contextmanager
def started(contestant: Contestant, workload: Workload, setting: Setting, *, seed: int) -> Iterator[Running]:
    """Run a contestant during the body; then end it and check its results."""
    with tempfile.TemporaryDirectory(prefix="rlsrl-bench-") as name:
        folder = Path(name)
        command = contestant.command(workload, setting, folder, seed=seed)
        with (folder / OUTPUT).open("wb") as output:
            began = time.time()
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **contestant.environment()},
                start_new_session=True,
            )
        try:
            yield Running(contestant=contestant, process=process, folder=folder, began=began)
        finally:
            end(process, contestant.end_signal)
        if process.returncode not in ENDED_WELL:
            raise ContestantFailed(f"{contestant.name} exited with {process.returncode}:\n{end_of_output(folder)}")
        contestant.check(folder)


def _watch(running: Running, began: float, seconds: float) -> None:
    """Wait for a window. It is extended until it has two whole iterations, up to ``STRETCH`` times its length."""
    time.sleep(seconds)

    def is_enough() -> bool:
        points = running.contestant.progress(running.folder).points
        return sum(at >= began for at, _ in points) > 2

    running.until(is_enough, "its window was over", seconds=(STRETCH - 1) * seconds)


def ended_by_signals() -> None:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that this process ends the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def end(process: subprocess.Popen[bytes], asked_by: signal.Signals) -> None:
    """End a program as a user does, then kill its session. A second signal kills at once."""
    try:
        if process.poll() is None:
            process.send_signal(asked_by)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
