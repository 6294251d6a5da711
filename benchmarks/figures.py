"""Turn measurements into a result. Pure.

A run has several rounds; in a round each contestant has one turn. A round is kept but does not count if other programs
used the machine. Without enough quiet rounds there is no result.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RLSRL = "rlsrl"
STABLE_BASELINES3 = "stable-baselines3"
SINGLE_FILE = "single-file"
SINGLE_FILE_COMPILED = "single-file-compiled"
"""The single file with its losses compiled by ``torch.compile``."""
SAMPLE_FACTORY = "sample-factory"
JAX = "jax"
"""A single file whose environments are compiled, too."""
QUIET_SHARE = 0.03
"""Largest share of the machine that other programs may use during a turn: with two cores, 6 % of one."""
COUNTS_FROM = 0.9
"""The single file counts as a peer from this share of Stable-Baselines3's speed. Below, it is badly written."""
SHOWN = "shown"
NO_QUIET_RUN = "not shown: no quiet run"
TOO_FEW_ROUNDS = "not shown: too few rounds in the time there is"

Point = tuple[float, float]
"""(Unix seconds, environment steps whose training is finished)."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One measurement of one contestant."""

    contestant: str
    figure: float | None
    """The figure to compare: environment steps a second, or seconds to the goal. None: no figure."""
    others: float
    """Share of the machine that neither the contestant nor the benchmark used."""
    own: float
    """Share of the machine that the contestant and the benchmark used."""
    megabytes: float | None = None
    """Memory of all its processes; shared memory counts once. None if it ended by itself."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other details to keep."""

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the machine alone."""
        return self.others <= QUIET_SHARE


@dataclass(frozen=True, kw_only=True)
class Round:
    """One turn of each contestant."""

    turns: tuple[Turn, ...]

    @property
    def is_quiet(self) -> bool:
        """Whether all turns were quiet."""
        return all(turn.is_quiet for turn in self.turns)

    @property
    def figures(self) -> dict[str, float]:
        """The figures by contestant, of those that have one."""
        return {turn.contestant: turn.figure for turn in self.turns if turn.figure is not None}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and range of several figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        ascending = sorted(values)
        return cls(median=statistics.median(ascending), low=ascending[0], high=ascending[-1])


def speed(points: Sequence[Point], began: float, ended: float) -> float | None:
    """Return steps a second between the first and the last point in a window, or None with fewer than two points.

    An iteration that crosses the window's edge does not count.
    """
    inside = [point for point in points if began <= point[0] <= ended]
    if len(inside) < 2:
        return None
    (first, steps), (last, more) = inside[0], inside[-1]
    return (more - steps) / (last - first) if last > first else None


def quiet_rounds(rounds: Iterable[Round]) -> list[Round]:
    """Return the rounds that count."""
    return [round_ for round_ in rounds if round_.is_quiet]


def counted_peers(
    figures: Mapping[str, float], *, less_is_better: bool = False, apart: Collection[str] = ()
) -> dict[str, float]:
    """Return the figures of rlsrl's peers: no contestants that are ``apart``, and no badly written single file."""
    peers = {name: figure for name, figure in figures.items() if name != RLSRL and name not in apart}
    if SINGLE_FILE in peers and STABLE_BASELINES3 in peers:
        ratio = peers[SINGLE_FILE] / peers[STABLE_BASELINES3]
        if (1 / ratio if less_is_better else ratio) < COUNTS_FROM:
            del peers[SINGLE_FILE]
    return peers


def ratio_of(
    figures: Mapping[str, float], *, less_is_better: bool = False, apart: Collection[str] = ()
) -> float | None:
    """Return rlsrl's figure over the best peer's in the same round, or None if one is missing."""
    peers = counted_peers(figures, less_is_better=less_is_better, apart=apart)
    if not peers or RLSRL not in figures:
        return None
    best = min(peers.values()) if less_is_better else max(peers.values())
    return figures[RLSRL] / best


def verdict(
    rounds: Sequence[Round],
    *,
    wanted: int,
    less_is_better: bool = False,
    limit: float | None = None,
    apart: Collection[str] = (),
) -> dict[str, Any]:
    """Return the result of the rounds.

    Args:
        rounds: All rounds, noisy ones included.
        wanted: Quiet rounds that a result needs.
        less_is_better: Whether figures are seconds.
        limit: The highest possible figure, if there is one.
        apart: Contestants that are no peers: with other environments than the workload's. Their ratios are kept apart.
    """
    counted = quiet_rounds(rounds)
    if len(counted) < wanted:
        return {"verdict": TOO_FEW_ROUNDS if rounds and len(counted) == len(rounds) else NO_QUIET_RUN}
    names = sorted({turn.contestant for round_ in counted for turn in round_.turns})
    spreads = {name: Spread.of(figures) for name in names if (figures := _figures(counted, name))}
    medians = {name: spread.median for name, spread in spreads.items()}
    peers = counted_peers(medians, less_is_better=less_is_better, apart=apart)
    ratios = [
        ratio
        for round_ in counted
        if (ratio := ratio_of(round_.figures, less_is_better=less_is_better, apart=apart)) is not None
    ]
    if len(ratios) < wanted:
        without = [name for name in names if len(_figures(counted, name)) < wanted]
        return {"verdict": f"not shown: too few figures of {', '.join(without)}"}
    fastest = (min if less_is_better else max)(peers, key=peers.__getitem__)
    result: dict[str, Any] = {
        "verdict": SHOWN,
        "figures": {name: asdict(spread) for name, spread in spreads.items()},
        "fastest_peer": fastest,
        "counted_peers": sorted(peers),
        "others": max(turn.others for round_ in counted for turn in round_.turns),
        "megabytes": {name: statistics.median(memory) for name in names if (memory := _megabytes(counted, name))},
        "ratio": asdict(Spread.of(ratios)),
    }
    if less_is_better:
        # Seeds differ by more than programs do, so medians are compared. Ratios of single seeds are only reported.
        result["ratio"]["median"] = spreads[RLSRL].median / spreads[fastest].median
    if beside := {name: _ratios(counted, name) for name in apart if name in spreads}:
        result["apart"] = {name: asdict(Spread.of(ratios)) for name, ratios in beside.items() if ratios}
    if limit is not None:
        result["of_the_limit"] = {name: spread.median / limit for name, spread in spreads.items()}
    return result


def _ratios(rounds: Iterable[Round], name: str) -> list[float]:
    """Return rlsrl's figure over that of another contestant, of the rounds that have both."""
    found = (round_.figures for round_ in rounds)
    return [figures[RLSRL] / figures[name] for figures in found if RLSRL in figures and name in figures]


def _figures(rounds: Iterable[Round], name: str) -> list[float]:
    return [round_.figures[name] for round_ in rounds if name in round_.figures]


def _megabytes(rounds: Iterable[Round], name: str) -> list[float]:
    turns = [turn for round_ in rounds for turn in round_.turns if turn.contestant == name]
    return [turn.megabytes for turn in turns if turn.megabytes is not None]
