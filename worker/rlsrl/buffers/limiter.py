"""The contract between experience gathered and experience trained.

After Reverb's rate limiters (Cassirer et al. 2021, "Reverb: A Framework For Experience Replay", section 3.3), in lanes:
one insert is one lane of a slot granted to a producer, one sample is one lane of a training batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class RateLimiter:
    """Counts lanes granted and lanes trained, and says how many more may be granted.

    Granting may run ahead of training so far that::

        inserted <= min_size + (sampled + error_buffer) / samples_per_insert

    On policy every lane is trained once: ``samples_per_insert`` 1, ``min_size`` one batch, ``error_buffer`` as many
    batches as the policy lag allows. Not thread-safe: the thread that trains owns it.
    """

    def __init__(self, *, samples_per_insert: float, min_size: int, error_buffer: float) -> None:
        if samples_per_insert <= 0 or min_size < 1 or error_buffer < 0:
            raise ValueError(
                f"samples_per_insert {samples_per_insert} must be above 0, min_size {min_size} at least 1, "
                f"error_buffer {error_buffer} at least 0"
            )
        self._samples_per_insert = samples_per_insert
        self._min_size = min_size
        self._error_buffer = error_buffer
        self._inserted = 0
        self._sampled = 0

    @classmethod
    def on_policy(cls, *, batch_lanes: int, max_policy_lag: int) -> Self:
        """Every lane is trained once, at most ``max_policy_lag`` steps after the version it was granted with."""
        return cls(samples_per_insert=1.0, min_size=batch_lanes, error_buffer=float(max_policy_lag * batch_lanes))

    def take(self) -> int:
        """Lanes that may be granted now; they count as inserted from here on."""
        allowed = self._min_size + int((self._sampled + self._error_buffer) / self._samples_per_insert)
        lanes = max(0, allowed - self._inserted)
        self._inserted += lanes
        return lanes

    def sampled(self, lanes: int) -> None:
        """A batch of that many lanes was trained."""
        self._sampled += lanes

    def discarded(self, lanes: int) -> None:
        """That many inserted lanes were dropped untrained: others may be granted in their place."""
        self._inserted -= lanes

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"sampled": self._sampled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after ``state``. What was granted and not trained then is gone with its holder's memory."""
        self._sampled = int(state["sampled"])
        self._inserted = int(self._sampled / self._samples_per_insert)
