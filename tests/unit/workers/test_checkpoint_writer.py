"""The checkpoint writer, over a database in memory that fails when the test asks."""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np
import pytest
import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import NUMBER_KEY
from rlsrl.parameters.protocols import Parameters, StaleAttempt, TrainerState
from rlsrl.runtime.mapping_thread import StageFailed
from rlsrl.runtime.pipe import PipeClosed
from rlsrl.testing.memory_parameter_db import MemoryParameterDB
from rlsrl.testing.waiting import until
from rlsrl.workers.checkpoints import QUEUED, CheckpointWriter
from rlsrl.workers.training import Checkpoint

DEADLINE_SECONDS = 30.0


class Disk(MemoryParameterDB):
    """Fails for the steps in ``refused``, and blocks while ``gate`` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()

    def push(self, policy: str, parameters: Parameters, **arguments: Any) -> None:
        self.writing.set()
        assert self.gate.wait(DEADLINE_SECONDS)
        if parameters.version.step in self.refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().push(policy, parameters, **arguments)

    def steps(self) -> list[int]:
        return [info.version.step for info in self.versions("default")]


class Desk:
    """A started writer and its callbacks."""

    def __init__(self, keep_last: int = 10) -> None:
        self.db = Disk()
        self.stored: list[Version] = []
        self.num_failed = 0
        self.unstored: list[int] = []
        self.writer = CheckpointWriter(
            db=self.db,
            policy_name="default",
            keep_last=keep_last,
            log=structlog.stdlib.get_logger(),
            on_stored=self.stored.append,
            on_failed=self._fail,
        )
        self.writer.start()

    def _fail(self, num_unstored: int) -> None:
        self.num_failed += 1
        self.unstored.append(num_unstored)


def checkpoint(step: int, *tags: str, attempt: int = 1) -> Checkpoint:
    version = Version(attempt, step)
    return Checkpoint(
        parameters=Parameters(version=version, vector=np.full(3, step, np.float32), layout="l"),
        state=TrainerState(version=version, arrays={}, values={"step": step}),
        metadata={"env_steps": step * 10},
        tags=tags,
    )


def test_checkpoints_are_stored_in_order_with_tags_metadata_and_state() -> None:
    desk = Desk()
    for step in (1, 2, 3):
        desk.writer.store(checkpoint(step, *(["good"] if step == 2 else [])))
    desk.writer.close(DEADLINE_SECONDS)
    desk.writer.check()
    assert desk.stored == [Version(1, 1), Version(1, 2), Version(1, 3)]
    infos = desk.db.versions("default")
    assert [(info.version.step, info.tags, info.has_state) for info in infos] == [
        (1, (), True),
        (2, ("good",), True),
        (3, (), True),
    ]
    assert infos[1].metadata["env_steps"] == 20
    state = desk.db.load_state("default")
    assert state is not None
    assert state.values == {"step": 3}


def test_versions_are_numbered_over_all_lives_of_the_run() -> None:
    desk = Desk()
    desk.db.refused = {2}
    for step in (1, 2, 3):
        desk.writer.store(checkpoint(step))
    desk.writer.close(DEADLINE_SECONDS)
    successor = CheckpointWriter(
        db=desk.db,
        policy_name="default",
        keep_last=2,
        log=structlog.stdlib.get_logger(),
        on_stored=desk.stored.append,
        on_failed=lambda: None,
    )
    for step in (4, 5):
        successor.store_now(checkpoint(step, attempt=2))
    numbers = [(str(info.version), info.metadata[NUMBER_KEY]) for info in desk.db.versions("default")]
    assert numbers == [("2.4", 2), ("2.5", 3)], "1.1 was 0, 1.3 was 1, and 1.2 was never stored"


def test_only_the_newest_and_the_tagged_versions_are_kept() -> None:
    desk = Desk(keep_last=2)
    for step in range(1, 7):
        desk.writer.store(checkpoint(step, *(["good"] if step == 2 else [])))
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.steps() == [2, 5, 6]


def test_a_full_disk_is_reported_and_the_next_checkpoint_tries_again() -> None:
    desk = Desk()
    desk.db.refused = {2, 3}
    with structlog.testing.capture_logs() as events:
        for step in (1, 2, 3):
            desk.writer.store(checkpoint(step))
        until(lambda: desk.num_failed == 2, "two failures")
        assert desk.writer.num_unstored == 2
        desk.writer.store(checkpoint(4))
        desk.writer.close(DEADLINE_SECONDS)
    desk.writer.check()
    assert desk.writer.num_unstored == 0
    assert desk.db.steps() == [1, 4]
    assert desk.stored == [Version(1, 1), Version(1, 4)], "only durable versions are reported as durable"
    assert desk.unstored == [1, 2]
    failures = [event for event in events if event["event"] == "checkpoint_failed"]
    assert [failure["version"] for failure in failures] == ["1.2", "1.3"]
    assert {(failure["errno"], failure["log_level"]) for failure in failures} == {(errno.ENOSPC, "error")}


def test_training_waits_for_a_slow_disk() -> None:
    desk = Desk()
    desk.db.gate.clear()
    for step in range(1, 2 + QUEUED):
        desk.writer.store(checkpoint(step))
        assert desk.db.writing.wait(DEADLINE_SECONDS), "the first is being written, the others are queued"
    last = threading.Thread(target=desk.writer.store, args=(checkpoint(9),))
    last.start()
    last.join(0.05)
    assert last.is_alive()
    desk.db.gate.set()
    last.join(DEADLINE_SECONDS)
    assert not last.is_alive()
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.steps() == [*range(1, 2 + QUEUED), 9]


def test_a_superseded_attempt_ends_the_trainer() -> None:
    desk = Desk()
    desk.db.push("default", checkpoint(5, attempt=2).parameters)
    desk.writer.store(checkpoint(6, attempt=1))
    desk.writer.close(DEADLINE_SECONDS)
    with pytest.raises(StageFailed) as raised:
        desk.writer.check()
    assert isinstance(raised.value.__cause__, StaleAttempt)
    with pytest.raises(PipeClosed):
        desk.writer.store(checkpoint(7))


def test_the_caller_stores_the_last_checkpoint_and_gets_its_failure() -> None:
    desk = Desk()
    desk.writer.close(DEADLINE_SECONDS)
    desk.writer.store_now(checkpoint(1, "end"))
    assert desk.db.steps() == [1]
    desk.db.refused = {2}
    with pytest.raises(OSError, match="No space left"):
        desk.writer.store_now(checkpoint(2))
    assert (desk.num_failed, desk.stored) == (0, [Version(1, 1)])


def test_close_raises_if_the_disk_is_too_slow() -> None:
    desk = Desk()
    desk.db.gate.clear()
    desk.writer.store(checkpoint(1))
    with pytest.raises(TimeoutError):
        desk.writer.close(0.01)
    desk.db.gate.set()
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.steps() == [1]
