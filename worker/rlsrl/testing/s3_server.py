"""A real S3 server for tests, which can kill or freeze it: Versity's gateway over a folder, on the loopback."""

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
        """Start the server on a free port.

        Raises:
            RuntimeError: the server does not start; the text is its output.
        """
        self._binary = binary
        self._root = root
        self._port = _free_port()
        root.mkdir(parents=True, exist_ok=True)
        self._process = self._start()

    @property
    def endpoint(self) -> str:
        """The server's URL. Restarts do not change it."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the current process."""
        return self._process.pid

    def create_bucket(self, name: str) -> Path:
        """Create a bucket and return its folder."""
        folder = self.folder(name)
        folder.mkdir()
        return folder

    def folder(self, bucket: str) -> Path:
        """Return the folder with a bucket's objects."""
        return self._root / bucket

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start the killed server again, on the same port."""
        self._process = self._start()

    def freeze(self) -> None:
        """Stop the process: it accepts connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the stopped process."""
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
        """Start the process and wait until it accepts connections. It dies with the calling thread."""
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
        while not self._accepts_connections():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_RECHECK_SECONDS)
            if process.poll() is not None or time.monotonic() >= deadline:
                process.kill()
                process.wait()
                raise RuntimeError(f"{self._binary} did not start: {log.read_text(errors='replace')}")
        return process

    def _accepts_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=_START_SECONDS).close()
        except ConnectionRefusedError:
            return False
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
