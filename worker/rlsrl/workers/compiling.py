"""Compile the training step beside training; all ranks switch to the compiled step after the same step.

A child process compiles first, for a batch of zeros. It is a new interpreter at the lowest priority, which costs
training next to nothing, and it leaves compiled code in a cache folder. Then each rank compiles from that cache between
two steps, which takes seconds instead of a minute, and trains with the result. Later runs use the folder again: torch
names its files by all that they were made from.

No failure here ends a run. It is logged once, and all ranks go on with the eager step.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from rlsrl.algorithms.learner import Learner
from rlsrl.api.spec import CompileMode
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.runtime.activity import COMPILER
from rlsrl.runtime.memory import anonymous_memory, available_memory
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.gang import Gang

CHILD_MODULE = "rlsrl.workers.build.compile_child"
"""The child's program. It needs the builders, which need this module."""
START_SECONDS = 20.0
"""How long a run trains before the background compilation starts: a shorter run would gain nothing from it."""
NICENESS = 19
"""Niceness of the child in the background: it gets the time that training leaves."""
COMPILER_BYTES = 1024**3
"""The memory that the compiler takes at most, beside a learner in the child that has all that the trainer's has."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder of compiled code; a value that the user sets is respected."""
_OUTPUT_TAIL_BYTES = 16 * 1024
"""Bytes at the end of the child's output in which its error is searched."""

CompileStage = Literal["eager", "waiting", "ready", "compiled"]
"""eager: never compiles; waiting: child unfinished or not started; ready: may switch; compiled: switched."""


