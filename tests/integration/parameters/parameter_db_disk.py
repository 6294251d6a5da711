"""Writes to a filesystem parameter database on disks that are full or fail. Run by test_parameter_db_disk.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from parameter_db_crashes import NEW, POLICY, STEPS, check_whole, leftovers, notes, push, state

from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB


def fill_a_small_disk(folder: Path) -> None:
    """Mount a small file system and push until it is full. The process needs its own mount namespace."""
    root = folder / "disk"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", root], check=True)
    db = FilesystemParameterDB(root)
    step = 0
    try:
        while True:
            step += 1
            push(db, Version(1, step))
            db.save_state(POLICY, state(Version(1, step)))
    except OSError as error:
        print(f"refused: {error.strerror} after {step}")
    assert leftovers(root) == []
    last = check_whole(root).get(POLICY).version
    assert last.step >= step - 1
    assert db.prune(POLICY, keep_last=1) != []
    for _ in range(2):
        push(db, Version(1, step))
        db.save_state(POLICY, state(Version(1, step)))
    assert check_whole(root).load_state(POLICY).version == Version(1, step)


def meet_errors(root: Path, num_rounds: int) -> None:
    """Take the steps repeatedly while system calls fail occasionally; repeat failed steps."""
    refusals: Counter[str] = Counter()
    db = FilesystemParameterDB(root)
    newest = Version(0, 0)

    def until_done(take: Callable[[], object], version: Version) -> None:
        while True:
            try:
                take()
            except OSError as error:
                refusals[error.strerror] += 1
                found = check_whole(root)
                assert not found.policies() or found.get(POLICY).version in (newest, version)
            else:
                return

    for step in range(1, num_rounds + 1):
        version = Version(1, step)
        for take in (
            lambda: push(db, version, "milestone"),
            lambda: db.save_state(POLICY, state(version)),
            lambda: db.annotate(POLICY, version, {"a": version.step}),
            lambda: db.prune(POLICY, keep_last=2),
        ):
            until_done(take, version)
        newest = version
        assert db.get(POLICY).version == db.get(POLICY, "milestone").version == version
        assert notes(db.versions(POLICY)[-1]) == {"a": step}
        assert db.load_state(POLICY).version == version
    next_writer = FilesystemParameterDB(root)
    until_done(lambda: push(next_writer, Version(2, 1)), Version(2, 1))
    assert check_whole(root).get(POLICY).version == Version(2, 1)
    text = json.dumps(refusals).encode()
    while True:  # This write may be the one that fails.
        with contextlib.suppress(OSError):
            os.write(1, text)
            return


def take_the_steps(root: Path) -> None:
    """Do everything that a writer does, in a new store; print a line after each step."""
    db = FilesystemParameterDB(root)
    push(db, Version(1, 1), "best")
    os.write(1, b"done")
    for take, _ in STEPS:
        take(db)
        os.write(1, b"done")
    push(db, NEW, "best")
    os.write(1, b"done")


if __name__ == "__main__":
    mode, target = sys.argv[1], Path(sys.argv[2])
    if mode == "small":
        fill_a_small_disk(target)
    elif mode == "errors":
        meet_errors(target, int(sys.argv[3]))
    else:
        take_the_steps(target)
