"""Environments that each have a thread: for environments that wait, so that they wait at the same time."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import structlog
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.slots import is_state_field
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.lane_environments import EnvCall, common_spec
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.call_board import CallBoard
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError

if TYPE_CHECKING:
    import gymnasium

WAKE_SECONDS = 60.0
"""How long one wait of ``ThreadedVectorEnv`` for its environments may take. Then it waits again."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for environments: half of the time in which ``rlsrl run`` expects a worker to exit."""

Job = Callable[[int, VectorEnv], None]
"""A thread's part of a job, given its lane and its environment as a vector of one."""
_log = structlog.stdlib.get_logger(__name__)


class _Abandoned(BaseException):
    """Ends an abandoned job. It is not an ``Exception``, so that code around an environment's call cannot catch it."""


class EnvironmentThreads:
    """N threads, each of which makes, steps and closes one environment. Each thread does its part of every job.

    A thread goes from one job to the next without waiting for the others. Without a job it waits; ``begin`` and
    ``close`` wake it. One owner thread calls the methods. In ``wait`` it waits until the first or the last thread has
    finished a job, or a thread fails: each of them wakes it.
    """

    def __init__(
        self,
        make: Callable[[int], gymnasium.Env[Any, Any]],
        *,
        seeds: Sequence[int],
        first_rank: int = 0,
        max_decorrelation_steps: int = 0,
        close_seconds: float = CLOSE_SECONDS,
        faults: EnvironmentFaults | None = None,
        board: CallBoard | None = None,
        reports: EpisodeReports | None = None,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make one environment per seed, one after the other; the arguments are those of ``LoopVectorEnv``.

        ``close_seconds``: how long ``close`` waits for environments inside a step.

        Raises:
            ConfigurationError: a space is not supported, or the environments have different spaces.
            EnvironmentFailed: ``make`` raised another error.
            WaitAbandoned: an environment's server is away, and the environments are no longer wanted.
        """
        if not seeds:
            raise ConfigurationError("a vector environment needs at least one seed")
        self.num_envs = len(seeds)
        """N: the number of environments, which is the number of lanes of each slot."""
        self._close_seconds = close_seconds
        self._progress = _Progress(self.num_envs)
        self._lanes: list[_Lane] = []
        try:
            for number, seed in enumerate(seeds):
                rank = first_rank + number
                make_envs = partial(
                    LoopVectorEnv,
                    make,
                    seeds=[seed],
                    first_rank=rank,
                    max_decorrelation_steps=max_decorrelation_steps,
                    faults=faults,
                    board=board,
                    reports=reports,
                    still_wanted=still_wanted,
                )
                lane = _Lane(number, rank, make_envs, self._progress)
                lane.thread.start()
                self._lanes.append(lane)
                lane.is_made.wait()
                self._progress.check()
            self.spec = common_spec([lane.spec for lane in self._lanes], first_rank)
            """The spec of each environment."""
        except BaseException:
            self.close()
            raise

    def begin(self, job: Job) -> None:
        """Give every thread the job. It does its part after its parts of earlier jobs."""
        self._progress.add_job()
        for lane in self._lanes:
            lane.jobs.put(job)

    @property
    def num_done(self) -> int:
        """Jobs whose parts are all done."""
        return self._progress.num_done

    @property
    def num_done_by_first(self) -> int:
        """Jobs of which at least one part is done."""
        return self._progress.num_done_by_first

    def call_on_change(self, notify: Callable[[], None]) -> None:
        """Have a thread call ``notify`` when the first or the last thread has finished a job, and when one fails."""
        self._progress.on_change = notify

    def check(self) -> None:
        """Raise the failure of a thread, as ``wait`` does."""
        self._progress.check()

    def wake(self) -> None:
        """Have ``wait`` ask ``is_due`` again. Any thread may call this."""
        self._progress.notify()

    def wait(self, is_due: Callable[[], bool], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until ``is_due`` is true, and return whether it is.

        ``is_due`` reads ``num_done`` and ``num_done_by_first``: their changes wake this call, and so does ``wake``.

        Raises:
            EnvironmentFailed: an environment failed more often than its budget allows. Any other error of a thread is
                raised as it is.
        """
        return self._progress.wait(is_due, timeout)

    def abandon(self) -> None:
        """Abandon all jobs. After the return no thread works on a job. Idempotent.

        A thread inside its environment's call ends the job when that call returns.
        """
        for lane in self._lanes:
            lane.abandoned = True
        for lane in self._lanes:
            with lane.at_work:
                pass

    def close(self) -> None:
        """Close every environment in its own thread, then raise a failure if there was one. Idempotent.

        Waits up to ``close_seconds`` for environments inside a step. Threads left after that end with the process.
        """
        self.abandon()
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.jobs.put(None)
        deadline = time.monotonic() + self._close_seconds
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        if running := [lane.rank for lane in lanes if lane.thread.is_alive()]:
            _log.warning("environments_left", ranks=running, waited_seconds=self._close_seconds)
        for lane in lanes:
            if lane.close_failure is not None:
                raise lane.close_failure


class ThreadedVectorEnv(VectorEnv):
    """Steps its environments side by side, each in a thread: a step takes as long as that of the slowest one.

    The arrays are those that ``LoopVectorEnv`` writes.
    """

    def __init__(
        self,
        make: Callable[[int], gymnasium.Env[Any, Any]],
        *,
        seeds: Sequence[int],
        first_rank: int = 0,
        faults: EnvironmentFaults | None = None,
        board: CallBoard | None = None,
        reports: EpisodeReports | None = None,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make one environment per seed. The arguments and errors are those of ``EnvironmentThreads``."""
        self._num_begun = 0
        self._threads = EnvironmentThreads(
            make,
            seeds=seeds,
            first_rank=first_rank,
            faults=faults,
            board=board,
            reports=reports,
            still_wanted=still_wanted,
        )
        self.spec, self.num_envs = self._threads.spec, self._threads.num_envs

    @override
    def begin(self, arrays: Arrays) -> None:
        self._do(lambda lane, envs: envs.begin(lane_of(arrays, lane)))

    @override
    def step(self, arrays: Arrays, step: int, actions: NDArray[Any]) -> None:
        self._do(lambda lane, envs: envs.step(lane_of(arrays, lane), step, actions[lane : lane + 1]))

    def _do(self, job: Job) -> None:
        self._threads.begin(job)
        self._num_begun += 1
        while not self._threads.wait(lambda: self._threads.num_done == self._num_begun, WAKE_SECONDS):
            pass

    @override
    def close(self) -> None:
        self._threads.close()


def lane_of(arrays: Arrays, lane: int) -> dict[str, NDArray[Any]]:
    """Return views of one lane: the arrays of a slot that has only this lane, without those of all lanes together."""
    return {
        name: array[lane : lane + 1] if is_state_field(name) else array[:, lane : lane + 1]
        for name, array in arrays.items()
        if array.ndim > 1
    }


class _Progress:
    """Counts finished jobs, which each thread does in order, and keeps the first failure. Any thread may use it."""

    def __init__(self, num_threads: int) -> None:
        self.num_done = 0
        """Jobs that all threads have finished."""
        self.num_done_by_first = 0
        """Jobs that at least one thread has finished."""
        self._num_threads = num_threads
        self._pending: deque[int] = deque()
        """For each unfinished job, in order: how many threads have not finished it."""
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.on_change: Callable[[], None] = lambda: None

    def notify(self) -> None:
        """Wake ``wait``, so that it asks again."""
        with self._changed:
            self._changed.notify()

    def add_job(self) -> None:
        """Count a new job."""
        with self._changed:
            self._pending.append(self._num_threads)

    def done(self, job: int) -> None:
        """Record that a thread has finished the job of that number, from 0."""
        with self._changed:
            self._pending[job - self.num_done] -= 1
            if is_first := job == self.num_done_by_first:
                self.num_done_by_first += 1
            if is_last := self._pending[0] == 0:
                self._pending.popleft()
                self.num_done += 1
            if not (is_first or is_last):
                return
            self._changed.notify()
        self.on_change()

    def failed(self, failure: BaseException) -> None:
        """Record that a thread has failed."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify()
        self.on_change()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wait(self, is_due: Callable[[], bool], timeout: float) -> bool:
        """Wait as ``EnvironmentThreads.wait`` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or is_due(), timeout)
            self.check()
            return is_due()


class _Lane:
    """One thread and its environment."""

    def __init__(self, lane: int, rank: int, make_envs: Callable[..., VectorEnv], progress: _Progress) -> None:
        """``make_envs`` makes the environment as a vector of one. It gets ``wrap_call``, as ``LoopVectorEnv`` does."""
        self.rank = rank
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """Jobs to do; None ends the thread."""
        self.at_work = threading.Lock()
        """Held while the thread does a job, and released during its environment's calls."""
        self.abandoned = False
        """Whether jobs are abandoned. The thread checks this each time it takes ``at_work``."""
        self.spec: EnvSpec
        """The environment's spec. Set once the environment is made."""
        self.is_made = threading.Event()
        """Set once the environment is made, or has failed to be made."""
        self.close_failure: BaseException | None = None
        # Daemonic: an environment whose step never returns must not keep the process alive.
        self.thread = threading.Thread(target=self._run, name=f"environment-{rank}", daemon=True)
        self._lane = lane
        self._make_envs = make_envs
        self._progress = progress

    def _run(self) -> None:
        try:
            envs = self._make_envs(wrap_call=self._release_during)
            self.spec = envs.spec
        except BaseException as failure:  # noqa: BLE001 - the owner's thread raises it
            self._progress.failed(failure)
            return
        finally:
            self.is_made.set()
        try:
            self._work(envs)
        except _Abandoned:
            pass
        except BaseException as failure:  # noqa: BLE001 - the owner's thread raises it
            self._progress.failed(failure)
        try:
            envs.close()
        except USERS_ERRORS as error:  # the owner's thread raises it
            self.close_failure = error

    def _work(self, envs: VectorEnv) -> None:
        for number in count():
            if (job := self.jobs.get()) is None:
                return
            with self.at_work:
                self._raise_if_abandoned()
                job(self._lane, envs)
            self._progress.done(number)

    def _release_during(self, call: EnvCall) -> EnvCall:
        """Wrap an environment's method so that the job can be abandoned during the call."""

        def called(*arguments: Any, **options: Any) -> Any:
            self.at_work.release()
            try:
                return call(*arguments, **options)
            finally:
                self.at_work.acquire()
                self._raise_if_abandoned()

        return called

    def _raise_if_abandoned(self) -> None:
        if self.abandoned:
            raise _Abandoned
