"""The checkpoint writer, over a database in memory that fails when the test asks."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import structlog

from rlsrl.api.spec import ParameterVersions
from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import NUMBER_KEY
from rlsrl.parameters.protocols import Parameters, StaleAttempt, TrainerState
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.runtime.errors import NotStored
from rlsrl.runtime.mapping_thread import StageFailed
from rlsrl.runtime.pipe import PipeClosed
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.memory_parameter_db import MemoryParameterDB
from rlsrl.testing.waiting import until
from rlsrl.workers.checkpoints import LATE_SECONDS, QUEUED, CheckpointWriter, Unstored
from rlsrl.workers.training import Checkpoint

DEADLINE_SECONDS = 30.0


class Disk(MemoryParameterDB):
    """Fails for the steps in ``refused`` or while it is ``full``, and blocks while ``gate`` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[int] = set()
        self.full = False
        self.code = errno.ENOSPC
        """The error of refused writes."""
        self.num_notes_refused = 0
        """How many of the next notes fail."""
        self.num_prunes_refused = 0
        """How many of the next prunes fail."""
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.meanwhile: dict[int, Callable[[], object]] = {}
        """By step: called while that version is written."""

    def push(self, policy: str, parameters: Parameters, **arguments: Any) -> None:
        self.writing.set()
        self.meanwhile.get(parameters.version.step, lambda: None)()
        assert self.gate.wait(DEADLINE_SECONDS)
        if self.full or parameters.version.step in self.refused:
            raise OSError(self.code, os.strerror(self.code))
        super().push(policy, parameters, **arguments)

    def annotate(self, policy: str, version: Version, metadata: Any) -> None:
        if self.num_notes_refused:
            self.num_notes_refused -= 1
            raise OSError(self.code, os.strerror(self.code))
        super().annotate(policy, version, metadata)

    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        if self.num_prunes_refused:
            self.num_prunes_refused -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().prune(policy, keep_last=keep_last)

    def tags(self) -> dict[int, tuple[str, ...]]:
        return {info.version.step: info.tags for info in self.versions("default")}

    def steps(self) -> list[int]:
        return [info.version.step for info in self.versions("default")]


def never(seconds: float) -> bool:
    raise AssertionError(f"the writer's thread does not wait {seconds} s for an exit")


class Desk:
    """A writer and its callbacks."""

    def __init__(
        self,
        keep_last: int = 10,
        *,
        db: Disk | None = None,
        wait_for_exit: Callable[[float], bool] = never,
        clock: ManualClock | None = None,
    ) -> None:
        self.db = db or Disk()
        self.stored: list[Version] = []
        self.failed: list[Unstored] = []
        self.writer = CheckpointWriter(
            db=self.db,
            policy_name="default",
            versions=ParameterVersions(keep_last=keep_last, retry_last_seconds=60.0),
            log=structlog.stdlib.get_logger(),
            clock=clock or ManualClock(),
            on_stored=lambda checkpoint: self.stored.append(checkpoint.parameters.version),
            on_failed=self.failed.append,
            wait_for_exit=wait_for_exit,
        )

    @property
    def unstored(self) -> list[int]:
        return [each.num_versions for each in self.failed]

    def started(self) -> Desk:
        self.writer.start()
        return self


def checkpoint(step: int, *, attempt: int = 1, is_permanent: bool = False) -> Checkpoint:
    version = Version(attempt, step)
    return Checkpoint(
        parameters=Parameters(version=version, vector=np.full(3, step, np.float32), layout="l"),
        state=TrainerState(version=version, arrays={}, values={"step": step}),
        metadata={"env_steps": step * 10},
        is_permanent=is_permanent,
    )


