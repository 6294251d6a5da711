"""Stores versions in a thread of its own: a durable write waits for the disk, and training does not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from rlsrl.api.spec import ParameterVersions
from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import NUMBER_KEY, next_number
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.rpc.back_off import BackOff
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.durable import NO_ROOM
from rlsrl.runtime.errors import NotStored
from rlsrl.runtime.mapping_thread import MappingThread
from rlsrl.runtime.pipe import Pipe
from rlsrl.workers.training import Checkpoint

QUEUED = 1
"""Checkpoints that may wait while one is written. If more are due, training waits for the disk."""
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 10.0
"""Shortest and longest time between two attempts to store a version while the store fails."""

UNSTORED = "unstored_versions"
"""The statistic that counts the newest consecutive checkpoints that could not be stored."""
UNSTORED_REASON = "unstored_reason"
"""The text that says why; see ``WorkerContext.report_text``."""
LATE_SECONDS = 60.0
"""Time from which a version may be late: see ``CheckpointWriter.late``."""
LATE = "late_version"
"""The text about a late version."""


@dataclass(frozen=True, kw_only=True)
class Unstored:
    """How many of the newest versions are not stored, and why."""

    num_versions: int
    """How many versions were due since the newest stored one."""
    why: str
    """The version, the store's error and what follows from it."""


@dataclass(frozen=True, kw_only=True)
class _Due:
    """A checkpoint that is due."""

    number: int
    """How many checkpoints of this life were due until this one."""
    num_permanent: int
    """How many of those are permanent, this one included."""
    at: float
    """Since when, in seconds on the writer's monotonic clock."""
    checkpoint: Checkpoint


def permanent_tag(version: Version) -> str:
    """Return the tag of a permanent version, which no pruning removes."""
    return f"step-{version.step}"


