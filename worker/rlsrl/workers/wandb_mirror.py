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
"""Failures after which this coordinator goes on without wandb."""
CLOSE_SECONDS = 8.0
"""Seconds that wandb may take at the end, within the coordinator's grace period."""


class WandbMirror:
    """Keeps the process of ``rlsrl.workers.wandb_process`` going. One thread uses it, and outlives it.

    Nothing here waits but ``close``, and nothing raises: a failure is logged and told to ``on_failed``, and the process
    started again, up to ``MAX_FAILURES`` times. What it had not written by then it reads from ``metrics.jsonl``.
    """

    def __init__(self, options: Options, *, log: structlog.stdlib.BoundLogger, on_failed: Callable[[], None]) -> None:
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
            # A full pipe tells the process enough; one that is broken shows in the next poll.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(process.stdin.fileno(), b"\n")

    def close(self) -> None:
        """Let the process finish within ``CLOSE_SECONDS``, then kill it. Idempotent."""
        process = self._process
        if process is None:
            return
        self._drop(process)
        try:
            if (code := process.wait(CLOSE_SECONDS)) != 0:
                self._failed(f"the process ended with {code}", final=True)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._failed(f"wandb did not finish within {CLOSE_SECONDS:g} s", final=True)

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
        """End the input of the process, which then finishes."""
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        self._process = None

    def _failed(self, reason: str, *, final: bool) -> None:
        self._failures = MAX_FAILURES if final else self._failures + 1
        self._on_failed()
        self._log.warning("wandb_failed", reason=reason, given_up=self._failures >= MAX_FAILURES)
