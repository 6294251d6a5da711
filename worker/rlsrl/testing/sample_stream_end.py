"""One end of a sample stream in its own process: ``DrivenProcess("rlsrl.testing.sample_stream_end", ...)``."""

from __future__ import annotations

import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

from rlsrl.data.slots import Slot
from rlsrl.data.version import Version
from rlsrl.runtime.references import load_callable
from rlsrl.testing.process_driver import perform
from rlsrl.testing.stream_bench import StreamBench, fill, value_of


class StreamEnd:
    """The commands of the process."""

    def __init__(self) -> None:
        self._in_hand: deque[Slot] = deque()
        self._read: list[Slot] = []

    def setup(self, role: str, transport: str, address: str, folder: str, **arguments: Any) -> None:
        """Make the producer or consumer (``role``) at ``address``, with its ledger in ``folder``."""
        bench = StreamBench(load_callable(transport, where="transport")(), Path(folder), address=address)
        if role == "producer":
            self.producer = bench.producer(**arguments)
        else:
            bench.trainer_ledger().resume(None)
            self.consumer = bench.consumer(**arguments)

    def acquire(self, timeout: float) -> int:
        """Acquire a slot; return the order of its credit."""
        self._in_hand.append(self.producer.acquire(timeout))
        return self._in_hand[-1].credit

    def fill(self, value: int) -> None:
        """Write ``value`` into every array of the oldest slot in hand."""
        fill(self._in_hand[0], value)

    def post(self) -> int:
        """Post the oldest slot in hand; return its sequence."""
        slot = self._in_hand.popleft()
        self.producer.post(slot)
        return slot.sequence

    def post_and_die(self) -> None:
        """Post the oldest slot in hand, then kill this process at once."""
        self.post()
        os.kill(os.getpid(), signal.SIGKILL)

    def produce(self, count: int, timeout: float) -> None:
        """Post ``count`` slots, filled with 0, 1, ..."""
        for value in range(count):
            self.producer.post(fill(self.producer.acquire(timeout), value))

    def flush(self, timeout: float) -> None:
        """Wait until every posted slot is acknowledged."""
        self.producer.flush(timeout)

    def grant(self, num_lanes: int, min_version: tuple[int, int]) -> None:
        """Grant lanes to producers."""
        self.consumer.grant(num_lanes, Version(*min_version))

    def receive(self, max_items: int, timeout: float) -> list[tuple[int, int, int, int]]:
        """Receive slots; return (producer's index, sequence, credit, value) of each. ``release`` gives them back."""
        slots = self.consumer.receive(max_items, timeout)
        self._read += slots
        return [
            (slot.producer.index, slot.sequence, slot.credit, value_of(slot))
            for slot in slots
            if slot.producer is not None
        ]

    def release(self) -> None:
        """Release every received slot."""
        while self._read:
            self.consumer.release(self._read.pop(0))


if __name__ == "__main__":
    perform(StreamEnd())
