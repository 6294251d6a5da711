"""Storing versions off the training thread: a durable write waits for the disk, and training does not."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import NUMBER_KEY, next_number
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.runtime.mapping_thread import MappingThread
from rlsrl.runtime.pipe import Pipe
from rlsrl.workers.training import Checkpoint

QUEUED = 1
"""Checkpoints that may wait while one is written; with more due, training waits for the disk."""


class CheckpointWriter:
    """Stores checkpoints in the order given, in a thread of its own.

    A full or failing disk costs durability, not the run: the failure is logged and counted, training goes on, and the
    next checkpoint due tries again. Only ``store_now``, the last one, raises it.
    """

    def __init__(
        self,
        *,
        db: ParameterDB,
        policy_name: str,
        keep_last: int,
        log: structlog.stdlib.BoundLogger,
        on_stored: Callable[[Version], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._db = db
        self._policy_name = policy_name
        self._keep_last = keep_last
        self._log = log
        self._on_stored = on_stored
        self._on_failed = on_failed
        self._number = next_number(db.versions(policy_name))
        self.num_unstored = 0
        """How many of the last checkpoints, in a row, the disk did not take."""
        self._pipe: Pipe[Checkpoint] = Pipe(QUEUED)
        self._stage: MappingThread[Checkpoint, None] = MappingThread(
            "checkpoints", self._try_to_store, upstream_queue=self._pipe
        )

    def adopt(self, *, keep_last: int) -> None:
        """Keep so many untagged versions from the next one on."""
        self._keep_last = keep_last

    def start(self) -> None:
        """Start the thread."""
        self._stage.start()

    def store(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint; waits while the disk is behind, woken by the writer getting on or ``close``.

        Raises:
            PipeClosed: ``close`` was called, or the writer failed: see ``check``.
        """
        self._pipe.put(checkpoint)

    def store_now(self, checkpoint: Checkpoint) -> None:
        """Store one in the calling thread; after ``close``.

        Raises:
            OSError: the disk failed.
            ParameterError: the version may not be stored: this attempt was succeeded, for example.
        """
        metadata = {**checkpoint.metadata, NUMBER_KEY: self._number}
        self._db.push(
            self._policy_name,
            checkpoint.parameters,
            tags=checkpoint.tags,
            metadata=metadata,
            state=checkpoint.state,
        )
        self._number += 1
        self.num_unstored = 0
        self._on_stored(checkpoint.parameters.version)
        self._db.prune(self._policy_name, keep_last=self._keep_last)

    def check(self) -> None:
        """Raise what the writer died of: a version that may not be stored ends the trainer."""
        self._stage.check()

    def close(self, timeout: float) -> None:
        """Write what is queued, then end the thread.

        Raises:
            TimeoutError: the disk did not take it in time.
        """
        self._pipe.close()
        self._stage.join(timeout)

    def _try_to_store(self, checkpoint: Checkpoint) -> None:
        try:
            self.store_now(checkpoint)
        except OSError as error:
            self.num_unstored += 1
            self._on_failed()
            self._log.exception("checkpoint_failed", version=str(checkpoint.parameters.version), errno=error.errno)
