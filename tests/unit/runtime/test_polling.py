"""Brief waits are polled, others are slept through."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable

import pytest

from rlsrl.runtime.polling import POLLED_SECONDS, BriefPolling, PollingSelector, polling_loop

BRIEF, LONG = POLLED_SECONDS / 2, POLLED_SECONDS * 100


class Events:
    """A clock that each look moves on a little, and an event that comes when it is time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due = 0.0
        self.looks = 0
        self.sleeps = 0
        self.polling = BriefPolling(now=lambda: self.now)

    def look(self) -> bool:
        self.looks += 1
        self.now += POLLED_SECONDS / 10
        return self.now >= self.due - POLLED_SECONDS / 100  # ticks do not add up exactly

    def sleep(self) -> bool:
        self.sleeps += 1
        self.now = max(self.now, self.due)
        return True

    def wait(self, seconds: float) -> tuple[bool, int, int]:
        """Wait for an event that comes in so many seconds: (what came of it, looks, sleeps)."""
        self.looks = self.sleeps = 0
        self.due = self.now + seconds
        return self.polling.wait(self.look, self.sleep), self.looks, self.sleeps


def test_the_first_wait_is_slept_through_and_those_after_brief_ones_are_polled() -> None:
    events = Events()
    assert events.wait(BRIEF) == (True, 0, 1)
    assert events.wait(BRIEF) == (True, 5, 0)
    assert events.wait(BRIEF) == (True, 5, 0)


def test_a_long_wait_is_polled_no_longer_than_a_brief_one_and_those_after_it_not_at_all() -> None:
    events = Events()
    events.wait(BRIEF)
    found, looks, sleeps = events.wait(LONG)
    assert (found, looks in (10, 11), sleeps) == (True, True, 1)
    assert events.wait(LONG) == (True, 0, 1)
    assert events.wait(BRIEF) == (True, 0, 1)
    assert events.wait(BRIEF) == (True, 5, 0)


def test_what_raises_while_it_is_looked_for_is_raised() -> None:
    events = Events()
    events.wait(BRIEF)

    def fail() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        events.polling.wait(fail, events.sleep)
    assert events.sleeps == 1, "that of the first wait"


@pytest.mark.parametrize("make", [selectors.DefaultSelector, PollingSelector])
def test_a_polling_selector_finds_what_another_finds(make: Callable[[], selectors.BaseSelector]) -> None:
    here, there = socket.socketpair()
    with here, there, make() as selector:
        selector.register(here, selectors.EVENT_READ)
        assert selector.select(0) == selector.select(-1) == []
        for number in range(100):
            there.send(b"x")
            ((key, events),) = selector.select(None if number % 2 else 60)
            assert (key.fileobj, events) == (here, selectors.EVENT_READ)
            here.recv(1)
        assert selector.select(POLLED_SECONDS / 10) == []
        assert selector.select(POLLED_SECONDS * 10) == []


def test_a_polling_loop_runs_what_others_ask_of_it_and_keeps_time() -> None:
    async def main() -> list[int]:
        loop, came = asyncio.get_running_loop(), asyncio.Queue[int]()
        for number in range(50):
            await asyncio.to_thread(loop.call_soon_threadsafe, came.put_nowait, number)
            await asyncio.sleep(POLLED_SECONDS * (number % 3))
        return [came.get_nowait() for _ in range(50)]

    with asyncio.Runner(loop_factory=polling_loop) as runner:
        assert runner.run(asyncio.wait_for(main(), 60)) == list(range(50))
