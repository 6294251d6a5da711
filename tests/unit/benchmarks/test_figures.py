"""From measurements to a result."""

from __future__ import annotations

import pytest
from figures import (
    JAX,
    NO_QUIET_RUN,
    QUIET_SHARE,
    RLSRL,
    SHOWN,
    SINGLE_FILE,
    STABLE_BASELINES3,
    TOO_FEW_ROUNDS,
    Round,
    Spread,
    Turn,
    counted_peers,
    quiet_rounds,
    ratio_of,
    speed,
    verdict,
)

NOISE = QUIET_SHARE + 0.001


def turn(name: str, figure: float | None, *, others: float = 0.0) -> Turn:
    return Turn(contestant=name, figure=figure, others=others, own=0.9, megabytes=100.0)


def round_of(rlsrl: float | None, sb3: float | None, single: float | None = None, *, others: float = 0.0) -> Round:
    turns = [turn(RLSRL, rlsrl), turn(STABLE_BASELINES3, sb3, others=others)]
    return Round(turns=(*turns, *([] if single is None else [turn(SINGLE_FILE, single)])))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(9.0, 0.0), (10.0, 100.0), (12.0, 300.0), (14.0, 500.0), (15.5, 900.0)], 100.0),
        ([(10.0, 0.0), (15.0, 50.0)], 10.0),  # both edges are within
        ([(12.0, 300.0)], None),
        ([(8.0, 0.0), (16.0, 800.0)], None),  # one iteration, around the window
        ([(12.0, 300.0), (12.0, 300.0)], None),
        ([], None),
    ],
)
def test_speed_is_of_whole_iterations_within_the_window(
    points: list[tuple[float, float]], expected: float | None
) -> None:
    assert speed(points, 10.0, 15.0) == expected


@pytest.mark.parametrize(("others", "quiet"), [(0.0, True), (QUIET_SHARE, True), (NOISE, False), (1.0, False)])
def test_one_noisy_turn_spoils_its_round(others: float, quiet: bool) -> None:
    each = round_of(80.0, 10.0, 8.0, others=others)
    assert each.is_quiet is quiet
    assert quiet_rounds([each]) == ([each] if quiet else [])


def test_spread_is_middle_lowest_and_highest() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    assert Spread.of([1.0, 4.0]) == Spread(median=2.5, low=1.0, high=4.0)


@pytest.mark.parametrize(
    ("single", "counts"), [(8.9, False), (9.0, True), (20.0, True)]
)  # of Stable-Baselines3's 10: below 0.9 of it, it does not count
def test_the_single_file_counts_unless_it_is_slow(single: float, counts: bool) -> None:
    peers = counted_peers({RLSRL: 80.0, STABLE_BASELINES3: 10.0, SINGLE_FILE: single})
    assert set(peers) == {STABLE_BASELINES3, *([SINGLE_FILE] if counts else [])}


@pytest.mark.parametrize(("single", "counts"), [(12.0, False), (11.0, True), (5.0, True)])
def test_where_less_is_better_slow_means_more(single: float, counts: bool) -> None:
    peers = counted_peers({RLSRL: 4.0, STABLE_BASELINES3: 10.0, SINGLE_FILE: single}, less_is_better=True)
    assert (SINGLE_FILE in peers) is counts


def test_the_ratio_is_to_the_best_peer_of_the_same_round() -> None:
    assert ratio_of({RLSRL: 80.0, STABLE_BASELINES3: 10.0, SINGLE_FILE: 16.0}) == 5.0
    assert ratio_of({RLSRL: 5.0, STABLE_BASELINES3: 20.0, SINGLE_FILE: 10.0}, less_is_better=True) == 0.5
    assert ratio_of({RLSRL: 80.0}) is None
    assert ratio_of({STABLE_BASELINES3: 10.0}) is None


def test_three_quiet_rounds_are_a_result_with_its_spread() -> None:
    rounds = [
        round_of(80.0, 10.0, 8.0),
        round_of(1.0, 10.0, 8.0, others=NOISE),
        round_of(60.0, 10.0, 12.0),
        round_of(70.0, 10.0, 10.0),
    ]
    told = verdict(rounds, wanted=3, limit=100.0)
    assert told["verdict"] == SHOWN
    assert told["ratio"] == {"median": 7.0, "low": 5.0, "high": 8.0}, "without the noisy round"
    assert told["figures"][RLSRL] == {"median": 70.0, "low": 60.0, "high": 80.0}
    assert told["fastest_peer"] in {STABLE_BASELINES3, SINGLE_FILE}
    assert told["others"] == 0.0
    assert told["of_the_limit"][RLSRL] == 0.7
    assert told["megabytes"][RLSRL] == 100.0


def test_a_contestant_that_is_no_peer_has_a_ratio_apart() -> None:
    rounds = [
        Round(turns=(turn(RLSRL, figure), turn(STABLE_BASELINES3, 10.0), turn(JAX, 200.0)))
        for figure in (80.0, 100.0, 90.0)
    ]
    result = verdict(rounds, wanted=3, apart=[JAX])
    assert (result["fastest_peer"], result["counted_peers"]) == (STABLE_BASELINES3, [STABLE_BASELINES3])
    assert result["ratio"] == {"median": 9.0, "low": 8.0, "high": 10.0}
    assert result["apart"] == {JAX: {"median": 0.45, "low": 0.4, "high": 0.5}}
    among_peers = verdict(rounds, wanted=3)
    assert (among_peers["fastest_peer"], among_peers["ratio"]["median"]) == (JAX, 0.45)
    assert "apart" not in among_peers
    assert "apart" not in verdict([round_of(80.0, 10.0)] * 3, wanted=3, apart=[JAX])


def test_without_enough_quiet_rounds_there_is_no_result() -> None:
    noisy = [round_of(1000.0, 1.0, others=NOISE)] * 5
    assert verdict([round_of(80.0, 10.0), round_of(80.0, 10.0), *noisy], wanted=3) == {"verdict": NO_QUIET_RUN}
    assert verdict([], wanted=3) == {"verdict": NO_QUIET_RUN}


def test_too_little_time_is_reported_as_such_and_not_as_noise() -> None:
    assert verdict([round_of(80.0, 10.0)] * 2, wanted=3) == {"verdict": TOO_FEW_ROUNDS}


def test_a_contestant_without_figures_is_named() -> None:
    told = verdict([round_of(None, 10.0)] * 3, wanted=3)
    assert told == {"verdict": f"not shown: too few figures of {RLSRL}"}
    told = verdict([round_of(80.0, None)] * 3, wanted=3)
    assert told == {"verdict": f"not shown: too few figures of {STABLE_BASELINES3}"}


def test_a_peer_without_figures_does_not_count() -> None:
    told = verdict([round_of(80.0, None, 10.0)] * 3, wanted=3)
    assert (told["fastest_peer"], told["counted_peers"]) == (SINGLE_FILE, [SINGLE_FILE])
    assert told["ratio"]["median"] == 8.0


def test_seconds_are_compared_by_their_medians() -> None:
    rounds = [round_of(2.0, 10.0), round_of(9.0, 10.0), round_of(4.0, 40.0)]
    told = verdict(rounds, wanted=3, less_is_better=True)
    assert told["ratio"] == {"median": 0.4, "low": 0.1, "high": 0.9}
