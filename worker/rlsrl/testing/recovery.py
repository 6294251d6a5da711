"""What was done to a run on a cluster, how it ended, and how long that took: printed, and kept for the report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

REPORT_VARIABLE = "RLSRL_E2E_REPORT"
"""Environment variable with the file to which rows are appended, a JSON object each; unset: they are only printed."""
GOAL = "the goal"


@dataclass(frozen=True, kw_only=True)
class RecoveryTime:
    """One row of the table of faults."""

    fault: str
    end: str
    """What the run came to: the goal, or the named condition and then the goal."""
    seconds: float
    """From the fault to training on with everybody there; or from the cure, where there had to be one."""


class Recovered(Protocol):
    """Hears of a row that came out as it should."""

    def __call__(self, fault: str, seconds: float, end: str = GOAL) -> None:
        """See ``RecoveryTime``."""


def record(fault: str, seconds: float, end: str = GOAL) -> None:
    """Print a row, and keep it where the environment says."""
    row = RecoveryTime(fault=fault, end=end, seconds=round(seconds, 1))
    print(f"{row.fault:60s} {row.end:40s} {row.seconds:6.1f} s")
    if path := os.environ.get(REPORT_VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
