"""One end of an inference stream in its own process: ``DrivenProcess("rlsrl.testing.inference_stream_end", ...)``."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from rlsrl.data.inference import RolloutResult
from rlsrl.runtime.references import load_callable
from rlsrl.streams.inference import InferenceBatch
from rlsrl.testing.inference_bench import (
    DEADLINE,
    EVERYTHING,
    InferenceBench,
    answer,
    answer_of,
    request,
    until,
    value_of,
)
from rlsrl.testing.process_driver import perform


class InferenceEnd:
    """The commands of the process."""

    def __init__(self) -> None:
        self._taken: list[InferenceBatch] = []
        self._asked: list[Future[RolloutResult]] = []
        self._served: list[int] = []

    def setup(self, role: str, transport: str, addresses: list[str]) -> None:
        """Make the server or client (``role``) of ``addresses``."""
        self._bench = InferenceBench(load_callable(transport, where="transport")(), address=addresses[0])
        if role == "server":
            self.restart()
        else:
            self.client = self._bench.client(*addresses)

    def restart(self) -> None:
        """Start a new server at the same address."""
        self.server = self._bench.server()

    def wait_for(self, num_waiting: int) -> None:
        """Wait until ``num_waiting`` requests wait."""
        until(lambda: self.server.num_waiting == num_waiting)

    def num_waiting(self) -> int:
        """Return the number of waiting requests."""
        return self.server.num_waiting

    def take(self, max_size: int) -> list[int]:
        """Take a batch for a later ``answer``; return the values of its requests."""
        batch = self.server.next_batch(max_size, DEADLINE)
        assert batch is not None, "no request arrived"
        self._taken.append(batch)
        return [value_of(asked) for asked in batch.requests]

    def answer(self) -> None:
        """Answer the oldest batch that was taken."""
        answer(self._taken.pop(0))

    def serve(self) -> None:
        """Start to answer every request."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (batch := self.server.next_batch(EVERYTHING, DEADLINE)) is not None:
            self._served += [value_of(asked) for asked in batch.requests]
            answer(batch)

    def served(self) -> list[int]:
        """Return the values that ``serve`` has answered since the last call."""
        served, self._served = self._served, []
        return served

    def close(self) -> None:
        """Close the server."""
        self.server.close()

    def ask(self, values: list[int]) -> None:
        """Send a request for each value."""
        self._asked += [self.client.submit(request(value)) for value in values]

    def answers(self) -> list[int]:
        """Return the answers to all requests since the last call."""
        asked, self._asked = self._asked, []
        return [answer_of(future.result(DEADLINE)) for future in asked]


if __name__ == "__main__":
    perform(InferenceEnd())
