"""No two environments, incarnations or purposes share a seed, and seeds never change."""

from __future__ import annotations

import itertools

import pytest

from rlsrl.envs.seeds import environment_seed


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        ((0, 0, 0), 476252562),
        ((1, 0, 0), 2933509889),
        ((0, 1, 0), 3952790413),
        ((0, 0, 1), 1921337475),
        ((2**63, 255, 9), 3463467381),
    ],
)
def test_seeds_never_change(arguments: tuple[int, int, int], seed: int) -> None:
    assert environment_seed(*arguments) == seed


def test_seeds_are_distinct_over_fleet_lives_experiments_and_purposes() -> None:
    keys = list(itertools.product(range(3), range(256), range(4), ("training", "evaluation")))
    seeds = {environment_seed(*key[:3], purpose=key[3]) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**32 for seed in seeds)
