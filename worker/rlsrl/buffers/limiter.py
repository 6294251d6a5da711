"""The ratio of experience gathered to experience trained.

After Reverb's rate limiters (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section 3.3), in lanes:
one insert is one lane of a slot granted to a producer, one sample is one lane of a training batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self


class RateLimiter:
    """Counts granted and trained lanes, and returns how many more lanes may be granted.

    Grants may run ahead of training while::

        inserted <= min_size + (sampled + error_buffer) / samples_per_insert

    On policy every lane is trained once: ``samples_per_insert`` is 1, ``min_size`` is one batch, and ``error_buffer``
    is one batch for each step of policy lag. A run whose end is known grants no more than the lanes that it can still
    train (``expect``). Not thread-safe: the training thread owns it.
    """

    def __init__(self, *, samples_per_insert: float, min_size: int, error_buffer: float) -> None:
        if samples_per_insert <= 0 or min_size < 1 or error_buffer < 0:
            raise ValueError(
                f"samples_per_insert is {samples_per_insert}, and must be above 0; min_size is {min_size}, and must be "
                f"at least 1; error_buffer is {error_buffer}, and must be at least 0"
            )
        self._samples_per_insert = samples_per_insert
        self._min_size = min_size
        self._error_buffer = error_buffer
        self._inserted = 0
        self._sampled = 0
        self._most_inserted: int | None = None
        """Granted lanes, over the whole run, that training can use; None: without a known end."""

    @classmethod
    def on_policy(cls, *, batch_lanes: int, max_policy_lag: int) -> Self:
        """Return a limiter that trains every lane once, at most ``max_policy_lag`` steps after its granted version."""
        return cls(samples_per_insert=1.0, min_size=batch_lanes, error_buffer=float(max_policy_lag * batch_lanes))

    def take(self) -> int:
        """Return the lanes that may be granted now, and count them as granted."""
        allowed = self._allowed if self._most_inserted is None else min(self._allowed, self._most_inserted)
        lanes = max(0, allowed - self._inserted)
        self._inserted += lanes
        return lanes

    def expect(self, lanes: int | None) -> None:
        """Grant no more than what training of ``lanes`` further lanes uses. None: the end of training is unknown."""
        self._most_inserted = None if lanes is None else math.ceil((self._sampled + lanes) / self._samples_per_insert)

    @property
    def room(self) -> int:
        """Lanes beyond those granted that may be granted without exceeding the ratio. 0 after ``take``, except at the
        end of a run: then the last slot may use them if it is wider than the lanes left."""
        return max(0, self._allowed - self._inserted)

    @property
    def is_complete(self) -> bool:
        """Whether all lanes that training can still use are granted."""
        return self._most_inserted is not None and self._inserted >= self._most_inserted

    @property
    def _allowed(self) -> int:
        return self._min_size + int((self._sampled + self._error_buffer) / self._samples_per_insert)

    def sampled(self, lanes: int) -> None:
        """Count a trained batch of that many lanes."""
        self._sampled += lanes

    def discarded(self, lanes: int) -> None:
        """Subtract granted lanes that were dropped untrained, so that others may be granted."""
        self._inserted -= lanes

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"sampled": self._sampled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Granted lanes that were not trained are lost with the processes that held them."""
        self._sampled = int(state["sampled"])
        self._inserted = int(self._sampled / self._samples_per_insert)
