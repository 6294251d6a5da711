"""Stores versions in a thread of its own: a durable write waits for the disk, and training does not."""

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
"""Checkpoints that may wait while one is written. If more are due, training waits for the disk."""

UNSTORED = "unstored_versions"
"""The statistic that counts the newest consecutive checkpoints that could not be stored."""


class CheckpointWriter:
    """Stores checkpoints in order, in a thread of its own.

    A full or failing disk does not end the run. The failure is logged and counted, training goes on, and the next
    checkpoint tries again. Only ``store_now``, which stores the last checkpoint, raises the failure.
    """

    def __init__(
        self,
        *,
        db: ParameterDB,
        policy_name: str,
        keep_last: int,
        log: structlog.stdlib.BoundLogger,
        on_stored: Callable[[Version], None],
        on_failed: Callable[[int], None],
    ) -> None:
        """Prepare the writer; ``start`` starts its thread.

        ``on_failed`` gets ``num_unstored`` after each checkpoint that could not be stored.
        """
        self._db = db
        self._policy_name = policy_name
        self._keep_last = keep_last
        self._log = log
        self._on_stored = on_stored
        self._on_failed = on_failed
        self._number = next_number(db.versions(policy_name))
        self.num_unstored = 0
        """How many of the newest checkpoints could not be stored, without a success among them."""
        self._pipe: Pipe[Checkpoint] = Pipe(QUEUED)
        self._stage: MappingThread[Checkpoint, None] = MappingThread(
            "checkpoints", self._try_to_store, upstream_queue=self._pipe
        )

    def adopt(self, *, keep_last: int) -> None:
        """Keep ``keep_last`` untagged versions from the next checkpoint on."""
        self._keep_last = keep_last

    def start(self) -> None:
        """Start the thread."""
        self._stage.start()

    def store(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint. Waits while the queue is full, until the writer takes one or ``close`` is called.

        Raises:
            PipeClosed: ``close`` was called, or the writer failed (``check`` raises why).
        """
        self._pipe.put(checkpoint)

    def store_now(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint in the calling thread. Call it after ``close`` or before ``start``.

        Raises:
            OSError: the disk failed.
            ParameterError: the version may not be stored, for example because a later attempt has started.
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
        """Raise the writer's failure. A version that may not be stored ends the trainer."""
        self._stage.check()

    def close(self, timeout: float) -> None:
        """Store the queued checkpoints, then end the thread.

        Raises:
            TimeoutError: the disk took longer than ``timeout`` seconds.
        """
        self._pipe.close()
        self._stage.join(timeout)

    def _try_to_store(self, checkpoint: Checkpoint) -> None:
        try:
            self.store_now(checkpoint)
        except OSError as error:
            self.num_unstored += 1
            self._on_failed(self.num_unstored)
            self._log.exception("checkpoint_failed", version=str(checkpoint.parameters.version), errno=error.errno)
