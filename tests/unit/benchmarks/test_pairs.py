"""The result of rounds of turns of a commit and the bases that it is paired with."""

from __future__ import annotations

import json
import math
import random

import pytest
from figures import QUIET_SHARE, Round, Turn
from pairs import (
    HEAD,
    LEAST_PAIRS,
    Bounds,
    bound_rank,
    closing_lines,
    counted_rounds,
    cpu_seconds,
    from_json,
    order_of,
    round_line,
    summarize,
    to_json,
    why_discarded,
)

CORES = 2
OLD, OLDER = "old", "older"


def turn(name: str, figure: float | None = 1000.0, *, others: float = 0.0, own: float = 0.5) -> Turn:
    return Turn(contestant=name, figure=figure, others=others, own=own)


def measured(
    old: float | None = 1000.0,
    head: float | None = 1000.0,
    *,
    older: float | None = 1000.0,
    others: float = 0.0,
    own: float = 0.5,
) -> Round:
    return Round(turns=(turn(OLDER, older), turn(OLD, old), turn(HEAD, head, others=others, own=own)))


@pytest.mark.parametrize(("number", "rank"), [(0, 0), (4, 0), (5, 1), (8, 2), (20, 6), (30, 11)])
def test_the_rank_of_the_bounds_is_the_sign_tests(number: int, rank: int) -> None:
    assert bound_rank(number) == rank


def test_each_bound_is_passed_by_the_median_in_at_most_one_case_of_twenty() -> None:
    for number in range(LEAST_PAIRS, 60):
        rank = bound_rank(number)
        chance = sum(math.comb(number, heads) for heads in range(rank)) / 2**number
        assert chance <= 0.05 < chance + math.comb(number, rank) / 2**number


def test_bounds_hold_for_a_skewed_distribution() -> None:
    random_numbers = random.Random(1)
    samples = [[random_numbers.lognormvariate(0.0, 1.0) for _ in range(30)] for _ in range(500)]
    missed = 0
    for sample in samples:
        bounds = Bounds.of(sample)
        assert bounds.low is not None
        assert bounds.high is not None
        missed += not bounds.low <= 1.0 <= bounds.high
    assert missed / 500 <= 0.12


def test_bounds_are_the_values_of_their_rank() -> None:
    assert Bounds.of([float(value) for value in range(30, 0, -1)]) == Bounds(median=15.5, low=11.0, high=20.0)


def test_few_rounds_have_a_median_and_no_bounds() -> None:
    assert Bounds.of([2.0, 1.0]) == Bounds(median=1.5, low=None, high=None)
    assert str(Bounds.of([2.0, 1.0])) == "1.500 (no bounds below 5 rounds)"


def test_the_order_is_reversed_each_time() -> None:
    forth, back = (OLDER, OLD, HEAD), (HEAD, OLD, OLDER)
    assert [order_of(number, [OLDER, OLD]) for number in range(3)] == [forth, back, forth]


@pytest.mark.parametrize(
    ("discarded", "why"),
    [
        (measured(others=1.5 * QUIET_SHARE), "other programs used 4.5% of the machine, allowed are 3%"),
        (measured(head=None), "too few training steps of head in the window"),
        (measured(old=None, head=None), "too few training steps of old and head in the window"),
    ],
)
def test_a_round_is_discarded_for_a_reason(discarded: Round, why: str) -> None:
    assert why_discarded(discarded) == why
    assert counted_rounds([discarded, measured()]) == [measured()]
    assert f"discarded: {why}" in round_line(7, discarded, cores=CORES)


def test_ratios_are_of_rounds_and_not_of_medians() -> None:
    found = summarize(
        [measured(1000.0, 500.0, older=250.0), measured(200.0, 400.0), measured(300.0, 300.0)], cores=CORES
    )
    assert found is not None
    assert {base: ratio.median for base, ratio in found.speed_ratios.items()} == {OLD: 1.0, OLDER: 0.4}
    assert found.speeds == {OLDER: 1000.0, OLD: 300.0, HEAD: 400.0}


def test_processor_time_is_that_of_one_env_step() -> None:
    # A quarter of two cores for 1000 steps a second.
    assert cpu_seconds(turn(OLD, 1000.0, own=0.25), CORES) == pytest.approx(0.0005)
    found = summarize([measured(1000.0, 2000.0, own=0.5)] * LEAST_PAIRS, cores=CORES)
    assert found is not None
    assert found.cpu_ratios == {base: Bounds(median=0.5, low=0.5, high=0.5) for base in (OLD, OLDER)}


def test_the_lines_have_what_a_closing_note_needs() -> None:
    rounds = [*[measured(1000.0, 1100.0, older=1250.0)] * 6, measured(others=0.5)]
    assert round_line(1, rounds[0], cores=CORES) == (
        "round   1  old    1,000 env steps/s 1000.0 us, others  0.0%  older    1,250 env steps/s  800.0 us, others  "
        "0.0%  head    1,100 env steps/s  909.1 us, others  0.0%  ratio 1.100, 0.880  older first"
    )
    names = {OLD: "aaa", OLDER: "bbb", HEAD: "ccc"}
    end = "medians with 90 % bounds of 6 rounds of 20 s a turn; discarded: 1"
    faster = "speed ratio 1.100 (1.100 to 1.100), 1,000 to 1,100 env steps/s"
    cheaper = "processor time per env step: ratio 0.909 (0.909 to 0.909), 1000.0 to 909.1 us"
    slower = "speed ratio 0.880 (0.880 to 0.880), 1,250 to 1,100 env steps/s"
    dearer = "processor time per env step: ratio 1.136 (1.136 to 1.136), 800.0 to 909.1 us"
    end = "medians with 90 % bounds of 6 rounds of 20 s a turn; discarded: 1"
    assert closing_lines("W1", names, rounds, cores=CORES, seconds=20.0) == [
        f"W1, aaa to ccc: {faster}; {cheaper}; {end}",
        f"W1, bbb to ccc: {slower}; {dearer}; {end}",
    ]


def test_without_a_round_that_counts_there_is_no_result() -> None:
    noisy = [measured(others=0.5)]
    assert summarize(noisy, cores=CORES) is None
    (line,) = closing_lines("W1", {OLD: "aaa", HEAD: "bbb"}, noisy, cores=CORES, seconds=20.0)
    assert line == "W1, aaa to bbb: no result, no round counts"


def test_a_kept_round_is_read_again_unless_conditions_differ() -> None:
    kept = json.loads(json.dumps(to_json(measured(), {"cores": 2, "window_seconds": 20.0})))
    assert from_json(kept, {"cores": 2, "window_seconds": 20.0}) == measured()
    assert from_json(kept, {"cores": 2, "window_seconds": 3.0}) is None
