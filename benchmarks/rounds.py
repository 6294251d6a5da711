"""Everybody in turn, round after round, until enough rounds were left in peace; told as it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from figures import Round, Turn, quiet_rounds

TRIES = 5
"""Rounds that others may spoil one after the other; then there is no result."""
MAX_SECONDS = 15 * 60.0
"""No round is begun that would end later than this after the beginning."""

Measure = Callable[[str, int], Turn]
"""One contestant's turn, by its name, in the round of that number."""


def play(
    names: Sequence[str],
    measure: Measure,
    *,
    wanted: int,
    say: Callable[[str], None],
    began: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Round]:
    """Rounds until ``wanted`` of them were quiet; fewer if others do not leave the machine alone, or time is up.

    Every round that was begun is among them, the noisy ones too. Seeds and places are those of the quiet round that a
    round wants to be, so that trying again changes nothing but the moment.

    Args:
        began: When the measurement began, by ``clock``.
    """
    rounds: list[Round] = []
    longest, failures = 0.0, 0
    while (number := len(quiet_rounds(rounds))) < wanted and failures < TRIES:
        round_began = clock()
        if round_began + longest > began + MAX_SECONDS:
            say(f"no time for another round: {MAX_SECONDS:.0f} s are nearly over")
            break
        turns = []
        # Nobody is always the first: the machine's speed drifts.
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            turns.append(measure(name, number))
            say(turn_line(number, turns[-1]))
        rounds.append(Round(turns=tuple(turns)))
        longest = max(longest, clock() - round_began)
        failures = 0 if rounds[-1].is_quiet else failures + 1
        if failures:
            say(f"round {number + 1} was not quiet: it counts for nothing (try {failures} of {TRIES})")
    return rounds


def turn_line(number: int, turn: Turn) -> str:
    """A turn in a line, with the processor time that others used meanwhile."""
    figure = "no figure" if turn.figure is None else f"{turn.figure:,.1f}"
    memory = "" if turn.megabytes is None else f"  {turn.megabytes:,.0f} MB"
    return (
        f"round {number + 1}  {turn.contestant:18} {figure:>12}  it used {turn.own:4.0%} of the machine, others "
        f"{turn.others:5.1%}{memory}"
    )
