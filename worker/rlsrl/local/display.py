"""Shows a run while it goes on: a live picture on a terminal, a plain line now and then elsewhere.

A broken output (a closed terminal, a full disk) ends the showing and never the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from rlsrl.api.spec import RLExperiment
from rlsrl.local.controller import ProcessState
from rlsrl.local.view import RunView, line, render

StatusSource = Callable[[], tuple[Mapping[str, Any] | None, float]]
"""Gives the newest status, None before the first, and its age in seconds."""

TERMINAL_INTERVAL_SECONDS = 0.5
LINE_INTERVAL_SECONDS = 2.0


class Viewer:
    """Puts together what is known of a run."""

    def __init__(
        self, experiment: RLExperiment, status: StatusSource, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._experiment = experiment
        self._status = status
        self._clock = clock
        self._began = clock()

    def view(self, processes: Sequence[ProcessState]) -> RunView:
        """What is known now."""
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
    """Plain lines, for files, pipes and logs."""

    interval_seconds = LINE_INTERVAL_SECONDS

    def __init__(self, viewer: Viewer, output: TextIO) -> None:
        self._viewer = viewer
        self._output = output

    def show(self, processes: Sequence[ProcessState]) -> None:
        """Print the picture in one line."""
        self.note(line(self._viewer.view(processes)))

    def note(self, text: str) -> None:
        """Print the text."""
        self._output.write(f"{text}\n")
        self._output.flush()

    def close(self) -> None:
        """Nothing is left to do."""


class TerminalDisplay:
    """A picture that is drawn over itself, with notes above it."""

    interval_seconds = TERMINAL_INTERVAL_SECONDS

    def __init__(self, viewer: Viewer, console: Console) -> None:
        self._viewer = viewer
        self._console = console
        # Drawn by `show` alone: no thread of rich's own, and its standard streams left as they are.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, processes: Sequence[ProcessState]) -> None:
        """Draw the picture anew."""
        self._live.update(render(self._viewer.view(processes)), refresh=True)

    def note(self, text: str) -> None:
        """Print the text above the picture."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last picture standing and the terminal as it was."""
        self._live.stop()


class UnbreakableOutput:
    """A text stream that swallows what it can no longer write."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        """Write, if that is still possible."""
        try:
            return self._output.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        """Flush, if that is still possible."""
        try:
            self._output.flush()
        except (OSError, ValueError):
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def open_display(viewer: Viewer, output: TextIO) -> LineDisplay | TerminalDisplay:
    """The display that suits the output."""
    safe: Any = UnbreakableOutput(output)
    console = Console(file=safe)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalDisplay(viewer, console)
    return LineDisplay(viewer, safe)
