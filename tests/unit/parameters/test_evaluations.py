"""The choice of the best version, and its tag when several processes move it at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import (
    BEST_TAG,
    EVALUATION_KEY,
    NUMBER_KEY,
    best_of,
    evaluation_of,
    next_number,
    number_of,
    return_mean_of,
    tag_best,
)
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import ParameterDB, VersionInfo
from rlsrl.testing.memory_parameter_db import MemoryBlobs, MemoryParameterDB
from rlsrl.testing.parameter_dbs import POLICY, make_parameters


def info(step: int, *tags: str, attempt: int = 1, **metadata: Any) -> VersionInfo:
    return VersionInfo(
        policy=POLICY,
        version=Version(attempt, step),
        tags=tags,
        created_at=0.0,
        num_parameters=1,
        nbytes=4,
        has_state=False,
        metadata=metadata,
    )


def evaluated(step: int, mean: float | None) -> VersionInfo:
    return info(step, evaluation={"unfinished": "too long"} if mean is None else {"return_mean": mean})


def test_an_evaluation_and_its_mean_are_read_from_the_metadata() -> None:
    assert (evaluation_of(info(1)), return_mean_of(info(1))) == (None, None)
    assert return_mean_of(evaluated(1, 7)) == 7.0
    assert return_mean_of(evaluated(1, None)) is None
    assert evaluation_of(evaluated(1, None)) == {"unfinished": "too long"}
    assert evaluation_of(info(1, evaluation="by hand")) is None


def test_the_mean_of_an_unfinished_evaluation_is_no_estimate() -> None:
    partial = info(2, evaluation={"unfinished": "2 of 4 episodes ended", "return_mean": 9.0})
    assert return_mean_of(partial) is None
    assert best_of([evaluated(1, 1.0), partial]) == evaluated(1, 1.0)


@pytest.mark.parametrize(
    ("means", "best"),
    [
        ([], None),
        ([None, None], None),
        ([1.0, 3.0, 2.0], 1),
        ([1.0, 3.0, 3.0], 1),
        ([None, -5.0, None], 1),
        ([-5.0, -7.0], 0),
    ],
)
def test_the_best_version_has_the_highest_mean_and_of_equals_is_the_oldest(
    means: list[float | None], best: int | None
) -> None:
    versions = [evaluated(step, mean) for step, mean in enumerate(means)]
    for order in (versions, versions[::-1]):
        found = best_of(order)
        assert (None if found is None else found.version.step) == best


def test_numbering_continues_from_the_highest_number() -> None:
    assert next_number([]) == 0
    assert next_number([info(1)]) == 1
    assert next_number([info(1, number=3), info(2, number=7, attempt=2), info(9)]) == 8
    assert number_of(info(1, **{NUMBER_KEY: "seven"})) == 0


@pytest.fixture(params=["memory", "filesystem"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ParameterDB]:
    """Return a function that opens the store again, as another process does."""
    if request.param == "filesystem":
        return lambda: FilesystemParameterDB(tmp_path / "parameters")
    blobs = MemoryBlobs()
    return lambda: MemoryParameterDB(blobs)


def push(db: ParameterDB, step: int, mean: float | None = None) -> None:
    db.push(POLICY, make_parameters(Version(1, step)))
    if mean is not None:
        db.annotate(POLICY, Version(1, step), {EVALUATION_KEY: {"return_mean": mean}})


def tagged(db: ParameterDB) -> list[str]:
    return [str(each.version) for each in db.versions(POLICY) if BEST_TAG in each.tags]


def test_the_tag_moves_only_to_a_better_version(open_again: Callable[[], ParameterDB]) -> None:
    db = open_again()
    push(db, 0)
    assert tag_best(db, POLICY) is None
    moves = []
    for step, mean in enumerate([5.0, 5.0, 4.0, 6.0, 5.5], start=1):
        push(db, step, mean)
        moves.append(str(tag_best(db, POLICY)))
        assert tagged(db) == [moves[-1]]
    assert moves == ["1.1", "1.1", "1.1", "1.4", "1.4"]
    assert db.prune(POLICY, keep_last=1) == [Version(1, step) for step in (0, 1, 2, 3)]
    assert tag_best(db, POLICY) == Version(1, 4), "the best outlives retention"


def test_a_manual_tag_on_a_version_without_evaluation_is_replaced(open_again: Callable[[], ParameterDB]) -> None:
    db = open_again()
    push(db, 1)
    push(db, 2, 3.0)
    db.tag(POLICY, Version(1, 1), BEST_TAG)
    assert tag_best(db, POLICY) == Version(1, 2)
    assert tagged(db) == ["1.2"]


class Interrupted(MemoryParameterDB):
    """Calls a function right before its first tag is written."""

    def __init__(self, blobs: MemoryBlobs, before_tag: Callable[[], object]) -> None:
        super().__init__(blobs)
        self._before_tag: list[Callable[[], object]] = [before_tag]

    def tag(self, policy: str, ref: Any, *tags: str) -> None:
        if self._before_tag:
            self._before_tag.pop()()
        super().tag(policy, ref, *tags)


def test_two_evaluators_that_tag_at_the_same_time_agree() -> None:
    blobs = MemoryBlobs()
    other = MemoryParameterDB(blobs)

    def the_other_is_quicker() -> None:
        push(other, 2, 9.0)
        assert tag_best(other, POLICY) == Version(1, 2)

    slow = Interrupted(blobs, the_other_is_quicker)
    push(slow, 1, 5.0)
    assert tag_best(slow, POLICY) == Version(1, 2), "its own late move is put right"
    assert tagged(other) == ["1.2"]


def test_a_best_version_that_is_pruned_before_it_is_tagged_leaves_the_next_best() -> None:
    blobs = MemoryBlobs()
    other = MemoryParameterDB(blobs)
    db = Interrupted(blobs, lambda: other.prune(POLICY, keep_last=1))
    push(db, 1, 9.0)
    push(db, 2, 5.0)
    assert tag_best(db, POLICY) == Version(1, 2)
    assert tagged(db) == ["1.2"]
