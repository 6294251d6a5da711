"""The training step is compiled beside training, and all ranks change over to it at one step.

A child process compiles it first, for a batch of zeros: a new interpreter at the lowest priority, which costs training
next to nothing and leaves in a folder what the compiler made of it. Then each rank compiles between two steps what it
finds there, which takes seconds instead of a minute, and trains with it. The folder is kept for later runs; torch names
what is in it by all that it was made from.

Nothing of this may end a run. Whatever goes wrong is logged once, and all ranks go on as they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rlsrl.algorithms.base import one_rank
from rlsrl.algorithms.learner import Learner
from rlsrl.api.resolved import TrainerConfig
from rlsrl.api.spec import CompileMode
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.data.version import Version
from rlsrl.runtime.process import leave
from rlsrl.workers.build.common import torch_policy
from rlsrl.workers.build.learner import build_learner, rank_device, stand_in_batch
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.gang import Gang

BEGIN_SECONDS = 20.0
"""How long a run trains before its step is compiled in the background: a shorter one would have nothing of it."""
NICENESS = 19
"""Of the child in the background: it gets what training leaves."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder of what was compiled; a user's own is respected."""
WAITING = "compiler"
"""What a trainer is shown to wait for while it makes no step on account of this."""
_LAST_WORDS = 16 * 1024
"""Bytes that are looked at of what the child printed."""

Stage = Literal["eager", "waiting", "ready", "compiled"]
"""How far a rank is: it stays eager; its child is not done, or not begun; it can change over; it has."""


class StepCompiler:
    """One rank's part in changing over to the compiled step. The training thread uses it, between two steps.

    The ranks of one machine share the cache: the first of them has the child, and the others are ready at once. On
    GPUs each has a child of its own: what torch keeps, it keeps for one GPU.
    """

    def __init__(
        self,
        *,
        mode: CompileMode,
        learner: Learner,
        stand_in: Callable[[], Arrays],
        request: str,
        context: WorkerContext,
        on_gpu: bool = False,
        environ: Mapping[str, str] = os.environ,
        begin_seconds: float = BEGIN_SECONDS,
    ) -> None:
        """``stand_in`` makes a batch of the form of all batches; ``request`` makes the child compile for such ones.

        ``environ`` is this process's own.
        """
        self._learner = learner
        self._stand_in = stand_in
        self._request = request
        self._context = context
        self._environ = environ
        self._upfront = mode == "upfront"
        self._begin_seconds = 0.0 if self._upfront else begin_seconds
        self._begins_at: float | None = None
        self._child: _Child | None = None
        leads = on_gpu or environ.get("LOCAL_RANK", "0") == "0"
        self._stage: Stage = "eager" if mode == "off" else "waiting" if leads else "ready"
        context.metrics.compiled.set(0)

    @property
    def holds_training(self) -> bool:
        """Whether no step may be made yet."""
        return self._upfront and self._stage in ("waiting", "ready")

    def stage(self) -> Stage:
        """How far this rank is; begins what is due."""
        if self._stage == "waiting":
            self._look()
        return self._stage

    def wait(self, timeout: float) -> None:
        """Wait for the child, if there is one."""
        if self._child is not None:
            with self._context.waiting(WAITING):
                self._child.wait(timeout)

    def follow(self, stages: Sequence[Stage], gang: Gang, version: Version) -> None:
        """Do what all ranks' stages ask for: the same on every rank, at the same boundary, which follows ``version``.

        Raises:
            RuntimeError: a rank is gone.
        """
        if "eager" in stages:
            self._stay_eager()
        elif all(stage == "ready" for stage in stages):
            self._change_over(gang, version)

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _look(self) -> None:
        now = self._context.clock.monotonic()
        if self._begins_at is None:
            self._begins_at = now + self._begin_seconds
        if self._child is None and now >= self._begins_at:
            self._begin()
        elif self._child is not None and self._child.wait(0):
            failure = self._child.failure()
            self.close()
            if failure is None:
                self._stage = "ready"
            else:
                self._stay_eager(failure)

    def _begin(self) -> None:
        try:
            environment = compiling_environment(self._environ)
            self._child = _Child(
                f"{self._request}\n{0 if self._upfront else NICENESS}\n".encode(), {**self._environ, **environment}
            )
        except OSError as error:
            self._stay_eager(str(error))
        else:
            self._context.log.info("compiling", pid=self._child.pid)

    def _change_over(self, gang: Gang, version: Version) -> None:
        began = self._context.clock.monotonic()
        with self._context.waiting(WAITING):
            failure = self._try_to_compile()
        if all(said["compiled"] for said in gang.agree({"compiled": failure is None})):
            self._learner.use_compiled()
            self._stage = "compiled"
            self._context.metrics.compiled.set(1)
            seconds = round(self._context.clock.monotonic() - began, 3)
            self._context.log.info("compiled", step=version.step, seconds=seconds)
        else:
            self._stay_eager(failure)

    def _try_to_compile(self) -> str | None:
        """What is wrong, None if it is compiled."""
        try:
            os.environ.update(compiling_environment(self._environ))
            self._learner.compile(self._stand_in())
        except Exception as error:  # noqa: BLE001 - a compiler may fail at anything, and training goes on without
            return described(error)
        return None

    def _stay_eager(self, reason: str | None = None) -> None:
        """Without a reason it is another rank's, and in that one's log."""
        self.close()
        self._stage = "eager"
        if reason is not None:
            self._context.log.warning("not_compiled", reason=reason)


