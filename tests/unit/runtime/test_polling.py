"""Waits that are brief time after time are polled, others are slept through."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket

import pytest

from rlsrl.runtime.polling import BRIEF_WAITS, POLLED_SECONDS, BriefPolling, PollingSelector

TICK = POLLED_SECONDS / 8
BRIEF, LONG = 4 * TICK, 800 * TICK


class Events:
    """A clock that each look moves on by a tick, and an event that comes when it is time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due = 0.0
        self.asked: list[float | None] = []
        """The seconds that ``find`` was given in the last wait."""
        self.polling = BriefPolling(now=lambda: self.now)

    def find(self, seconds: float | None) -> bool:
        self.asked.append(seconds)
        if seconds is None or self.now + seconds >= self.due:
            self.now = max(self.now, self.due)
            return True
        self.now += seconds or TICK
        return False

    def wait(self, seconds: float, timeout: float | None = None) -> bool:
        """Wait for an event that comes in so many."""
        self.asked.clear()
        self.due = self.now + seconds
        return self.polling.wait(self.find, timeout)

    def make_brief(self) -> None:
        for _ in range(BRIEF_WAITS):
            assert self.wait(BRIEF)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return Events()


def test_after_brief_waits_it_polls(events: Events) -> None:
    for _ in range(BRIEF_WAITS):
        assert events.wait(BRIEF)
        assert events.asked == [None]
    for _ in range(3):
        assert events.wait(BRIEF)
        assert events.asked == [0] * 5


def test_one_long_wait_is_polled_in_part_and_ends_the_polling(events: Events) -> None:
    events.make_brief()
    assert events.wait(LONG)
    assert events.asked == [*[0] * 8, None]
    for _ in range(BRIEF_WAITS):
        assert events.wait(BRIEF)
        assert events.asked == [None]
    assert events.wait(BRIEF)
    assert events.asked == [0] * 5


def test_what_is_now_soon_and_now_late_is_never_polled_for(events: Events) -> None:
    """As at a server: its own answer is sent soon, the next question comes late."""
    for _ in range(10 * BRIEF_WAITS):
        for seconds in (BRIEF, LONG):
            assert events.wait(seconds)
            assert events.asked == [None]


def test_a_wait_lasts_no_longer_for_being_polled(events: Events) -> None:
    events.make_brief()
    began = events.now
    assert not events.wait(LONG, timeout=16 * TICK)
    assert events.asked == pytest.approx([*[0] * 8, 8 * TICK])
    assert events.now - began == pytest.approx(16 * TICK)
    events.make_brief()
    began = events.now
    assert not events.wait(LONG, timeout=2 * TICK)
    assert events.asked == pytest.approx([0, 0, 0])
    assert events.now - began == pytest.approx(3 * TICK)


def test_on_one_core_nothing_is_polled(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    alone = Events()
    alone.make_brief()
    assert alone.wait(BRIEF)
    assert alone.asked == [None]


def test_what_is_raised_by_a_look_is_raised(events: Events) -> None:
    events.make_brief()

    def fail(seconds: float | None) -> bool:
        assert seconds == 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        events.polling.wait(fail, None)


class CountingPolling(BriefPolling):
    """Polls always, and counts its waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, find, timeout):  # type: ignore[no-untyped-def]  # as the one above
        self.num_waits += 1
        self._may_poll, self._num_brief = True, BRIEF_WAITS
        return super().wait(find, timeout)


@pytest.mark.parametrize("polls", [False, True])
def test_a_polling_selector_finds_what_another_finds(polls: bool) -> None:
    here, there = socket.socketpair()
    polling = CountingPolling()
    with here, there, PollingSelector(polling) as selector:
        selector.polls = polls
        selector.register(here, selectors.EVENT_READ)
        assert selector.select(0) == selector.select(-1) == []
        assert polling.num_waits == 0, "a look is none"
        for number in range(100):
            there.send(b"x")
            ((key, events),) = selector.select(None if number % 2 else 60)
            assert (key.fileobj, events) == (here, selectors.EVENT_READ)
            here.recv(1)
        assert selector.select(POLLED_SECONDS / 10) == []
        assert selector.select(POLLED_SECONDS * 10) == []
    assert polling.num_waits == (102 if polls else 0)


def test_an_event_loop_that_polls_hears_its_threads_and_its_timers() -> None:
    polling = CountingPolling()
    selector = PollingSelector(polling)
    selector.polls = True

    async def main() -> list[int]:
        loop, came = asyncio.get_running_loop(), asyncio.Queue[int]()
        for number in range(50):
            await asyncio.to_thread(loop.call_soon_threadsafe, came.put_nowait, number)
            await asyncio.sleep(POLLED_SECONDS * (number % 3))
        return [came.get_nowait() for _ in range(50)]

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(asyncio.wait_for(main(), 60)) == list(range(50))
    assert polling.num_waits > 50
