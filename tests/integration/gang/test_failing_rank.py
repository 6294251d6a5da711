"""A rank that fails says why where its launcher does, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import rlsrl.workers.__main__ as workers
from rlsrl.workers import gang_launcher
def fail():
    raise ArithmeticError("the training thread failed")
workers.main = fail
sys.argv = ["gang_launcher", "--ranks", "1"]
sys.exit(gang_launcher.main())
"""


def test_a_rank_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "ArithmeticError: the training thread failed" in done.stderr
    assert list(tmp_path.iterdir()) == []
