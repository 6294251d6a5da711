"""The local controller: starts the worker processes of one run, restarts those that die, and ends them all.

One thread waits in one ``select`` for ended processes, signals, due restarts and the next refresh of the display. The
supervisor decides about an ended process; this module acts. Each worker has its own session and asks the kernel to die
with the controller, so no worker outlives it.
"""

from __future__ import annotations

import math
import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Literal, Protocol

from rlsrl.api.failures import CONFIGURATION_ERROR
from rlsrl.api.role_names import COORDINATOR, EVALUATOR, TRAINER
from rlsrl.local.processes import ChildProcess, OomKills, count_oom_kills
from rlsrl.local.signals import SignalInbox
from rlsrl.local.supervisor import Exit, Fail, Restart, RestartLimits, Supervisor
from rlsrl.runtime.process import worker_environment

WORKER_COMMAND = (sys.executable, "-m", "rlsrl.workers")
GANG_COMMAND = (sys.executable, "-m", "rlsrl.workers.gang_launcher")
"""Starts several trainer ranks; the controller handles them as one process."""

CHECK_SECONDS = 2.0
"""Longest time between two checks of the journal."""

QUOTED_LINES = 15
"""Number of a failed process's last lines in the message; a traceback at their end is whole."""

COMPARED_LINES = 200
"""Number of a failed process's last lines by which its failures are compared."""

QUOTED_CHARACTERS = 160
"""Characters of a restarted process's last line in the note."""

LAST_CHARACTERS = 1000
"""Characters of the last line of a process that did not end cleanly: what was lost, and why."""


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The processes of one role."""

    role: str
    replicas: int
    config: Path
    """The role's resolved config, JSON."""
    command: tuple[str, ...] | None = None
    """Starts one of its processes; None: the command of the ``LaunchOptions``."""
    config_name: str = ""
    """See ``rlsrl.api.live.name_of``: processes with a config of another name are replaced."""

    def replaces(self, before: RolePlan) -> bool:
        """Return whether the running processes of an earlier plan must end.

        Fewer processes replace all of them: which of them holds the last index is not known here.
        """
        is_other = (self.config_name, self.command) != (before.config_name, before.command)
        return is_other or self.replicas < before.replicas


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What runs, until an edit of the experiment replaces it."""

    roles: tuple[RolePlan, ...]
    """In the order of starting. Workers wait for their peers, so the controller does not."""
    limits: RestartLimits


@dataclass(frozen=True, kw_only=True)
class EndDeadlines:
    """How long processes may take to end, and how close the signals of one request are, in seconds."""

    trainer: float = 60.0
    """For the trainer to finish its step and store a checkpoint; a large one takes seconds to write."""
    worker: float = 10.0
    """For any other worker to end by itself."""
    evaluation: float = 300.0
    """For the evaluators to play the last version of a finished run."""
    kill: float = 10.0
    """For the kernel to end a killed process."""
    repeat: float = 1.0
    """Signals within this time after a counted signal belong to the same request. One request can arrive twice:
    ``timeout`` signals its child and the child's group, systemd sends SIGHUP after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How worker processes are started."""

    environment: Mapping[str, str]
    """The environment of every worker; ``worker_environment`` adds the variables of its role."""
    logs: Path
    """An existing folder for the output of the processes."""
    command: Sequence[str] = WORKER_COMMAND
    """Starts a worker with the arguments ``--role``, ``--config`` and, for a trainer, ``--attempt``."""
    keep_fds: Collection[int] = ()
    """Descriptors that every worker inherits, so that a lock stays held until the last worker has ended."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """One process for the display."""

    role: str
    number: int
    state: Literal["running", "ending", "ended", "restarting"]
    """``ending``: signalled and still alive. ``restarting``: ended and waiting for its restart."""
    pid: int | None
    """None while it is not alive."""
    is_gang: bool = False
    """Whether it only launches the workers of its role, which report under their own pids."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run has its terminal record, which may name a failure (``rlsrl.parameters.terminal``)."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A signal or the watching program ended the run; the run can be resumed."""

    signum: signal.Signals
    """The first signal; SIGINT if the program did."""
    killed: bool
    """Whether a second signal interrupted the clean end: work since the last durable version is lost."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A process failed for good; the run can be resumed once the cause is fixed."""

    process: str
    """``role-number``."""
    what: str
    """What happened to it, for example ``exited with code 1``."""
    reason: str
    """Why it was not restarted."""
    configuration: bool
    """Whether the user's input is the cause."""
    log: Path
    lines: tuple[str, ...]
    """The last lines of its output."""

    @property
    def message(self) -> str:
        """The user's message: process, exit, cause, last lines and log."""
        head = f"{self.process} {self.what}: {self.reason}."
        if not self.lines:
            return f"{head} It printed nothing; log: {self.log}."
        quoted = "".join(f"\n  {line}" for line in self.lines)
        return f"{head} Last lines of {self.log}:{quoted}"


