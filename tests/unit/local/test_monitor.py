from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

from rlsrl.local.monitor import StatusMonitor
from rlsrl.runtime.coordination import CoordinatorUnavailable
from rlsrl.testing.clock import ManualClock

DEADLINE = 10.0


class ScriptedClient:
    """A client whose answers the test provides, and whose requests the test can await."""

    def __init__(self) -> None:
        self.asked: queue.Queue[None] = queue.Queue()
        self.answers: queue.Queue[Mapping[str, Any] | Exception] = queue.Queue()
        self.closed = threading.Event()

    def status(self, timeout: float) -> Mapping[str, Any]:
        self.asked.put(None)
        answer = self.answers.get(timeout=DEADLINE)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()
        self.answers.put(ValueError("Cannot invoke RPC on closed channel!"))


def test_the_newest_status_and_its_age() -> None:
    clock, client = ManualClock(), ScriptedClient()
    monitor = StatusMonitor(client, clock=clock.monotonic)
    assert monitor.newest() == (None, 0.0)
    monitor.start(interval_seconds=0.0)
    client.answers.put(CoordinatorUnavailable("not there yet"))
    client.answers.put({"phase": "training"})
    for _ in range(3):
        client.asked.get(timeout=DEADLINE)
    clock.advance(4.0)
    assert monitor.newest() == ({"phase": "training"}, 4.0)
    client.answers.put(CoordinatorUnavailable("gone again"))
    client.asked.get(timeout=DEADLINE)
    assert monitor.newest() == ({"phase": "training"}, 4.0), "an unreachable coordinator only makes old news"
    client.answers.put({"phase": "finished"})
    client.asked.get(timeout=DEADLINE)
    assert monitor.newest() == ({"phase": "finished"}, 0.0)
    monitor.close()


def test_each_status_is_published_once() -> None:
    published: queue.Queue[Mapping[str, Any]] = queue.Queue()
    client = ScriptedClient()
    monitor = StatusMonitor(client, publish=published.put)
    monitor.start(interval_seconds=0.0)
    for answer in ({"phase": "starting"}, CoordinatorUnavailable("for a moment"), {"phase": "training"}):
        client.answers.put(answer)
    assert [published.get(timeout=DEADLINE)["phase"] for _ in range(2)] == ["starting", "training"]
    monitor.close()
    assert published.empty()


def test_close_ends_the_thread_during_a_request_and_during_a_wait() -> None:
    for interval_seconds, answer in ((0.0, None), (3600.0, {"phase": "training"})):
        client = ScriptedClient()
        monitor = StatusMonitor(client)
        monitor.start(interval_seconds=interval_seconds)
        client.asked.get(timeout=DEADLINE)
        if answer is not None:
            client.answers.put(answer)
        monitor.close()
        assert client.closed.is_set()
        assert not any(thread.name == "status-monitor" for thread in threading.enumerate())


def test_close_before_start_does_nothing() -> None:
    client = ScriptedClient()
    StatusMonitor(client).close()
    assert client.closed.is_set()
