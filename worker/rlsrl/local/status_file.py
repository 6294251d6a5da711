"""The run folder's copy of the coordinator's status document, which ``rlsrl top`` reads.

Reading the document from the coordinator needs the run's token, which is in no file. Its contents are not secret.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StatusFile:
    """Writes the copy atomically, from one thread. Readers always see a whole document."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")

    def write(self, status: Mapping[str, Any]) -> None:
        """Replace the copy. If the disk fails, the old copy stays and the run goes on."""
        try:
            # No flush: after a power loss the status is worthless.
            self._temporary.write_text(json.dumps(status))
            self._temporary.replace(self._path)
        except OSError:
            return

    def remove(self) -> None:
        """Remove the copy of an earlier life of the run.

        Raises:
            OSError: the file cannot be removed.
        """
        self._path.unlink(missing_ok=True)


def read_status(path: Path) -> tuple[Mapping[str, Any], float] | None:
    """Return the document and its age in seconds; None if the file does not exist.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a status document.
    """
    try:
        with path.open(encoding="utf-8") as file:
            document = json.load(file)
            written_at = path.stat().st_mtime
    except FileNotFoundError:
        return None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a status document")
    return document, max(0.0, time.time() - written_at)
