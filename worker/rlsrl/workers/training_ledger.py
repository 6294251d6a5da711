"""The ledger as training writes it. Without torch: buffer workers write it, too."""

from __future__ import annotations

from typing import Any, Protocol


class TrainingLedger(Protocol):
    """The part of the ledger that is written for what the rank received."""

    def trained(self, num_transitions: int, *, num_untrained: int = 0) -> None:
        """Count a step's transitions, which left the buffer: those trained, and those whose updates were skipped."""

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Count transitions that left the buffer untrained."""

    def snapshot(self) -> dict[str, Any]:
        """Return JSON values to resume from."""