RunOutcome = Finished | Interrupted | Failed


class RecordsLost(Exception):
    """The folder with the run's records was removed or moved: nothing can be stored. The text names it."""


class Journal(Protocol):
    """Durable records of the controller."""

    def begin_attempt(self) -> int:
        """Return a new attempt number, which no trainer of this run had before. Durable when this returns."""

    def end_attempt(self) -> None:
        """Record the end of the current attempt's trainer."""

    def count_restart(self, role: str) -> None:
        """Record a restart of that role."""

    def is_finished(self) -> bool:
        """Return whether the run has its terminal record."""

    def trained(self) -> int:
        """Return the transitions that training has counted until now. Resuming from an older version lowers it."""

    def resumption(self) -> str | None:
        """Return from which version the next trainer resumes and what is lost, in words; None if that is unknown."""

    def check(self) -> None:
        """Raise ``RecordsLost`` if the records were removed or moved."""


class Edits(Protocol):
    """Edits of the experiment while it runs."""

    def take(self) -> RunPlan | None:
        """Return the plan after edits since the last call; None without an edit. Called at least every two seconds."""


Watch = Callable[[], bool]
"""Looks at the run for the user's own program, at least every two seconds while the run trains. Returns whether the run
is to end, as after Ctrl-C. Must not raise."""


class Display(Protocol):
    """Shows the run. Must not raise: a broken terminal does not end a run."""

    @property
    def interval_seconds(self) -> float:
        """Time between two calls of ``show``."""

    def show(self, processes: Sequence[ProcessState], *, last: bool = False) -> None:
        """Refresh the view; the ``last`` one is shown even if no refresh is due."""

    def note(self, text: str) -> None:
        """Show a message."""


