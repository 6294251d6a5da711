"""A run while it trains, for the user's own program: ``rlsrl.train(..., on_progress=...)``."""

from __future__ import annotations

import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlsrl.api.control import control_changes, overrides_of
from rlsrl.api.spec import RLExperiment
from rlsrl.local.edits import ask
from rlsrl.local.goals import seconds_left
from rlsrl.local.run_folder import read_record
from rlsrl.local.view import RunView
from rlsrl.local.worker_report import mapping, number
from rlsrl.runs.run import Run
from rlsrl.runtime.coordination import OWN_PREFIX, CoordinatorClient, CoordinatorUnavailable, ProgramRow
from rlsrl.runtime.interval_metrics import MAX_NAME_LENGTH

ANSWER_SECONDS = 1.0
"""How long the coordinator may take for rows. Later looks at the run send them again."""
MAX_ROWS_A_MESSAGE = 256
CALL_SECONDS = 0.9
"""Least time between two calls of the user's function: workers report once a second."""


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """A run at one moment of its training."""

    run: Run
    """Its figures until now, and its stored policies."""
    seconds: float
    """Seconds since the processes were started."""
    seconds_left: float | None
    """Seconds to the first of the limits in ``stop`` at the present speed; None: it cannot be told. ``stop.returnMean``
    may end the run earlier."""
    env_steps: int
    """Transitions trained until now."""
    train_steps: int
    """Training steps until now."""
    return_mean: float | None
    """Mean return of the last episodes; None before an episode has ended."""
    version: str | None
    """The newest version of the policy, for example ``"1.2500"``; it may not be stored."""
    _watch: RunWatch = field(repr=False)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add a row of metrics of your own, at this training step.

        TensorBoard, W&B and ``run.metrics("own")`` show them under their names after ``own/``.

        Raises:
            ValueError: a name is empty, too long or not Unicode.
            TypeError: a name is not text, or a value is not a number.
            RuntimeError: ``on_progress`` has returned.
        """
        self._watch.log(self.train_steps, {_own_name(name): _number(name, value) for name, value in metrics.items()})

    def stop(self) -> None:
        """Let the run end at its next step, as ``rlsrl control RUN stop`` does.

        Raises:
            RuntimeError: ``on_progress`` has returned.
            OSError: the request cannot be written, or another process has edited the run for ten seconds.
        """
        self._watch.stop()


class RunWatch:
    """Calls a function of the user's with each new status of a run, and sends what it logs."""

    def __init__(self, folder: Path, on_progress: Callable[[TrainingProgress], object]) -> None:
        """``folder`` is the run folder; the run may not have begun."""
        self._folder = folder.absolute()
        self._on_progress = on_progress
        self._seen: Mapping[str, Any] | None = None
        self._next_call = 0.0
        self._is_calling = False
        self._instance = str(uuid.uuid4())
        self._next_row = 0
        self._unsent: deque[ProgramRow] = deque()
        self.error: BaseException | None = None
        """What the function raised."""

    @property
    def num_unsent(self) -> int:
        """Number of rows that the coordinator has not stored."""
        return len(self._unsent)

    def look(self, view: RunView, client: CoordinatorClient) -> bool:
        """Look at the run: see ``rlsrl.local.controller.Watch``."""
        totals = mapping(view.status, "totals")
        env_steps = number(totals, "env_steps")
        if view.status is not self._seen and env_steps is not None and view.elapsed_seconds >= self._next_call:
            self._seen, self._next_call = view.status, view.elapsed_seconds + CALL_SECONDS
            self._call(self._progress(view, int(env_steps)))
        self._send(client)
        return self.error is not None

    def _call(self, progress: TrainingProgress) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the controller only notes signals
        self._is_calling = True
        try:
            self._on_progress(progress)
        except BaseException as error:  # noqa: BLE001 - `train` raises it after the run's clean end
            self.error = error
        finally:
            self._is_calling = False
            signal.signal(signal.SIGINT, before)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send a row after this look."""
        self._require_call()
        self._unsent.append(ProgramRow(sequence=self._next_row, step=step, wall=time.time(), scalars=scalars))
        self._next_row += 1

    def stop(self) -> None:
        """Ask the run to end, as ``rlsrl control RUN stop`` does."""
        self._require_call()
        record = read_record(self._folder)
        assert record is not None, "the run has begun"

        def stopping(experiment: RLExperiment) -> list[str]:
            return overrides_of(control_changes(experiment.spec, "stop", role=None, index=None, now=""))

        ask(self._folder, record, stopping)

    def _require_call(self) -> None:
        if not self._is_calling:
            raise RuntimeError("on_progress has returned: log() and stop() work only within it")

    def _progress(self, view: RunView, env_steps: int) -> TrainingProgress:
        totals = mapping(view.status, "totals")
        return TrainingProgress(
            run=Run(self._folder),
            seconds=view.elapsed_seconds,
            seconds_left=seconds_left(view.goals),
            env_steps=env_steps,
            train_steps=int(number(totals, "train_steps") or 0),
            return_mean=number(totals, "return_mean"),
            version=str(totals["version"]) if totals.get("version") else None,
            _watch=self,
        )

    def _send(self, client: CoordinatorClient) -> None:
        while rows := list(islice(self._unsent, MAX_ROWS_A_MESSAGE)):
            try:
                client.add_rows(self._instance, rows, ANSWER_SECONDS)
            except CoordinatorUnavailable:
                return  # the next look sends them again
            for _ in rows:
                self._unsent.popleft()


def _own_name(name: str) -> str:
    longest = MAX_NAME_LENGTH - len(OWN_PREFIX)
    if not 1 <= len(name) <= longest:
        raise ValueError(f"the name of a metric has 1 to {longest} characters, not {len(name)}: {name!r}")
    name.encode()  # raises ValueError for half a surrogate pair
    return OWN_PREFIX + name


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"the value of the metric {name!r} is {value!r}; it must be a number")
    return float(value)
