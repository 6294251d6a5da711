"""The learning curve on disk: ``metrics.jsonl``, and TensorBoard events made from it.

The workers' own metrics and videos are events without rows. An event that the disk does not take is lost.

Workers get an acknowledgement of rows in ``metrics.jsonl``, and a row that a worker sends again is recognised there.
The events derive from the rows. Each life of the coordinator begins an event file, and first writes the events that a
killed life did not write.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from rlsrl.workers.event_file import EventFile, count_scalar_events
from rlsrl.workers.worker_metrics import WORKERS_PREFIX, WorkerMetricsRow

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
VIDEOS_PREFIX = "videos/"
"""All names of videos at trackers begin with it, and no other names do."""
_BLOCK_BYTES = 64 * 1024
"""Bytes read at a time while the file's last line end is searched."""


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """One row of the learning curve, and its sender."""

    step: int
    wall: float
    """Unix seconds."""
    scalars: Mapping[str, float]
    role: str
    index: int
    attempt: int
    instance: str
    """UUID of the sending process."""
    sequence: int
    """The sender's number of the row."""

    def to_line(self) -> bytes:
        """Return one line of JSON. Values that JSON lacks are strings: ``"nan"``, ``"inf"``, ``"-inf"``."""
        value = asdict(self)
        value["scalars"] = {
            name: scalar if math.isfinite(scalar) else str(scalar) for name, scalar in self.scalars.items()
        }
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Read a line of ``to_line``.

        Raises:
            TypeError, ValueError: the line is not one of ``to_line``.
        """
        value: dict[str, Any] = json.loads(line)
        value["scalars"] = {name: float(scalar) for name, scalar in dict(value["scalars"]).items()}
        return cls(**value)


class LearningCurve:
    """Appends rows, each once. One thread uses it."""

    def __init__(self, folder: Path, *, now: float, log: structlog.stdlib.BoundLogger) -> None:
        """Open the files in ``folder`` at ``now`` (Unix seconds), and repair what a kill left.

        Raises:
            OSError: the folder cannot be written.
        """
        self._log = log
        self._path = folder / METRICS_FILE
        self._marks: dict[str, int] = {}
        self._attempt: int | None = None
        self.newest_step = 0
        """The training step of a trainer's newest row; 0 before the first."""
        self._file = self._path.open("a+b", buffering=0)
        try:
            self._size = _cut_torn_line(self._file.fileno())
            num_events = count_scalar_events(folder / TENSORBOARD_FOLDER, but_for=(WORKERS_PREFIX, VIDEOS_PREFIX))
            self._events = EventFile(folder / TENSORBOARD_FOLDER, now=now)
            for number, row in enumerate(self._read()):
                self._mark(row)
                if number >= num_events:
                    self._write_event(row)
                self._note_attempt(row)
            self._events.flush()
        except BaseException:
            self._file.close()
            raise

    def append(self, rows: Iterable[CurveRow]) -> int:
        """Append the new rows in order; return how many. After that a kill cannot lose them.

        Raises:
            OSError: the disk failed or is full; none of the rows is kept.
        """
        new = [row for row in rows if row.sequence > self._marks.get(row.instance, -1)]
        if not new:
            return 0
        data = b"".join(row.to_line() for row in new)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"{self._path}: only {written} of {len(data)} bytes were written")
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(data)
        for row in new:
            self._mark(row)
        self._append_events(new)
        return len(new)

    def show(self, row: WorkerMetricsRow) -> bool:
        """Write the workers' metrics as one event; return whether the disk took it."""
        try:
            self._events.write_scalars(row.step, row.wall, row.scalars)
            self._events.flush()
        except OSError:
            return False
        return True

    def show_record(self, record: bytes) -> bool:
        """Write a record of ``event_file.gif_record``; return whether the disk took it."""
        try:
            self._events.write_record(record)
            self._events.flush()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._file.close()
        self._events.close()

    def _append_events(self, rows: Sequence[CurveRow]) -> None:
        try:
            for row in rows:
                self._write_event(row)
                self._note_attempt(row)
            self._events.flush()
        except OSError:
            # The rows are safe; the next life of the coordinator writes their events.
            self._log.exception("events_not_written")

    def _write_event(self, row: CurveRow) -> None:
        if self._attempt is not None and row.attempt > self._attempt:
            # A new trainer gang goes on from the last durable version; the steps after it were undone.
            self._events.write_restart(row.step, row.wall)
        self._events.write_scalars(row.step, row.wall, row.scalars)

    def _note_attempt(self, row: CurveRow) -> None:
        """Only trainers have attempts, which count from 1. Rows of other roles change neither attempt nor step."""
        if row.attempt:
            self._attempt, self.newest_step = row.attempt, row.step

    def _mark(self, row: CurveRow) -> None:
        self._marks[row.instance] = max(row.sequence, self._marks.get(row.instance, -1))

    def _read(self) -> Iterator[CurveRow]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield CurveRow.from_line(line)
                except (TypeError, ValueError, KeyError):
                    self._log.warning("row_not_readable", path=str(self._path), line=number)


def _cut_torn_line(descriptor: int) -> int:
    """Cut the incomplete line that a killed writer left; return the remaining size."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(descriptor, end)
    return end
