"""A real S3 server for tests, which can kill or freeze it: Versity's gateway over a folder, on the loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from typing_extensions import override

from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.servers import free_address, start_server

ACCESS_KEY = "rlsrl-test-access-key"
SECRET_KEY = "rlsrl-test-secret-key"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""The environment of a process that may use the server."""
REGION = "us-east-1"

_CONNECT_SECONDS = 60.0


class S3Server(ClosedAtExit):
    """One server process. Its objects are files under ``root``: a bucket is a folder there."""

    def __init__(self, binary: Path, root: Path) -> None:
        """Start the server on a free port.

        Raises:
            RuntimeError: the server does not start; the text is its output.
        """
        self._binary = binary
        self._root = root
        self._address = free_address()
        root.mkdir(parents=True, exist_ok=True)
        self._process = self._start()

    @property
    def endpoint(self) -> str:
        """The server's URL. Restarts do not change it."""
        return f"http://{self._address}"

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
        """Stop the process: it accepts connections and answers nothing. Return when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Continue the stopped process."""
        self._process.send_signal(signal.SIGCONT)

    @override
    def close(self) -> None:
        """End the process."""
        self.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it accepts connections."""
        return start_server(
            str(self._binary), "--port", self._address, "--region", REGION, "--quiet", "--keep-alive",
            "posix", str(self._root),
            log=self._root.with_name(f"{self._root.name}.log"), is_ready=self._accepts_connections,
            env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        )  # fmt: skip

    def _accepts_connections(self) -> bool:
        host, port = self._address.split(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return False
        return True
