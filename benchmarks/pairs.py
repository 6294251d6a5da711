"""Evaluate rounds of turns of a commit and the bases that it is paired with: order, bounds and printed lines. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from figures import QUIET_SHARE, Round, Turn

HEAD = "head"
"""Name of the contestant that is judged against each of the others, the bases."""
CONFIDENCE = 0.9
LEAST_PAIRS = 5
"""With fewer rounds, even the smallest and the largest ratio bound the median with less than 90 % confidence."""


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
            return f"{self.median:.3f} (no bounds below {LEAST_PAIRS} rounds)"
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of the counted rounds."""

    rounds: int
    discarded: int
    speeds: Mapping[str, float]
    """Median env steps a second of each contestant."""
    speed_ratios: Mapping[str, Bounds]
    """Head over each base, round by round."""
    cpu_seconds: Mapping[str, float]
    """Median processor seconds per env step of each contestant."""
    cpu_ratios: Mapping[str, Bounds]
    """Head over each base, round by round."""


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


def order_of(number: int, bases: Sequence[str]) -> tuple[str, ...]:
    """Return the order of the turns in the counted round of that number, from 0: it is reversed from round to round."""
    names = (*bases, HEAD)
    return names if number % 2 == 0 else names[::-1]


def counted_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds that were quiet and have a speed of each contestant."""
    return [round_ for round_ in rounds if why_discarded(round_) is None]


def why_discarded(round_: Round) -> str | None:
    """Return why a round does not count, or None."""
    if not round_.is_quiet:
        noisiest = max(turn.others for turn in round_.turns)
        return f"other programs used {noisiest:.1%} of the machine, allowed are {QUIET_SHARE:.0%}"
    without = [turn.contestant for turn in round_.turns if not turn.figure]
    return f"too few training steps of {' and '.join(without)} in the window" if without else None


def cpu_seconds(turn: Turn, cores: int) -> float:
    """Return the processor seconds of one env step of a turn that has a speed."""
    assert turn.figure, "a counted round"
    return turn.own * cores / turn.figure


def summarize(rounds: Sequence[Round], *, cores: int) -> Summary | None:
    """Return the result of the rounds, or None if none of them counts."""
    counted = counted_rounds(rounds)
    if not counted:
        return None
    speeds = [round_.figures for round_ in counted]
    costs = [{turn.contestant: cpu_seconds(turn, cores) for turn in round_.turns} for round_ in counted]
    return Summary(
        rounds=len(counted),
        discarded=len(rounds) - len(counted),
        speeds=_medians(speeds),
        speed_ratios=_ratios(speeds),
        cpu_seconds=_medians(costs),
        cpu_ratios=_ratios(costs),
    )


def round_line(number: int, round_: Round, *, cores: int) -> str:
    """Return the line that is printed for a round; ``number`` counts all rounds from 1, discarded ones included."""
    turns = sorted(round_.turns, key=lambda turn: (turn.contestant == HEAD, turn.contestant))
    parts = [f"round {number:3}", *(_turn_part(turn, cores) for turn in turns)]
    if (why := why_discarded(round_)) is not None:
        return "  ".join([*parts, f"discarded: {why}"])
    head = round_.figures[HEAD]
    ratios = ", ".join(f"{head / turn.figure:.3f}" for turn in turns[:-1] if turn.figure)
    return "  ".join([*parts, f"ratio {ratios}", f"{round_.turns[0].contestant} first"])


def closing_lines(
    workload: str, names: Mapping[str, str], rounds: Sequence[Round], *, cores: int, seconds: float
) -> list[str]:
    """Return the result for each base in one line, for a closing note.

    Args:
        workload: Its name.
        names: What to call each contestant; those besides ``HEAD`` are the bases.
        rounds: All rounds, discarded ones included.
        cores: Cores of the machine.
        seconds: Length of a turn.
    """
    found = summarize(rounds, cores=cores)
    bases = [base for base in names if base != HEAD]
    if found is None:
        return [f"{workload}, {names[base]} to {names[HEAD]}: no result, no round counts" for base in bases]
    return [_closing_line(f"{workload}, {names[base]} to {names[HEAD]}", base, found, seconds) for base in bases]


def to_json(round_: Round, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round as it is kept, with the conditions that rounds of one result share."""
    return {"conditions": dict(conditions), "turns": [asdict(turn) for turn in round_.turns]}


def from_json(document: Mapping[str, Any], conditions: Mapping[str, Any]) -> Round | None:
    """Return a kept round, or None if it was measured under other conditions."""
    if document["conditions"] != dict(conditions):
        return None
    return Round(turns=tuple(Turn(**turn) for turn in document["turns"]))


def _medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}


def _ratios(figures: Sequence[Mapping[str, float]]) -> dict[str, Bounds]:
    bases = [name for name in figures[0] if name != HEAD]
    return {base: Bounds.of([figure[HEAD] / figure[base] for figure in figures]) for base in bases}


def _closing_line(what: str, base: str, found: Summary, seconds: float) -> str:
    base_cost, head_cost = (1e6 * found.cpu_seconds[name] for name in (base, HEAD))
    return (
        f"{what}: speed ratio {found.speed_ratios[base]}, {found.speeds[base]:,.0f} to {found.speeds[HEAD]:,.0f} env "
        f"steps/s; processor time per env step: ratio {found.cpu_ratios[base]}, {base_cost:.1f} to {head_cost:.1f} us; "
        f"medians with 90 % bounds of {found.rounds} rounds of {seconds:g} s a turn; discarded: {found.discarded}"
    )


def _turn_part(turn: Turn, cores: int) -> str:
    if not turn.figure:
        return f"{turn.contestant} no speed"
    cost = 1e6 * cpu_seconds(turn, cores)
    return f"{turn.contestant} {turn.figure:8,.0f} env steps/s {cost:6.1f} us, others {turn.others:5.1%}"
