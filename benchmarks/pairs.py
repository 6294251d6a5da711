"""Evaluate pairs of turns of two commits: order, bounds and the lines that are printed. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from figures import QUIET_SHARE, Round, Turn

BASE, HEAD = "base", "head"
"""Names of the two commits in a pair: the older one, and the one that is judged against it."""
CONFIDENCE = 0.9
LEAST_PAIRS = 5
"""With fewer pairs, even the smallest and the largest ratio bound the median with less than 90 % confidence."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A median with its confidence bounds."""

    median: float
    low: float | None
    """None with fewer than ``LEAST_PAIRS`` values."""
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Bounds:
        """Return the median of at least one value, with bounds that hold for any distribution of the values."""
        ascending = sorted(values)
        rank = bound_rank(len(ascending))
        low, high = (ascending[rank - 1], ascending[-rank]) if rank else (None, None)
        return cls(median=statistics.median(ascending), low=low, high=high)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.3f} (no bounds below {LEAST_PAIRS} pairs)"
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of the counted pairs."""

    pairs: int
    discarded: int
    speeds: Mapping[str, float]
    """Median env steps a second of each commit."""
    speed_ratio: Bounds
    """Head over base, pair by pair."""
    cpu_seconds: Mapping[str, float]
    """Median processor seconds per env step of each commit."""
    cpu_ratio: Bounds
    """Head over base, pair by pair."""


def bound_rank(number: int) -> int:
    """Return the largest k for which the k-th smallest and the k-th largest of ``number`` values bound the median.

    The chance that the median lies below the k-th smallest value is that of fewer than k heads in ``number`` tosses of
    a coin. It may be 5 % on each side. Returns 0 if no k keeps that.
    """
    allowed = (1 - CONFIDENCE) / 2
    rank, chance = 0, 0.0
    while (chance := chance + math.comb(number, rank) / 2**number) <= allowed:
        rank += 1
    return rank


def order_of(number: int) -> tuple[str, str]:
    """Return which commit is measured first in the counted pair of that number, from 0: they alternate."""
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def counted_pairs(pairs: Sequence[Round]) -> list[Round]:
    """Return the pairs that were quiet and have a speed of both commits."""
    return [pair for pair in pairs if why_discarded(pair) is None]


def why_discarded(pair: Round) -> str | None:
    """Return why a pair does not count, or None."""
    if not pair.is_quiet:
        noisiest = max(turn.others for turn in pair.turns)
        return f"other programs used {noisiest:.1%} of the machine, allowed are {QUIET_SHARE:.0%}"
    without = [turn.contestant for turn in pair.turns if not turn.figure]
    return f"too few training steps of {' and '.join(without)} in the window" if without else None


def cpu_seconds(turn: Turn, cores: int) -> float:
    """Return the processor seconds of one env step of a turn that has a speed."""
    assert turn.figure, "a counted pair"
    return turn.own * cores / turn.figure


def summarize(pairs: Sequence[Round], *, cores: int) -> Summary | None:
    """Return the result of the pairs, or None if none of them counts."""
    counted = counted_pairs(pairs)
    if not counted:
        return None
    speeds = [pair.figures for pair in counted]
    costs = [{turn.contestant: cpu_seconds(turn, cores) for turn in pair.turns} for pair in counted]
    return Summary(
        pairs=len(counted),
        discarded=len(pairs) - len(counted),
        speeds=_medians(speeds),
        speed_ratio=Bounds.of([pair[HEAD] / pair[BASE] for pair in speeds]),
        cpu_seconds=_medians(costs),
        cpu_ratio=Bounds.of([pair[HEAD] / pair[BASE] for pair in costs]),
    )


def pair_line(number: int, pair: Round, *, cores: int) -> str:
    """Return the line that is printed for a pair; ``number`` counts all pairs from 1, discarded ones included."""
    turns = {turn.contestant: turn for turn in pair.turns}
    parts = [f"pair {number:3}"]
    parts += [_turn_part(turns[name], cores) for name in (BASE, HEAD)]
    if (why := why_discarded(pair)) is not None:
        return "  ".join([*parts, f"discarded: {why}"])
    ratio = pair.figures[HEAD] / pair.figures[BASE]
    return "  ".join([*parts, f"ratio {ratio:.3f}", f"{pair.turns[0].contestant} first"])


def closing_line(workload: str, commits: Mapping[str, str], summary: Summary | None, *, seconds: float) -> str:
    """Return the result in one line, for a closing note."""
    names = f"{workload}, {commits[BASE]} to {commits[HEAD]}"
    if summary is None:
        return f"{names}: no result, no pair counts"
    base, head = summary.speeds[BASE], summary.speeds[HEAD]
    base_cost, head_cost = (1e6 * summary.cpu_seconds[name] for name in (BASE, HEAD))
    return (
        f"{names}: speed ratio {summary.speed_ratio}, {base:,.0f} to {head:,.0f} env steps/s; processor time per env "
        f"step: ratio {summary.cpu_ratio}, {base_cost:.1f} to {head_cost:.1f} us; medians with 90 % bounds of "
        f"{summary.pairs} pairs of {seconds:g} s; discarded: {summary.discarded}"
    )


def to_json(pair: Round, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair as it is kept, with the conditions that pairs of one result share."""
    return {"conditions": dict(conditions), "turns": [asdict(turn) for turn in pair.turns]}


def from_json(document: Mapping[str, Any], conditions: Mapping[str, Any]) -> Round | None:
    """Return a kept pair, or None if it was measured under other conditions."""
    if document["conditions"] != dict(conditions):
        return None
    return Round(turns=tuple(Turn(**turn) for turn in document["turns"]))


def _medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(pair[name] for pair in figures) for name in (BASE, HEAD)}


def _turn_part(turn: Turn, cores: int) -> str:
    if not turn.figure:
        return f"{turn.contestant} no speed"
    cost = 1e6 * cpu_seconds(turn, cores)
    return f"{turn.contestant} {turn.figure:8,.0f} env steps/s {cost:6.1f} us, others {turn.others:5.1%}"
