"""Observations as a network sees them: standardised where the version that is evaluated carries statistics. numpy only.

Observations travel as the environment gave them. Whoever evaluates a version (actor, policy worker, evaluator, trainer)
applies the statistics of that very version with the functions here, so all of them feed the network equal bits.
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
"""Standardised values are kept within this range around 0."""
EPSILON = np.float32(1e-8)
"""Added to the variance: what never varied is not divided by 0."""


def mean_of(path: str) -> str:
    """The name of an observation's mean among ``Parameters.statistics``."""
    return f"{path}/mean"


def variance_of(path: str) -> str:
    """The name of an observation's variance among ``Parameters.statistics``."""
    return f"{path}/variance"


@dataclass(frozen=True, kw_only=True, eq=False)
class Standardization:
    """(x - mean) * scale within ``CLIP_RANGE``, for one observation array."""

    mean: Floats
    scale: Floats

    @classmethod
    def of(cls, statistics: Arrays, path: str) -> Self | None:
        """What the statistics say of that path; None if they say nothing: it is not normalised."""
        mean, variance = statistics.get(mean_of(path)), statistics.get(variance_of(path))
        if mean is None or variance is None:
            return None
        return cls(mean=mean.astype(np.float32), scale=1.0 / np.sqrt(variance.astype(np.float32) + EPSILON))

    def as_column(self) -> Self:
        """The same for flattened arrays with the lanes last, [features, N]."""
        return type(self)(mean=self.mean.reshape(-1, 1), scale=self.scale.reshape(-1, 1))

    def apply(self, values: NDArray[Any], out: Floats) -> None:
        """Write the standardised values; their last axes are those of the statistics."""
        np.subtract(values, self.mean, out=out)
        np.multiply(out, self.scale, out=out)
        np.minimum(out, CLIP_RANGE, out=out)
        np.maximum(out, -CLIP_RANGE, out=out)


def standardizations(statistics: Arrays, paths: Iterable[str]) -> dict[str, Standardization]:
    """What the statistics say of each path; those they say nothing of are missing."""
    found = {path: Standardization.of(statistics, path) for path in paths}
    return {path: each for path, each in found.items() if each is not None}


def standardized(observation: Arrays, by_path: Mapping[str, Standardization]) -> dict[str, NDArray[Any]]:
    """The observation arrays [..., *shape] by path; those that are normalised as new float32 arrays."""
    result = dict(observation)
    for path, standardization in by_path.items():
        result[path] = np.empty(observation[path].shape, np.float32)
        standardization.apply(observation[path], out=result[path])
    return result
