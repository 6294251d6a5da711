"""The local controller: starts the worker processes of one run, restarts those that die, and ends them all.

One thread waits in one ``select`` for ended processes, signals, due restarts and the display's next turn. What to do
about an ended process is the supervisor's decision; this module only carries it out. Workers live in sessions of
their own and die with the controller (each asks the kernel for that), so nothing outlives it, however it ends.
"""

from __future__ import annotations

import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Literal, Protocol

from rlsrl.local.processes import ChildProcess
from rlsrl.local.signals import SignalInbox
from rlsrl.local.supervisor import Exit, Fail, RestartLimits, Supervisor
from rlsrl.runtime.errors import CONFIGURATION_ERROR
from rlsrl.runtime.process import worker_environment

WORKER_COMMAND = (sys.executable, "-m", "rlsrl.workers")
GANG_COMMAND = (sys.executable, "-m", "rlsrl.workers.gang_launcher")
"""Several trainer ranks, as one process that is started, ended and restarted."""

TRAINER = "trainer"
COORDINATOR = "coordinator"
EVALUATOR = "evaluator"

TRAINER_GRACE_SECONDS = 60.0
"""Time the trainer has to finish its step and store a checkpoint; a large one takes seconds to reach the disk."""

WORKER_GRACE_SECONDS = 10.0
"""Time any other worker has to end by itself."""

EVALUATION_SECONDS = 300.0
"""Time evaluators have to play the last version of a finished run."""

KILL_GRACE_SECONDS = 10.0
"""Time the kernel has to end a killed process."""

QUOTED_LINES = 15
"""How many of a failed process's last lines the message repeats."""

QUOTED_CHARACTERS = 160
"""How much of a restarted process's last line its note repeats."""


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The processes of one role."""

    role: str
    replicas: int
    config: Path
    """The role's resolved config, JSON."""
    command: tuple[str, ...] | None = None
    """Starts one of its processes, in place of the controller's ordinary command."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """One process, as the display shows it."""

    role: str
    number: int
    state: Literal["running", "ending", "ended", "restarting"]
    """``ending``: asked to, and still there. ``restarting``: gone, and waits to be started again."""
    pid: int | None
    """None while it is not there."""
    is_gang: bool = False
    """Whether it only launches the workers of its role, which report under pids of their own."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run has its terminal record."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A signal asked for the end; the run can be resumed."""

    signum: signal.Signals
    """The first one."""
    killed: bool
    """A second signal cut the clean end short: work since the last durable version is lost."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A process could not be kept alive; the run can be resumed once the cause is mended."""

    process: str
    """``role-number``."""
    what: str
    """What happened to it, for example ``exited with code 1``."""
    reason: str
    """Why it was not started again."""
    configuration: bool
    """Whether the cause is the user's input."""
    log: Path
    lines: tuple[str, ...]
    """The last it printed."""

    @property
    def message(self) -> str:
        """For the user: who, what, why, its last words and where the rest is."""
        head = f"{self.process} {self.what}: {self.reason}."
        if not self.lines:
            return f"{head} It printed nothing; its log is {self.log}."
        quoted = "".join(f"\n  {line}" for line in self.lines)
        return f"{head} Its last lines, from {self.log}:{quoted}"


Outcome = Finished | Interrupted | Failed


class Journal(Protocol):
    """Where the controller writes what must survive it."""

    def begin_attempt(self) -> int:
        """A number no trainer of this run had before; durable when this returns."""

    def end_attempt(self) -> None:
        """The trainer of the current attempt has ended."""

    def count_restart(self, role: str) -> None:
        """A process of that role is started again."""

    def is_finished(self) -> bool:
        """Whether the run has its terminal record."""


class Display(Protocol):
    """What the user sees meanwhile. Must not raise: a broken terminal does not end a run."""

    @property
    def interval_seconds(self) -> float:
        """Time between two calls of ``show``."""

    def show(self, processes: Sequence[ProcessState]) -> None:
        """Bring the picture up to date."""

    def note(self, text: str) -> None:
        """Tell of something that happened."""


