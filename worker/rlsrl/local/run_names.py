"""Names by which runs on this machine are found. `rlsrl doctor` and kubectl's plugin need them without any extra."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
"""The default parent of run folders."""
RECORD = "controller.json"
"""The controller's record in a run folder."""
