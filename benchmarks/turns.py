"""One turn: a contestant is started as a user starts it, watched while it trains, and ended with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from contestants import OUTPUT, Contestant, ContestantFailed, Progress, Setting, last_words
from figures import Turn, speed
from machine import Usage, megabytes_of, shares
from profiles import time_shares
from workloads import Workload

START_SECONDS = 240.0
"""In which a contestant has to begin to train; a compiler's first run is part of it."""
END_SECONDS = 90.0
"""In which it has to end when it is asked to."""
LOOK_SECONDS = 0.2
"""Between two looks at what it has written."""
STRETCH = 3
"""How many times as long a window may last."""
GOAL_SECONDS = 120.0
"""In which a goal has to be reached: what takes longer counts as so long."""
ENDED_WELL = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A contestant that was started."""

    contestant: Contestant
    process: subprocess.Popen[bytes]
    folder: Path
    began: float
    """Unix seconds at which its process was started."""

    def until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> bool:
        """Wait for a condition; whether it came to hold in time.

        Raises:
            ContestantFailed: the process ended before.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            # What ended may have said that very thing last.
            if self.process.poll() is not None and not condition():
                said = last_words(self.folder)
                raise ContestantFailed(f"{self.contestant.name} ended before {what}:\n{said}")
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def await_training(self) -> None:
        """Wait until it trains, and can be watched.

        Raises:
            ContestantFailed: it ended before, or does not begin to.
        """
        if not self.until(lambda: self.contestant.has_started(self.folder), "it trained", seconds=START_SECONDS):
            said = last_words(self.folder)
            raise ContestantFailed(f"{self.contestant.name} has not begun to train in {START_SECONDS:.0f} s:\n{said}")


def throughput_turn(contestant: Contestant, workload: Workload, setting: Setting, *, window_seconds: float) -> Turn:
    """How much it trains a second of a window that begins once its start is over.

    Raises:
        ContestantFailed: it did not begin to train, ended by itself, or left what may not count.
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
            raise ContestantFailed(f"{contestant.name} ended by itself:\n{last_words(folder)}")
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
    """How many seconds pass from the start of its process until it has reached the workload's goal.

    Raises:
        ContestantFailed: it ended before, or left what may not count.
    """
    goal = workload.goal
    assert goal is not None, "a workload with a goal"
    with started(contestant, workload, setting, seed=seed) as running:
        usage = Usage.now()

        def reached() -> tuple[float, float] | None:
            told = contestant.progress(running.folder)
            pairs = zip(told.points, told.return_means, strict=True)
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
) -> Progress:
    """What it told until it ended by itself, at the workload's goal or its last step. Nobody looks at the time.

    ``hindered`` gets its folder, and may be in its way while it lasts; ``wanted`` is asked meanwhile.

    Raises:
        ContestantFailed: it goes on after so many seconds, failed, left what may not count, or is not wanted any more.
    """
    if not wanted():
        raise ContestantFailed(f"{contestant.name} is not wanted any more")
    with started(contestant, workload, setting, seed=seed) as running, hindered(running.folder):
        in_time = running.until(lambda: running.process.poll() is not None or not wanted(), "it ended", seconds=seconds)
        if not in_time or not wanted():
            why = "is not wanted any more" if in_time else f"goes on after {seconds:.0f} s"
            raise ContestantFailed(f"{contestant.name} {why}:\n{last_words(running.folder)}")
        return contestant.progress(running.folder)


@contextlib.contextmanager
def started(contestant: Contestant, workload: Workload, setting: Setting, *, seed: int) -> Iterator[Running]:
    """It, while the body lasts; then it is ended, and what it left is looked at."""
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
            _end(process, contestant.end_signal)
        if process.returncode not in ENDED_WELL:
            raise ContestantFailed(f"{contestant.name} exited with {process.returncode}:\n{last_words(folder)}")
        contestant.check(folder)


def _watch(running: Running, began: float, seconds: float) -> None:
    """Let a window pass; one with fewer than two whole iterations goes on, for up to ``STRETCH`` times as long."""
    time.sleep(seconds)

    def is_enough() -> bool:
        points = running.contestant.progress(running.folder).points
        return sum(at >= began for at, _ in points) > 2

    running.until(is_enough, "its window was over", seconds=(STRETCH - 1) * seconds)


def ended_by_signals() -> None:
    """From now on this process ends what it started, too, when it is told to end or its terminal is gone."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _end(process: subprocess.Popen[bytes], asked_by: signal.Signals) -> None:
    """As a user ends it; then for good, with all of its session: at once, if somebody is in a hurry."""
    try:
        if process.poll() is None:
            process.send_signal(asked_by)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