class LocalController:
    """One life of a run on this machine. Use ``run`` once, from the main thread.

    The main thread also starts the processes: the kernel ties a worker's death to the thread that started it.
    """

    def __init__(
        self,
        *,
        plans: Sequence[RolePlan],
        limits: RestartLimits,
        journal: Journal,
        display: Display,
        environment: Mapping[str, str],
        logs: Path,
        command: Sequence[str] = WORKER_COMMAND,
        keep_fds: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plan a run; nothing is started yet.

        Args:
            plans: In the order in which they are started; workers wait for their peers, so nobody waits here.
            environment: The environment of every worker, but for what is said of all processes of its role.
            logs: An existing folder for what the processes print.
            command: Starts a worker when followed by ``--role``, ``--config`` and, for a trainer, ``--attempt``.
            keep_fds: Descriptors every worker inherits, so that a lock is held until the last one is gone.
        """
        self._plans = {plan.role: plan for plan in plans}
        self._supervisor = Supervisor(limits=limits)
        self._journal = journal
        self._display = display
        self._environment = environment
        self._logs = logs
        self._command = command
        self._keep_fds = keep_fds
        self._clock = clock
        self._inbox = SignalInbox()
        self._selector = selectors.DefaultSelector()
        self._children: list[ChildProcess] = []
        self._asked_to_end: set[ChildProcess] = set()
        self._waiting: dict[tuple[str, int], float] = {}
        self._started_at: dict[tuple[str, int], float] = {}
        self._signals: list[signal.Signals] = []
        self._next_show = clock()

    def run(self) -> Outcome:
        """Start everything, keep it alive, and end it: when it has finished, on a signal, or when it cannot be mended.

        No process is left when this returns or raises.

        Raises:
            OSError: a process cannot be started at all.
        """
        with self._inbox, self._selector:
            self._selector.register(self._inbox, selectors.EVENT_READ)
            try:
                for plan in self._plans.values():
                    for number in range(plan.replicas):
                        self._start(plan, number)
                outcome = self._supervise()
                self._end(finished=isinstance(outcome, Finished))
            finally:
                self._kill()
        if isinstance(outcome, Finished) or self._journal.is_finished():
            return Finished()
        if isinstance(outcome, Interrupted):
            return Interrupted(signum=outcome.signum, killed=len(self._signals) > 1)
        return outcome

    def _supervise(self) -> Outcome:
        """Keep every process alive until there is a reason to end.

        Waits for ended processes, signals and due restarts; woken by each.
        """
        while True:
            for child, code in self._turn(min(self._waiting.values(), default=None)):
                if (outcome := self._mend(child, code)) is not None:
                    return outcome
            if self._signals:
                self._display.note("Ending cleanly with a last checkpoint; once more to kill everything at once.")
                return Interrupted(signum=self._signals[0], killed=False)
            now = self._clock()
            for key in [key for key, due in self._waiting.items() if due <= now]:
                del self._waiting[key]
                role, number = key
                self._start(self._plans[role], number)

    def _mend(self, child: ChildProcess, code: int) -> Outcome | None:
        """Plan the process's restart; or say why the run ends."""
        if self._journal.is_finished():
            return Finished()
        now = self._clock()
        last_words = "".join(child.last_lines(1))
        lived_seconds = now - self._started_at[child.role, child.number]
        ended = Exit(
            role=child.role, number=child.number, code=code, at=now, lived_seconds=lived_seconds, last_words=last_words
        )
        decision, self._supervisor = self._supervisor.decide(ended)
        what = describe_exit(code)
        if isinstance(decision, Fail):
            return Failed(
                process=child.name,
                what=what,
                reason=decision.reason,
                configuration=code == CONFIGURATION_ERROR,
                log=child.log,
                lines=child.last_lines(QUOTED_LINES),
            )
        when = f"in {decision.delay_seconds:g} s" if decision.delay_seconds else "now"
        said = shorten(last_words, QUOTED_CHARACTERS, placeholder="...") if code > 0 else ""
        why = f": {said}" if said else ""
        restart = f"restart {decision.used} of {self._supervisor.limits.budget}"
        self._display.note(f"{child.name} {what}{why}; starting it again {when} ({restart})")
        self._journal.count_restart(child.role)
        self._waiting[child.role, child.number] = now + decision.delay_seconds
        return None

    def _end(self, *, finished: bool) -> None:
        """End all processes: the trainer first, for its checkpoint, and last the coordinator, which records the rest.

        Each has its time to end by itself; then, or when a second signal comes, it is killed. Before they are asked
        to, the evaluators of a finished run have theirs to play its last version.
        """
        self._waiting.clear()
        self._end_those(lambda child: child.role == TRAINER, TRAINER_GRACE_SECONDS)
        self._end_those(lambda child: child.role not in (COORDINATOR, EVALUATOR), WORKER_GRACE_SECONDS)
        if finished:
            self._await_evaluators()
        self._end_those(lambda child: child.role != COORDINATOR, WORKER_GRACE_SECONDS)
        self._end_those(lambda _: True, WORKER_GRACE_SECONDS)

    def _await_evaluators(self) -> None:
        """Wait until the evaluators have ended by themselves; ended early by any signal since the run finished."""
        evaluators = [child for child in self._children if child.role == EVALUATOR]
        if evaluators and not self._signals:
            self._display.note("Evaluating the last version; Ctrl-C to end without.")
        deadline = self._clock() + EVALUATION_SECONDS
        while any(child in self._children for child in evaluators) and not self._signals:
            if self._clock() >= deadline:
                self._display.note(
                    f"the last version is not evaluated: that takes longer than {EVALUATION_SECONDS:g} s"
                )
                return
            self._note_bad_ends(self._turn(deadline))

    def _end_those(self, chosen: Callable[[ChildProcess], bool], grace_seconds: float) -> None:
        children = [child for child in self._children if chosen(child)]
        for child in children:
            child.send_signal(signal.SIGTERM)
        self._asked_to_end.update(children)
        deadline = self._clock() + grace_seconds
        while any(child in self._children for child in children) and len(self._signals) < 2:
            if self._clock() >= deadline:
                self._display.note(f"killing what did not end within {grace_seconds:g} s")
                break
            self._note_bad_ends(self._turn(deadline))
        if len(self._signals) >= 2:
            children = list(self._children)
        self._kill(children)

    def _note_bad_ends(self, ended: Sequence[tuple[ChildProcess, int]]) -> None:
        for child, code in ended:
            if code not in (0, -signal.SIGTERM):
                self._display.note(f"{child.name} {describe_exit(code)} instead of ending cleanly; see {child.log}")

    def _kill(self, children: Sequence[ChildProcess] | None = None) -> None:
        """Kill those, or all, and wait until the kernel has ended them."""
        doomed = list(self._children if children is None else children)
        for child in doomed:
            if child in self._children:
                child.send_signal(signal.SIGKILL)
        deadline = self._clock() + KILL_GRACE_SECONDS
        while left := [child for child in doomed if child in self._children]:
            if self._clock() >= deadline:
                self._display.note("the kernel has not ended " + ", ".join(f"process {child.pid}" for child in left))
                return
            self._turn(deadline)

    def _start(self, plan: RolePlan, number: int) -> None:
        command = [*(plan.command or self._command), "--role", plan.role, "--config", str(plan.config)]
        if plan.role == TRAINER:
            command += ["--attempt", str(self._journal.begin_attempt())]
        child = ChildProcess(
            role=plan.role,
            number=number,
            command=command,
            environment=worker_environment(self._environment, plan.role),
            log=self._logs / f"{plan.role}-{number}.out",
            keep_fds=self._keep_fds,
        )
        self._started_at[plan.role, number] = self._clock()
        self._children.append(child)
        self._selector.register(child, selectors.EVENT_READ, child)

    def _turn(self, deadline: float | None) -> list[tuple[ChildProcess, int]]:
        """Wait for something to happen, at most until the deadline; returns the processes that ended, with their codes.

        Woken by an ended process, a signal and the display's next turn.
        """
        now = self._clock()
        if now >= self._next_show:
            self._display.show(self._states())
            self._next_show = now + self._display.interval_seconds
        wake_at = self._next_show if deadline is None else min(deadline, self._next_show)
        ended = []
        for key, _ in self._selector.select(max(0.0, wake_at - now)):
            if isinstance(child := key.data, ChildProcess):
                ended.append((child, self._reap(child)))
            else:
                self._signals.extend(self._inbox.read())
        return ended

    def _reap(self, child: ChildProcess) -> int:
        self._selector.unregister(child)
        self._children.remove(child)
        code = child.reap()
        if child.role == TRAINER:
            self._journal.end_attempt()
        return code

    def _states(self) -> list[ProcessState]:
        children = {(child.role, child.number): child for child in self._children}
        return [
            self._state(plan, number, children.get((plan.role, number)))
            for plan in self._plans.values()
            for number in range(plan.replicas)
        ]

    def _state(self, plan: RolePlan, number: int, child: ChildProcess | None) -> ProcessState:
        state: Literal["running", "ending", "ended", "restarting"]
        if child is not None:
            state = "ending" if child in self._asked_to_end else "running"
        else:
            state = "restarting" if (plan.role, number) in self._waiting else "ended"
        return ProcessState(
            role=plan.role,
            number=number,
            state=state,
            pid=None if child is None else child.pid,
            is_gang=plan.command is not None,
        )


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