class LocalController:
    """One life of a run on this machine. Call ``run`` once, from the main thread.

    The main thread also starts the processes: a worker dies with the thread that started it.
    """

    def __init__(
        self,
        *,
        plan: RunPlan,
        journal: Journal,
        display: Display,
        launch: LaunchOptions,
        edits: Edits | None = None,
        watch: Watch | None = None,
        deadlines: EndDeadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
        oom_kills: Callable[[], int] = count_oom_kills,
    ) -> None:
        """Prepare a run without starting a process.

        Args:
            plan: The first plan.
            launch: How to start every worker.
            edits: Replaces the plan while the run lasts; None: the plan stays.
            watch: See ``Watch``; None: no program watches the run.
            deadlines: None: the defaults.
            oom_kills: Returns how many processes the kernel has killed for lack of memory.
        """
        self._plans = {role.role: role for role in plan.roles}
        self._supervisor = Supervisor(limits=plan.limits)
        self._edits = edits
        self._watch = watch
        self._journal = journal
        self._display = display
        self._launch = launch
        self._deadlines = deadlines or EndDeadlines()
        self._clock = clock
        self._oom_kills = OomKills(oom_kills)
        self._inbox = SignalInbox()
        self._selector = selectors.DefaultSelector()
        self._children: list[ChildProcess] = []
        self._asked_to_end: set[ChildProcess] = set()
        self._replaced: dict[ChildProcess, float] = {}
        """The processes that end because of an edit, and when they are killed."""
        self._waiting: dict[tuple[str, int], float] = {}
        self._started_at: dict[tuple[str, int], float] = {}
        self._signals: list[signal.Signals] = []
        """The requests to end, by their first signal."""
        self._signalled_at = -math.inf
        self._next_show = clock()

    def run(self) -> RunOutcome:
        """Start all processes, restart failed ones, and end all after the finish, a signal or a lasting failure.

        No process is alive when this returns or raises.

        Raises:
            OSError: a process cannot be started.
            RecordsLost: see ``Journal.check``.
        """
        with self._inbox, self._selector:
            self._selector.register(self._inbox, selectors.EVENT_READ)
            try:
                for plan in self._plans.values():
                    for number in range(plan.replicas):
                        self._start(plan, number)
                outcome = self._supervise()
                self._display.show(self._states(), last=True)
                self._end(finished=isinstance(outcome, Finished))
            finally:
                self._kill()
        if isinstance(outcome, Finished) or self._journal.is_finished():
            return Finished()
        if isinstance(outcome, Interrupted):
            return Interrupted(signum=outcome.signum, killed=len(self._signals) > 1)
        return outcome

    def _supervise(self) -> RunOutcome:
        """Restart processes until the run ends; return its outcome.

        Waits for ended processes, signals, due restarts and the next check of records and edits; each of them wakes it.
        """
        while True:
            due = (*self._waiting.values(), *self._replaced.values())
            ended = self._wait(min([*due, self._clock() + CHECK_SECONDS]))
            self._journal.check()
            for child, code in ended:
                if (outcome := self._handle_exit(child, code)) is not None:
                    return outcome
            if self._watch is not None and self._watch():
                self._display.note("The program that watches the run ends it.")
                self._signals.append(signal.SIGINT)
                self._signalled_at = self._clock()
            if self._signals:
                self._display.note(
                    "Storing a last checkpoint and ending; Ctrl-C again, a second later, kills all processes."
                )
                return Interrupted(signum=self._signals[0], killed=False)
            if self._edits is not None and (plan := self._edits.take()) is not None:
                self._adopt(plan)
            self._kill_overdue()
            self._start_due()

    def _adopt(self, plan: RunPlan) -> None:
        """Start the processes that the plan has in addition; end those that it lacks, or has with another config.

        Each of the latter starts again when it has ended.
        """
        before, self._plans = self._plans, {role.role: role for role in plan.roles}
        self._supervisor = replace(self._supervisor, limits=plan.limits)
        now = self._clock()
        for child in self._children:
            after = self._plans.get(child.role)
            if after is None or after.replaces(before[child.role]):
                seconds = self._deadlines.trainer if child.role == TRAINER else self._deadlines.worker
                self._replaced.setdefault(child, now + seconds)
                child.send_signal(signal.SIGTERM)
        self._asked_to_end.update(self._replaced)
        present = {(child.role, child.number) for child in self._children}
        wanted = {(role.role, number) for role in plan.roles for number in range(role.replicas)}
        self._waiting = {key: due for key, due in self._waiting.items() if key in wanted}
        self._waiting.update(dict.fromkeys(wanted - present - self._waiting.keys(), now))

    def _kill_overdue(self) -> None:
        now = self._clock()
        for child in [child for child, due in self._replaced.items() if due <= now]:
            self._display.note(f"killing {child.name}, which did not end in time for an edit")
            self._replaced[child] = math.inf
            child.send_signal(signal.SIGKILL)

    def _start_due(self) -> None:
        now = self._clock()
        for key in [key for key, due in self._waiting.items() if due <= now]:
            del self._waiting[key]
            role, number = key
            self._start(self._plans[role], number)

    def _handle_exit(self, child: ChildProcess, code: int) -> RunOutcome | None:
        """Schedule a restart and return None, or return the outcome of the run."""
        if self._journal.is_finished():
            return Finished()
        now = self._clock()
        if self._replaced.pop(child, None) is not None:
            if (after := self._plans.get(child.role)) is not None and child.number < after.replicas:
                self._waiting[child.role, child.number] = now
            return None
        ended = Exit(
            role=child.role,
            number=child.number,
            code=code,
            at=now,
            lived_seconds=now - self._started_at[child.role, child.number],
            lines=child.last_lines(COMPARED_LINES),
            trained=self._journal.trained() if child.role == TRAINER else None,
        )
        decision, self._supervisor = self._supervisor.decide(ended)
        exit_text = describe_exit(code) + self._oom_kills.note(code)
        if isinstance(decision, Fail):
            return Failed(
                process=child.name,
                what=exit_text,
                reason=decision.reason,
                configuration=code == CONFIGURATION_ERROR,
                log=child.log,
                lines=child.end_of_output(QUOTED_LINES),
            )
        cause = _last_words(child, QUOTED_CHARACTERS) if code > 0 else ""
        self._display.note(f"{child.name} {exit_text}{cause}; {_restarting(decision, self._supervisor.limits.budget)}")
        if child.role == TRAINER and (resumption := self._journal.resumption()) is not None:
            self._display.note(f"{child.name} resumes {resumption}")
        self._journal.count_restart(child.role)
        self._waiting[child.role, child.number] = now + decision.delay_seconds
        return None

    def _end(self, *, finished: bool) -> None:
        """End all processes: the trainer first, for its checkpoint; the coordinator last, because it records the rest.

        Each process is killed after its grace period or a second signal. The evaluators of a finished run first get
        time to play its last version.
        """
        self._waiting.clear()
        self._end_matching(lambda child: child.role == TRAINER, self._deadlines.trainer)
        self._end_matching(lambda child: child.role not in (COORDINATOR, EVALUATOR), self._deadlines.worker)
        if finished:
            self._await_evaluators()
        self._end_matching(lambda child: child.role != COORDINATOR, self._deadlines.worker)
        self._end_matching(lambda _: True, self._deadlines.worker)

    def _await_evaluators(self) -> None:
        """Wait until the evaluators have ended by themselves; any signal ends the wait."""
        evaluators = [child for child in self._children if child.role == EVALUATOR]
        if evaluators and not self._signals:
            self._display.note("Evaluating the last version; Ctrl-C skips this.")
        seconds = self._deadlines.evaluation
        deadline = self._clock() + seconds
        while any(child in self._children for child in evaluators) and not self._signals:
            if self._clock() >= deadline:
                self._display.note(f"the last version is not evaluated: no result within {seconds:g} s")
                return
            self._note_bad_exits(self._wait(deadline))

    def _end_matching(self, chosen: Callable[[ChildProcess], bool], grace_seconds: float) -> None:
        children = [child for child in self._children if chosen(child)]
        for child in children:
            child.send_signal(signal.SIGTERM)
        self._asked_to_end.update(children)
        deadline = self._clock() + grace_seconds
        while any(child in self._children for child in children) and len(self._signals) < 2:
            if self._clock() >= deadline:
                self._display.note(f"killing the processes that did not end within {grace_seconds:g} s")
                break
            self._note_bad_exits(self._wait(deadline))
        if len(self._signals) >= 2:
            children = list(self._children)
        self._kill(children)

    def _note_bad_exits(self, ended: Sequence[tuple[ChildProcess, int]]) -> None:
        for child, code in ended:
            if code not in (0, -signal.SIGTERM):
                cause = _last_words(child, LAST_CHARACTERS) if code > 0 else ""
                self._display.note(
                    f"{child.name} {describe_exit(code)} instead of ending cleanly{cause}; see {child.log}"
                )

    def _kill(self, children: Sequence[ChildProcess] | None = None) -> None:
        """Kill these processes, by default all, and wait until they have ended."""
        doomed = list(self._children if children is None else children)
        for child in doomed:
            if child in self._children:
                child.send_signal(signal.SIGKILL)
        deadline = self._clock() + self._deadlines.kill
        while left := [child for child in doomed if child in self._children]:
            if self._clock() >= deadline:
                self._display.note("the kernel has not ended " + ", ".join(f"process {child.pid}" for child in left))
                return
            self._wait(deadline)

    def _start(self, plan: RolePlan, number: int) -> None:
        command = [*(plan.command or self._launch.command), "--role", plan.role, "--config", str(plan.config)]
        if plan.role == TRAINER:
            command += ["--attempt", str(self._journal.begin_attempt())]
        child = ChildProcess(
            role=plan.role,
            number=number,
            command=command,
            environment=worker_environment(self._launch.environment, plan.role),
            log=self._launch.logs / f"{plan.role}-{number}.out",
            keep_fds=self._launch.keep_fds,
        )
        self._started_at[plan.role, number] = self._clock()
        self._children.append(child)
        self._selector.register(child, selectors.EVENT_READ, child)

    def _wait(self, deadline: float) -> list[tuple[ChildProcess, int]]:
        """Wait for an event, at most until the deadline; return the processes that ended, with their exit codes.

        An ended process, a signal and the next refresh of the display wake it.
        """
        now = self._clock()
        if now >= self._next_show:
            self._display.show(self._states())
            self._next_show = now + self._display.interval_seconds
        ended = []
        for key, _ in self._selector.select(max(0.0, min(deadline, self._next_show) - now)):
            if isinstance(child := key.data, ChildProcess):
                ended.append((child, self._reap(child)))
            else:
                self._count_signals()
        return ended

    def _count_signals(self) -> None:
        """Count the received signals; those that belong to a counted request are dropped."""
        now = self._clock()
        for signum in self._inbox.read():
            if now - self._signalled_at >= self._deadlines.repeat:
                self._signals.append(signum)
                self._signalled_at = now

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
            _process_state(
                plan,
                number,
                child := children.get((plan.role, number)),
                is_ending=child in self._asked_to_end,
                is_restarting=(plan.role, number) in self._waiting,
            )
            for plan in self._plans.values()
            for number in range(plan.replicas)
        ]


def _process_state(
    plan: RolePlan, number: int, child: ChildProcess | None, *, is_ending: bool, is_restarting: bool
) -> ProcessState:
    return ProcessState(
        role=plan.role,
        number=number,
        state=("restarting" if is_restarting else "ended") if child is None else "ending" if is_ending else "running",
        pid=None if child is None else child.pid,
        is_gang=plan.command is not None,
    )


def _last_words(child: ChildProcess, max_characters: int) -> str:
    """Return the process's last line, after a colon; nothing if it printed nothing."""
    return "".join(f": {shorten(line, max_characters, placeholder='...')}" for line in child.last_lines(1))


def _restarting(decision: Restart, budget: int) -> str:
    when = f"in {decision.delay_seconds:g} s" if decision.delay_seconds else "now"
    return f"restarting {when} (restart {decision.used} of {budget})"


def describe_exit(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