def test_checkpoints_are_stored_in_order_with_tags_metadata_and_state() -> None:
    desk = Desk().started()
    for step in (1, 2, 3):
        desk.writer.store(checkpoint(step, is_permanent=step == 2))
    desk.writer.close(DEADLINE_SECONDS)
    desk.writer.check()
    assert desk.stored == [Version(1, 1), Version(1, 2), Version(1, 3)]
    infos = desk.db.versions("default")
    assert [(info.version.step, info.tags, info.has_state) for info in infos] == [
        (1, (), True),
        (2, ("step-2",), True),
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
        with contextlib.suppress(OSError):
            desk.writer.store_now(checkpoint(step))
    successor = Desk(keep_last=2, db=desk.db)
    for step in (4, 5):
        successor.writer.store_now(checkpoint(step, attempt=2))
    numbers = [(str(info.version), info.metadata[NUMBER_KEY]) for info in desk.db.versions("default")]
    assert numbers == [("2.4", 2), ("2.5", 3)], "1.1 was 0, 1.3 was 1, and 1.2 was never stored"


def test_only_the_newest_and_the_permanent_versions_are_kept() -> None:
    desk = Desk(keep_last=2).started()
    for step in range(1, 7):
        desk.writer.store(checkpoint(step, is_permanent=step == 2))
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.steps() == [2, 5, 6]


def test_a_full_disk_is_reported_and_the_newest_checkpoint_is_tried_again() -> None:
    desk = Desk().started()
    with structlog.testing.capture_logs() as events:
        desk.writer.store(checkpoint(1))
        until(lambda: desk.stored == [Version(1, 1)], "the first version is stored")
        desk.db.full = True
        for step in (2, 3, 4):
            desk.writer.store(checkpoint(step))
        until(lambda: desk.unstored[-1:] == [3], "a failure of the newest of three versions")
        assert desk.writer.num_unstored == 3
        assert desk.failed[-1].why == "1.4: [Errno 28] No space left on device"
        desk.writer.store(checkpoint(5))
        desk.db.full = False
        until(lambda: desk.stored[-1] == Version(1, 5), "the newest version is stored without a new one")
        desk.writer.close(DEADLINE_SECONDS)
    desk.writer.check()
    assert desk.writer.num_unstored == 0
    assert not {2, 3} & set(desk.db.steps())
    assert [version.step for version in desk.stored] == desk.db.steps(), "only durable versions are reported as durable"
    assert desk.unstored == sorted(desk.unstored)
    failures = [event for event in events if event["event"] == "checkpoint_failed"]
    assert [failure["version"] for failure in failures] == [each.why.partition(":")[0] for each in desk.failed]
    assert {(failure["errno"], failure["log_level"]) for failure in failures} == {(errno.ENOSPC, "error")}


def replacements(events: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    found = [event for event in events if event["event"] == "permanent_versions_replaced"]
    return [(event["number"], event["by"], event["log_level"]) for event in found]


def test_the_next_stored_version_is_permanent_in_place_of_those_that_it_replaces() -> None:
    desk = Desk().started()
    desk.db.full = True
    with structlog.testing.capture_logs() as events:
        desk.writer.store(checkpoint(1))
        until(lambda: desk.writer.num_unstored == 1, "a failure")
        for step in (2, 3, 4):
            desk.writer.store(checkpoint(step, is_permanent=step != 4))
        until(lambda: desk.failed[-1].why.startswith("1.4: "), "a failure of the newest version")
        assert desk.failed[-1].why == (
            "1.4: [Errno 28] No space left on device; permanent versions lost: 2 (1.4 becomes permanent instead)"
        )
        desk.db.full = False
        until(lambda: desk.stored == [Version(1, 4)], "the newest version is stored")
        desk.writer.store(checkpoint(5))
        desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.tags() == {4: ("step-4",), 5: ()}
    assert replacements(events) == [(2, "step-4", "warning")]


def test_the_last_version_is_permanent_in_place_of_one_that_it_replaces() -> None:
    desk, leaves = waiting_desk()
    desk.started()
    desk.db.full = True
    desk.writer.store(checkpoint(1, is_permanent=True))
    until(lambda: desk.writer.num_unstored == 1, "a failure")
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.failed[-1].why == "1.1: [Errno 28] No space left on device", "nothing is lost yet"
    desk.db.full = False
    desk.writer.store_last(checkpoint(9), record=RECORD)
    assert (desk.db.tags(), leaves.waits) == ({9: ("step-9",)}, [])


def test_a_permanent_version_that_is_stored_twice_replaces_none() -> None:
    desk = Desk().started()
    desk.db.num_prunes_refused = 1
    with structlog.testing.capture_logs() as events:
        desk.writer.store(checkpoint(1, is_permanent=True))
        until(lambda: len(desk.stored) == 2, "the version is stored again after its pruning has failed")
        desk.writer.store(checkpoint(2))
        desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.tags() == {1: ("step-1",), 2: ()}
    assert replacements(events) == []


def test_training_does_not_wait_for_a_disk_that_fails() -> None:
    desk = Desk().started()
    desk.db.full = True
    desk.writer.store(checkpoint(1))
    until(lambda: desk.writer.num_unstored == 1, "a failure")
    desk.db.writing.clear()
    assert desk.db.writing.wait(DEADLINE_SECONDS), "another attempt, without another version"
    desk.db.gate.clear()
    for step in range(2, 9):
        desk.writer.store(checkpoint(step))
    desk.db.full = False
    desk.db.gate.set()
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.steps()[-1] == 8


def test_closing_tries_the_newest_checkpoint_once_more() -> None:
    desk = Desk().started()
    desk.db.full = True
    desk.writer.store(checkpoint(1))
    until(lambda: desk.writer.num_unstored == 1, "a failure")
    desk.writer.store(checkpoint(2))
    desk.writer.close(DEADLINE_SECONDS)
    desk.writer.check()
    assert desk.db.steps() == []
    assert desk.failed[-1].why.startswith("1.2: ")


def test_training_waits_for_a_slow_disk() -> None:
    desk = Desk().started()
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


def test_a_version_is_late_if_it_is_not_stored_a_minute_after_it_was_due_and_the_next_is_due() -> None:
    clock = ManualClock()
    desk = Desk(clock=clock).started()
    desk.db.gate.clear()
    desk.writer.store(checkpoint(1))
    assert desk.db.writing.wait(DEADLINE_SECONDS)
    clock.advance(LATE_SECONDS + 30)
    assert desk.writer.late == "", "it is still the newest: the schedule asks for no other"
    desk.writer.store(checkpoint(2))
    assert desk.writer.late == "version 1.1 was due 90 s ago and is not stored yet"
    desk.db.gate.set()
    until(lambda: desk.writer.late == "", "the second is stored, too")
    assert desk.db.steps() == [1, 2]
    desk.writer.close(DEADLINE_SECONDS)


def test_a_late_version_is_reported_until_one_is_stored_in_time() -> None:
    clock = ManualClock()
    desk, texts = Desk(clock=clock).started(), list[str]()
    desk.db.meanwhile[2] = lambda: desk.writer.store(checkpoint(3))
    desk.db.meanwhile[3] = lambda: texts.append(desk.writer.late)
    desk.db.gate.clear()
    for step in (1, 2):
        desk.writer.store(checkpoint(step))
        assert desk.db.writing.wait(DEADLINE_SECONDS)
    clock.advance(LATE_SECONDS)
    assert desk.writer.late == ""
    clock.advance(1.0)
    assert desk.writer.late == "version 1.1 was due 61 s ago and is not stored yet"
    desk.db.gate.set()
    until(lambda: desk.db.steps() == [1, 2, 3], "all are stored")
    until(lambda: desk.writer.late == "", "the third is stored in time")
    assert texts == ["version 1.2 was stored 61 s after it was due"]
    desk.writer.close(DEADLINE_SECONDS)


def test_a_failing_store_is_not_late() -> None:
    clock = ManualClock()
    desk = Desk(clock=clock).started()
    desk.db.full = True
    desk.writer.store(checkpoint(1))
    until(lambda: desk.writer.num_unstored == 1, "a failure")
    desk.db.gate.clear()
    desk.db.writing.clear()
    assert desk.db.writing.wait(DEADLINE_SECONDS), "another attempt"
    clock.advance(10 * LATE_SECONDS)
    desk.writer.store(checkpoint(2))
    assert desk.writer.late == ""
    desk.db.gate.set()
    desk.writer.close(DEADLINE_SECONDS)


def test_a_store_that_hangs_at_the_end_is_named() -> None:
    desk = Desk().started()
    desk.db.gate.clear()
    desk.writer.store(checkpoint(1))
    assert desk.db.writing.wait(DEADLINE_SECONDS)
    with pytest.raises(TimeoutError, match=r"not stored within 0\.01 s: the store is too slow, or it hangs"):
        desk.writer.close(0.01)
    desk.db.gate.set()


def test_a_superseded_attempt_ends_the_trainer() -> None:
    desk = Desk().started()
    desk.db.push("default", checkpoint(5, attempt=2).parameters)
    desk.writer.store(checkpoint(6, attempt=1))
    desk.writer.close(DEADLINE_SECONDS)
    with pytest.raises(StageFailed) as raised:
        desk.writer.check()
    assert isinstance(raised.value.__cause__, StaleAttempt)
    with pytest.raises(PipeClosed):
        desk.writer.store(checkpoint(7))


RECORD = {"reason": "trainSteps", "version": "1.9", "result": {}}


class Exit:
    """Counts the waits for a request to exit; each advances the clock and calls ``meanwhile``."""

    def __init__(self, clock: ManualClock, *, after: int | None = None) -> None:
        self.waits: list[float] = []
        self.meanwhile: dict[int, Callable[[], None]] = {}
        """By number of the wait, from 1."""
        self._clock = clock
        self._after = after

    def __call__(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self._clock.advance(seconds)
        self.meanwhile.get(len(self.waits), lambda: None)()
        return len(self.waits) == self._after


def waiting_desk(*, after: int | None = None) -> tuple[Desk, Exit]:
    clock = ManualClock()
    leaves = Exit(clock, after=after)
    return Desk(wait_for_exit=leaves, clock=clock), leaves


def test_the_last_checkpoint_waits_for_room_with_back_off() -> None:
    desk, leaves = waiting_desk()
    desk.db.full = True
    leaves.meanwhile[5] = lambda: setattr(desk.db, "full", False)
    desk.writer.store_last(checkpoint(9), record=RECORD)
    assert leaves.waits == [1.0, 2.0, 4.0, 8.0, 10.0]
    (info,) = desk.db.versions("default")
    assert info.metadata[TERMINAL_KEY] == RECORD
    assert (desk.writer.num_unstored, desk.stored) == (0, [Version(1, 9)])
    assert desk.failed[0].why == (
        "1.9: [Errno 28] No space left on device; training is over, and the trainer tries again until 22:14:20 UTC"
    )


def test_a_record_that_fails_is_repeated_and_the_version_is_not() -> None:
    desk, leaves = waiting_desk()
    desk.db.num_notes_refused = 1
    desk.writer.store_last(checkpoint(9), record=RECORD)
    assert leaves.waits == [1.0]
    (info,) = desk.db.versions("default")
    assert (info.metadata[TERMINAL_KEY], info.metadata[NUMBER_KEY]) == (RECORD, 0)
    assert (desk.writer.num_unstored, desk.unstored) == (0, [1])


def test_the_last_checkpoint_is_given_up_when_the_time_is_up() -> None:
    desk, leaves = waiting_desk()
    desk.db.full = True
    with pytest.raises(NotStored) as raised:
        desk.writer.store_last(checkpoint(9), record=RECORD)
    assert sum(leaves.waits) == 60.0
    assert raised.value.is_final
    assert str(raised.value) == (
        "the last version, 1.9, could not be stored for 60 s (parameters.retryLastSeconds): [Errno 28] No space left "
        "on device. Correct this, then resume the run: it continues from the newest stored version"
    )
    assert desk.failed[-1].why == "1.9: [Errno 28] No space left on device"


def test_a_request_to_exit_ends_the_wait_for_room() -> None:
    desk, leaves = waiting_desk(after=2)
    desk.db.full = True
    with pytest.raises(NotStored, match=r"1\.9, could not be stored: ") as raised:
        desk.writer.store_last(checkpoint(9), record=RECORD)
    assert leaves.waits == [1.0, 2.0]
    assert not raised.value.is_final


def test_an_unfinished_run_does_not_wait_for_room() -> None:
    desk, leaves = waiting_desk()
    desk.db.full = True
    with pytest.raises(NotStored) as raised:
        desk.writer.store_last(checkpoint(9), record=None)
    assert (leaves.waits, raised.value.is_final) == ([], False)


def test_a_first_checkpoint_without_room_is_final_and_other_errors_are_not() -> None:
    desk = Desk()
    desk.db.full = True
    with pytest.raises(NotStored, match=r"the first version could not be stored: .* No space left") as raised:
        desk.writer.store_first(checkpoint(0))
    assert raised.value.is_final
    desk.db.code = errno.EACCES
    with pytest.raises(PermissionError):
        desk.writer.store_first(checkpoint(0))


def test_close_raises_if_the_disk_is_too_slow() -> None:
    desk = Desk().started()
    desk.db.gate.clear()
    desk.writer.store(checkpoint(1))
    with pytest.raises(TimeoutError):
        desk.writer.close(0.01)
    desk.db.gate.set()
    desk.writer.close(DEADLINE_SECONDS)
    assert desk.db.steps() == [1]
