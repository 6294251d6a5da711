"""Standardises observations with the statistics of the version that is evaluated. numpy only.

Slots and requests hold raw observations. Actors, policy workers, evaluators and trainers apply the statistics of the
version they evaluate with the functions of this module. So they all feed the network the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays

Floats = NDArray[np.float32]

CLIP_RANGE = np.float32(10.0)
"""Standardised values are clipped to this range around 0."""
EPSILON = np.float32(1e-8)
"""Added to the variance, so that a constant value is not divided by 0."""


def mean_of(path: str) -> str:
    """Return the name of an observation's mean in ``Parameters.statistics``."""
    return f"{path}/mean"


def variance_of(path: str) -> str:
    """Return the name of an observation's variance in ``Parameters.statistics``."""
    return f"{path}/variance"


def count_of(path: str) -> str:
    """Return the name, in ``Parameters.statistics``, of the number of samples of an observation's mean and variance."""
    return f"{path}/count"


@dataclass(frozen=True, kw_only=True, eq=False)
class Standardization:
    """Computes (x - mean) * scale, clipped to ``CLIP_RANGE``, for one observation array."""

    mean: Floats
    scale: Floats

    @classmethod
    def of(cls, statistics: Arrays, path: str) -> Self | None:
        """Return the standardisation of that path, or None if the statistics do not have it: it is not normalised."""
        mean, variance = statistics.get(mean_of(path)), statistics.get(variance_of(path))
        if mean is None or variance is None:
            return None
        return cls(mean=mean.astype(np.float32), scale=1.0 / np.sqrt(variance.astype(np.float32) + EPSILON))

    def as_column(self) -> Self:
        """Return the same for flattened arrays with the lanes last, [features, N]."""
        return type(self)(mean=self.mean.reshape(-1, 1), scale=self.scale.reshape(-1, 1))

    def apply(self, values: NDArray[Any], out: Floats) -> None:
        """Write the standardised values. The last axes of ``values`` are those of the statistics."""
        np.subtract(values, self.mean, out=out)
        np.multiply(out, self.scale, out=out)
        np.minimum(out, CLIP_RANGE, out=out)
        np.maximum(out, -CLIP_RANGE, out=out)


def standardizations(statistics: Arrays, paths: Iterable[str]) -> dict[str, Standardization]:
    """Return the standardisation of each path that the statistics have."""
    found = {path: Standardization.of(statistics, path) for path in paths}
    return {path: standardization for path, standardization in found.items() if standardization is not None}


def standardized(observation: Arrays, by_path: Mapping[str, Standardization]) -> dict[str, NDArray[Any]]:
    """Return the observation arrays [..., *shape] by path; normalised arrays are new float32 arrays."""
    result = dict(observation)
    for path, standardization in by_path.items():
        result[path] = np.empty(observation[path].shape, np.float32)
        standardization.apply(observation[path], out=result[path])
    return result
