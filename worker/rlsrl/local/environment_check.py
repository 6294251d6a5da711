"""Checks the user's environment while the workers start, in a process of its own: a crash or hang of it costs nothing.

The check only warns. Many environments break Gymnasium's contract in ways that training never meets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlsrl.api.spec import Environment
from rlsrl.runtime.process import worker_environment

CHECK_COMMAND = (sys.executable, "-m", "rlsrl.workers.environment_check")
CHECK_SECONDS = 60.0
"""Time after which the check is killed."""
MAX_PROBLEMS = 5
"""Problems shown."""


def is_users_own(environment: Environment) -> bool:
    """Return whether the environment is neither Gymnasium's nor a plugin's: those need no check."""
    return environment.factory is not None or ":" in (environment.id or "")


class EnvironmentCheck:
    """One check. Its own thread waits for the process and shows what was found; ``close`` ends both."""

    def __init__(
        self,
        config: Path,
        report: Path,
        *,
        environment: Mapping[str, str],
        show: Callable[[str], None],
        command: Sequence[str] = CHECK_COMMAND,
        seconds: float = CHECK_SECONDS,
    ) -> None:
        """Start the check. Main thread only: the process dies with the thread that started it.

        Args:
            config: The actors' resolved config, JSON.
            report: A file that does not exist; the process writes what it finds into it.
            environment: The environment variables of every worker.
            show: Takes each warning, in the check's thread; must not raise.
            command: Starts the check, with both paths as its arguments.
            seconds: Time after which it is killed.

        Raises:
            OSError: the process cannot be started.
        """
        self._report = report
        self._show = show
        self._seconds = seconds
        self._is_closed = False
        self._process = subprocess.Popen(
            [*command, str(config), str(report)],
            env=worker_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._wait, name="environment-check", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kill the process and its children if they still run, and wait for the end. Idempotent."""
        self._is_closed = True
        self._kill()
        self._thread.join()

    def _wait(self) -> None:
        try:
            self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        with contextlib.suppress(FileNotFoundError):
            lines = self._report.read_text(encoding="utf-8").splitlines()
            if not self._is_closed:
                self._show_findings(lines)

    def _show_findings(self, lines: Sequence[str]) -> None:
        """Show problems, and after an empty line warnings."""
        num_problems = lines.index("") if "" in lines else len(lines)
        if num_problems:
            listed = [f"\n  - {problem}" for problem in lines[: min(num_problems, MAX_PROBLEMS)]]
            listed += [f"\n  and {more} more" for more in [num_problems - MAX_PROBLEMS] if more > 0]
            self._show(f"warning: the environment breaks Gymnasium's contract:{''.join(listed)}")
        for warning in lines[num_problems + 1 :]:
            self._show(f"warning: {warning}")

    def _kill(self) -> None:
        if self._process.returncode is None:  # until it is reaped, its number names no other group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
