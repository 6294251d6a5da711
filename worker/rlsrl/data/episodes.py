"""What episodes report at their ends: fields of slots, and names of their statistics on the learning curve.

The chosen values of ``info`` (``environment.episodeInfo``) have one field ``episode_info/<key>`` each. It is written
only where an episode is reported; NaN means that the episode has no finite value of that key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from rlsrl.data.specs import Arrays

EPISODE_INFO = "episode_info"
"""Begins the names of fields and statistics of chosen values of ``info``."""
_PREFIX = f"{EPISODE_INFO}/"

InfoStatistics = Mapping[str, Mapping[str, float | None]]
"""By key of ``info``: ``mean``, None without a value, and ``count``: how many episodes had a finite value."""


def info_field(key: str) -> str:
    """Return the name of the field for values of ``info[key]``."""
    return f"{_PREFIX}{key}"


def info_keys(names: Iterable[str]) -> list[str]:
    """Return the keys of ``info`` that have a field among ``names``."""
    return [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]


@dataclass(frozen=True, kw_only=True)
class EndedEpisodes:
    """The reports of the episodes that ended in a batch, by step. JSON values."""

    returns: Sequence[float] = ()
    """Undiscounted returns."""
    lengths: Sequence[int] = ()
    """Steps of the same episodes."""
    info: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By key: the finite values of ``info`` at the ends. Episodes without a value are left out."""

    @classmethod
    def of(cls, batch: Arrays) -> Self:
        """Return the episodes reported by the transitions of a batch: [T, B] fields of a slot."""
        reported = (batch["episode_length"] > 0) & batch["mask"]
        values = {key: batch[info_field(key)][reported] for key in info_keys(batch)}
        return cls(
            returns=batch["episode_return"][reported].tolist(),
            lengths=batch["episode_length"][reported].tolist(),
            info={key: each[np.isfinite(each)].tolist() for key, each in values.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the episodes of all parts, in their order."""
        keys = dict.fromkeys(key for part in parts for key in part.info)
        return cls(
            returns=[value for part in parts for value in part.returns],
            lengths=[value for part in parts for value in part.lengths],
            info={key: [value for part in parts for value in part.info.get(key, ())] for key in keys},
        )


def finite_mean(values: Sequence[float]) -> float | None:
    """Return the mean; None if there is no value, or if the sum overflows. Every JSON document can hold it."""
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def info_scalars(statistics: InfoStatistics) -> dict[str, float]:
    """Return the statistics by the names of the learning curve; nothing for a mean of no value."""
    return {
        f"{info_field(key)}/{name}": float(value)
        for key, values in statistics.items()
        for name, value in values.items()
        if value is not None
    }


def info_statistics(scalars: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Return the statistics among ``scalars``, named as ``info_scalars`` names them."""
    found: dict[str, dict[str, float | None]] = {}
    for name in info_keys(scalars):
        key, _, statistic = name.rpartition("/")
        found.setdefault(key, {"mean": None, "count": None})[statistic] = scalars[info_field(name)]
    return found


def info_texts(statistics: InfoStatistics, *, num_last: int | None = None) -> list[str]:
    """Return a text for each key: ``is_success 0.93 in 120 episodes``.

    ``num_last``: the means are of at most this many episodes, the last ones; None: of all.
    """
    return [_info_text(key, values["mean"], values["count"] or 0, num_last) for key, values in statistics.items()]


def _info_text(key: str, mean: float | None, count: float, num_last: int | None) -> str:
    text = f"{key} {'-' if mean is None else format(mean, '.3g')}"
    if num_last is None or count <= num_last:
        return f"{text} in {count:,.0f} episodes"
    return f"{text} (mean of the last {num_last:,} of {count:,.0f} episodes)"
