"""The discrete events below the model: a clock, machines whose cores are shared, processes, links. Knows no roles.

A machine shares its cores equally among the processes that have something to compute (processor sharing, Kleinrock
1967): with n of them on c cores each goes at min(1, c / n) of a core's speed. One virtual clock a machine makes that
cheap: a job ends when the clock has moved on by its work, whoever comes and goes meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

Done = Callable[..., None]


class Clock:
    """What happens next. Events of the same moment come in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self.num_events = 0
        self._events: list[tuple[float, int, Done, tuple[Any, ...]]] = []
        self._made = 0

    def at(self, when: float, done: Done, *arguments: Any) -> None:
        """Call ``done`` then."""
        self._made += 1
        heapq.heappush(self._events, (when, self._made, done, arguments))

    def after(self, seconds: float, done: Done, *arguments: Any) -> None:
        """Call ``done`` so much later."""
        self.at(self.now + seconds, done, *arguments)

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, done, arguments = heapq.heappop(self._events)
        self.num_events += 1
        done(*arguments)
        return True


class Machine:
    """Cores, and the jobs that share them."""

    def __init__(self, clock: Clock, cores: float, *, full_load_speed: float = 1.0) -> None:
        """``full_load_speed``: a core's speed while all are busy, as a share of its speed while it is alone."""
        self._clock = clock
        self._cores = cores
        self._full_load_speed = full_load_speed
        self._jobs: list[tuple[float, int, Done, tuple[Any, ...]]] = []
        self._virtual = 0.0
        self._since = 0.0
        self._made = 0
        self._alarm = 0
        self.work_done = 0.0
        """Seconds of work, of all jobs, until now at the latest change."""

    @property
    def rate(self) -> float:
        """How much of its work each job gets done in a second."""
        busy = len(self._jobs)
        others = min(1.0, (busy - 1) / (self._cores - 1)) if self._cores > 1 else 0.0
        speed = 1.0 - (1.0 - self._full_load_speed) * max(0.0, others)
        return speed * min(1.0, self._cores / busy) if busy else 0.0

    def compute(self, work: float, done: Done, *arguments: Any) -> None:
        """Call ``done`` when so many seconds of a core's work are done."""
        self._advance()
        self._made += 1
        heapq.heappush(self._jobs, (self._virtual + work, self._made, done, arguments))
        self._set_alarm()

    def _advance(self) -> None:
        now = self._clock.now
        progress = (now - self._since) * self.rate
        self._virtual += progress
        self.work_done += progress * len(self._jobs)
        self._since = now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._virtual)
            self._clock.after(left / self.rate, self._ring, self._alarm)

    def _ring(self, alarm: int) -> None:
        if alarm != self._alarm:
            return  # somebody came or went meanwhile
        self._advance()
        finish, _, done, arguments = heapq.heappop(self._jobs)
        self._virtual = max(self._virtual, finish)
        self._set_alarm()
        done(*arguments)


class Process:
    """Does one thing after the other on its machine: the thread that has the interpreter."""

    def __init__(self, clock: Clock, machine: Machine) -> None:
        self._clock = clock
        self._machine = machine
        self._tasks: deque[tuple[float, float, Done, tuple[Any, ...]]] = deque()
        self._occupied = False
        self.computed = 0.0
        """Seconds of work begun."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._occupied

    def do(self, work: float, done: Done, *arguments: Any, wait: float = 0.0) -> None:
        """When all before it is done: compute, wait for ``wait`` seconds while nothing else is done, call ``done``."""
        self._tasks.append((work, wait, done, arguments))
        if not self._occupied:
            self._next()

    def _next(self) -> None:
        self._occupied = True
        work, wait, done, arguments = self._tasks.popleft()
        self.computed += work
        self._machine.compute(work, self._computed, wait, done, arguments)

    def _computed(self, wait: float, done: Done, arguments: tuple[Any, ...]) -> None:
        if wait:
            self._clock.after(wait, self._finish, done, arguments)
        else:
            self._finish(done, arguments)

    def _finish(self, done: Done, arguments: tuple[Any, ...]) -> None:
        self._occupied = False
        if self._tasks:
            self._next()
        done(*arguments)


class Link:
    """One direction of a worker's network link: messages go one after the other."""

    def __init__(self, clock: Clock, bandwidth: float, latency: float) -> None:
        """``bandwidth`` in bytes a second, ``latency`` in seconds."""
        self._clock = clock
        self._bandwidth = bandwidth
        self._latency = latency
        self._free_at = 0.0
        self.carried = 0.0
        """Bytes."""

    def carry(self, nbytes: float, done: Done, *arguments: Any) -> None:
        """Call ``done`` when a message of that size has come."""
        self.carried += nbytes
        self._free_at = max(self._free_at, self._clock.now) + nbytes / self._bandwidth
        self._clock.at(self._free_at + self._latency, done, *arguments)
