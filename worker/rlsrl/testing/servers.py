"""Server programs that tests start on the loopback interface."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from rlsrl.testing.waiting import until

_START_SECONDS = 60.0


def free_address() -> str:
    """Return the host and an unused port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def start_server(
    *command: str, log: Path, is_ready: Callable[[], bool], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server program and wait until it is ready. It dies with the calling thread.

    Args:
        command: The program and its arguments.
        log: The file for its output.
        is_ready: Called until it returns True.
        env: Its environment variables, by default those of this process.

    Raises:
        RuntimeError: the program ends, or is not ready in time; the text has its output.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def is_up() -> bool:
        if process.poll() is not None:
            raise TimeoutError(f"{command[0]} ended with {process.returncode}")
        return is_ready()

    try:
        until(is_up, f"{command[0]} is ready", timeout=_START_SECONDS)
    except TimeoutError as error:
        process.kill()
        process.wait()
        raise RuntimeError(f"{error}: {log.read_text(errors='replace')}") from error
    return process
