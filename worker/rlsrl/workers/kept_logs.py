"""The last megabyte that the workers at each index printed: files of the coordinator, which outlive the workers' pods.

A log is two files. When the newer file reaches ``KEPT_BYTES``, it replaces the older one. So the last megabyte is
always there, and an index takes about two megabytes at most. Without a volume, these files end with the coordinator's
pod: ``LogCopies`` keeps copies in the bucket.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.coordination import WorkerLog

if TYPE_CHECKING:
    from rlsrl.parameters.objects import Objects

LOGS_FOLDER = "logs"
"""The folder of logs in a run folder, on a volume or in a bucket."""
KEPT_BYTES = 1024 * 1024
"""Bytes of each log that are always kept. A log takes at most twice as many, and what one heartbeat brings."""
_SUFFIX = ".out"
_OLDER_SUFFIX = ".out.old"
_FILE_NAME = re.compile(rf"([a-z]+)-(\d{{1,9}}){re.escape(_SUFFIX)}")


@dataclass(frozen=True, order=True, slots=True)
class LogName:
    """The role and the index whose workers share a log."""

    role: str
    index: int

    @property
    def file_name(self) -> str:
        """The name of the newer file, and of the object in a bucket."""
        return f"{self.role}-{self.index}{_SUFFIX}"


class KeptLogs:
    """Appends to the logs and reads them. Thread-safe."""

    def __init__(self, folder: Path, *, log: structlog.stdlib.BoundLogger) -> None:
        """Use the logs in ``folder``. The first text creates the folder."""
        self._folder = folder
        self._log = log
        self._lock = threading.Lock()
        self._newest: dict[LogName, tuple[str, int]] = {}
        """The process and the sequence of each log's last part."""
        self._changed: set[LogName] = set()
        self._is_failing = False

    def append(self, name: LogName, process: str, parts: Sequence[pb.LogPart]) -> None:
        """Append the parts of a process that are new, after an empty line if an earlier process has used the log.

        If the disk fails, the parts are lost.
        """
        known, newest = self._newest.get(name, ("", -1))
        begins = known != process
        new = [part for part in parts if begins or part.sequence > newest]
        if not new:
            return
        self._newest[name] = (process, new[-1].sequence)
        try:
            with self._lock:
                self._write(name, b"".join(part.text for part in new), begins=begins)
        except OSError as error:
            if not self._is_failing:  # Once, because this line is text for the coordinator's own log.
                self._log.warning("log_not_kept", log=name.file_name, error=str(error))
            self._is_failing = True
        else:
            self._is_failing = False

    def names(self) -> list[LogName]:
        """Return the names of the logs.

        Raises:
            OSError: the disk failed.
        """
        return names_in(os.listdir(self._folder)) if self._folder.exists() else []

    def read(self, name: LogName) -> bytes:
        """Return the last ``KEPT_BYTES`` of the log, from the beginning of a line; nothing if there is no log.

        Raises:
            OSError: the disk failed.
        """
        with self._lock:
            text = _content(self._older(name)) + _content(self._newer(name))
        return _end_of(text)

    def restore(self, name: LogName, text: bytes) -> None:
        """Let the log begin with text that an earlier coordinator kept elsewhere, unless there is an older file.

        Raises:
            OSError: the disk failed.
        """
        with self._lock:
            if not self._older(name).exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._older(name).write_bytes(text)
                self._newer(name).touch()

    def take_changed(self) -> set[LogName]:
        """Return the names of the logs with new text since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def mark_changed(self, names: Iterable[LogName]) -> None:
        """Let the next ``take_changed`` return these names, too."""
        with self._lock:
            self._changed.update(names)

    def _write(self, name: LogName, text: bytes, *, begins: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        newer = self._newer(name)
        with newer.open("ab") as file:
            if begins and (file.tell() or self._older(name).exists()):
                file.write(b"\n")
            file.write(text)
            size = file.tell()
        if size >= KEPT_BYTES:
            newer.replace(self._older(name))
            newer.touch()
        self._changed.add(name)

    def _newer(self, name: LogName) -> Path:
        return self._folder / name.file_name

    def _older(self, name: LogName) -> Path:
        return self._newer(name).with_suffix(_OLDER_SUFFIX)


class LogCopies:
    """Copies of the kept logs in the bucket of a run without a volume: an object for each log."""

    def __init__(self, logs: KeptLogs, objects: Objects, *, log: structlog.stdlib.BoundLogger) -> None:
        self._logs = logs
        self._objects = objects
        self._log = log

    def restore(self) -> None:
        """Let the logs begin with those of the coordinator before. If the store fails, that text is lost."""
        try:
            for each in read_copies(self._objects):
                self._logs.restore(LogName(each.role, each.index), each.text)
        except OSError as error:
            self._log.warning("logs_not_restored", error=str(error))

    def write(self) -> None:
        """Write the copies of the logs with new text. The first failure ends this; the next call writes the rest."""
        changed = sorted(self._logs.take_changed())
        for number, name in enumerate(changed):
            try:
                self._objects.write(f"{LOGS_FOLDER}/{name.file_name}", self._logs.read(name))
            except OSError as error:
                self._log.warning("logs_not_copied", error=str(error))
                self._logs.mark_changed(changed[number:])
                return


def read_copies(objects: Objects, *, role: str | None = None, index: int | None = None) -> Iterator[WorkerLog]:
    """Yield the copies in a bucket, by role and index. ``role`` and ``index`` choose some of them.

    Raises:
        OSError: the store failed.
    """
    names = names_in(listed.key.rpartition("/")[2] for listed in objects.listed(LOGS_FOLDER))
    for name in chosen(names, role=role, index=index):
        text = objects.read(f"{LOGS_FOLDER}/{name.file_name}")
        yield WorkerLog(role=name.role, index=name.index, text=text)


def names_in(file_names: Iterable[str]) -> list[LogName]:
    """Return the logs among files. Other files are ignored."""
    found = map(_FILE_NAME.fullmatch, file_names)
    return [LogName(match[1], int(match[2])) for match in found if match is not None]


def chosen(names: Iterable[LogName], *, role: str | None, index: int | None) -> list[LogName]:
    """Return the names with that role and that index, sorted; None: any."""
    return sorted(name for name in names if role in (None, name.role) and index in (None, name.index))


def last_lines(text: bytes, number: int | None) -> bytes:
    """Return the last lines of a text, without the end of the last one; None: all lines."""
    lines = text.removesuffix(b"\n").split(b"\n")
    return b"\n".join(lines if number is None else lines[max(0, len(lines) - number) :])


def _end_of(text: bytes) -> bytes:
    """Return the last ``KEPT_BYTES`` of a text, without a line whose beginning is cut."""
    if len(text) <= KEPT_BYTES:
        return text
    end = text[-KEPT_BYTES - 1 :]
    _, newline, whole_lines = end.partition(b"\n")
    return whole_lines if newline else end[1:]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
