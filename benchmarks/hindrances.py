"""What happens to runs of rlsrl while they train: a trainer that is slow, workers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from contestants import RUN, ContestantFailed

from rlsrl.testing.live_runs import RunFolderFacts

SLOWED = 5
"""Factor by which a slowed trainer is slower."""
SLICE_SECONDS = 0.05
KILLED_ROLES = ("coordinator", "actor", "trainer")
STEPS_BETWEEN_KILLS = 20
"""Training steps between two kills."""


@contextlib.contextmanager
def slow_trainer(folder: Path) -> Iterator[None]:
    """Let a run's trainer work only 1/``SLOWED`` of the time, until the body ends."""
    over = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(folder / RUN / "status.json", over), name="slow-trainer")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def killed(folder: Path) -> Iterator[None]:
    """Kill one worker of each role of a run, one after the other, each once all train again.

    Raises:
        ContestantFailed: the body ended before each was killed.
    """
    over, gone = threading.Event(), list[str]()
    thread = threading.Thread(target=_kill_each, args=(RunFolderFacts(folder / RUN), over, gone), name="killer")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if left := [role for role in KILLED_ROLES if role not in gone]:
        raise ContestantFailed(f"the run ended before a worker of these roles was killed: {', '.join(left)}")


def _kill_each(facts: RunFolderFacts, over: threading.Event, gone: list[str]) -> None:
    """Kill the workers, and add each role to ``gone`` whose worker was."""
    trained = 0
    for role in KILLED_ROLES:
        while not over.wait(SLICE_SECONDS):
            if (steps := facts.train_steps()) > trained + STEPS_BETWEEN_KILLS and (found := facts.workers(role)):
                trained = steps
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[0].pid, signal.SIGKILL)
                    gone.append(role)
                    break


def _slow_down(status: Path, over: threading.Event) -> None:
    """Stop and continue the trainer by turns."""
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
    """Return the trainer's process, or None before its first step."""
    try:
        document = json.loads(status.read_text())
    except FileNotFoundError:
        return None
    workers = document["roles"].get("trainer", [])
    return workers[0]["pid"] if workers and workers[0]["stats"].get("train_steps", 0) else None
