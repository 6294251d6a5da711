"""What sequences of steps have beside the steps: where episodes begin, and whether the frames before are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IS_FIRST = "is_first"
"""Among the rows of sequences: whether each frame is the first of an episode."""
HAS_BURN_IN = "has_burn_in"
"""Among the rows of sequences with burn-in: whether the frames before the sequence are those of the same lane."""


def first_frames(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of the frames after steps begin an episode, by a slot's ``mask``, of the same shape.

    A step that is no transition leads to the first frame of an episode.
    """
    found: NDArray[Any] = np.logical_not(mask)
    return found
