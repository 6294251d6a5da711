"""The folder of one run: who may use it, and what it knows of the run.

One controller at a time holds the folder's lock. Its workers inherit the lock's descriptor, so the folder is free only
once the last process of the run is gone.
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

from rlsrl.api.resolve import POLICY_NAME
from rlsrl.local.run_record import RunRecord
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.parameters.terminal import terminal_record
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.durable import make_folder, write_durably
from rlsrl.workers.build.run_database import open_run_database

RUNS = Path("runs")
"""Where run folders are, unless told otherwise."""

LOCK = "lock"
RECORD = "controller.json"
STATUS = "status.json"
EXPERIMENT = "experiment.yaml"
"""The file the user gave."""
RESOLVED_EXPERIMENT = "experiment.resolved.yaml"
"""The experiment as it runs: with what ``--set`` and ``--seed`` changed. The run's identity."""
_BEFORE_RECORD = {LOCK, EXPERIMENT, RESOLVED_EXPERIMENT}

PREDECESSOR_GRACE_SECONDS = 10.0
"""Time for the workers of a killed controller to be gone; the kernel kills them with it."""


class RunFolderError(Exception):
    """The folder cannot be used; the text says why and what can be done."""


class RunFolderBusy(RunFolderError):  # noqa: N818 - named for the fact
    """Another process holds the folder."""


class RunFolder:
    """A locked run folder with the run's record. Use it as a context manager, or ``close`` it."""

    def __init__(self, path: Path, lock_fd: int, *, clock: Clock) -> None:
        """For ``open``, which takes the lock."""
        self.path = path
        self.lock_fd = lock_fd
        self._clock = clock
        self._record = read_record(path)

    @classmethod
    def open(cls, path: Path, *, fresh: bool = False, clock: Clock | None = None) -> Self:
        """Lock the folder; make it if it is not there. Main thread only.

        Waits for the workers of a killed controller to be gone, at most ``PREDECESSOR_GRACE_SECONDS``.

        Args:
            fresh: Move the run that is there aside, to the first free ``<name>.<n>``.

        Raises:
            RunFolderBusy: another process holds it.
            RunFolderError: it holds something that is no run.
            OSError: it cannot be made or written.
        """
        path = path.absolute()
        make_folder(path)
        _refuse_strangers(path)
        lock_fd = _lock(path)
        try:
            if fresh and (path / RECORD).exists():
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
        """What is known of the run; only once there is one."""
        assert self._record is not None, "no run here yet"  # noqa: S101 - an invariant of our own
        return self._record

    @property
    def holds_run(self) -> bool:
        """Whether a run was created here."""
        return self._record is not None

    def create(self, *, as_given: bytes, resolved: bytes, package_version: str) -> None:
        """Make the folder a run's: store its experiment and give it an identity, durably.

        The record comes last: a folder without one holds no run, whatever a killed ``create`` left.
        """
        for folder in (self.logs, self.ledger, self.configs):
            folder.mkdir(exist_ok=True)
        write_durably(self.path / EXPERIMENT, as_given)
        write_durably(self.path / RESOLVED_EXPERIMENT, resolved)
        self._save(
            RunRecord(run_uid=uuid.uuid4().hex[:12], created_at=self._clock.time(), package_version=package_version)
        )

    @property
    def logs(self) -> Path:
        """What the processes print and log."""
        return self.path / "logs"

    @property
    def ledger(self) -> Path:
        """The ledger's pages."""
        return self.path / "ledger"

    @property
    def configs(self) -> Path:
        """Each role's config."""
        return self.path / "config"

    @property
    def metrics(self) -> Path:
        """The coordinator's record of the metrics, a JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """The picture of the learning curve."""
        return self.path / "curve.png"

    @property
    def summary(self) -> Path:
        """What came of the run."""
        return self.path / "summary.json"

    @property
    def status(self) -> Path:
        """What its workers do, or did last: the coordinator's page, for ``rlsrl top``."""
        return self.path / STATUS

    def begin_life(self, *, modules: Path) -> None:
        """A controller starts to run the run. A life that was killed counts up to its last metrics.

        ``modules`` is where the user's own modules are.
        """
        try:
            last_sign = self.metrics.stat().st_mtime
        except FileNotFoundError:
            last_sign = 0.0
        record = self.record.begin_life(self._clock.time(), last_sign=last_sign)
        self._save(replace(record, modules=str(modules.absolute())))

    def end_life(self) -> None:
        """The controller has ended everything."""
        self._save(self.record.end_life(self._clock.time()))

    def begin_attempt(self) -> int:
        """A number that no trainer of this run had before; durable when this returns."""
        self._save(self.record.begin_attempt(self._clock.time()))
        return self.record.attempt

    def end_attempt(self) -> None:
        """The trainer of the current attempt has ended."""
        self._save(self.record.end_attempt(self._clock.time()))

    def count_restart(self, role: str) -> None:
        """A process of that role is started again."""
        self._save(self.record.count_restart(role))

    @property
    def database(self) -> ParameterDB:
        """The run's versions.

        Raises:
            ConfigurationError: see ``open_run_database``.
        """
        return open_run_database(self.path)

    def terminal(self) -> Mapping[str, Any] | None:
        """The terminal record; None while the run is unfinished."""
        return terminal_record(self.database, POLICY_NAME)

    def is_finished(self) -> bool:
        """Whether the run has its terminal record."""
        return self.terminal() is not None

    def close(self) -> None:
        """Let go of the folder; it is free for others once no worker holds it either."""
        os.close(self.lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _save(self, record: RunRecord) -> None:
        write_durably(self.path / RECORD, json.dumps(record.to_json(), indent=2).encode())
        self._record = record


def read_record(path: Path) -> RunRecord | None:
    """What is known of the run in the folder, which may be another process's; None if no run was created there.

    Raises:
        RunFolderError: the record is not what rlsrl writes.
    """
    try:
        text = (path / RECORD).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return RunRecord.from_json(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path / RECORD} is not what rlsrl wrote ({error!r}); --fresh moves the run aside"
        ) from error


def is_running(path: Path) -> bool:
    """Whether somebody runs the run in the folder, by its lock: a controller, or workers that outlive it for a moment.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared and let go of at once: a controller that starts this very moment waits for it (`_flock`).
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _refuse_strangers(path: Path) -> None:
    """A folder of something else is left as it is."""
    strangers = sorted(entry.name for entry in path.iterdir() if not _is_ours(entry))
    if strangers and not (path / RECORD).exists():
        raise RunFolderError(
            f"{path} holds no run, yet is not empty ({', '.join(strangers[:3])}); give another folder by --run-dir"
        )


def _is_ours(entry: Path) -> bool:
    """Whether a killed ``create`` may have left it; folders count only while empty."""
    if entry.is_dir():
        return next(entry.iterdir(), None) is None
    return entry.name in _BEFORE_RECORD or entry.name.endswith(".tmp")


def _first_free(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _lock(path: Path) -> int:
    """A locked descriptor of the folder's lock file, which names our process.

    Raises:
        RunFolderBusy: another process holds it.
    """
    while True:
        lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _flock(path, lock_fd)
            # The folder may have been moved aside by --fresh between opening and locking.
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
                f"process {holder} is running {path}; wait for it, stop it, or give another folder by --run-dir"
            ) from None
    else:
        return
    try:
        with _alarm(PREDECESSOR_GRACE_SECONDS):
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
    except TimeoutError:
        raise RunFolderBusy(
            f"process {holder}, which ran {path}, is gone, but workers of it are still there; "
            f"`fuser {path / LOCK}` lists them"
        ) from None


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return True  # It has the lock and has not yet written its number.
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
