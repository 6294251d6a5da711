"""The folder of one run: its lock, its record and the paths in it.

One controller at a time holds the folder's lock. Its workers inherit the lock's descriptor, so the folder stays locked
until the last process of the run has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import TRAINER
from rlsrl.data.version import Version
from rlsrl.local.controller import RecordsLost
from rlsrl.local.run_names import RECORD, RUNS
from rlsrl.local.run_record import RunRecord
from rlsrl.local.status_file import read_status
from rlsrl.local.worker_report import mapping, number
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.parameters.resumption import Rollback, resumption_text
from rlsrl.parameters.terminal import terminal_record
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.durable import make_folder, write_durably
from rlsrl.runtime.errors import ConfigurationError, damage, did_you_mean
from rlsrl.runtime.ledger import LedgerError, read_pages
from rlsrl.workers.build.run_database import open_run_database

LOCK = "lock"
STATUS = "status.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "curve.png"
FRESH = "--fresh renames the folder and starts a new run"
"""The cure of a folder that cannot be resumed, for the end of an error."""
EXPERIMENT = "experiment.yaml"
"""The user's experiment file."""
CONFIGS = "config"
"""The folder of the roles' configs."""
RESOLVED_EXPERIMENT = "experiment.resolved.yaml"
"""The experiment with the changes of ``--set`` and ``--seed``: the run's identity."""
_BEFORE_RECORD = {LOCK, EXPERIMENT, RESOLVED_EXPERIMENT}

PREDECESSOR_GRACE_SECONDS = 10.0
"""Time for the workers of a killed controller to end; the kernel kills them with it."""


class RunFolderError(Exception):
    """The folder cannot be used. The text says why and what to do."""


class RunFolderBusy(RunFolderError):
    """Another process holds the folder."""


