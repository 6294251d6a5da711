"""Kills writers of a filesystem parameter database and checks the remaining files. Run by test_parameter_db_crashes.py.

It is a separate process because it forks children that are killed: it has one thread and no open sockets.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import Parameters, TrainerState, VersionInfo

POLICY = "default"
CHANGES = {"open", "write", "fsync", "replace", "unlink", "mkdir", "flock", "close"}
"""The system calls before each of which a writer is killed."""


def parameters(version: Version) -> Parameters:
    vector = np.full(3000, version.attempt * 1000 + version.step, dtype=np.float32)
    return Parameters(version=version, vector=vector, layout="layout", statistics={"mean": np.full(3, version.step)})


def state(version: Version) -> TrainerState:
    moments = np.full(6000, version.step, dtype=np.float32)
    return TrainerState(version=version, arrays={"m": moments}, values={"step": version.step})


def push(db: FilesystemParameterDB, version: Version, *tags: str, with_state: bool = False) -> None:
    metadata = {"env_steps": version.step}
    db.push(POLICY, parameters(version), tags=tags, metadata=metadata, state=state(version) if with_state else None)


def in_child(body: Callable[[], None]) -> int:
    """Run ``body`` in a fork; return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def before_each_change(hook: Callable[[], None]) -> None:
    """From now on, call ``hook`` before each system call that changes a file."""

    def profile(_frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__module__ in ("posix", "fcntl") and function.__name__ in CHANGES:
            hook()

    sys.setprofile(profile)


def check_whole(root: Path) -> FilesystemParameterDB:
    """Check that all stored files are whole and belong together."""
    db = FilesystemParameterDB(root)
    stems = {path.name.partition(".")[0] for path in (root / POLICY / "versions").glob("[0-9]*.safetensors")}
    infos = db.versions(POLICY)
    assert len(infos) == len(stems), (stems, infos)
    for info in infos:
        expected = parameters(info.version)
        there = db.get(POLICY, info.version)
        np.testing.assert_array_equal(there.vector, expected.vector)
        np.testing.assert_array_equal(there.statistics["mean"], expected.statistics["mean"])
        assert info.metadata["env_steps"] == info.version.step
        if info.has_state:
            saved = db.load_state(POLICY, info.version)
            assert saved.values == {"step": info.version.step}
            assert (saved.arrays["m"] == info.version.step).all()
        for tag in info.tags:
            assert db.get(POLICY, tag).version == info.version
    for path in (root / POLICY / "tags").glob("[a-z]*"):
        assert db.get(POLICY, path.stem) is not None
    return db


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_file()]


# -- a kill before every single system call ---------------------------------------------------------------------------

OLD, NEW = Version(1, 2), Version(2, 3)


def prepare(root: Path) -> None:
    """Store the previous gang's two versions, both with states, the older one tagged."""
    db = FilesystemParameterDB(root)
    push(db, Version(1, 1), "best")
    push(db, OLD)
    for version in (Version(1, 1), OLD):
        db.save_state(POLICY, state(version))
        db.annotate(POLICY, version, {"note": "old"})


STEPS: list[tuple[Callable[[FilesystemParameterDB], object], Callable[[FilesystemParameterDB], bool]]] = [
    (
        lambda db: push(db, NEW, "best", "milestone", with_state=True),
        lambda db: db.get(POLICY).version == db.load_state(POLICY).version == NEW and is_tagged(db),
    ),
    (lambda db: db.save_state(POLICY, state(NEW)), lambda db: db.load_state(POLICY).version == NEW),
    (
        lambda db: db.annotate(POLICY, NEW, {"a": 1, "b": 2}),
        lambda db: notes(db.versions(POLICY)[-1]) == {"a": 1, "b": 2},
    ),
    (lambda db: db.tag(POLICY, NEW, "extra"), lambda db: db.get(POLICY, "extra").version == NEW),
    (lambda db: db.prune(POLICY, keep_last=1), lambda db: [info.version for info in db.versions(POLICY)] == [NEW]),
]
"""What a writer does, and how one sees that it was done."""


def is_tagged(db: FilesystemParameterDB) -> bool:
    return db.get(POLICY, "best").version == db.get(POLICY, "milestone").version == NEW


