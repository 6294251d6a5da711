"""The next version of an evaluator: the newest of its share that is due, and always the last of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.workers.evaluation_choice import EvaluationInterval, Share, choose

ALONE = Share(index=0, num_evaluators=1)
ALWAYS = EvaluationInterval(every_seconds=None, every_versions=None)


def stored(number: int, *, at: float = 0.0, **metadata: Any) -> VersionInfo:
    """Return a version whose step is 10 times its number."""
    return VersionInfo(
        policy="default",
        version=Version(1, 10 * number),
        tags=(),
        created_at=at,
        num_parameters=1,
        nbytes=4,
        has_state=True,
        metadata={"number": number, **metadata},
    )


def played(number: int, *, at: float = 0.0, **metadata: Any) -> VersionInfo:
    return stored(number, at=at, evaluation={"return_mean": 1.0}, **metadata)


def noted(info: VersionInfo, **metadata: Any) -> VersionInfo:
    return replace(info, metadata={**info.metadata, **metadata})


def chosen(
    versions: list[VersionInfo],
    *,
    share: Share = ALONE,
    interval: EvaluationInterval = ALWAYS,
    last: VersionInfo | None = None,
) -> int | None:
    info = choose(versions, share=share, interval=interval, last=last)
    return None if info is None else info.metadata["number"]


def test_without_a_stored_version_none_is_due() -> None:
    assert chosen([]) is None


def test_a_withdrawn_end_makes_no_version_due() -> None:
    seldom = EvaluationInterval(every_seconds=None, every_versions=5)
    versions = [played(0), stored(1, terminal=None)]
    assert chosen(versions, interval=seldom) is None
    assert chosen([played(0), stored(1, terminal={"reason": "envSteps"})], interval=seldom) == 1


def test_the_newest_version_is_played_and_older_ones_are_skipped() -> None:
    assert chosen([stored(0), stored(1), stored(2)]) == 2
    assert chosen([stored(0), stored(1), played(2)]) is None


def test_no_version_is_played_twice_in_one_process_with_or_without_a_result() -> None:
    assert chosen([stored(0), stored(1)], last=stored(1)) is None
    assert chosen([stored(0), stored(1)], last=stored(5)) is None, "the one played may be pruned by now"
    assert chosen([played(3), stored(4)], last=stored(1)) == 4


def test_an_unfinished_evaluation_counts_as_played() -> None:
    assert chosen([stored(1, evaluation={"unfinished": "too long"})]) is None


@pytest.mark.parametrize(("newest", "due"), [(3, None), (4, None), (5, 5), (9, 9)])
def test_every_n_versions_one_is_due(newest: int, due: int | None) -> None:
    interval = EvaluationInterval(every_seconds=None, every_versions=3)
    assert chosen([played(2), stored(newest)], interval=interval) == due
    assert chosen([stored(newest)], interval=interval, last=stored(2)) == due


@pytest.mark.parametrize(("at", "due"), [(9.9, None), (10.0, 3)])
def test_versions_are_due_after_some_seconds(at: float, due: int | None) -> None:
    interval = EvaluationInterval(every_seconds=10.0, every_versions=None)
    assert chosen([played(2, at=0.0), stored(3, at=at)], interval=interval) == due


@pytest.mark.parametrize(("number", "at", "due"), [(3, 1.0, None), (3, 10.0, 3), (12, 1.0, 12)])
def test_the_earlier_of_seconds_and_versions_counts(number: int, at: float, due: int | None) -> None:
    interval = EvaluationInterval(every_seconds=10.0, every_versions=10)
    assert chosen([played(2), stored(number, at=at)], interval=interval) == due


def test_the_first_version_is_due_at_once() -> None:
    assert chosen([stored(0)], interval=EvaluationInterval(every_seconds=60.0, every_versions=100)) == 0


def test_the_last_version_of_a_run_is_always_due() -> None:
    rare = EvaluationInterval(every_seconds=None, every_versions=100)
    assert chosen([played(2), stored(3, terminal={"reason": "envSteps"})], interval=rare) == 3
    assert chosen([played(2), stored(3)], interval=rare) is None
    assert chosen([played(2), played(3, terminal={"reason": "envSteps"})], interval=rare) is None


def test_evaluators_share_by_number() -> None:
    versions = [stored(number) for number in range(6)]
    shares = [Share(index=index, num_evaluators=4) for index in range(4)]
    assert [chosen(versions, share=share) for share in shares] == [4, 5, 2, 3]
    every_second = EvaluationInterval(every_seconds=None, every_versions=2)
    assert chosen([played(0), stored(4)], share=shares[0], interval=every_second) is None
    assert chosen([played(0), stored(8)], share=shares[0], interval=every_second) == 8


def test_a_version_of_a_newer_attempt_is_newer() -> None:
    old, new = played(7), stored(8)
    again = replace(new, version=Version(2, 5))
    assert chosen([old, again]) == 8


@given(
    num_evaluators=st.integers(1, 5),
    every_versions=st.one_of(st.none(), st.integers(1, 4)),
    looks=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=40),
)
def test_every_version_has_one_evaluator_and_the_last_is_always_played(
    num_evaluators: int, every_versions: int | None, looks: list[tuple[int, int]]
) -> None:
    """Versions come and go, and evaluators check at random times: none plays a version twice or another's version."""
    interval = EvaluationInterval(every_seconds=None, every_versions=every_versions)
    results: dict[int, int] = {}
    versions: list[VersionInfo] = [stored(0)]

    def look(index: int) -> None:
        share = Share(index=index, num_evaluators=num_evaluators)
        info = choose(versions, share=share, interval=interval, last=None)
        if info is not None:
            number = info.metadata["number"]
            assert number not in results
            assert number % num_evaluators == index
            results[number] = index
            versions[versions.index(info)] = noted(info, evaluation={"return_mean": 1.0})

    for who, num_new in looks:
        first = versions[-1].metadata["number"] + 1
        versions = (versions + [stored(number) for number in range(first, first + num_new)])[-5:]
        look(who % num_evaluators)
    last = versions[-1].metadata["number"]
    versions[-1] = noted(versions[-1], terminal={"reason": "envSteps"})
    for index in range(num_evaluators):
        look(index)
    assert last in results
