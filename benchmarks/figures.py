"""From what was measured to what may be said of it. Pure.

A run is some rounds; in a round everybody is measured once, one after the other. A round in which somebody else used
the machine is told and counts for nothing; without enough quiet ones there is no result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RLSRL = "rlsrl"
STABLE_BASELINES3 = "stable-baselines3"
SINGLE_FILE = "single-file"
SAMPLE_FACTORY = "sample-factory"
QUIET_SHARE = 0.03
"""The most of the machine that others may have used during a turn: of two cores, 6 % of one."""
COUNTS_FROM = 0.9
"""The single file is a peer if it comes to so much of Stable-Baselines3's speed: a slower one is badly written."""
SHOWN = "shown"
NO_QUIET_RUN = "not shown: no quiet run"
TOO_FEW_ROUNDS = "not shown: too few rounds in the time there is"

Point = tuple[float, float]
"""(Unix seconds, environment steps whose training is finished)."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One contestant, measured once."""

    contestant: str
    figure: float | None
    """What is compared: environment steps a second, or seconds to the goal; None if it did not come to one."""
    others: float
    """The share of the machine's processors that neither the contestant used nor who measured it."""
    own: float
    """The share that these used."""
    megabytes: float | None = None
    """Of all its processes, where shared memory counts once; None of one that has ended by itself."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else is worth keeping."""

    @property
    def is_quiet(self) -> bool:
        """Whether others left the machine alone."""
        return self.others <= QUIET_SHARE


@dataclass(frozen=True, kw_only=True)
class Round:
    """Everybody, once; and whether nobody else was there."""

    turns: tuple[Turn, ...]

    @property
    def is_quiet(self) -> bool:
        """Whether each turn was left in peace."""
        return all(turn.is_quiet for turn in self.turns)

    @property
    def figures(self) -> dict[str, float]:
        """By contestant; without those who came to none."""
        return {turn.contestant: turn.figure for turn in self.turns if turn.figure is not None}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Several figures for one thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ascending = sorted(values)
        return cls(median=statistics.median(ascending), low=ascending[0], high=ascending[-1])


def speed(points: Sequence[Point], began: float, ended: float) -> float | None:
    """Steps a second between the first and the last point within a window; None if fewer than two are in it.

    Steps whose training goes on at the window's edge are on neither side, so that no iteration counts in part.
    """
    inside = [point for point in points if began <= point[0] <= ended]
    if len(inside) < 2:
        return None
    (first, steps), (last, more) = inside[0], inside[-1]
    return (more - steps) / (last - first) if last > first else None


def quiet_rounds(rounds: Iterable[Round]) -> list[Round]:
    """Those that count."""
    return [each for each in rounds if each.is_quiet]


def counted_peers(figures: Mapping[str, float], *, less_is_better: bool = False) -> dict[str, float]:
    """The figures of those whom rlsrl is compared with: all others, the single file only where it is no strawman."""
    peers = {name: figure for name, figure in figures.items() if name != RLSRL}
    if SINGLE_FILE in peers and STABLE_BASELINES3 in peers:
        ratio = peers[SINGLE_FILE] / peers[STABLE_BASELINES3]
        if (1 / ratio if less_is_better else ratio) < COUNTS_FROM:
            del peers[SINGLE_FILE]
    return peers


def ratio_of(figures: Mapping[str, float], *, less_is_better: bool = False) -> float | None:
    """rlsrl's figure over the best peer's in the same round; None if one of them came to none."""
    peers = counted_peers(figures, less_is_better=less_is_better)
    if not peers or RLSRL not in figures:
        return None
    best = min(peers.values()) if less_is_better else max(peers.values())
    return figures[RLSRL] / best


def verdict(
    rounds: Sequence[Round], *, wanted: int, less_is_better: bool = False, limit: float | None = None
) -> dict[str, Any]:
    """What the rounds come to.

    Args:
        wanted: Quiet rounds without which there is no result.
        limit: The figure that nobody can exceed, where there is such a one.
    """
    counted = quiet_rounds(rounds)
    if len(counted) < wanted:
        return {"verdict": TOO_FEW_ROUNDS if rounds and len(counted) == len(rounds) else NO_QUIET_RUN}
    names = sorted({turn.contestant for each in counted for turn in each.turns})
    spreads = {name: Spread.of(figures) for name in names if (figures := _figures(counted, name))}
    peers = counted_peers({name: each.median for name, each in spreads.items()}, less_is_better=less_is_better)
    ratios = [ratio for each in counted if (ratio := ratio_of(each.figures, less_is_better=less_is_better)) is not None]
    if len(ratios) < wanted:
        without = [name for name in names if len(_figures(counted, name)) < wanted]
        return {"verdict": f"not shown: too few figures of {', '.join(without)}"}
    fastest = (min if less_is_better else max)(peers, key=peers.__getitem__)
    told: dict[str, Any] = {
        "verdict": SHOWN,
        "figures": {name: asdict(spread) for name, spread in spreads.items()},
        "fastest_peer": fastest,
        "counted_peers": sorted(peers),
        "others": max(turn.others for each in counted for turn in each.turns),
        "megabytes": {name: statistics.median(memory) for name in names if (memory := _megabytes(counted, name))},
        "ratio": asdict(Spread.of(ratios)),
    }
    if less_is_better:
        # Seeds differ by more than programs do: medians are compared, and the ratios of single seeds only told.
        told["ratio"]["median"] = spreads[RLSRL].median / spreads[fastest].median
    if limit is not None:
        told["of_the_limit"] = {name: spread.median / limit for name, spread in spreads.items()}
    return told


def _figures(rounds: Iterable[Round], name: str) -> list[float]:
    return [each.figures[name] for each in rounds if name in each.figures]


def _megabytes(rounds: Iterable[Round], name: str) -> list[float]:
    turns = [turn for each in rounds for turn in each.turns if turn.contestant == name]
    return [turn.megabytes for turn in turns if turn.megabytes is not None]
