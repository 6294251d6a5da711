"""One worker process as the controller sees it: started, watched, signalled, and reaped with all it started.

A pidfd names the process and never a later one with the same number, and is readable once the process has ended, so
the controller waits for any number of them in one ``select``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

TAIL_BYTES = 16 * 1024
"""How much of a log's end is read to quote its last lines."""


class ChildProcess:
    """A worker process in a session of its own, so that a Ctrl-C at the terminal reaches only the controller.

    Everything it prints goes to ``log``, appended: a restart writes below what its predecessor wrote.
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
        """Start it.

        Args:
            keep_fds: Descriptors the process inherits; it need not know of them.

        Raises:
            OSError: the program or the log cannot be opened, or the system has no room for a process.
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
        """Process id, which is also its session's and process group's."""
        return self._process.pid

    def fileno(self) -> int:
        """The pidfd: readable once the process has ended."""
        return self._pidfd

    def send_signal(self, signum: signal.Signals) -> None:
        """Signal the process; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def reap(self) -> int:
        """Exit status of the ended process (``-n``: by signal n); kills what it left behind in its process group.

        Blocks until the process has ended; call it when ``fileno`` is readable.
        """
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        # While the leader is a zombie its number still names this very group and no other.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self._pidfd)
        return code

    def last_lines(self, count: int) -> tuple[str, ...]:
        """The last lines this life of the process printed."""
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())[-count:]
