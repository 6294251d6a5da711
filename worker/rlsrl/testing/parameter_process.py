"""A parameter service in its own process: ``DrivenProcess("rlsrl.testing.parameter_process")``."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
from grpc import aio

from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.service import READS, ParameterService
from rlsrl.rpc.servers import bind, new_server
from rlsrl.rpc.tls import tls_from_environment
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.process_driver import REPLY_SECONDS, perform

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Serving:
    server: aio.Server
    service: ParameterService
    clock: ManualClock
    refused: Counter[str]


class ParameterServer:
    """The commands of the driven process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._serving: dict[str, _Serving] = {}
        threading.Thread(target=self._loop.run_forever, name="parameter-server", daemon=True).start()

    def setup(self) -> None:
        """Do nothing: ``serve`` starts each server."""

    def serve(self, address: str, token: str, folder: str, **options: Any) -> str:
        """Serve the versions in a folder at the address; return the bound address. ``options`` go to the service."""
        return self._do(self._serve(address, token, Path(folder), options))

    def advance(self, address: str, seconds: float) -> None:
        """Advance the clock of the database that is served at the address."""
        self._serving[address].clock.advance(seconds)

    def refused(self, address: str) -> dict[str, int]:
        """Return how many calls were refused at the address, by kind of error."""
        return dict(self._serving[address].refused)

    def end(self, address: str) -> None:
        """Stop the server at the address."""
        serving = self._serving.pop(address)
        self._do(serving.server.stop(0))
        serving.service.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(REPLY_SECONDS)

    async def _serve(self, address: str, token: str, folder: Path, options: dict[str, Any]) -> str:
        clock, server = ManualClock(), new_server(token, reads=READS)
        db = FilesystemParameterDB(folder, clock=clock)
        log = structlog.stdlib.get_logger("parameters")
        refused: Counter[str] = Counter()
        service = ParameterService(db, log=log, on_refused=lambda kind: refused.update([kind]), **options)
        service.add_to(server)
        bound = bind(server, address, tls_from_environment())
        await server.start()
        self._serving[bound] = _Serving(server=server, service=service, clock=clock, refused=refused)
        return bound


if __name__ == "__main__":
    perform(ParameterServer())
