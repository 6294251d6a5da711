"""Shows a run's progress: a live view on a terminal, plain lines elsewhere: often at first, then one a minute.

A broken output (a closed terminal, a full disk) ends the display and never the run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from rlsrl.api.spec import RLExperiment
from rlsrl.local.controller import ProcessState
from rlsrl.local.view import RunView, line, render
from rlsrl.local.worker_report import hold_ups, store_failures

StatusSource = Callable[[], tuple[Mapping[str, Any] | None, float]]
"""Returns the newest status (None before the first) and its age in seconds."""

TERMINAL_INTERVAL_SECONDS = 0.5
FIRST_LINES_SECONDS, LINES_SECONDS = 5.0, 60.0
"""Seconds between two lines without a terminal, at first and later, unless there is an alarm."""
LINES_SHARE = 0.25
"""The time between two lines as a share of the time until the first of them, within these bounds."""
ALARM_INTERVAL_SECONDS = 1.0
"""Seconds between two checks for an alarm, which is shown at once: versions that are not stored, a run that stands
still, or a long call of an environment."""
_NUMBERS = re.compile(r"[0-9]+")


class Viewer:
    """Combines the experiment, the newest status and the processes into a ``RunView``."""

    def __init__(
        self, experiment: RLExperiment, status: StatusSource, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._experiment = experiment
        self._status = status
        self._clock = clock
        self._began = clock()

    def adopt(self, experiment: RLExperiment) -> None:
        """Show the edited experiment from now on."""
        self._experiment = experiment

    def view(self, processes: Sequence[ProcessState]) -> RunView:
        """Return the view at this moment."""
        status, age = self._status()
        return RunView(
            name=self._experiment.metadata.name,
            stop=self._experiment.spec.stop,
            elapsed_seconds=self._clock() - self._began,
            processes=processes,
            status=status,
            status_age_seconds=age,
        )


class LineDisplay:
    """Plain lines with the time, for files, pipes and logs."""

    interval_seconds = ALARM_INTERVAL_SECONDS

    def __init__(
        self, viewer: Viewer, output: TextIO, *, now: Callable[[], datetime] = lambda: datetime.now().astimezone()
    ) -> None:
        self._viewer = viewer
        self._output = output
        self._now = now
        self._next_line_at = 0.0
        self._alarm: list[str] = []
        """The alarms of the last line, without their numbers."""

    def show(self, processes: Sequence[ProcessState], *, last: bool = False) -> None:
        """Print the view in one line if a line is due or the last one, or if an alarm begins, ends or changes."""
        view = self._viewer.view(processes)
        alarm = [_NUMBERS.sub("", text) for text in store_failures(view.status)]
        alarm += ["hold-up"] if hold_ups(view.status) else []
        if not last and alarm == self._alarm and view.elapsed_seconds < self._next_line_at:
            return
        self._alarm = alarm
        elapsed = view.elapsed_seconds
        self._next_line_at = elapsed + min(LINES_SECONDS, max(FIRST_LINES_SECONDS, LINES_SHARE * elapsed))
        self.note(line(view))

    def others_print(self) -> AbstractContextManager[object]:
        """Let the user's own program print within the context."""
        return contextlib.nullcontext()

    def note(self, text: str) -> None:
        """Print the text after the time."""
        self._output.write(f"{self._now().isoformat(timespec='seconds')} {text}\n")
        self._output.flush()

    def close(self) -> None:
        """Do nothing."""


class TerminalDisplay:
    """A view that is redrawn in place, with notes above it."""

    interval_seconds = TERMINAL_INTERVAL_SECONDS

    def __init__(self, viewer: Viewer, console: Console) -> None:
        self._viewer = viewer
        self._console = console
        # Only `show` draws: rich starts no thread and leaves the standard streams alone.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, processes: Sequence[ProcessState], *, last: bool = False) -> None:  # noqa: ARG002 - always drawn
        """Redraw the view."""
        self._live.update(render(self._viewer.view(processes)), refresh=True)

    @contextlib.contextmanager
    def others_print(self) -> Iterator[None]:
        """Show above the view what the user's own program prints within the context. The next view would erase it."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                yield
        finally:
            if text := printed.getvalue().rstrip("\n"):
                self.note(text)

    def note(self, text: str) -> None:
        """Print the text above the view."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last view on the screen and restore the terminal."""
        self._live.stop()


class UnbreakableOutput:
    """A text stream that ignores write errors.

    A pipe without a reader becomes ``/dev/null``, so that the interpreter can flush the stream at its end, too.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        """Write; ignore a failure."""
        try:
            return self._output.write(text)
        except (OSError, ValueError) as error:
            self._abandon(error)
            return len(text)

    def flush(self) -> None:
        """Flush; ignore a failure."""
        try:
            self._output.flush()
        except (OSError, ValueError) as error:
            self._abandon(error)

    def _abandon(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:  # no descriptor: nothing to do
                os.dup2(nowhere.fileno(), self._output.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def open_display(viewer: Viewer, output: TextIO) -> LineDisplay | TerminalDisplay:
    """Return a terminal display for a terminal, a line display for anything else."""
    safe: Any = UnbreakableOutput(output)
    console = Console(file=safe)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalDisplay(viewer, console)
    return LineDisplay(viewer, safe)
