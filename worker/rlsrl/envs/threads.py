"""Environments that each live in a thread of their own: for those that wait, so that they wait at the same time."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import structlog

from rlsrl.data.specs import EnvSpec
from rlsrl.envs.vector import Call, LoopVectorEnv, VectorEnv, common_spec
from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for environments: half of what ``rlsrl run`` gives a worker to end in."""

Job = Callable[[int, VectorEnv], None]
"""What a thread does with its environment, given its lane and the environment as a vector of one."""
_log = structlog.stdlib.get_logger(__name__)


class _Abandoned(BaseException):
    """Ends a job that nobody wants any more. No ``Exception``: it is nothing that an environment raised."""


class EnvironmentThreads:
    """N threads, each of which makes, steps and closes one environment. They get jobs, and each does its part of them.

    A thread goes from one job to the next without waiting for the others; without a job it waits, woken by ``begin``
    and ``close``. One thread owns them all. It waits in ``wait``, woken by the first thread to have done its part of a
    job, by the last, and by the first that fails.
    """

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        *,
        seeds: Sequence[int],
        first_rank: int = 0,
        max_decorrelation_steps: int = 0,
    ) -> None:
        """Make one environment a seed, one after the other; see ``LoopVectorEnv``.

        Raises:
            ConfigurationError: a space is not supported, or the environments differ in their spaces.
        """
        if not seeds:
            raise ConfigurationError("a vector environment holds at least one environment")
        self._progress = _Progress(len(seeds))
        self._lanes: list[_Lane] = []
        try:
            for number, seed in enumerate(seeds):
                lane = _Lane(number, make, seed, first_rank + number, max_decorrelation_steps, self._progress)
                lane.thread.start()
                self._lanes.append(lane)
                lane.is_made.wait()
                self._progress.check()
            self._spec = common_spec([lane.spec for lane in self._lanes], first_rank)
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> EnvSpec:
        """What each environment gives and takes."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """N: lanes of the slots to be filled."""
        return len(self._lanes)

    def begin(self, job: Job) -> None:
        """Have every thread do its part of the job, once it has done those before."""
        self._progress.expect()
        for lane in self._lanes:
            lane.jobs.put(job)

    @property
    def num_done(self) -> int:
        """Jobs that every thread has done its part of."""
        return self._progress.num_done

    @property
    def num_done_by_first(self) -> int:
        """Jobs that some thread has done its part of."""
        return self._progress.num_done_by_first

    def wait(self, is_due: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``num_done`` or ``num_done_by_first`` are as ``is_due`` wants them, for ``timeout`` seconds at
        most; whether they are.

        Raises:
            EnvironmentFailed: an environment raised; or whatever else the first thread that failed did.
        """
        return self._progress.wait(is_due, timeout)

    def abandon(self) -> None:
        """Nobody wants any job any more. From the return on no thread does any more of one: those that are within their
        environment find out when it is done with its step. Idempotent.
        """
        for lane in self._lanes:
            lane.abandoned = True
        for lane in self._lanes:
            with lane.at_work:
                pass

    def close(self) -> None:
        """Close every environment, in its own thread; a failure is raised at the end. Idempotent.

        Waits up to ``CLOSE_SECONDS`` for those that are within a step; what is left then ends with the process.
        """
        self.abandon()
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.jobs.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        if left := [lane.rank for lane in lanes if lane.thread.is_alive()]:
            _log.warning("environments_left", ranks=left, waited_seconds=CLOSE_SECONDS)
        for lane in lanes:
            if lane.close_failure is not None:
                raise lane.close_failure


class _Progress:
    """How far threads are with jobs, which each of them does in order, and the first failure. Any thread may use it."""

    def __init__(self, num_threads: int) -> None:
        self.num_done = 0
        """Jobs that all have done."""
        self.num_done_by_first = 0
        """Jobs that at least one has done."""
        self._num_threads = num_threads
        self._left: deque[int] = deque()
        """Of the jobs that not all have done, in order: how many threads have not."""
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def expect(self) -> None:
        """One job more."""
        with self._changed:
            self._left.append(self._num_threads)

    def done(self, job: int) -> None:
        """A thread has done the job of that number, from 0."""
        with self._changed:
            self._left[job - self.num_done] -= 1
            if job == self.num_done_by_first:
                self.num_done_by_first += 1
                self._changed.notify()
            if self._left[0] == 0:
                self._left.popleft()
                self.num_done += 1
                self._changed.notify()

    def failed(self, failure: BaseException) -> None:
        """A thread has ended."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wait(self, is_due: Callable[[], bool], timeout: float) -> bool:
        """See ``EnvironmentThreads.wait``."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or is_due(), timeout)
            self.check()
            return is_due()


class _Lane:
    """One thread and its environment."""

    def __init__(
        self,
        lane: int,
        make: Callable[[], gymnasium.Env[Any, Any]],
        seed: int,
        rank: int,
        max_decorrelation_steps: int,
        progress: _Progress,
    ) -> None:
        self.rank = rank
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """Jobs to do; None: no more of them."""
        self.at_work = threading.Lock()
        """Held while the thread does a job, let go where it is within its environment."""
        self.abandoned = False
        """Whether no more is to be done of any job. The thread looks whenever it takes ``at_work``."""
        self.spec: EnvSpec
        """What the environment gives and takes; there once it is made."""
        self.is_made = threading.Event()
        """Whether it was made, or never will be."""
        self.close_failure: Exception | None = None
        # Daemonic so that an environment whose step never returns cannot keep a process alive that is done.
        self.thread = threading.Thread(target=self._run, name=f"environment-{rank}", daemon=True)
        self._lane = lane
        self._make = make
        self._seed = seed
        self._max_decorrelation_steps = max_decorrelation_steps
        self._progress = progress

    def _run(self) -> None:
        try:
            envs = LoopVectorEnv(
                self._make,
                seeds=[self._seed],
                first_rank=self.rank,
                max_decorrelation_steps=self._max_decorrelation_steps,
                around=self._let_go,
            )
            self.spec = envs.spec
        except BaseException as failure:  # noqa: BLE001 - raised again in the owner's thread
            self._progress.failed(failure)
            return
        finally:
            self.is_made.set()
        try:
            self._work(envs)
        except _Abandoned:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised again in the owner's thread
            self._progress.failed(failure)
        try:
            envs.close()
        except Exception as error:  # noqa: BLE001 - raised again in the owner's thread
            self.close_failure = error

    def _work(self, envs: VectorEnv) -> None:
        for number in count():
            if (job := self.jobs.get()) is None:
                return
            with self.at_work:
                self._look()
                job(self._lane, envs)
            self._progress.done(number)

    def _let_go(self, call: Call) -> Call:
        """A call into the environment, during which the job may be abandoned."""

        def called(*arguments: Any, **options: Any) -> Any:
            self.at_work.release()
            try:
                return call(*arguments, **options)
            finally:
                self.at_work.acquire()
                self._look()

        return called

    def _look(self) -> None:
        if self.abandoned:
            raise _Abandoned
