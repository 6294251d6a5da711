"""A process that executes a test's commands, one at a time, so that the test can kill or stop it at any point.

Commands and replies are lines of JSON on the process's standard input and output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

REPLY_SECONDS = 60.0
"""Deadline of a reply; never reached."""


class ProcessEndedError(Exception):
    """The process ended instead of replying."""


class CommandError(Exception):
    """The command raised; ``kind`` is the error's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class DrivenProcess:
    """A test's handle of such a process. For one thread."""

    def __init__(self, module: str, **setup: Any) -> None:
        """Start ``python -m module``, which calls ``perform``, and wait for its ``setup``."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._buffer = b""
        self.call("setup", **setup)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def call(self, command: str, **arguments: Any) -> Any:
        """Execute a command and return its result.

        Raises:
            CommandError: the command raised.
            ProcessEndedError: the process ended.
        """
        self.send(command, **arguments)
        return self.reply()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")

    def reply(self) -> Any:
        """Wait for the reply of the sent command and return its result; see ``call``."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + REPLY_SECONDS
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no reply within {REPLY_SECONDS} s")
            chunk = self._process.stdout.read(65536)
            if not chunk:
                raise ProcessEndedError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        kind, value = json.loads(line)
        if kind == "error":
            raise CommandError(*value)
        return value

    def has_reply(self) -> bool:
        """Return whether ``reply`` would return at once."""
        assert self._process.stdout is not None
        return b"\n" in self._buffer or bool(select.select([self._process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        """Send SIGKILL; return when the process is dead."""
        self._process.kill()
        self.wait_dead()

    def wait_dead(self) -> None:
        """Wait until the process has ended."""
        self._process.wait(REPLY_SECONDS)

    def stop(self) -> None:
        """Send SIGSTOP; return when the process has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process in any state and close its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def driven_processes(module: str, **setup: Any) -> Iterator[Callable[..., DrivenProcess]]:
    """Yield a function that starts such a process, with further ``setup`` arguments; close all processes at the end."""
    with ExitStack() as stack:

        def start(**arguments: Any) -> DrivenProcess:
            return stack.enter_context(closing(DrivenProcess(module, **setup, **arguments)))

        yield start


def perform(commands: object) -> None:
    """Execute commands until standard input ends. Runs in the process.

    A command is a method of ``commands``. Output of commands goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = ["result", getattr(commands, command)(**arguments)]
        except Exception as error:  # noqa: BLE001 - reported to the test
            answer = ["error", [type(error).__name__, str(error)]]
        replies.write(json.dumps(answer) + "\n")
