"""The run folder's copy of the coordinator's status page, by which ``rlsrl top`` shows a run of this machine.

The page itself is for those who have the run's token, which is in no file. What it says of workers is no secret.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StatusFile:
    """Writes the copy. One thread writes; readers meet a whole page, always."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")

    def write(self, status: Mapping[str, Any]) -> None:
        """Put the page in place of the one before. A disk that does not take it costs the copy, and no run."""
        try:
            # Renamed, not flushed: after a power loss nobody asks what workers did just then.
            self._temporary.write_text(json.dumps(status))
            self._temporary.replace(self._path)
        except OSError:
            return

    def remove(self) -> None:
        """Take away what an earlier life of the run left.

        Raises:
            OSError: that is not possible.
        """
        self._path.unlink(missing_ok=True)


def read_status(path: Path) -> tuple[Mapping[str, Any], float] | None:
    """The page and its age in seconds; None if there is none.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no status page.
    """
    try:
        with path.open(encoding="utf-8") as file:
            page = json.load(file)
            written_at = path.stat().st_mtime
    except FileNotFoundError:
        return None
    if not isinstance(page, dict):
        raise ValueError(f"{path} is no status page")
    return page, max(0.0, time.time() - written_at)