class RunFolder:
    """A locked run folder with the run's record. Use as a context manager, or ``close`` it."""

    def __init__(self, path: Path, lock_fd: int, *, clock: Clock) -> None:
        """Read the record. Use ``open``, which takes the lock."""
        self.path = path
        self.lock_fd = lock_fd
        self.logs = path / "logs"
        """The folder of the processes' output and logs."""
        self.ledger = path / "ledger"
        """The folder of the ledger's pages."""
        self.configs = path / CONFIGS
        """The folder of the roles' configs."""
        self.metrics = path / METRICS
        """The coordinator's metrics, one JSON object a line."""
        self.curve = path / CURVE
        """The plot of the learning curve."""
        self.summary = path / SUMMARY
        """The summary of the run, JSON."""
        self.status = path / STATUS
        """The copy of the coordinator's last status document, for ``rlsrl top``."""
        self._clock = clock
        self._stat = path.stat()
        self._record = read_record(path)

    @classmethod
    def open(cls, path: Path, *, fresh: bool = False, clock: Clock | None = None) -> Self:
        """Lock the folder; create it if it does not exist. Main thread only.

        Waits until the workers of a killed controller have ended, at most ``PREDECESSOR_GRACE_SECONDS``.

        Args:
            fresh: Rename the existing run's folder to the first free ``<name>.<n>``.

        Raises:
            RunFolderBusy: another process has locked it.
            RunFolderError: it contains other files and no run, or a run without its record.
            OSError: it cannot be created or written.
        """
        path = path.absolute()
        make_folder(path)
        if not (fresh and _lacks_record(path)):
            _refuse_foreign_files(path)
        lock_fd = _lock(path)
        try:
            if fresh and ((path / RECORD).exists() or _lacks_record(path)):
                path.rename(_first_free(path))
                make_folder(path)
                moved, lock_fd = lock_fd, _lock(path)
                os.close(moved)
            return cls(path, lock_fd, clock=clock or SystemClock())
        except BaseException:
            os.close(lock_fd)
            raise

    @property
    def record(self) -> RunRecord:
        """The run's record; only if ``holds_run``."""
        assert self._record is not None, "no run here yet"
        return self._record

    @property
    def holds_run(self) -> bool:
        """Whether the folder contains a run."""
        return self._record is not None

    def create(self, *, as_given: bytes, resolved: bytes, package_version: str) -> None:
        """Create a run in the folder, durably: its experiment and its identity.

        The record is written last, so a folder that a killed ``create`` left contains no run.
        """
        for folder in (self.logs, self.ledger, self.configs):
            folder.mkdir(exist_ok=True)
        self.write_experiment(as_given=as_given, resolved=resolved)
        self._save(
            RunRecord(run_uid=uuid.uuid4().hex[:12], created_at=self._clock.time(), package_version=package_version)
        )

    def write_experiment(self, *, as_given: bytes, resolved: bytes) -> None:
        """Write the experiment, durably: the user's file, and the experiment itself."""
        write_durably(self.path / EXPERIMENT, as_given)
        write_durably(self.path / RESOLVED_EXPERIMENT, resolved)

    def begin_life(self, *, modules: Path) -> None:
        """Record the start of a controller. An earlier controller that was killed counts until its last metrics.

        ``modules`` is the folder of the user's own modules.
        """
        try:
            last_sign = self.metrics.stat().st_mtime
        except FileNotFoundError:
            last_sign = 0.0
        record = self.record.begin_life(self._clock.time(), last_sign=last_sign)
        self._save(replace(record, modules=str(modules.absolute())))

    def end_life(self, *, failure: str = "") -> None:
        """Record the end of the controller and all workers, and the worker's failure that caused it, if one did."""
        self._save(self.record.end_life(self._clock.time(), failure=failure))

    def begin_attempt(self) -> int:
        """Return a new attempt number, which no trainer of this run had before. Durable when this returns."""
        self._save(self.record.begin_attempt(self._clock.time()))
        return self.record.attempt

    def end_attempt(self) -> None:
        """Record the end of the current attempt's trainer."""
        self._save(self.record.end_attempt(self._clock.time()))

    def count_restart(self, role: str) -> None:
        """Record a restart of that role."""
        self._save(self.record.count_restart(role))

    def record_rollback(self, rollback: Rollback) -> None:
        """Record that training resumes from an older version than the newest."""
        self._save(self.record.roll_back(rollback))

    @property
    def database(self) -> BlobParameterDB:
        """The run's parameter DB.

        Raises:
            ConfigurationError: see ``open_run_database``.
        """
        return open_run_database(self.path)

    def terminal(self) -> Mapping[str, Any] | None:
        """Return the terminal record; None while the run is unfinished."""
        return terminal_record(self.database, POLICY_NAME)

    def is_finished(self) -> bool:
        """Return whether the run has its terminal record."""
        return self.terminal() is not None

    def trained(self) -> int:
        """Return the transitions that the trainers' ledger pages count as trained. Damaged pages count nothing."""
        with contextlib.suppress(LedgerError):
            return sum(page.counters["trained"] for page in read_pages(self.ledger) if page.role == TRAINER)
        return 0

    def resumption(self, version: Version | None = None) -> str | None:
        """Return from which version the next trainer resumes and what is lost, in words; None if that is unknown.

        ``version``: an intact version with a state; None: the newest one with a state, which is not verified, if
        versions are in this folder. A bucket is not asked then: the controller must not wait for it.
        """
        if version is None and not (self.path / PARAMETERS).is_dir():
            return None
        with contextlib.suppress(OSError, ConfigurationError):
            for info in reversed(self.database.versions(POLICY_NAME)):
                if info.has_state if version is None else info.version == version:
                    reached = mapping(self._last_status(), "totals")
                    return resumption_text(
                        info.version,
                        env_steps=number(info.metadata, "env_steps"),
                        reached=number(reached, "train_steps"),
                        reached_env_steps=number(reached, "env_steps"),
                    )
        return None

    def check(self) -> None:
        """Raise ``RecordsLost`` if the folder was removed or moved; also if another one has its name now."""
        try:
            if os.path.samestat(self.path.stat(), self._stat):
                return
        except FileNotFoundError:
            pass
        raise RecordsLost(f"{self.path} was removed or moved while the run trained; all its processes were killed")

    def close(self) -> None:
        """Unlock the folder. It stays locked while a worker lives."""
        os.close(self.lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _last_status(self) -> Mapping[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            return None if (found := read_status(self.status)) is None else found[0]
        return None

    def _save(self, record: RunRecord) -> None:
        write_durably(self.path / RECORD, json.dumps(record.to_json(), indent=2).encode())
        self._record = record


def find_run(run: Path, *marks: str) -> Path:
    """Return the folder ``run``, or the run of that name in runs/. A run folder contains one of the files ``marks``.

    Raises:
        RunFolderError: the run does not exist; with the nearest match.
    """
    for folder in (run, RUNS / run):
        if any((folder / mark).exists() for mark in marks):
            return folder
    if run.exists():
        problem = f"{run} is not a run folder: it has no {' or '.join(marks)}"
    else:
        problem = f"run {run} does not exist, neither here nor in {RUNS}/"
    raise RunFolderError(
        problem + did_you_mean(run.name, [path.parent.name for mark in marks for path in RUNS.glob(f"*/{mark}")])
    )


def read_record(path: Path) -> RunRecord | None:
    """Return the record of the run in the folder, locked or not; None without a run.

    Raises:
        RunFolderError: the record is invalid.
    """
    try:
        text = (path / RECORD).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return RunRecord.from_json(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path / RECORD} is damaged ({damage(error)}); {FRESH}") from error


def is_running(path: Path) -> bool:
    """Return whether processes of the run live, by its lock: a controller, or workers that outlive it for a moment.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, released at once: a controller that starts at this moment waits for it (`_flock`).
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _refuse_foreign_files(path: Path) -> None:
    """Raise unless the folder is empty, contains a run or the rest of a killed ``create``."""
    if _lacks_record(path):
        raise RunFolderError(f"{path / RECORD} is missing, but the folder holds a run; restore the file; {FRESH}")
    foreign = _foreign_entries(path)
    if foreign and not (path / RECORD).exists():
        raise RunFolderError(
            f"{path} contains other files and no run ({', '.join(foreign[:3])}); give another folder with --run-dir"
        )


def _lacks_record(path: Path) -> bool:
    """Return whether the folder holds a run that has started and whose record is gone."""
    return (path / RESOLVED_EXPERIMENT).exists() and not (path / RECORD).exists() and bool(_foreign_entries(path))


def _foreign_entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not _is_ours(entry))


def _is_ours(entry: Path) -> bool:
    """Return whether a killed ``create`` may have left the entry; of folders only empty ones."""
    if entry.is_dir():
        return next(entry.iterdir(), None) is None
    return entry.name in _BEFORE_RECORD or entry.name.endswith(".tmp")


def _first_free(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _lock(path: Path) -> int:
    """Return a locked descriptor of the folder's lock file, and write our pid into it.

    Raises:
        RunFolderBusy: another process holds the lock.
    """
    while True:
        lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _flock(path, lock_fd)
            # --fresh may have renamed the folder between opening and locking.
            if _is_same_file(path / LOCK, lock_fd):
                os.ftruncate(lock_fd, 0)
                os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
                return lock_fd
        except BaseException:
            os.close(lock_fd)
            raise
        os.close(lock_fd)
        make_folder(path)


def _flock(path: Path, lock_fd: int) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
        if _is_alive(holder):
            raise RunFolderBusy(
                f"process {holder} is running {path}; wait for it, stop it, or give another folder with --run-dir"
            ) from None
    else:
        return
    try:
        with _alarm(PREDECESSOR_GRACE_SECONDS):
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
    except TimeoutError:
        raise RunFolderBusy(
            f"process {holder}, which ran {path}, has ended, but its workers still run; "
            f"`fuser {path / LOCK}` lists them"
        ) from None


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return True  # It has the lock and has not written its pid yet.
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_same_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError out of a blocking system call in the body when the time is up. Main thread only."""

    def expire(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
