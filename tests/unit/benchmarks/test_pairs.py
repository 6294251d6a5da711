"""The result of pairs of turns of two commits."""

from __future__ import annotations

import json
import math
import random

import pytest
from figures import QUIET_SHARE, Round, Turn
from pairs import (
    BASE,
    HEAD,
    LEAST_PAIRS,
    Bounds,
    bound_rank,
    closing_line,
    counted_pairs,
    cpu_seconds,
    from_json,
    order_of,
    pair_line,
    summarize,
    to_json,
    why_discarded,
)

CORES = 2


def turn(name: str, figure: float | None = 1000.0, *, others: float = 0.0, own: float = 0.5) -> Turn:
    return Turn(contestant=name, figure=figure, others=others, own=own)


def pair(base: float | None = 1000.0, head: float | None = 1000.0, *, others: float = 0.0, own: float = 0.5) -> Round:
    return Round(turns=(turn(BASE, base), turn(HEAD, head, others=others, own=own)))


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


def test_few_pairs_have_a_median_and_no_bounds() -> None:
    assert Bounds.of([2.0, 1.0]) == Bounds(median=1.5, low=None, high=None)
    assert str(Bounds.of([2.0, 1.0])) == "1.500 (no bounds below 5 pairs)"


def test_the_order_alternates() -> None:
    assert [order_of(number) for number in range(3)] == [(BASE, HEAD), (HEAD, BASE), (BASE, HEAD)]


@pytest.mark.parametrize(
    ("discarded", "why"),
    [
        (pair(others=1.5 * QUIET_SHARE), "other programs used 4.5% of the machine, allowed are 3%"),
        (pair(head=None), "too few training steps of head in the window"),
        (pair(base=None, head=None), "too few training steps of base and head in the window"),
    ],
)
def test_a_pair_is_discarded_for_a_reason(discarded: Round, why: str) -> None:
    assert why_discarded(discarded) == why
    assert counted_pairs([discarded, pair()]) == [pair()]
    assert f"discarded: {why}" in pair_line(7, discarded, cores=CORES)


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    found = summarize([pair(1000.0, 500.0), pair(200.0, 400.0), pair(300.0, 300.0)], cores=CORES)
    assert found is not None
    assert found.speed_ratio.median == 1.0
    assert found.speeds == {BASE: 300.0, HEAD: 400.0}


def test_processor_time_is_that_of_one_env_step() -> None:
    # A quarter of two cores for 1000 steps a second.
    assert cpu_seconds(turn(BASE, 1000.0, own=0.25), CORES) == pytest.approx(0.0005)
    found = summarize([pair(1000.0, 2000.0, own=0.5)] * LEAST_PAIRS, cores=CORES)
    assert found is not None
    assert found.cpu_ratio == Bounds(median=0.5, low=0.5, high=0.5)


def test_the_lines_have_what_a_closing_note_needs() -> None:
    pairs = [*[pair(1000.0, 1100.0)] * 6, pair(others=0.5)]
    assert pair_line(1, pairs[0], cores=CORES) == (
        "pair   1  base    1,000 env steps/s 1000.0 us, others  0.0%  head    1,100 env steps/s  909.1 us, others  "
        "0.0%  ratio 1.100  base first"
    )
    assert closing_line("W1", {BASE: "aaa", HEAD: "bbb"}, summarize(pairs, cores=CORES), seconds=20.0) == (
        "W1, aaa to bbb: speed ratio 1.100 (1.100 to 1.100), 1,000 to 1,100 env steps/s; processor time per env step: "
        "ratio 0.909 (0.909 to 0.909), 1000.0 to 909.1 us; medians with 90 % bounds of 6 pairs of 20 s; "
        "discarded: 1"
    )


def test_without_a_pair_that_counts_there_is_no_result() -> None:
    assert summarize([pair(others=0.5)], cores=CORES) is None
    assert closing_line("W1", {BASE: "aaa", HEAD: "bbb"}, None, seconds=20.0).endswith("no result, no pair counts")


def test_a_kept_pair_is_read_again_unless_conditions_differ() -> None:
    kept = json.loads(json.dumps(to_json(pair(), {"cores": 2, "window_seconds": 20.0})))
    assert from_json(kept, {"cores": 2, "window_seconds": 20.0}) == pair()
    assert from_json(kept, {"cores": 2, "window_seconds": 3.0}) is None
