"""Batches of requests: their split by the weights that can answer them, and how they are joined again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlsrl.data.version import Version
from rlsrl.streams.inference import Answers, InferenceBatch, PendingRequest, RequestQueue
from rlsrl.testing.inference_bench import DEADLINE, EVERYTHING, answer, request, value_of

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


class Delivered:
    """What batches deliver: the numbers of the requests, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, pending: Sequence[PendingRequest], answers: Answers) -> None:
        self.numbers += [entry.number for entry in pending]


@pytest.fixture
def delivered() -> Delivered:
    return Delivered()


def batch_of(*versions: Version, delivered: Delivered, first: int = 0, at: float = 0.0) -> InferenceBatch:
    """Return a batch of requests, each of two lanes, numbered from ``first``, that arrived at ``at`` + 0, 1, ..."""
    pending = [
        PendingRequest(request=request(first + i, min_version=version), client="a", number=first + i, arrived_at=at + i)
        for i, version in enumerate(versions)
    ]
    return InferenceBatch(pending, taken_at=at + 10.0, deliver=delivered)


def values_of(batch: InferenceBatch | None) -> list[int] | None:
    return None if batch is None else [value_of(each) for each in batch.requests]


@pytest.mark.parametrize(
    ("version", "max_size", "first", "others"),
    [
        (V1, EVERYTHING, [1, 3], [0, 2]),
        (V2, EVERYTHING, [0, 1, 3], [2]),
        (V2, 4, [0, 1], [2, 3]),
        (V2, 1, [0], [1, 2, 3]),
        (V3, EVERYTHING, [0, 1, 2, 3], None),
        (V3, 8, [0, 1, 2, 3], None),
        (V3, 7, [0, 1, 2], [3]),
        (Version(1, 0), EVERYTHING, None, [0, 1, 2, 3]),
        (Version(2, 0), EVERYTHING, [0, 1, 2, 3], None),
    ],
)
def test_a_batch_is_split_into_the_oldest_requests_that_the_weights_satisfy_and_the_others(
    version: Version, max_size: int, first: list[int] | None, others: list[int] | None, delivered: Delivered
) -> None:
    batch = batch_of(V2, V1, V3, V1, delivered=delivered)
    parts = batch.split(version, max_size)
    assert [values_of(part) for part in parts] == [first, others]
    for part in parts:
        if part is not None:
            answer(part)
    assert delivered.numbers == [*(first or ()), *(others or ())], "each request is answered once"
    if first and others:
        with pytest.raises(RuntimeError, match="answered once"):
            answer(batch)


def test_the_parts_of_a_batch_have_versions_lanes_and_times_of_their_own(delivered: Delivered) -> None:
    first, others = batch_of(V2, V1, V3, V1, delivered=delivered).split(V1, EVERYTHING)
    assert first is not None
    assert others is not None
    assert [(part.least_version, part.min_version, part.num_lanes) for part in (first, others)] == [
        (V1, V1, 4),
        (V2, V3, 4),
    ]
    assert [(part.taken_at, part.queueing_seconds) for part in (first, others)] == [(10.0, 8.0), (10.0, 9.0)]


def test_joined_batches_are_one_in_the_order_of_their_requests(delivered: Delivered) -> None:
    early, late = (
        batch_of(V2, delivered=delivered),
        batch_of(V1, V1, V1, delivered=delivered, first=1, at=40.0),
    )
    joined = early.joined(late)
    assert values_of(joined) == [0, 1, 2, 3]
    assert (joined.least_version, joined.min_version, joined.num_lanes) == (V1, V2, 8)
    assert joined.taken_at == pytest.approx(40.0), "mean of 10, 50, 50 and 50"
    assert joined.queueing_seconds == pytest.approx(9.25), "mean of 10, 10, 9 and 8"
    for part in (early, late):
        with pytest.raises(RuntimeError, match="joined before"):
            part.fail(ValueError("too late"))
    answer(joined)
    assert delivered.numbers == [0, 1, 2, 3]


def test_waking_ends_the_present_wait_for_a_batch_or_the_next_one(delivered: Delivered) -> None:
    queue = RequestQueue()
    queue.wake()
    assert queue.next_batch(EVERYTHING, DEADLINE, delivered) is None
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(queue.next_batch, EVERYTHING, DEADLINE, delivered)
        queue.wake()
        assert waiting.result(DEADLINE / 2) is None
        queue.put("a", 1, request(1))
        assert values_of(queue.next_batch(EVERYTHING, DEADLINE, delivered)) == [1]