class _Child:
    """A process that does what a request asks. It dies with this one, however that dies: its input ends then."""

    def __init__(self, request: bytes, environment: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: the system has no room for it, or it ended at once.
        """
        self._said = os.memfd_create("compiling")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError:
            os.close(self._said)
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None, "it is a pipe"  # noqa: S101 - an invariant of subprocess
        self._input = self._process.stdin
        try:
            self._input.write(request)
            self._input.flush()
        except OSError:
            self.close()
            raise

    def wait(self, timeout: float) -> bool:
        """Wait so many seconds for its end; whether it has ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def failure(self) -> str | None:
        """What went wrong, once it has ended; None if nothing did."""
        status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        if status is not None and (status.si_code, status.si_status) == (os.CLD_EXITED, 0):
            return None
        size = os.fstat(self._said).st_size
        said = os.pread(self._said, _LAST_WORDS, max(0, size - _LAST_WORDS)).decode(errors="replace")
        lines = [line for line in said.splitlines() if line.strip()]
        ended = "" if status is None or status.si_code == os.CLD_EXITED else f" by signal {status.si_status}"
        return lines[-1] if lines and not ended else f"the compiling process ended{ended}"

    def close(self) -> None:
        """Kill it and what it started."""
        # Until it is waited for, its number names this very group and no other.
        os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # of a request that it did not take
            self._input.close()
        self._process.wait()
        os.close(self._pidfd)
        os.close(self._said)


def compiling_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What has to be in a process's environment before it compiles; the folder for what is compiled is there then.

    Raises:
        OSError: there is no C++ compiler, or that folder cannot be made.
    """
    compiler = environ.get("CXX") or "g++"
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        raise FileNotFoundError(f"there is no C++ compiler {compiler}")
    folder = Path(environ[CACHE_VARIABLE]) if environ.get(CACHE_VARIABLE) else _cache_folder(environ)
    # What is there is executed.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One thread: others would be forks and processes of a pool that stays.
    return {CACHE_VARIABLE: str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _cache_folder(environ: Mapping[str, str]) -> Path:
    if not (base := environ.get("XDG_CACHE_HOME")):
        if not (home := environ.get("HOME")):
            raise FileNotFoundError("neither XDG_CACHE_HOME nor HOME says where to keep what is compiled")
        base = f"{home}/.cache"
    python = "{}.{}".format(*sys.version_info)
    return Path(base, "rlsrl", f"torch-{torch.__version__}-python-{python}")


def request_for(config: TrainerConfig, env_spec: EnvSpec) -> str:
    """A line that makes the child compile the step of a trainer with that config."""
    return json.dumps({"config": config.to_json(), "env_spec": env_spec.to_json()})


def described(error: BaseException) -> str:
    """An error of the compiler's in a line: torch's texts are pages."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def main() -> int:
    """Be the child; returns the exit code."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    niceness = int(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_trainer, name="trainer", daemon=True).start()
    os.nice(niceness)
    try:
        config = TrainerConfig.from_json(request["config"])
        env_spec = EnvSpec.from_json(request["env_spec"])
        policy = torch_policy(config.network, env_spec, seed=config.seed)
        device = rank_device(config, policy)
        learner = build_learner(config, env_spec, policy, policy.parameters(Version(0, 0)), one_rank, device)
        learner.compile(stand_in_batch(config, env_spec))
    except Exception as error:  # noqa: BLE001 - said to the trainer, which goes on without
        sys.stderr.write(f"{described(error)}\n")
        return 1
    return 0


def _end_with_the_trainer() -> None:
    """Kill this process and what it started once the trainer has gone, or does not want it any more."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    leave(main())
