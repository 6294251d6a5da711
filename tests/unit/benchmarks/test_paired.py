"""Rounds of a commit and its bases: how many are measured, what is stored, and where an interrupted run continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from figures import Turn
from paired import MAX_DISCARDED, MAX_SECONDS, KeptRounds, measure_rounds
from pairs import HEAD, counted_rounds

from rlsrl.testing.clock import ManualClock

OLD, OLDER = "old", "older"
FORTH, BACK = (OLDER, OLD, HEAD), (HEAD, OLD, OLDER)


class Commits:
    """Three commits of constant speed, on a machine that is noisy in some turns."""

    def __init__(self, *, seconds: float = 1.0, noisy_turns: Sequence[int] = (), fails_in: int | None = None) -> None:
        self.clock = ManualClock()
        self.measured: list[str] = []
        self._seconds = seconds
        self._noisy_turns = noisy_turns
        self._fails_in = fails_in

    def turn(self, name: str) -> Turn:
        number = len(self.measured)
        if number == self._fails_in:
            raise KeyboardInterrupt
        self.measured.append(name)
        self.clock.advance(self._seconds)
        others = 0.5 if number in self._noisy_turns else 0.0
        return Turn(contestant=name, figure=100.0, others=others, own=0.5)

    def measure(self, kept: KeptRounds, wanted: int) -> tuple[int, int]:
        """Return how many rounds there are then, and how many of them count."""
        rounds = measure_rounds(kept, self.turn, [OLDER, OLD], wanted=wanted, cores=2, clock=self.clock.monotonic)
        return len(rounds), len(counted_rounds(rounds))


@pytest.fixture
def kept(tmp_path: Path) -> KeptRounds:
    return KeptRounds(folder=tmp_path / "rounds", conditions={"window_seconds": 20.0})


def test_the_order_is_reversed_from_round_to_round(kept: KeptRounds) -> None:
    commits = Commits()
    assert commits.measure(kept, 3) == (3, 3)
    assert commits.measured == [*FORTH, *BACK, *FORTH]


def test_a_discarded_round_is_kept_and_measured_again_in_the_same_order(kept: KeptRounds) -> None:
    commits = Commits(noisy_turns=[4])
    assert commits.measure(kept, 2) == (3, 2)
    assert commits.measured == [*FORTH, *BACK, *BACK]
    assert len(kept.read()) == 3


def test_an_interrupted_run_goes_on_after_its_last_whole_round(kept: KeptRounds) -> None:
    with pytest.raises(KeyboardInterrupt):
        Commits(fails_in=5).measure(kept, 3)
    assert len(kept.read()) == 1
    again = Commits()
    assert again.measure(kept, 3) == (3, 3)
    assert again.measured == [*BACK, *FORTH], "the interrupted round is measured again"
    done = Commits()
    assert done.measure(kept, 3) == (3, 3)
    assert done.measured == []


def test_rounds_of_other_conditions_are_left_alone(kept: KeptRounds) -> None:
    Commits().measure(kept, 2)
    other = replace(kept, conditions={"window_seconds": 3.0})
    assert Commits().measure(other, 1) == (1, 1)
    assert len(kept.read()) == 2


def test_it_ends_when_the_machine_is_not_quiet(kept: KeptRounds) -> None:
    assert Commits(noisy_turns=range(1000)).measure(kept, 3) == (MAX_DISCARDED, 0)


def test_no_round_begins_that_would_end_too_late(kept: KeptRounds) -> None:
    commits = Commits(seconds=MAX_SECONDS / 3 / 2.5)
    assert commits.measure(kept, 30) == (2, 2)
