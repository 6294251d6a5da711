"""A real S3 server for tests: Versity's gateway over a folder, on the loopback interface, with faults made to order."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ACCESS_KEY = "rlsrl-test-access-key"
SECRET_KEY = "rlsrl-test-secret-key"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""The environment of a process that may use the server."""
REGION = "us-east-1"

_START_SECONDS = 60.0
_RECHECK_SECONDS = 0.01


class S3Server:
    """One server process. Its objects are files under ``root``: a bucket is a folder there."""

    def __init__(self, binary: Path, root: Path) -> None:
        """Starts the server on a free port.

        Raises:
            RuntimeError: it does not start; the text is what it said.
        """
        self._binary = binary
        self._root = root
        self._port = _free_port()
        root.mkdir(parents=True, exist_ok=True)
        self._process = self._start()

    @property
    def endpoint(self) -> str:
        """Its URL; the same over restarts."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def create_bucket(self, name: str) -> Path:
        """Make a bucket and return its folder."""
        folder = self.folder(name)
        folder.mkdir()
        return folder

    def folder(self, bucket: str) -> Path:
        """Where a bucket's objects are."""
        return self._root / bucket

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start again what was killed, on the same port."""
        self._process = self._start()

    def freeze(self) -> None:
        """Stop the process: it takes connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start it and wait until it takes connections. It dies with the thread that called this."""
        log = self._root.with_name(f"{self._root.name}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL",
                    str(self._binary), "--port", f"127.0.0.1:{self._port}", "--region", REGION, "--quiet",
                    "--keep-alive", "posix", str(self._root),
                ],
                env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while not self._takes_connections():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_RECHECK_SECONDS)
            if process.poll() is not None or time.monotonic() >= deadline:
                process.kill()
                process.wait()
                raise RuntimeError(f"{self._binary} did not start: {log.read_text(errors='replace')}")
        return process

    def _takes_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=_START_SECONDS).close()
        except ConnectionRefusedError:
            return False
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
