"""``rlsrl serve-environment`` in a process of its own, for tests that kill and restart it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from typing_extensions import override

from rlsrl.envs.http.protocol import STATE
from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.live_runs import fetch, rlsrl_command
from rlsrl.testing.servers import free_address, start_server


class EnvironmentServer(ClosedAtExit):
    """A server on the loopback interface. Its address stays when it is started again."""

    def __init__(self, folder: Path, *arguments: str, token: str = "") -> None:
        """Start it. Further arguments of the command, such as ``--id``, come from the test. ``token``: that of its
        ``--token-file``.
        """
        self._folder = folder
        self._token = token
        self._arguments = arguments
        self._address = free_address()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://{self._address}"

    @property
    def num_steps(self) -> int:
        """The steps of all its lives, from its file."""
        return int((self._folder / "steps").read_text())

    def state(self) -> dict[str, Any]:
        """Return the server's own report.

        Raises:
            OSError: it does not answer.
        """
        state: dict[str, Any] = json.loads(fetch(self.url + STATE, self._token))
        return state

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        host, _, port = self._address.rpartition(":")
        address = ("--host", host, "--port", port, "--steps-file", str(self._folder / "steps"))
        self._process = start_server(
            rlsrl_command(),
            "serve-environment",
            *address,
            *self._arguments,
            log=self._folder / "environment-server.log",
            is_ready=self._is_ready,
        )

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code."""
        assert self._process is not None, "started"
        self._process.terminate()
        process, self._process = self._process, None
        return process.wait()

    @override
    def close(self) -> None:
        self.kill()

    def _is_ready(self) -> bool:
        try:
            return bool(self.state())
        except OSError:
            return False
