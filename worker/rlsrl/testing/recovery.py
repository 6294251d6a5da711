"""Recovery times after faults on a cluster: printed, and stored for the report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol

REPORT_VARIABLE = "RLSRL_E2E_REPORT"
"""Environment variable with the file for the rows, one JSON object each. Unset: rows are only printed."""
GOAL = "the goal"


class Recovered(Protocol):
    """Receives the row of a passed test."""

    def __call__(self, fault: str, seconds: float, end: str = GOAL) -> None:
        """See ``record``."""


def record(fault: str, seconds: float, end: str = GOAL) -> None:
    """Print a row of the report's table of faults, and append it to the file of ``REPORT_VARIABLE``.

    Args:
        fault: The fault.
        seconds: From the fault, or from its cure, until all workers train again.
        end: How the run ended: at the goal, or with the named condition and then at the goal.
    """
    row = {"fault": fault, "end": end, "seconds": round(seconds, 1)}
    print(f"{fault:60s} {end:40s} {seconds:6.1f} s")
    if path := os.environ.get(REPORT_VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
