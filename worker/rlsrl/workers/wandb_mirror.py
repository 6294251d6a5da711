"""The coordinator's side of wandb: starts the process that writes to wandb, signals new rows, and survives its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

import structlog

from rlsrl.runtime.process import worker_environment
from rlsrl.workers.wandb_process import NOT_INSTALLED, Options

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
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """``close_seconds``: how long ``close`` waits for wandb."""
        self._close_seconds = close_seconds
        self._options = options
        self._log = log
        self._on_failed = on_failed
        self._failures = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def poll(self, *, new_rows: bool) -> None:
        """Restart the process if it has ended, and signal new rows."""
        process = self._process
        if process is None:
            return
        if (code := process.poll()) is not None:
            self._drop(process)
            self._failed(f"the process ended with {code}", final=code == NOT_INSTALLED)
            self._start()
        elif new_rows:
            assert process.stdin is not None, "it is a pipe"
            # If the pipe is full, the process has a signal already. If it is broken, the next poll finds the exit code.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(process.stdin.fileno(), b"\n")

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

    def _failed(self, reason: str, *, final: bool) -> None:
        self._failures = MAX_FAILURES if final else self._failures + 1
        self._on_failed()
        self._log.warning("wandb_failed", reason=reason, given_up=self._failures >= MAX_FAILURES)
