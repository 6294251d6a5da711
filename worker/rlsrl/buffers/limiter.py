"""How far gathering may run ahead of training where each lane is trained once.

After Reverb's rate limiters (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section 3.3), with one
sample for each insert. An insert is a lane of a slot granted to a producer, a sample a lane of a training batch. With
replay see ``rlsrl.buffers.replay.ratio``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RateLimiter:
    """Counts granted and trained lanes, and returns how many more lanes may be granted.

    One batch is granted at first, and one more for each step of policy lag. Each trained lane lets another be granted.
    A run whose end is known grants no more than the lanes that it can still train (``expect``). Not thread-safe: the
    training thread owns it.
    """

    def __init__(self, *, batch_lanes: int, max_policy_lag: int) -> None:
        """Train every lane once, at most ``max_policy_lag`` steps after its granted version."""
        self._ahead = batch_lanes * (1 + max_policy_lag)
        """Lanes granted and not trained, at most."""
        self._granted = 0
        self._trained = 0
        self._most_granted: int | None = None
        """Granted lanes, over the whole run, that training can use; None: without a known end."""

    def take(self) -> int:
        """Return the lanes that may be granted now, and count them as granted."""
        allowed = self._allowed if self._most_granted is None else min(self._allowed, self._most_granted)
        lanes = max(0, allowed - self._granted)
        self._granted += lanes
        return lanes

    def expect(self, lanes: int | None) -> None:
        """Grant no more than what training of ``lanes`` further lanes uses. None: the end of training is unknown."""
        self._most_granted = None if lanes is None else self._trained + lanes

    @property
    def room(self) -> int:
        """Lanes beyond those granted that may be granted without exceeding the lag. 0 after ``take``, except at the
        end of a run: then the last slot may use them if it is wider than the lanes left."""
        return max(0, self._allowed - self._granted)

    @property
    def is_complete(self) -> bool:
        """Whether all lanes that training can still use are granted."""
        return self._most_granted is not None and self._granted >= self._most_granted

    @property
    def _allowed(self) -> int:
        return self._trained + self._ahead

    def sampled(self, lanes: int) -> None:
        """Count a trained batch of that many lanes."""
        self._trained += lanes

    def discarded(self, lanes: int) -> None:
        """Subtract granted lanes that were dropped untrained, so that others may be granted."""
        self._granted -= lanes

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"sampled": self._trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Granted lanes that were not trained are lost with the processes that held them."""
        self._trained = self._granted = int(state["sampled"])
