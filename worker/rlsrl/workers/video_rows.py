"""The name of a video's file, on its way from the coordinator to the process of W&B."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class VideoRow:
    """A video for W&B."""

    step: int
    """The step of its version."""
    tag: str
    """Its name at trackers."""
    file: str
    """The path of the mp4 file in the run folder."""

    def to_line(self) -> bytes:
        """Return one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self | None:
        """Read a line of ``to_line``; None for a line of another kind."""
        value = json.loads(line)
        return cls(**value) if "file" in value else None
