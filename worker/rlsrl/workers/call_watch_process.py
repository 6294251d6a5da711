"""The call watch of one worker: ``python -m rlsrl.workers.call_watch_process OPTIONS``.

It is a process because a call of an environment may hold the worker's interpreter lock. It reads the worker's call
board, reports calls that last long to the coordinator, and ends the worker when a call reaches its limit. It ends with
the worker. Until the first report it imports neither gRPC nor the spec's models: it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from rlsrl.runtime.call_board import BOARD_BYTES, CallBoard, CallClock, CallName, EnvironmentCall
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent

if TYPE_CHECKING:
    from rlsrl.runtime.coordination import CoordinatorClient

POLL_SECONDS = 0.5
"""Seconds between two looks at the board."""
MAX_LOOK_SECONDS = 2 * POLL_SECONDS
"""The most that one look adds to the duration of a call: time in which this process itself stood still does not count,
since the worker probably stood still, too."""
LONG_SECONDS = 5.0
"""Duration from which a call is reported."""
REPEAT_SECONDS = 2.0
"""Seconds between two reports while calls last long. The coordinator forgets reports that are not repeated."""
MAX_CALLS = 64
"""Calls in one report: the longest ones."""
SAY_SECONDS = 60.0
"""Seconds between two lines about long calls in the worker's output."""
REPORT_SECONDS = 1.0
"""Seconds that a report may take."""
DUMP_SECONDS = 0.5
"""Seconds that the worker gets to dump its tracebacks."""
END_SECONDS = 2.0
"""Seconds that the worker gets to obey ``END_SIGNAL`` before SIGKILL."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes the worker dump the tracebacks of all threads to standard error."""
END_SIGNAL = signal.SIGUSR2
"""Ends the worker; its exit code is the signal's number."""
LIMIT_FIELDS: Mapping[CallName, str] = {
    "step": "environment.stepSeconds",
    "reset": "environment.resetSeconds",
    "make": "environment.resetSeconds",
    "close": "environment.resetSeconds",
    "render": "environment.stepSeconds",
}
"""The fields of the spec that limit the calls. The wait for a server has no limit."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of the process."""

    board: int
    """The inherited descriptor of the board's memory."""
    role: str
    """The worker's role."""
    process: str
    """The worker's name at the coordinator (``rlsrl.runtime.identity``)."""
    coordinator: str
    """The coordinator's address. Token and certificates come from the environment."""
    limits: Mapping[CallName, float | None]
    """The longest duration of each call, in seconds; None or absent: no limit."""

    def to_json(self) -> str:
        """Return a JSON object that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read an object of ``to_json``."""
        return cls(**json.loads(text))


class CallWatch:
    """Decides at each look what to report, and whether to end the worker."""

    def __init__(
        self,
        board: CallBoard,
        limits: Mapping[CallName, float | None],
        *,
        report: Callable[[Sequence[EnvironmentCall], str], None],
        end: Callable[[EnvironmentCall, str], None],
    ) -> None:
        """Watch the board.

        Args:
            board: The worker's.
            limits: The longest duration of each call, in seconds; None: no limit.
            report: Takes the calls that last long, and the field of the limit that the first one has reached, or "".
            end: Ends the worker because the call has reached the limit of that field.
        """
        self._clock = CallClock(board)
        self._limits = limits
        self._report = report
        self._end = end
        self._since_report: float | None = None
        """Seconds since the last report; None while there is nothing to report."""

    def look(self, elapsed: float) -> None:
        """Look at the board, ``elapsed`` seconds after the last look."""
        calls = self._clock.look(elapsed)
        for call in calls:
            limit = self._limits.get(call.name)
            if limit is not None and call.seconds >= limit:
                field = LIMIT_FIELDS[call.name]
                self._report([call], field)
                self._end(call, field)
                return
        self._repeat([call for call in calls if call.seconds >= LONG_SECONDS][:MAX_CALLS], elapsed)

    def _repeat(self, calls: Sequence[EnvironmentCall], elapsed: float) -> None:
        """Report the calls if a report is due; report once when none lasts long any more."""
        if self._since_report is not None:
            self._since_report += elapsed
        is_due = self._since_report is None or self._since_report >= REPEAT_SECONDS
        if calls and is_due:
            self._report(calls, "")
            self._since_report = 0.0
        elif not calls and self._since_report is not None:
            self._report([], "")
            self._since_report = None


class CallReporter:
    """Sends reports to the coordinator. A report that does not arrive is lost: the next one repeats it.

    Once a minute it also writes the longest call into the worker's output. Kubernetes quotes this line if the worker,
    whose call holds the interpreter lock, fails its liveness probe.
    """

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._client: CoordinatorClient | None = None
        self._say_at = -math.inf

    def send(self, calls: Sequence[EnvironmentCall], limit: str) -> None:
        """Send a report; return after ``REPORT_SECONDS`` at the latest."""
        if calls and not limit and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_SECONDS
            say(f"{calls[0].text} ({self._options.role})")
        from rlsrl.rpc.auth import token_from_environment
        from rlsrl.rpc.tls import tls_from_environment
        from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable

        with contextlib.suppress(CoordinatorUnavailable, OSError):
            if self._client is None:
                access = token_from_environment(), tls_from_environment()
                self._client = CoordinatorClient(self._options.coordinator, *access)
            self._client.report_calls(self._options.process, calls, limit=limit, timeout=REPORT_SECONDS)


def say(text: str) -> None:
    """Write a line into the worker's output."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"rlsrl: {text}\n".encode())


def end_worker(parent: int, role: str, call: EnvironmentCall, limit: str) -> NoReturn:
    """Let the worker dump its tracebacks, say why it ends, and end it. This process dies with it."""
    os.kill(parent, DUMP_SIGNAL)
    time.sleep(DUMP_SECONDS)
    # The last line of the worker's output: the supervisor and Kubernetes quote it.
    say(f"{call.environments} was in {call.name} for {call.seconds:.0f} s ({limit}): the {role} was ended")
    os.kill(parent, END_SIGNAL)
    time.sleep(END_SECONDS)
    os.kill(parent, signal.SIGKILL)
    os._exit(0)


def main() -> int:
    """Watch until the worker ends; return the exit code."""
    parent = int(os.environ[PARENT_VARIABLE])
    die_with_parent(parent)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    options = WatchOptions.from_json(sys.argv[1])
    watch = CallWatch(
        CallBoard(mmap.mmap(options.board, BOARD_BYTES)),
        options.limits,
        report=CallReporter(options).send,
        end=lambda call, limit: end_worker(parent, options.role, call, limit),
    )
    looked_at = time.monotonic()
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if not is_stopped(parent):
            watch.look(min(now - looked_at, MAX_LOOK_SECONDS))
        looked_at = now
    return 0


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, a debugger): then its calls stand still, too."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


if __name__ == "__main__":
    sys.exit(main())
