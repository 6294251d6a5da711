"""The worker's side of the call watch: shares the call board with the process that reads it, and obeys its signals."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

from rlsrl.api.resolved import ActorConfig, EvaluatorConfig, RoleConfig
from rlsrl.api.spec.environment import Environment
from rlsrl.runtime.call_board import BOARD_BYTES, CallBoard, CallName
from rlsrl.runtime.identity import own_process
from rlsrl.runtime.process import worker_environment
from rlsrl.workers.call_watch_process import DUMP_SIGNAL, END_SIGNAL, WatchOptions

_MODULE = "rlsrl.workers.call_watch_process"


def call_limits(environment: Environment) -> dict[CallName, float | None]:
    """Return the longest duration of each call of such environments, in seconds; None: no limit.

    It has no limit for the wait for a server: that is no call of an environment.
    """
    return {
        "step": environment.step_seconds,
        "reset": environment.reset_seconds,
        "make": environment.reset_seconds,
        "close": environment.reset_seconds,
        "render": environment.step_seconds,
    }


@contextlib.contextmanager
def watched_calls(role: str, config: RoleConfig) -> Iterator[CallBoard | None]:
    """Watch the environment calls of this process during the body; gives the board that shows them.

    It gives None for roles that step no environments, and outside Linux. Call it from the thread that ends last: the
    watch ends with it.

    Raises:
        OSError: the system cannot create a process.
    """
    if sys.platform != "linux" or not isinstance(config, ActorConfig | EvaluatorConfig):
        yield None
        return
    memory = os.memfd_create("rlsrl-call-board")
    try:
        os.ftruncate(memory, BOARD_BYTES)
        board = CallBoard(mmap.mmap(memory, BOARD_BYTES))
        _obey_watch()
        options = WatchOptions(
            board=memory,
            role=role,
            process=own_process(),
            coordinator=config.coordinator_address,
            limits=call_limits(config.environment),
        )
        watch = subprocess.Popen(
            [sys.executable, "-m", _MODULE, options.to_json()],
            stdin=subprocess.DEVNULL,
            env=worker_environment(os.environ),
            pass_fds=[memory],
        )
    finally:
        os.close(memory)
    try:
        yield board
    finally:
        watch.kill()
        watch.wait()


def _obey_watch() -> None:
    """Let signals of the watch dump the tracebacks of all threads, and end this process with the signal as exit code.

    Both handlers are C code: a call that holds the interpreter lock does not delay them.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(END_SIGNAL, ctypes.cast(libc["_exit"], ctypes.c_void_p))
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
