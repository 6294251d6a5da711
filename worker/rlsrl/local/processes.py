"""One worker process of the controller: start, wait, signal, and reap with its own children.

A pidfd always names the same process, even after its pid is reused. It is readable once the process has ended, so
the controller waits for all processes in one ``select``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rlsrl.runtime.tracebacks import end_of_output

TAIL_BYTES = 16 * 1024
"""Bytes read from a log's end to quote its last lines."""


def count_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in vmstat.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


class OomKills:
    """Says whether the kernel may have killed a process for lack of memory."""

    def __init__(self, count: Callable[[], int]) -> None:
        """``count`` returns how many processes the kernel has killed for lack of memory."""
        self._count = count
        self._before = count()

    def note(self, code: int) -> str:
        """Return a text about a process that ended with that code, if the kernel has killed one since the last call."""
        before, self._before = self._before, self._count()
        is_suspect = code == -signal.SIGKILL and self._before > before
        return " (the kernel has just killed a process for lack of memory)" if is_suspect else ""


class ChildProcess:
    """A worker process in its own session, so that Ctrl-C at the terminal reaches only the controller.

    Its output is appended to ``log``, below that of earlier processes of the same name.
    """

    def __init__(
        self,
        *,
        role: str,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        keep_fds: Collection[int] = (),
    ) -> None:
        """Start the process.

        Args:
            keep_fds: Descriptors that the process inherits without using them.

        Raises:
            OSError: the program or the log cannot be opened, or the system cannot create a process.
        """
        self.role = role
        self.number = number
        self.log = log
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(keep_fds),
            )
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def name(self) -> str:
        """``role-number``."""
        return f"{self.role}-{self.number}"

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session and process group."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the pidfd, readable once the process has ended."""
        return self._pidfd

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal; do nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def reap(self) -> int:
        """Kill the rest of the ended process's group and return its exit status (``-n``: by signal n).

        Blocks until the process has ended; call it when ``fileno`` is readable.
        """
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        # As long as the leader is a zombie, its number names this group and no other.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self._pidfd)
        return code

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return the last lines that this process printed."""
        return self._lines()[-count:]

    def end_of_output(self, count: int) -> tuple[str, ...]:
        """Return the last lines that this process printed, or more: a traceback at their end is whole."""
        return end_of_output(self._lines(), count)

    def _lines(self) -> tuple[str, ...]:
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())
