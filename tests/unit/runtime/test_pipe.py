import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rlsrl.runtime.pipe import Pipe, PipeClosed

SOON = 10.0


class Waiter:
    """A call in another thread. The constructor returns once the thread waits on the condition."""

    def __init__(self, pipe: Pipe[Any], condition: str, call: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.future: Future[Any] = self._pool.submit(call)
        self._pool.shutdown(wait=False)
        watched: threading.Condition = getattr(pipe, condition)
        while True:  # spins without sleeping until the thread waits on the condition
            with watched:
                if watched._waiters or self.future.done():  # type: ignore[attr-defined]
                    return


def test_first_in_first_out() -> None:
    pipe: Pipe[int] = Pipe(3)
    for item in (1, 2, 3):
        pipe.put(item)
    assert [pipe.get(), pipe.get(), pipe.get()] == [1, 2, 3]


def test_put_waits_for_capacity() -> None:
    pipe: Pipe[int] = Pipe(1)
    pipe.put(1)
    waiter = Waiter(pipe, "_not_full", lambda: pipe.put(2))
    assert not waiter.future.done()
    assert pipe.get() == 1
    waiter.future.result(SOON)
    assert pipe.get() == 2


def test_replace_drops_the_oldest_item_instead_of_waiting() -> None:
    pipe: Pipe[int] = Pipe(2)
    for item in (1, 2, 3):
        pipe.replace(item)
    assert [pipe.get(), pipe.get()] == [2, 3]
    pipe.close()
    with pytest.raises(PipeClosed):
        pipe.replace(4)


def test_take_newest_empties_the_pipe_and_lets_a_waiting_put_continue() -> None:
    pipe: Pipe[int] = Pipe(1)
    assert pipe.take_newest() is None
    pipe.put(1)
    waiter = Waiter(pipe, "_not_full", lambda: pipe.put(2))
    assert pipe.take_newest() == 1
    waiter.future.result(SOON)
    pipe.close()
    assert pipe.take_newest() == 2
    assert pipe.take_newest() is None


def test_replace_wakes_a_waiting_get() -> None:
    pipe: Pipe[int] = Pipe(1)
    waiter = Waiter(pipe, "_not_empty", pipe.get)
    pipe.replace(7)
    assert waiter.future.result(SOON) == 7


def test_get_waits_for_an_item() -> None:
    pipe: Pipe[int] = Pipe(1)
    waiter = Waiter(pipe, "_not_empty", pipe.get)
    pipe.put(7)
    assert waiter.future.result(SOON) == 7


def test_close_wakes_everyone_at_both_ends() -> None:
    empty: Pipe[int] = Pipe(1)
    full: Pipe[int] = Pipe(1)
    full.put(1)
    getters = [Waiter(empty, "_not_empty", empty.get).future for _ in range(3)]
    putters = [Waiter(full, "_not_full", lambda: full.put(2)).future for _ in range(3)]
    empty.close()
    full.close()
    for future in getters + putters:
        assert isinstance(future.exception(SOON), PipeClosed)


def test_items_put_before_close_can_be_taken_after_it() -> None:
    pipe: Pipe[int] = Pipe(2)
    pipe.put(1)
    pipe.put(2)
    pipe.close()
    pipe.close()
    assert [pipe.get(), pipe.get()] == [1, 2]
    with pytest.raises(PipeClosed):
        pipe.get()
    with pytest.raises(PipeClosed):
        pipe.put(3)


def test_many_threads_lose_and_duplicate_nothing() -> None:
    pipe: Pipe[int] = Pipe(2)

    def put_all(items: range) -> None:
        for item in items:
            pipe.put(item)

    with ThreadPoolExecutor(8) as pool:
        getters = [pool.submit(lambda: [pipe.get() for _ in range(200)]) for _ in range(4)]
        for first in range(4):
            pool.submit(put_all, range(first * 200, first * 200 + 200))
        taken = [item for getter in getters for item in getter.result(SOON)]
    assert sorted(taken) == list(range(800))
