"""Rounds: measure all contestants in turn until enough rounds were quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from figures import Round, Turn, quiet_rounds

TRIES = 5
"""Noisy rounds in a row after which there is no result."""
MAX_SECONDS = 15 * 60.0
"""No round begins that would end later than this after the start."""

Measure = Callable[[str, int], Turn]
"""Measures one contestant, by its name, in the round of that number."""


def play(
    names: Sequence[str],
    measure: Measure,
    *,
    wanted: int,
    log: Callable[[str], None],
    began: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Round]:
    """Return rounds, ``wanted`` of them quiet; fewer if the machine stays noisy or time is up.

    All rounds are returned, noisy ones included. A repeated round has the seed and order of the round that it repeats.

    Args:
        began: Start of the measurement, by ``clock``.
    """
    rounds: list[Round] = []
    longest, failures = 0.0, 0
    while (number := len(quiet_rounds(rounds))) < wanted and failures < TRIES:
        round_began = clock()
        if round_began + longest > began + MAX_SECONDS:
            log(f"no time for another round: the limit is {MAX_SECONDS:.0f} s")
            break
        turns = []
        # The order rotates, because the machine's speed drifts.
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            turns.append(measure(name, number))
            log(turn_line(number, turns[-1]))
        rounds.append(Round(turns=tuple(turns)))
        longest = max(longest, clock() - round_began)
        failures = 0 if rounds[-1].is_quiet else failures + 1
        if failures:
            log(f"round {number + 1} was not quiet: it does not count (try {failures} of {TRIES})")
    return rounds


def turn_line(number: int, turn: Turn) -> str:
    """Return a turn in one line, with the processor time that other programs used meanwhile."""
    figure = "no figure" if turn.figure is None else f"{turn.figure:,.1f}"
    memory = "" if turn.megabytes is None else f"  {turn.megabytes:,.0f} MB"
    return (
        f"round {number + 1}  {turn.contestant:18} {figure:>12}  it used {turn.own:4.0%} of the machine, others "
        f"{turn.others:5.1%}{memory}"
    )
