"""Each key is worked on once for any number of additions, one call at a time, and again after a failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from rlsrl_operator import keyed_queue
from rlsrl_operator.keyed_queue import KeyedQueue

DEADLINE_SECONDS = 20
LATER = 0.001
"""Delay until the next call, in tests that wait for it."""


class Work:
    """Records each call and blocks it until the test releases it with a result."""

    def __init__(self, end: Callable[[str, int], float | None] = lambda key, number: None) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.calls: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.most_busy = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._end = end

    async def __call__(self, key: str) -> float | None:
        self.calls[key] += 1
        self.busy[key] += 1
        self.most_busy = max(self.most_busy, self.busy.total())
        assert self.busy[key] == 1, "never twice at a time"
        self.begun.put_nowait(key)
        try:
            await asyncio.sleep(0)  # let other tasks run
            await self.gate.wait()
            return self._end(key, self.calls[key])
        finally:
            self.busy[key] -= 1
            self.ended.put_nowait(key)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def running(
    work: Callable[[str], Awaitable[float | None]], *, num_workers: int = 2, pause: float = 0.0, **delays: float
) -> AsyncIterator[KeyedQueue[str]]:
    keys = KeyedQueue(work, num_workers=num_workers, pause=pause, **delays)
    task = asyncio.create_task(keys.run())
    try:
        yield keys
        assert not task.done()
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_waiting_key_is_queued_once() -> None:
    async def test() -> None:
        work = Work()
        work.gate.clear()
        async with running(work, num_workers=1) as keys:
            keys.add("first")
            assert await work.begun.get() == "first"
            for _ in range(100):
                keys.add("a")
            keys.add("b")
            work.gate.set()
            assert [await work.ended.get() for _ in range(3)] == ["first", "a", "b"]
            keys.add("end")
            assert await work.ended.get() == "end"
            assert work.calls == {"first": 1, "a": 1, "b": 1, "end": 1}

    run(test())


def test_a_key_that_is_added_while_it_is_busy_is_worked_on_once_more() -> None:
    async def test() -> None:
        work = Work()
        work.gate.clear()
        async with running(work) as keys:
            keys.add("a")
            await work.begun.get()
            for _ in range(100):
                keys.add("a")
            keys.add("b")
            assert await work.begun.get() == "b", "the other worker has nothing else to do"
            assert work.calls["a"] == 1
            work.gate.set()
            assert sorted([await work.ended.get() for _ in range(3)]) == ["a", "a", "b"]
            keys.add("end")
            while await work.ended.get() != "end":
                pass
            assert work.calls == {"a": 2, "b": 1, "end": 1}

    run(test())


def test_keys_are_worked_on_in_parallel_and_never_one_twice() -> None:
    """``Work`` refuses a second call for a busy key. Keys add themselves and each other while others are busy."""
    keys: list[KeyedQueue[str]] = []

    async def test() -> None:
        work = Work()

        async def busy(key: str) -> float | None:
            for other in "abcdef":
                if work.calls.total() < 500:
                    keys[0].add(other)
            return await work(key)

        async with running(busy, num_workers=3) as queue:
            keys.append(queue)
            queue.add("a")
            while work.calls.total() < 500:
                await work.ended.get()
        assert set(work.calls) == set("abcdef")
        assert 1 < work.most_busy <= 3

    run(test())


def failing(key: str, number: int) -> float | None:
    raise RuntimeError(f"{key} failed for the {number}th time")


@pytest.fixture
def failures() -> Iterator[list[MutableMapping[str, Any]]]:
    """The log lines of the queue, which logs failures alone."""
    with capture_logs() as lines:
        yield lines


def test_failures_back_off_and_success_resets_the_back_off(failures: list[MutableMapping[str, Any]]) -> None:
    def end(key: str, number: int) -> float | None:
        return LATER if number == 7 else failing(key, number)

    async def test() -> None:
        work = Work(end)
        async with running(work, first_retry=0.0001, last_retry=0.0012) as keys:
            keys.add("a")
            for _ in range(9):
                assert await work.ended.get() == "a"

    run(test())
    growing = [0.0001, 0.0002, 0.0004, 0.0008, 0.0012, 0.0012]
    assert [each["retry"] for each in failures[:7]] == pytest.approx([*growing, 0.0001])
    assert failures[0]["event"] == "reconcile_failed"
    assert failures[0]["error"] == "RuntimeError: a failed for the 1th time"


def test_the_back_off_ends_at_half_a_minute() -> None:
    assert 0 < keyed_queue.FIRST_RETRY_SECONDS < 1
    assert keyed_queue.LAST_RETRY_SECONDS == 30


def test_many_failures_overflow_nothing(failures: list[MutableMapping[str, Any]]) -> None:
    async def test() -> None:
        work = Work(failing)
        async with running(work, last_retry=0.0) as keys:
            keys.add("a")
            for _ in range(2000):
                await work.ended.get()

    run(test())
    assert {each["retry"] for each in failures} == {0.0}


def test_one_keys_failure_stops_no_other(failures: list[MutableMapping[str, Any]]) -> None:
    async def test() -> None:
        work = Work(lambda key, number: failing(key, number) if key == "bad" else None)
        async with running(work, num_workers=1) as keys:
            for key in ("bad", "a", "bad", "b"):
                keys.add(key)
            assert [await work.ended.get() for _ in range(3)] == ["bad", "a", "b"]

    run(test())
    assert len(failures) == 1


def test_adding_a_key_ends_its_back_off() -> None:
    async def test() -> None:
        work = Work(lambda key, number: failing(key, number) if number == 1 else None)
        async with running(work, first_retry=3600.0, last_retry=3600.0) as keys:
            keys.add("a")
            await work.ended.get()
            keys.add("b")
            assert await work.ended.get() == "b", "by now a's next try is an hour away"
            keys.add("a")
            assert await work.ended.get() == "a"

    run(test())


def test_a_returned_delay_schedules_the_next_call() -> None:
    async def test() -> None:
        work = Work(lambda key, number: LATER if key == "again" and number < 3 else None)
        async with running(work) as keys:
            keys.add("once")
            keys.add("again")
            assert sorted([await work.ended.get() for _ in range(4)]) == ["again", "again", "again", "once"]
            assert work.calls == {"once": 1, "again": 3}

    run(test())


def test_a_burst_causes_one_call_at_once_and_one_after_a_pause() -> None:
    async def test() -> None:
        work = Work()
        async with running(work, pause=1.0) as keys:
            keys.add("a")
            await work.ended.get()
            for _ in range(3):
                keys.add("a")
                await asyncio.sleep(0)
                keys.add("b")
            assert await work.ended.get() == "b", "no other key has to wait"
            assert await work.ended.get() == "a"
            keys.add("end")
            while await work.ended.get() != "end":
                pass
            assert work.calls["a"] == 2

    run(test())


def test_cancelling_ends_the_calls_under_way() -> None:
    async def test() -> None:
        work = Work()
        work.gate.clear()
        keys = KeyedQueue(work, num_workers=2)
        task = asyncio.create_task(keys.run())
        keys.add("a")
        keys.add("b")
        assert {await work.begun.get(), await work.begun.get()} == {"a", "b"}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.busy.total() == 0
        assert {work.ended.get_nowait(), work.ended.get_nowait()} == {"a", "b"}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test())
