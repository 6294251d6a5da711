"""One-hot inputs of categories, as tables that numpy and torch apply alike. numpy only.

Slots and requests hold raw integers. Networks and exported actors encode them where the features begin, so a rollout of
Taxi holds one integer a frame and not 500 floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ArraySpec


@dataclass(frozen=True, kw_only=True, eq=False)
class OneHot:
    """Feature f is 1 where entry ``entries[f]`` of the flattened array has the value ``values[f]``, else 0.

    A value outside its category makes all features of its entry 0.
    """

    entries: NDArray[np.int64]
    """[features]."""
    values: NDArray[np.int64]
    """[features]."""

    @classmethod
    def of(cls, spec: ArraySpec) -> OneHot | None:
        """Return the encoding of such arrays, or None if their entries are numbers."""
        if not spec.categories:
            return None
        return cls(
            entries=np.repeat(np.arange(spec.size), [number for _, number in spec.categories]),
            values=np.concatenate([np.arange(first, first + number) for first, number in spec.categories]),
        )
