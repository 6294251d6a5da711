"""Ranks are forks of their launcher. A failing rank reports its error in the launcher's output and leaves no files.
Ranks can use a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import rlsrl.workers.__main__ as workers
from rlsrl.workers import gang_launcher
def rank():
    {}
workers.main = rank
sys.argv = ["gang_launcher", "--ranks", "1"]
sys.exit(gang_launcher.main())
"""
FAILS = 'raise ArithmeticError("the training thread failed")'
ASKS = "import torch; print('forked after CUDA was asked:', torch.cuda._is_in_bad_fork()); return 0"


def launch(what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a gang of one rank with this body."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(what)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )


def test_a_failing_rank_prints_its_error_and_leaves_no_files(tmp_path: Path) -> None:
    done = launch(FAILS, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "ArithmeticError: the training thread failed" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "code"),
    [("return 2", 2), ("return 4", 4), ("return 75", 75), ("import os; os.kill(os.getpid(), 9)", 137)],
    ids=["configuration error", "version not stored", "another process not reached", "killed"],
)
def test_the_launcher_ends_as_its_rank_did(tmp_path: Path, what: str, code: int) -> None:
    done = launch(what, tmp_path)
    assert done.returncode == code, done.stderr


def test_a_rank_may_use_a_gpu(tmp_path: Path) -> None:
    """torch refuses CUDA in a fork of a process that has used it."""
    done = launch(ASKS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "forked after CUDA was asked: False" in done.stdout
