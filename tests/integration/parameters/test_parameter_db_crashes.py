"""A filesystem parameter database survives the death of its writer at any point, and a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("parameter_db_crashes.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder in memory if possible: a kill loses no data that the kernel has, so a disk would only slow
    hundreds of flushes down.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def crash(*arguments: str | Path) -> str:
    """Run the script, which raises if a file is not whole; return its output."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_kill_before_any_system_call_leaves_whole_versions_and_the_next_writer_continues(
    folder: Path,
) -> None:
    """Kill the writer at each system call of a push with tags, a state, an annotation, a tag and a prune."""
    num_kills = int(crash("everywhere", folder).split()[0])
    assert num_kills > 80


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_whole_versions_that_never_move_back(folder: Path, seed: int) -> None:
    assert crash("random", folder, str(seed), "32").startswith("32 kills")


def test_a_full_disk_raises_and_damages_nothing(folder: Path) -> None:
    """RLIMIT_FSIZE ends writes in the middle, as a full disk does."""
    refusals = crash("full", folder).splitlines()
    assert refusals == ["refused: File too large"] * 10
