"""The life cycle that all roles share: configure, start, pause, exit. Subclasses do the work of a role."""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.frequency import FrequencyControl

ConfigT = TypeVar("ConfigT")

REST_SECONDS = 0.2
"""Seconds between two calls of ``_rest``, unless a command wakes the worker."""

Report = Callable[[Mapping[str, float]], None]
"""Takes a worker's statistics by name. It must not block: ``run`` calls it between two polls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PollResult:
    """The work of one poll, in the units that the role counts."""

    num_samples: int = 0
    num_batches: int = 0


class Worker(ABC, Generic[ConfigT]):
    """The worker of one role, from ``configure`` to the end of ``run``.

    ``start``, ``pause`` and ``exit`` may be called at any time, also before ``configure``, from any thread and from a
    signal handler. They record the command and return; ``run`` obeys between two polls. A worker polls after ``start``,
    rests after ``pause``, and ends after ``exit``, which cannot be undone.

    A role whose ``_poll`` waits overrides ``pause`` or ``exit`` to wake it, and calls ``super()`` first. A role that
    must do something while it is paused, such as keep a stream alive, overrides ``_rest``.

    After a poll at which ``frequency`` is due (default: every 10 seconds), and at a clean end, the worker logs its
    statistics and passes them to ``report``.
    """

    def __init__(
        self,
        *,
        report: Report | None = None,
        frequency: FrequencyControl | None = None,
        log: structlog.stdlib.BoundLogger | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._log = log if log is not None else structlog.stdlib.get_logger(__name__)
        self._report = report
        self._frequency = frequency if frequency is not None else FrequencyControl(seconds=10, clock=self._clock)
        self._configured = False
        self._running = False
        self._exiting = False
        self._adopted: deque[ConfigT] = deque(maxlen=1)
        # SimpleQueue.put is safe in a signal handler. A condition is not: the handler may interrupt the waiting thread
        # between its check and its wait. Each command puts one token, and the thread checks again at each token.
        self._commands: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tally = _Tally(self._clock.monotonic())

    @property
    def exiting(self) -> bool:
        """Whether ``exit`` was called."""
        return self._exiting

    @property
    def done(self) -> bool:
        """Whether the role's work is complete, so that this worker needs no successor."""
        return self.result is not None

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The result of the role's work as a JSON value, or None while it is not complete."""
        return None

    def configure(self, config: ConfigT) -> None:
        """Build the role's parts, once, in the thread that will call ``run``. Does nothing after ``exit``.

        Raises:
            Any error of ``_configure``, which first closes the parts that it had built.
            RuntimeError: the worker is configured already. Another config needs another worker.
        """
        if self._configured:
            raise RuntimeError(f"{type(self).__name__} is already configured")
        if self._exiting:
            return
        self._configure(config)
        self._configured = True

    def adopt(self, config: ConfigT) -> None:
        """Use ``config``, which may differ only in live settings. Thread-safe.

        ``run`` takes the newest one between two polls.
        """
        self._adopted.append(config)

    @property
    def is_running(self) -> bool:
        """Whether ``run`` may poll: the last of ``start`` and ``pause`` was ``start``."""
        return self._running

    def start(self) -> None:
        """Let ``run`` poll."""
        self._running = True
        self._commands.put(None)

    def pause(self) -> None:
        """Let ``run`` rest after the current poll, until ``start`` or ``exit``."""
        self._running = False
        self._commands.put(None)

    def exit(self) -> None:
        """Let ``run`` return after the current poll."""
        self._exiting = True
        self._commands.put(None)

    def run(
        self, *, on_last_poll: Callable[[], None] = lambda: None, on_rest: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Poll until ``exit``. Call it once. While paused it rests without a limit, until ``start`` or ``exit``.

        ``on_rest`` gets True each time that a paused worker has come to rest, and False when it goes on. If the worker
        is configured, ``on_last_poll`` and ``_shutdown`` run once at the end, also after a failure. ``on_last_poll``
        and ``on_rest`` must not raise.

        Raises:
            The first failure of ``_poll``, ``_rest``, ``_stats``, ``report`` or ``_shutdown``, unchanged, after
                ``_shutdown`` ran.
                A later failure of ``_shutdown`` is logged, and added to the first failure as a note.
            RuntimeError: the worker was not configured, or has run.
        """
        if not self._configured:
            if self._exiting:
                return
            raise RuntimeError(f"{type(self).__name__} is not configured")
        try:
            self._loop(on_rest)
        except BaseException as failure:
            on_last_poll()
            self._shutdown_after(failure)
            raise
        on_last_poll()
        self._end()

    def _loop(self, on_rest: Callable[[bool], None]) -> None:
        rested, paused_at = False, None
        while not self._exiting:
            if self._adopted:
                self._adopt(self._adopted.pop())
            runs, begin = self._running, self._clock.monotonic()
            if not runs and paused_at is None:
                paused_at = begin
            rests = not runs and self._rest()
            if rests != rested:
                rested = rests
                on_rest(rests)
            if not runs:
                continue
            if paused_at is not None:
                self._tally.exclude(begin - paused_at)
                paused_at = None
            result = self._poll()
            self._tally.add(result, self._clock.monotonic() - begin)
            if self._frequency.check():
                self._log_statistics()
        if self._tally.num_polls:
            self._log_statistics()

    def _log_statistics(self) -> None:
        now = self._clock.monotonic()
        statistics = {**self._tally.statistics(now), **self._stats()}
        self._tally = _Tally(now)
        self._log.info("statistics", **statistics)
        if self._report is not None:
            self._report(statistics)

    def _end(self) -> None:
        self._configured = False
        self._shutdown()

    def _shutdown_after(self, failure: BaseException) -> None:
        try:
            self._end()
        except Exception as error:  # noqa: BLE001 - the first failure is the one to raise
            self._log.exception("shutdown_failed")
            failure.add_note(f"shutting down failed as well: {error!r}")

    @abstractmethod
    def _configure(self, config: ConfigT) -> None:
        """Build the role's parts from its resolved config. If it raises, it must first close what it has opened."""

    @abstractmethod
    def _poll(self) -> PollResult:
        """Do one round of work. It may wait for less than a second, or until ``exit`` wakes it."""

    def _rest(self) -> bool:
        """Do what must go on while the worker is paused; return whether it has come to rest.

        ``run`` calls it again and again, in the place of ``_poll``. It may wait for less than a second.
        """
        with contextlib.suppress(queue.Empty):
            self._commands.get(timeout=REST_SECONDS)
        return True

    def _adopt(self, config: ConfigT) -> None:
        """Use new values of live settings. Also called while the worker is paused."""

    def _shutdown(self) -> None:
        """Close the parts that ``_configure`` built. Called once, also after a failure."""

    def _stats(self) -> Mapping[str, float]:
        """Return the role's own statistics since the last call."""
        return {}


class _Tally:
    """Counts polls since the last report."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._num_samples = 0
        self._num_batches = 0
        self._poll_seconds = 0.0
        self.num_polls = 0

    def add(self, result: PollResult, seconds: float) -> None:
        self._num_samples += result.num_samples
        self._num_batches += result.num_batches
        self._poll_seconds += seconds
        self.num_polls += 1

    def exclude(self, seconds: float) -> None:
        """Leave paused time out of the rates."""
        self._since += seconds

    def statistics(self, now: float) -> dict[str, float]:
        elapsed = now - self._since
        return {
            "samples_per_second": self._num_samples / elapsed if elapsed > 0 else 0.0,
            "batches_per_second": self._num_batches / elapsed if elapsed > 0 else 0.0,
            "poll_seconds": self._poll_seconds / self.num_polls,
        }
