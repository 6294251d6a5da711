"""A trace of each trainer rank's ratio limiter, for ``rlsrl.testing.ratio_history``.

An experiment switches it on by its algorithm: the factory is loaded in trainer ranks, before they make their limiters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typing_extensions import override

from rlsrl.algorithms.custom import Setup
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.testing.q_learning import QLearning
from rlsrl.testing.ratio_history import (
    CountsSaved,
    EndExpected,
    LanesGranted,
    LimiterEvent,
    LimiterRestored,
    LimiterStarted,
    PaceTuned,
    SlotStored,
    StepTrained,
)
from rlsrl.workers.build import replay


class TracedQLearning(QLearning):
    """Q-learning in a process whose ratio limiter writes a trace."""

    def __init__(self, setup: Setup, *, trace: str, **kwargs: float) -> None:
        """``trace``: the folder of all ranks' traces. The other arguments are those of ``QLearning``."""
        super().__init__(setup, **kwargs)
        # For the rest of the process: the rank makes its limiter after its algorithm.
        patch.object(replay, "RatioLimiter", partial(_limiter_with_trace, Path(trace))).start()


def folder_of(trace: Path, rank: int) -> Path:
    """Return the folder of a rank's traces, one file for each life."""
    return trace / f"rank-{rank}"


def open_trace(folder: Path) -> Callable[[LimiterEvent], None]:
    """Start the next life's file, and return a function that appends an event.

    Each event is one write to the file, without a buffer: after a SIGKILL only the last line may be missing or cut.

    Raises:
        FileExistsError: another life starts at the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = len([*folder.iterdir()])
    file = os.open(folder / f"{number:04}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)

    def append(event: LimiterEvent) -> None:
        os.write(file, f"{event.to_json()}\n".encode())

    return append


class TracedLimiter(RatioLimiter):
    """A limiter that passes on each of its events. Not for turns."""

    def __init__(
        self,
        pace: Pace,
        *,
        start: int,
        updates_per_step: int,
        steps_per_lane: int,
        on_event: Callable[[LimiterEvent], None],
    ) -> None:
        """As ``RatioLimiter``. ``on_event`` is called after each event, with what this object counts then."""
        super().__init__(pace, start=start, updates_per_step=updates_per_step, steps_per_lane=steps_per_lane)
        assert not self.takes_turns
        self._on_event = on_event
        self._last_end: int | None = None
        self._on_event(
            LimiterStarted(
                debt=self.debt,
                pace=pace,
                start=start,
                updates_per_step=updates_per_step,
                steps_per_lane=steps_per_lane,
            )
        )

    @override
    def take(self) -> int:
        lanes = super().take()
        if lanes:
            self._on_event(LanesGranted(debt=self.debt, lanes=lanes))
        return lanes

    @override
    def expect(self, end: int | None) -> None:
        super().expect(end)
        if end != self._last_end:
            self._last_end = end
            self._on_event(EndExpected(debt=self.debt, end=end))

    @override
    def stored(self, env_steps: int, *, lanes: int, fresh: int | None = None) -> None:
        super().stored(env_steps, lanes=lanes, fresh=fresh)
        grown = env_steps if fresh is None else fresh
        self._on_event(SlotStored(debt=self.debt, env_steps=env_steps, lanes=lanes, fresh=grown))

    @override
    def trained(self) -> None:
        super().trained()
        self._on_event(StepTrained(debt=self.debt))

    @override
    def tune(self, pace: Pace) -> None:
        super().tune(pace)
        self._on_event(PaceTuned(debt=self.debt, pace=pace))

    @override
    def state_dict(self, env_steps: int) -> dict[str, Any]:
        state = super().state_dict(env_steps)
        saved = CountsSaved(debt=self.debt, counted=env_steps, due=state["due"], updates=state["updates"])
        self._on_event(saved)
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, stored: int, held: int) -> None:
        super().load_state_dict(state, stored=stored, held=held)
        self._on_event(
            LimiterRestored(
                debt=self.debt,
                counted=int(state["stored"]),
                due=float(state["due"]),
                updates=int(state["updates"]),
                stored=max(stored, int(state["stored"])),
                held=held,
            )
        )


def _limiter_with_trace(trace: Path, pace: Pace, **kwargs: int) -> TracedLimiter:
    rank = int(os.environ.get("RANK", "0"))  # torchrun's variable; a rank alone may have none
    return TracedLimiter(pace, **kwargs, on_event=open_trace(folder_of(trace, rank)))
