"""Rounds until enough of them were quiet."""

from __future__ import annotations

from collections.abc import Iterator

from figures import QUIET_SHARE, Turn, quiet_rounds
from rounds import MAX_SECONDS, TRIES, play

from rlsrl.testing.clock import ManualClock

NAMES = ("a", "b", "c")


class Table:
    """Plays turns on a manual clock, with some noisy rounds, and records them."""

    def __init__(self, noisy: Iterator[bool], seconds: float = 1.0) -> None:
        self.played: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.clock = ManualClock()
        self._noisy = noisy
        self._seconds = seconds
        self._is_noisy = False

    def measure(self, name: str, number: int) -> Turn:
        if len(self.played) % len(NAMES) == 0:
            self._is_noisy = next(self._noisy)
        self.played.append((name, number))
        self.clock.advance(self._seconds)
        others = 2 * QUIET_SHARE if self._is_noisy else 0.0
        return Turn(contestant=name, figure=10.0, others=others, own=0.5, megabytes=1.0)

    def play(self, wanted: int = 3) -> tuple[int, int]:
        rounds = play(
            NAMES, self.measure, wanted=wanted, log=self.said.append, began=self.clock.monotonic(),
            clock=self.clock.monotonic,
        )  # fmt: skip
        return len(rounds), len(quiet_rounds(rounds))


def endlessly(*noisy: bool) -> Iterator[bool]:
    yield from noisy
    while True:
        yield noisy[-1]


def test_contestants_take_turns_in_rotating_order() -> None:
    table = Table(endlessly(False))
    assert table.play() == (3, 3)
    assert [name for name, _ in table.played] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [number for _, number in table.played] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_noisy_round_is_kept_printed_and_repeated() -> None:
    table = Table(endlessly(False, True, True, False))
    assert table.play() == (5, 3)
    assert [number for _, number in table.played[::3]] == [0, 1, 1, 1, 2], "the same round, with the same seed"
    assert sum("was not quiet" in line for line in table.said) == 2
    assert all(f"others {2 * QUIET_SHARE:5.1%}" in line for line in table.said[3:6]), "with what others used"


def test_it_gives_up_after_the_allowed_tries_and_keeps_them_all() -> None:
    table = Table(endlessly(False, True))
    assert table.play() == (1 + TRIES, 1)
    assert f"(try {TRIES} of {TRIES})" in table.said[-1]


def test_no_round_begins_that_would_end_too_late() -> None:
    table = Table(endlessly(False), seconds=MAX_SECONDS / 3 / 2.5)
    assert table.play() == (2, 2)
    assert "no time for another round" in table.said[-1]