class CheckpointWriter:
    """Stores checkpoints in order, in a thread of its own.

    A full or failing disk does not end training. The failure is reported, training continues, and the newest checkpoint
    is tried again, with back-off. Only ``store_last`` gives up.

    Memory holds no more than the checkpoint that is tried and ``QUEUED`` newer ones: a newer checkpoint replaces an
    older one that cannot be stored. If a permanent one is replaced, the next stored version is permanent instead.
    """

    def __init__(
        self,
        *,
        db: ParameterDB,
        policy_name: str,
        versions: ParameterVersions,
        log: structlog.stdlib.BoundLogger,
        clock: Clock,
        on_stored: Callable[[Checkpoint], None],
        on_failed: Callable[[Unstored], None],
        wait_for_exit: Callable[[float], bool],
    ) -> None:
        """Prepare the writer; ``start`` starts its thread.

        Args:
            db: where versions are stored.
            policy_name: the name under which they are stored.
            versions: which of them are kept, and how long the last one is tried.
            log: gets each failure.
            clock: limits the attempts to store the last checkpoint.
            on_stored: gets each checkpoint that has become durable.
            on_failed: called after each failed attempt.
            wait_for_exit: waits for the given seconds; returns True at once if the process is asked to exit.
        """
        self._db = db
        self._policy_name = policy_name
        self._versions = versions
        self._log = log
        self._clock = clock
        self._on_stored = on_stored
        self._on_failed = on_failed
        self._wait_for_exit = wait_for_exit
        self._number = next_number(db.versions(policy_name))
        self.num_unstored = 0
        """How many checkpoints were due since the newest stored one. 0 until an attempt has failed."""
        self._num_due = self._num_permanent_due = 0
        self._last_stored = self._last_permanent = 0
        """``_Due.number`` and ``_Due.num_permanent`` of the newest stored checkpoint; 0 before."""
        self._writing: _Due | None = None
        """The checkpoint that the thread writes, or has failed to write."""
        self._stored_late = ""
        """A text about the last version that the thread has stored, if that was late."""
        self._closing = threading.Event()
        self._pipe: Pipe[_Due] = Pipe(QUEUED)
        self._stage: MappingThread[_Due, None] = MappingThread(
            "checkpoints", self._store_newest, upstream_queue=self._pipe
        )

    @property
    def late(self) -> str:
        """A text about the version that is late; empty if versions are stored in time, or if the store fails.

        A version is late if it is not stored ``LATE_SECONDS`` after it was due and the next one is due, too. The text
        stays until a version is stored in time.
        """
        if self.num_unstored:
            return ""
        if (due := self._writing) is not None and (seconds := self._late_seconds(due)) is not None:
            return f"version {due.checkpoint.parameters.version} was due {seconds:.0f} s ago and is not stored yet"
        return self._stored_late

    def adopt(self, versions: ParameterVersions) -> None:
        """Use new settings from the next checkpoint on."""
        self._versions = versions

    def start(self) -> None:
        """Start the thread."""
        self._stage.start()

    def store(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint. Waits while the queue is full, until the writer takes one or ``close`` is called.

        While the store fails, it does not wait: the checkpoint replaces the queued one.

        Raises:
            PipeClosed: ``close`` was called, or the writer failed (``check`` raises why).
        """
        due = self._due(checkpoint)
        if self.num_unstored:
            self._pipe.replace(due)
        else:
            self._pipe.put(due)

    def store_now(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint in the calling thread. Call it after ``close`` or before ``start``.

        Raises:
            OSError: the disk failed.
            ParameterError: the version may not be stored, for example because a later attempt has started.
        """
        due = self._due(checkpoint)
        self._store(due)
        self._last_stored = due.number

    def store_first(self, checkpoint: Checkpoint) -> None:
        """Store the first checkpoint of a run, before ``start``.

        Raises:
            NotStored: the disk has no room. Nothing is trained yet, so nothing is worth waiting for.
            OSError, ParameterError: as ``store_now``.
        """
        try:
            self.store_now(checkpoint)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise NotStored(f"the first version could not be stored: {error}", is_final=True) from error

    def store_last(self, checkpoint: Checkpoint, *, record: Mapping[str, Any] | None) -> None:
        """Store the last checkpoint in the calling thread, after ``close``.

        With the ``record`` of a run whose training is over, store that, too, and repeat what fails, with back-off, for
        ``retry_last_seconds``. Without one the process was asked to exit, or has failed, and may not wait.

        Raises:
            NotStored: the store failed until the time was up, or until the process was asked to exit.
            ParameterError: as ``store_now``.
        """
        version = checkpoint.parameters.version
        due = self._due(checkpoint)
        steps = deque([lambda: self._store(due)])
        if record is not None:
            steps.append(lambda: self._db.annotate(self._policy_name, version, {TERMINAL_KEY: record}))
        self._retry(steps, due, 0.0 if record is None else self._versions.retry_last_seconds)
        if self.num_unstored:  # the record failed at first
            self.num_unstored = 0
            self._on_stored(checkpoint)

    def check(self) -> None:
        """Raise the writer's failure. A version that may not be stored ends the trainer."""
        self._stage.check()

    def close(self, timeout: float) -> None:
        """Try once more to store the queued checkpoints, then end the thread.

        Raises:
            TimeoutError: the disk took longer than ``timeout`` seconds.
        """
        self._closing.set()
        self._pipe.close()
        try:
            self._stage.join(timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"the last scheduled versions were not stored within {timeout:g} s: the store is too slow, or it hangs"
            ) from error

    def _due(self, checkpoint: Checkpoint) -> _Due:
        self._num_due += 1
        self._num_permanent_due += checkpoint.is_permanent
        return _Due(
            number=self._num_due,
            num_permanent=self._num_permanent_due,
            at=self._clock.monotonic(),
            checkpoint=checkpoint,
        )

    def _late_seconds(self, due: _Due) -> float | None:
        """Return for how long a checkpoint has been due, in seconds; None if it is not late."""
        seconds = self._clock.monotonic() - due.at
        return seconds if seconds > LATE_SECONDS and due.number < self._num_due else None

    def _store(self, due: _Due) -> None:
        """Store a checkpoint, as a permanent version if one is due since the newest stored version."""
        checkpoint, num_replaced = due.checkpoint, self._num_replaced(due)
        version = checkpoint.parameters.version
        self._db.push(
            self._policy_name,
            checkpoint.parameters,
            tags=(permanent_tag(version),) if checkpoint.is_permanent or num_replaced else (),
            metadata={**checkpoint.metadata, NUMBER_KEY: self._number},
            state=checkpoint.state,
        )
        self._number += 1
        self.num_unstored = 0
        self._on_stored(checkpoint)
        self._last_permanent = due.num_permanent
        if num_replaced:
            self._log.warning("permanent_versions_replaced", number=num_replaced, by=permanent_tag(version))
        self._db.prune(self._policy_name, keep_last=self._versions.keep_last)

    def _num_replaced(self, due: _Due) -> int:
        """Return how many permanent checkpoints newer ones have replaced since the newest stored version."""
        num_owed = due.num_permanent - self._last_permanent  # 0 if the same checkpoint is stored again
        return max(num_owed - due.checkpoint.is_permanent, 0)

    def _store_newest(self, due: _Due) -> None:
        """Store a checkpoint; while that fails, try the newest one. Between attempts ``close`` wakes the thread."""
        back_off = BackOff(first_seconds=FIRST_RETRY_SECONDS, max_seconds=MAX_RETRY_SECONDS)
        closing = False
        while not self._try_to_store(due) and not closing:
            # Taken before the wait, too: the training thread may wait for room in the queue.
            due = self._pipe.take_newest() or due
            closing = self._closing.wait(back_off.next_delay())
            due = self._pipe.take_newest() or due

    def _try_to_store(self, due: _Due) -> bool:
        self._writing = due
        try:
            self._store(due)
        except OSError as error:
            self._report(error, due)
            return False
        self._writing, self._last_stored = None, due.number
        seconds, version = self._late_seconds(due), due.checkpoint.parameters.version
        self._stored_late = "" if seconds is None else f"version {version} was stored {seconds:.0f} s after it was due"
        return True

    def _retry(self, steps: deque[Callable[[], None]], due: _Due, seconds: float) -> None:
        """Take the steps that store ``due``; repeat each until it succeeds, for ``seconds`` in all."""
        back_off = BackOff(first_seconds=FIRST_RETRY_SECONDS, max_seconds=MAX_RETRY_SECONDS)
        deadline = self._clock.monotonic() + seconds
        while steps:
            try:
                steps[0]()
            except OSError as error:
                left = deadline - self._clock.monotonic()
                self._report(error, due, outlook=self._outlook(left))
                failure = error
            else:
                steps.popleft()
                continue
            if left <= 0 or self._wait_for_exit(min(left, back_off.next_delay())):
                version = due.checkpoint.parameters.version
                tried = f" for {seconds:g} s (parameters.retryLastSeconds)" if left <= 0 < seconds else ""
                raise NotStored(
                    f"the last version, {version}, could not be stored{tried}: {failure}. Correct this, then resume "
                    "the run: it continues from the newest stored version",
                    is_final=left <= 0 < seconds,
                ) from failure

    def _outlook(self, seconds_left: float) -> str:
        if seconds_left <= 0:
            return ""
        until = datetime.fromtimestamp(self._clock.time() + seconds_left, UTC)
        return f"; training is over, and the trainer tries again until {until:%H:%M:%S} UTC"

    def _report(self, error: OSError, due: _Due, *, outlook: str = "") -> None:
        """Log and report that ``due`` could not be stored. Called where ``error`` is handled."""
        version = str(due.checkpoint.parameters.version)
        self.num_unstored = due.number - self._last_stored
        why = f"{version}: {error}"
        if num_replaced := self._num_replaced(due):
            why += f"; permanent versions lost: {num_replaced} ({version} becomes permanent instead)"
        self._on_failed(Unstored(num_versions=self.num_unstored, why=why + outlook))
        self._log.exception("checkpoint_failed", version=version, errno=error.errno, permanent_replaced=num_replaced)