class StepCompiler:
    """One rank's part in the switch to the compiled step. The training thread uses it, between two steps.

    The ranks of one machine share the cache: only the first rank starts a child, and the others are ready at once. On
    GPUs each rank starts a child, since torch caches compiled code for one GPU.
    """

    def __init__(
        self,
        *,
        mode: CompileMode,
        learner: Learner,
        example_batch: Callable[[], Arrays],
        request: str,
        context: WorkerContext,
        on_gpu: bool = False,
        environ: Mapping[str, str] = os.environ,
        memory: Callable[[], tuple[int, int]] = lambda: (available_memory(), anonymous_memory()),
        start_child: Callable[[bytes, Mapping[str, str]], _Child] | None = None,
    ) -> None:
        """Compile for batches of the form of ``example_batch()``, as ``request`` makes the child do.

        ``environ`` is the process's own environment. ``memory`` returns the bytes that it may still use, and those that
        it has. ``start_child`` takes the child's request and environment.
        """
        self._learner = learner
        self._example_batch = example_batch
        self._request = request
        self._context = context
        self._environ = environ
        self._memory = memory
        self._new_child = start_child or _Child
        self._upfront = mode == "upfront"
        self._starts_at: float | None = None
        self._child: _Child | None = None
        self._num_children = int(environ.get("LOCAL_WORLD_SIZE", "1")) if on_gpu else 1
        has_child = on_gpu or environ.get("LOCAL_RANK", "0") == "0"
        self._stage: CompileStage = "eager" if mode == "off" else "waiting" if has_child else "ready"
        context.metrics.compiled.set(0)

    @property
    def blocks_training(self) -> bool:
        """Whether training has to wait for the compiled step."""
        return self._upfront and self._stage in ("waiting", "ready")

    def stage(self) -> CompileStage:
        """Return this rank's stage. Starts the child when it is due."""
        if self._stage == "waiting":
            self._update_stage()
        return self._stage

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the child, if there is one."""
        if self._child is not None:
            with self._context.waiting(COMPILER):
                self._child.wait(timeout)

    def follow(self, stages: Sequence[CompileStage], gang: Gang, version: Version) -> None:
        """Switch, or give up, as all ranks' stages require: the same on every rank, at the boundary after ``version``.

        Raises:
            RuntimeError: a rank is gone.
        """
        if "eager" in stages:
            self._stay_eager()
        elif all(stage == "ready" for stage in stages):
            self._switch(gang, version)

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _update_stage(self) -> None:
        now = self._context.clock.monotonic()
        if self._starts_at is None:
            self._starts_at = now if self._upfront else now + START_SECONDS
        if self._child is None and now >= self._starts_at:
            self._start_child()
        elif self._child is not None and self._child.wait(0):
            failure = self._child.failure()
            self.close()
            if failure is None:
                self._stage = "ready"
            else:
                self._stay_eager(failure)

    def _start_child(self) -> None:
        try:
            if (missing := self._missing_memory()) is not None:
                self._stay_eager(missing)
                return
            environment = compiling_environment(self._environ)
            self._child = self._new_child(
                f"{self._request}\n{0 if self._upfront else NICENESS}\n".encode(), {**self._environ, **environment}
            )
        except OSError as error:
            self._stay_eager(str(error))
        else:
            self._context.log.info("compiling", pid=self._child.pid)

    def _missing_memory(self) -> str | None:
        """Return why there is too little memory, or None.

        A container that exceeds its limit ends whole, and a trainer that resumes would compile again, and again.
        """
        available, own = self._memory()
        needed = self._num_children * (COMPILER_BYTES + own)
        if available >= needed:
            return None
        return f"{available / 1024**3:.2f} GiB of memory are available, and compiling needs {needed / 1024**3:.2f} GiB"

    def _switch(self, gang: Gang, version: Version) -> None:
        started = self._context.clock.monotonic()
        with self._context.waiting(COMPILER):
            failure = self._try_to_compile()
        if all(answer["compiled"] for answer in gang.agree({"compiled": failure is None})):
            self._learner.use_compiled()
            self._stage = "compiled"
            self._context.metrics.compiled.set(1)
            seconds = round(self._context.clock.monotonic() - started, 3)
            self._context.log.info("compiled", step=version.step, seconds=seconds)
        else:
            self._stay_eager(failure)

    def _try_to_compile(self) -> str | None:
        """Compile the step; return the error, or None."""
        try:
            os.environ.update(compiling_environment(self._environ))
            self._learner.compile(self._example_batch())
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and training goes on without it
            return error_summary(error)
        return None

    def _stay_eager(self, reason: str | None = None) -> None:
        """Give up compiling. ``reason`` is None if another rank failed: that rank logs it."""
        self.close()
        self._stage = "eager"
        if reason is not None:
            self._context.log.warning("not_compiled", reason=reason)


class _Child:
    """A process that compiles on request. It dies with this process, however this one ends: its input ends then."""

    def __init__(self, request: bytes, environment: Mapping[str, str]) -> None:
        """Start the process.

        Raises:
            OSError: the system cannot start it, or it ended at once.
        """
        self._output = os.memfd_create("compiling")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD_MODULE],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
        except OSError:
            os.close(self._output)
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None, "it is a pipe"
        self._input = self._process.stdin
        try:
            self._input.write(request)
            self._input.flush()
        except OSError:
            self.close()
            raise

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the process; return whether it has ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def failure(self) -> str | None:
        """Return the error of the process that has ended, or None if it succeeded."""
        status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        if status is not None and (status.si_code, status.si_status) == (os.CLD_EXITED, 0):
            return None
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, _OUTPUT_TAIL_BYTES, max(0, size - _OUTPUT_TAIL_BYTES)).decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.strip()]
        ended = "" if status is None or status.si_code == os.CLD_EXITED else f" by signal {status.si_status}"
        return lines[-1] if lines and not ended else f"the compiling process ended{ended}"

    def close(self) -> None:
        """Kill the process and the processes that it started."""
        # Until this process waits for it, no other group can get its number.
        os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # the process did not read the request
            self._input.close()
        self._process.wait()
        os.close(self._pidfd)
        os.close(self._output)


def compiling_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs before it compiles, and make the cache folder.

    Raises:
        OSError: there is no C++ compiler, or the folder cannot be made.
    """
    compiler = environ.get("CXX") or "g++"
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        raise FileNotFoundError(f"there is no C++ compiler {compiler}")
    folder = Path(environ[CACHE_VARIABLE]) if environ.get(CACHE_VARIABLE) else _cache_folder(environ)
    # Code from this folder is executed: nobody else may write it.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One thread: torch would start a pool of processes for more, which stays.
    return {CACHE_VARIABLE: str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _cache_folder(environ: Mapping[str, str]) -> Path:
    if not (base := environ.get("XDG_CACHE_HOME")):
        if not (home := environ.get("HOME")):
            raise FileNotFoundError("compiled code needs a cache folder: set XDG_CACHE_HOME or HOME")
        base = f"{home}/.cache"
    python = "{}.{}".format(*sys.version_info)
    return Path(base, "rlsrl", f"torch-{torch.__version__}-python-{python}")


def error_summary(error: BaseException) -> str:
    """Return a compiler's error in one line: torch's messages fill pages."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
