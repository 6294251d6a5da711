"""The coordinator's side of wandb: starts the process that writes to wandb, signals new rows, and survives its end.

The process reads rows from the disk at its own pace. The workers' metrics and the names of videos pass through the pipe
of the signals, and are lost while it is full.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import structlog

from rlsrl.runtime.process import worker_environment
from rlsrl.workers.video_rows import VideoRow
from rlsrl.workers.wandb_process import NOT_INSTALLED, Options
from rlsrl.workers.worker_metrics import WorkerMetricsRow

MAX_FAILURES = 3
"""Failures after which the coordinator continues without wandb."""
CLOSE_SECONDS = 8.0
"""Seconds that ``close`` waits for wandb; shorter than the coordinator's grace period."""


class WandbMirror:
    """Runs and restarts the process of ``rlsrl.workers.wandb_process``. One thread uses it, and must outlive it.

    Only ``close`` waits, and no method raises. After a failure it writes a log line, calls ``on_failed`` and starts the
    process again, until ``MAX_FAILURES``. The new process reads the rows that are not at wandb from ``metrics.jsonl``.
    """

    def __init__(
        self,
        options: Options,
        *,
        log: structlog.stdlib.BoundLogger,
        on_failed: Callable[[], None],
        on_lost: Callable[[int], None],
        on_lost_videos: Callable[[int], None] = lambda _: None,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """``on_lost`` is called with the number of metrics rows that wandb does not take, and ``on_lost_videos`` with
        that of videos. ``close_seconds``: how long ``close`` waits for wandb."""
        self._close_seconds = close_seconds
        self._options = options
        self._log = log
        self._on_failed = on_failed
        self._on_lost = on_lost
        self._on_lost_videos = on_lost_videos
        self._failures = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""
        """The rest of what the pipe did not take whole."""
        self._start()

    def poll(
        self, *, new_rows: bool, metrics_rows: Sequence[WorkerMetricsRow] = (), videos: Sequence[VideoRow] = ()
    ) -> None:
        """Restart the process if it has ended, signal new rows of the learning curve, and send metrics and videos."""
        process, is_sent = self._process, False
        if process is not None and (code := process.poll()) is not None:
            self._drop(process)
            self._failed(f"the process ended with {code}", final=code == NOT_INSTALLED)
            self._start()
        elif process is not None:
            self._unsent = _written(process, self._unsent)
            if not self._unsent:  # If the pipe is full, the process has a signal already.
                signal = b"\n" if new_rows else b""
                lines = b"".join([*(row.to_line() for row in metrics_rows), *(row.to_line() for row in videos)])
                self._unsent, is_sent = _written(process, signal + lines), True
        if not is_sent:
            self._on_lost(len(metrics_rows))
            self._on_lost_videos(len(videos))

    def close(self) -> None:
        """Let the process finish within ``close_seconds``, then kill it. Idempotent."""
        process = self._process
        if process is None:
            return
        self._drop(process)
        try:
            if (code := process.wait(self._close_seconds)) != 0:
                self._failed(f"the process ended with {code}", final=True)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._failed(f"wandb did not finish within {self._close_seconds:g} s", final=True)

    def _start(self) -> None:
        if self._failures >= MAX_FAILURES:
            return
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlsrl.workers.wandb_process", self._options.to_json()],
                stdin=subprocess.PIPE,
                env=worker_environment(os.environ),
            )
        except OSError as error:
            self._failed(str(error), final=True)
            return
        assert process.stdin is not None, "it is a pipe"
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        """Close the standard input of the process, so that it finishes."""
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        self._process = None
        self._unsent = b""

    def _failed(self, reason: str, *, final: bool) -> None:
        self._failures = MAX_FAILURES if final else self._failures + 1
        self._on_failed()
        self._log.warning("wandb_failed", reason=reason, given_up=self._failures >= MAX_FAILURES)


def _written(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """Write to the process what its pipe takes; return the rest. If the pipe is broken, the next poll finds out."""
    assert process.stdin is not None, "it is a pipe"
    try:
        return data[os.write(process.stdin.fileno(), data) :] if data else data
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""
