"""A budget that recovers: what was spent falls continuously, so that rare faults never exhaust it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The amount spent of a budget at one time; it decays from then on."""

    amount: float = 0.0
    at: float = 0.0
    """Seconds on the caller's clock."""

    def amount_at(self, now: float, *, decay_seconds: float) -> float:
        """Return what is left of the amount at ``now``: it falls by one in ``decay_seconds``, down to 0."""
        return max(0.0, self.amount - (now - self.at) / decay_seconds)
