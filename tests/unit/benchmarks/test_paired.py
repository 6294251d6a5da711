"""Pairs of two commits: the number of measurements, the stored results, and where an interrupted run continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from figures import Turn
from paired import MAX_DISCARDED, MAX_SECONDS, KeptPairs, measure_pairs
from pairs import BASE, HEAD, counted_pairs

from rlsrl.testing.clock import ManualClock


class Commits:
    """Two commits of constant speed, on a machine that is noisy in some turns."""

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

    def measure(self, kept: KeptPairs, wanted: int) -> tuple[int, int]:
        """Return how many pairs there are then, and how many of them count."""
        pairs = measure_pairs(kept, self.turn, wanted=wanted, cores=2, clock=self.clock.monotonic)
        return len(pairs), len(counted_pairs(pairs))


@pytest.fixture
def kept(tmp_path: Path) -> KeptPairs:
    return KeptPairs(folder=tmp_path / "pairs", conditions={"window_seconds": 20.0})


def test_the_order_alternates_from_pair_to_pair(kept: KeptPairs) -> None:
    commits = Commits()
    assert commits.measure(kept, 3) == (3, 3)
    assert commits.measured == [BASE, HEAD, HEAD, BASE, BASE, HEAD]


def test_a_discarded_pair_is_kept_and_measured_again_in_the_same_order(kept: KeptPairs) -> None:
    commits = Commits(noisy_turns=[2])
    assert commits.measure(kept, 2) == (3, 2)
    assert commits.measured == [BASE, HEAD, HEAD, BASE, HEAD, BASE]
    assert len(kept.read()) == 3


def test_an_interrupted_run_goes_on_after_its_last_whole_pair(kept: KeptPairs) -> None:
    with pytest.raises(KeyboardInterrupt):
        Commits(fails_in=3).measure(kept, 3)
    assert len(kept.read()) == 1
    again = Commits()
    assert again.measure(kept, 3) == (3, 3)
    assert again.measured == [HEAD, BASE, BASE, HEAD], "the interrupted pair is measured again"
    done = Commits()
    assert done.measure(kept, 3) == (3, 3)
    assert done.measured == []


def test_pairs_of_other_conditions_are_left_alone(kept: KeptPairs) -> None:
    Commits().measure(kept, 2)
    other = replace(kept, conditions={"window_seconds": 3.0})
    assert Commits().measure(other, 1) == (1, 1)
    assert len(kept.read()) == 2


def test_it_ends_when_the_machine_is_not_quiet(kept: KeptPairs) -> None:
    assert Commits(noisy_turns=range(1000)).measure(kept, 3) == (MAX_DISCARDED, 0)


def test_no_pair_begins_that_would_end_too_late(kept: KeptPairs) -> None:
    commits = Commits(seconds=MAX_SECONDS / 2 / 2.5)
    assert commits.measure(kept, 30) == (2, 2)
