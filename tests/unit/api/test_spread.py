import pytest

from rlsrl.api.spread import spread_environments, spread_evaluation

SPREADS = [
    # environments, workers, counts, warnings
    (8, 1, (8,), ()),
    (8, 4, (2, 2, 2, 2), ()),
    (4, 4, (1, 1, 1, 1), ()),
    (7, 2, (4, 3), ("do not divide evenly over 2 workers: the first 1 step 4, the others 3",)),
    (11, 4, (3, 3, 3, 2), ("do not divide evenly over 4 workers: the first 3 step 3, the others 2",)),
    (3, 8, (1, 1, 1), ("need no more than 3 of 8 workers: 3 are used",)),
    (1, 1, (1,), ()),
]


@pytest.mark.parametrize(("environments", "workers", "counts", "warnings"), SPREADS)
def test_environments_are_spread_over_workers(
    environments: int, workers: int, counts: tuple[int, ...], warnings: tuple[str, ...]
) -> None:
    spread = spread_environments(environments, workers)

    assert spread.counts == counts
    assert spread.num_workers == len(counts)
    assert spread.num_environments == environments
    assert len(spread.warnings) == len(warnings)
    assert all(expected in actual for expected, actual in zip(warnings, spread.warnings, strict=True))


def test_every_spread_is_complete_and_even() -> None:
    for environments in range(1, 41):
        for workers in range(1, 41):
            counts = spread_environments(environments, workers).counts
            assert len(counts) == min(environments, workers)
            assert sum(counts) == environments
            assert max(counts) - min(counts) <= 1
            assert list(counts) == sorted(counts, reverse=True)


def test_workers_share_one_range_of_ranks() -> None:
    spread = spread_environments(7, 3)

    assert [list(spread.ranks_of(worker)) for worker in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("worker", [-1, 3])
def test_a_worker_without_environments_has_no_ranks(worker: int) -> None:
    with pytest.raises(IndexError, match="not one of the 3"):
        spread_environments(3, 8).ranks_of(worker)


@pytest.mark.parametrize(("environments", "workers"), [(0, 1), (1, 0)])
def test_impossible_spreads_are_refused(environments: int, workers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        spread_environments(environments, workers)


@pytest.mark.parametrize(
    ("environments", "workers", "max_steps", "per_worker", "total", "steps"),
    [
        (8, 4, 1000, 2, 8, 125),
        (10, 4, 1000, 2, 8, 125),  # rounded down: 10 // 4 each
        (3, 4, 1000, 1, 4, 250),  # at least one each: more than asked
        (1, 1, 7, 1, 1, 7),
        (5, 2, 1001, 2, 4, 250),  # the limit is shared among the rounded total
    ],
)
def test_evaluation_is_rounded_to_equal_shares(
    environments: int, workers: int, max_steps: int, per_worker: int, total: int, steps: int
) -> None:
    spread = spread_evaluation(environments, workers, max_steps=max_steps)

    assert (spread.num_per_worker, spread.num_environments, spread.max_steps_per_environment) == (
        per_worker, total, steps,
    )  # fmt: skip


def test_evaluation_without_steps_or_environments_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        spread_evaluation(4, 4, max_steps=3)
    with pytest.raises(ValueError, match="at least 1"):
        spread_evaluation(0, 4, max_steps=3)