def notes(info: VersionInfo) -> dict[str, Any]:
    return {key: value for key, value in info.metadata.items() if key != "env_steps"}


def kill_before_call(number: int, root: Path, done: int) -> None:
    """Take the steps and die before the given system call. Write one byte to ``done`` after each step."""
    countdown = iter(range(number))

    def hook() -> None:
        if next(countdown, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    db = FilesystemParameterDB(root)
    before_each_change(hook)
    for take, _ in STEPS:
        take(db)
        os.write(done, b".")


def kill_everywhere(folder: Path) -> None:
    template = folder / "template"
    prepare(template)
    for number in range(1, 10_000):
        root = folder / "store"
        shutil.copytree(template, root)
        reading, writing = os.pipe()
        status = in_child(lambda: kill_before_call(number, root, writing))
        os.close(writing)
        num_done = len(os.read(reading, 100))
        os.close(reading)
        db = check_whole(root)
        assert db.get(POLICY).version in (OLD, NEW)
        assert db.load_state(POLICY).version == db.get(POLICY).version, "training can resume from the stored version"
        assert all(was_done(db) for _, was_done in STEPS[:num_done]), (number, num_done)
        for info in db.versions(POLICY):
            assert notes(info) in ([{}, {"a": 1, "b": 2}] if info.version == NEW else [{"note": "old"}])
        if status == 0:
            assert num_done == len(STEPS)
            print(f"{number - 1} kills")
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        for take, was_done in STEPS:
            take(db)
            assert was_done(db), number
        assert leftovers(root) == []
        shutil.rmtree(root)


# -- a kill from outside at random moments ----------------------------------------------------------------------------


def work(root: Path, attempt: int, progress: int) -> None:
    """Push, save, tag, annotate and prune until killed. Write one byte to ``progress`` before each system call."""
    db = FilesystemParameterDB(root)
    before_each_change(lambda: os.write(progress, b"."))
    step = 0
    while True:
        step += 1
        version = Version(attempt, step)
        push(db, version, *(["milestone"] if step % 3 == 0 else []), with_state=True)
        db.save_state(POLICY, state(version))
        db.annotate(POLICY, version, {"return_mean": step})
        db.tag(POLICY, version, f"attempt-{attempt}")
        db.prune(POLICY, keep_last=2)


def kill_at_random(folder: Path, seed: int, num_kills: int) -> None:
    rng = random.Random(seed)
    root = folder / "store"
    newest = Version(0, 0)
    for attempt in range(1, num_kills + 1):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            work(root, attempt, writing)
        os.close(writing)
        num_calls = rng.randrange(40, 300)
        while num_calls > 0:
            num_calls -= len(os.read(reading, num_calls))
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        os.close(reading)
        db = check_whole(root)
        there = db.get(POLICY).version
        assert there >= newest, (there, newest)
        assert db.load_state(POLICY).version == there
        newest = there
    print(f"{num_kills} kills, newest {newest}")


# -- a full disk ------------------------------------------------------------------------------------------------------


def limited(root: Path, limit: int) -> None:
    """Limit every file of this process to ``limit`` bytes; a write may end in the middle."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    db = FilesystemParameterDB(root)
    before = [info.version for info in db.versions(POLICY)]
    for take in (lambda: db.save_state(POLICY, state(OLD)), lambda: push(db, NEW)):
        try:
            take()
        except OSError as error:
            print(f"refused: {error.strerror}")
        else:
            raise AssertionError(f"wrote more than {limit} bytes")
    assert [info.version for info in db.versions(POLICY)] == before
    assert leftovers(root) == []


def fill_the_disk(folder: Path) -> None:
    for limit in (0, 10, 200, 5000, 12_000):
        root = folder / str(limit)
        prepare(root)
        assert in_child(lambda: limited(root, limit)) == 0
        db = check_whole(root)
        assert db.load_state(POLICY).version == OLD
        push(db, NEW)
        assert db.get(POLICY).version == NEW


if __name__ == "__main__":
    mode, target = sys.argv[1], Path(sys.argv[2])
    if mode == "everywhere":
        kill_everywhere(target)
    elif mode == "random":
        kill_at_random(target, int(sys.argv[3]), int(sys.argv[4]))
    else:
        fill_the_disk(target)
