"""Reads a learning curve bit by bit, for those who look at a run: what its file has got since they asked last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_BYTES = 1024 * 1024
"""Bytes of the file that are read for one answer."""


def rows_after(path: Path, after: int, file_id: str = "", *, run_uid: str) -> dict[str, Any]:
    """Return rows of the learning curve from the byte ``after`` of its file on, and where to go on.

    The answer has ``rows``, each with ``step``, ``role`` and the ``scalars`` that are numbers; ``next`` and ``file``
    for the next question; and ``more``: whether there are further rows already. ``file_id`` is the ``file`` of the
    answer before; empty in the first question. If the file is shorter or another one, it has another run's curve by
    now: the answer begins anew and says so (``anew``).

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            found_id = f"{run_uid}-{os.fstat(file.fileno()).st_ino}"
            size = file.seek(0, 2)
            is_anew = not 0 <= after <= size or file_id not in ("", found_id)
            begin = 0 if is_anew else after
            file.seek(begin)
            data = file.read(MAX_BYTES)
    except FileNotFoundError:
        return {"next": 0, "file": "", "anew": after > 0, "more": False, "rows": []}
    end = data.rfind(b"\n") + 1
    rows = [row for line in data[:end].splitlines(keepends=True) if (row := _row(line)) is not None]
    is_part = end > 0 and begin + len(data) < size
    return {"next": begin + end, "file": found_id, "anew": is_anew, "more": is_part, "rows": rows}


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        scalars = {name: each for name, each in value["scalars"].items() if isinstance(each, int | float)}
        return {"step": int(value["step"]), "role": str(value["role"]), "scalars": scalars}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
