"""One end of an inference stream in a process of its own: ``DrivenProcess("rlsrl.testing.inference_puppet", ...)``."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from rlsrl.data.inference import RolloutResult
from rlsrl.runtime.references import load_callable
from rlsrl.streams.inference import InferenceBatch
from rlsrl.testing.inference_bench import (
    DEADLINE,
    EVERYTHING,
    DrivenClient,
    InferenceBench,
    ObservableServer,
    answer,
    answer_of,
    request,
    until,
    value_of,
)
from rlsrl.testing.process_driver import perform


class InferenceEnd:
    """The commands."""

    def __init__(self) -> None:
        self._server: ObservableServer | None = None
        self._client: DrivenClient | None = None
        self._taken: list[InferenceBatch] = []
        self._asked: list[Future[RolloutResult]] = []
        self._served: list[int] = []

    def setup(self, role: str, transport: str, addresses: list[str]) -> None:
        """Make the end that ``role`` names."""
        self._bench = InferenceBench(load_callable(transport, where="transport")(), address=addresses[0])
        if role == "server":
            self.serve_anew()
        else:
            self._client = self._bench.client(*addresses)

    def serve_anew(self) -> None:
        """Make a server."""
        self._server = self._bench.server()

    @property
    def server(self) -> ObservableServer:
        """The end, if that is what it is."""
        assert self._server is not None, "set up as a server"
        return self._server

    def wait_for(self, num_waiting: int) -> None:
        """Until so many requests wait."""
        until(lambda: self.server.num_waiting == num_waiting)

    def num_waiting(self) -> int:
        """How many requests wait now."""
        return self.server.num_waiting

    def take(self, max_size: int) -> list[int]:
        """Take a batch, and keep it; returns what it asks."""
        batch = self.server.next_batch(max_size, DEADLINE)
        assert batch is not None, "there is one"
        self._taken.append(batch)
        return [value_of(asked) for asked in batch.requests]

    def answer(self) -> None:
        """Answer the oldest batch taken."""
        answer(self._taken.pop(0))

    def serve(self) -> None:
        """From now on answer whatever comes."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (batch := self.server.next_batch(EVERYTHING, DEADLINE)) is not None:
            self._served += [value_of(asked) for asked in batch.requests]
            answer(batch)

    def served(self) -> list[int]:
        """What ``serve`` answered since the last call."""
        served, self._served = self._served, []
        return served

    def close(self) -> None:
        """Close the server."""
        self.server.close()

    def ask(self, values: list[int]) -> None:
        """Ask for these values."""
        assert self._client is not None, "set up as a client"
        self._asked += [self._client.submit(request(value)) for value in values]

    def answers(self) -> list[int]:
        """The answers to all that was asked since the last call."""
        asked, self._asked = self._asked, []
        return [answer_of(future.result(DEADLINE)) for future in asked]


def main() -> None:
    """Play until standard input ends."""
    end = InferenceEnd()
    serving = ["wait_for", "num_waiting", "take", "answer", "serve", "served", "close", "serve_anew"]
    names = ["setup", *serving, "ask", "answers"]
    perform({name: getattr(end, name) for name in names})


if __name__ == "__main__":
    main()
