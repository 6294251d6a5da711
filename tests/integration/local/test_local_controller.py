"""The controller with real processes that play scripts: restarts, ends and leftovers."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlsrl.api.failures import FUTILE_STARTS, TEMPORARY_FAILURE
from rlsrl.local.controller import (
    Edits,
    EndDeadlines,
    Failed,
    Finished,
    Interrupted,
    LaunchOptions,
    LocalController,
    ProcessState,
    RolePlan,
    RunPlan,
    Watch,
)
from rlsrl.local.run_folder import RunFolder
from rlsrl.local.supervisor import RestartLimits

STANDIN = (sys.executable, str(Path(__file__).with_name("standin_worker.py")))
UNTIL_TOLD = [{"until": "SIGTERM"}, {"exit": 0}]
FINISH = [{"touch": "finished"}, {"exit": 0}]


class MemoryJournal:
    """A journal whose run is finished once the file ``finished`` exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.attempt = 0
        self.open_attempts = 0
        self.restarts: list[str] = []

    def begin_attempt(self) -> int:
        self.attempt += 1
        self.open_attempts += 1
        return self.attempt

    def end_attempt(self) -> None:
        self.open_attempts -= 1

    def count_restart(self, role: str) -> None:
        self.restarts.append(role)

    def is_finished(self) -> bool:
        return (self._folder / "finished").exists()

    def trained(self) -> int:
        """Return the size of the file ``trained``."""
        path = self._folder / "trained"
        return path.stat().st_size if path.exists() else 0

    def resumption(self) -> str | None:
        """Return the words for a trainer."""
        return f"from version {self.attempt}.7"

    def check(self) -> None:
        """Find the records in place."""


class MemoryDisplay:
    """Records the notes."""

    interval_seconds = 0.05

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.shown: list[Sequence[ProcessState]] = []

    def show(self, processes: Sequence[ProcessState], *, last: bool = False) -> None:
        self.shown.append(processes)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Stage:
    """A folder with scripts, and a controller to run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = MemoryJournal(folder)
        self.display = MemoryDisplay()
        self.plans: list[RolePlan] = []

    def script(self, role: str, *lives: list[dict], replicas: int = 1) -> None:
        (self.folder / f"{role}.script").write_text(json.dumps(lives))
        self.plans.append(RolePlan(role=role, replicas=replicas, config=self.folder / f"{role}.json"))

    def controller(
        self,
        *,
        budget: int = 5,
        keep_fds: tuple[int, ...] = (),
        deadlines: EndDeadlines | None = None,
        oom_kills: Callable[[], int] = lambda: 0,
        edits: Edits | None = None,
        watch: Watch | None = None,
    ) -> LocalController:
        return LocalController(
            plan=RunPlan(roles=tuple(self.plans), limits=RestartLimits(budget=budget, decay_seconds=600.0)),
            journal=self.journal,
            display=self.display,
            launch=LaunchOptions(
                environment={**os.environ, "STANDIN_FOLDER": str(self.folder), "RLSRL_TOKEN": "secret"},
                logs=self.folder,
                command=STANDIN,
                keep_fds=keep_fds,
            ),
            deadlines=deadlines,
            oom_kills=oom_kills,
            edits=edits,
            watch=watch,
        )

    def lives(self, role: str) -> list[dict]:
        path = self.folder / f"{role}.lives"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> list[int]:
        return [life["pid"] for path in self.folder.glob("*.lives") for life in self.lives(path.stem)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def assert_gone(pids: Sequence[int], timeout: float = 20.0) -> None:
    """Check that these processes have ended, at the latest within the time."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([pidfd], [], [], timeout)[0], f"process {pid} is still there"
        finally:
            os.close(pidfd)


def test_a_finished_trainer_ends_the_run_and_all_other_workers(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", [{"read_fifo": "ready", "bytes": 3}, *FINISH])
    stage.script("actor", [{"write_fifo": "ready"}, *UNTIL_TOLD], replicas=3)
    os.mkfifo(stage.folder / "ready")

    assert stage.controller().run() == Finished()

    assert len(stage.lives("actor")) == 3
    assert [life["attempt"] for life in stage.lives("trainer")] == [1]
    assert {(life["token"], life["config"]) for life in stage.lives("actor")} == {
        ("secret", str(stage.folder / "actor.json"))
    }
    assert stage.journal.restarts == []
    assert stage.journal.open_attempts == 0
    assert_gone(stage.pids(), timeout=0)


def test_the_coordinator_ends_last_and_the_trainer_first(stage: Stage) -> None:
    """Each role records the processes that still live when it is asked to end."""
    os.mkfifo(stage.folder / "ready")
    ready = {"write_fifo": "ready"}
    stage.script("coordinator", [ready, {"until": "SIGTERM"}, {"print": "last"}, {"touch": "coordinator-ended"}])
    stage.script(
        "trainer",
        [{"read_fifo": "ready", "bytes": 2}, {"signal_parent": "SIGTERM"}, {"until": "SIGTERM"}, {"touch": "t-ended"}],
    )
    stage.script("actor", [ready, {"until": "SIGTERM"}, {"touch": "actor-ended"}])

    assert stage.controller().run() == Interrupted(signum=signal.SIGTERM, killed=False)

    order = sorted(stage.folder.glob("*-ended"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in order] == ["t-ended", "actor-ended", "coordinator-ended"]


def ready_after(stage: Stage, count: int) -> dict:
    """Return the trainer's first step: wait until this many others have reached ``READY``."""
    os.mkfifo(stage.folder / "ready")
    return {"read_fifo": "ready", "bytes": count}


READY = {"write_fifo": "ready"}


def test_the_evaluators_of_a_finished_run_end_by_themselves(stage: Stage) -> None:
    """The actor releases the evaluator when it is asked to end; the evaluator itself is never asked."""
    os.mkfifo(stage.folder / "actor-ends")
    stage.script("coordinator", [READY, {"until": "SIGTERM"}, {"touch": "coordinator-ended"}, {"exit": 0}])
    stage.script("actor", [READY, {"until": "SIGTERM"}, {"write_fifo": "actor-ends"}, {"exit": 0}])
    stage.script("evaluator", [READY, {"read_fifo": "actor-ends", "bytes": 1}, {"touch": "evaluated"}, {"exit": 0}])
    stage.script("trainer", [ready_after(stage, 3), *FINISH])

    assert stage.controller().run() == Finished()

    evaluated, last = stage.folder / "evaluated", stage.folder / "coordinator-ended"
    assert evaluated.stat().st_mtime_ns <= last.stat().st_mtime_ns
    assert stage.journal.restarts == []
    assert_gone(stage.pids(), timeout=0)


def test_an_evaluation_that_takes_too_long_is_cut_short(stage: Stage) -> None:
    stage.script("evaluator", [READY, {"until": "SIGTERM"}, {"touch": "told"}, {"exit": 0}])
    stage.script("trainer", [ready_after(stage, 1), *FINISH])

    assert stage.controller(deadlines=EndDeadlines(evaluation=0.1)).run() == Finished()

    assert stage.display.notes == [
        "Evaluating the last version; Ctrl-C skips this.",
        "the last version is not evaluated: no result within 0.1 s",
    ]
    assert (stage.folder / "told").exists(), "it is asked before it is killed"


def test_a_signal_during_the_last_evaluation_ends_it_cleanly(stage: Stage) -> None:
    """The evaluator sends the signal once the run is ending, which it learns from the actor."""
    os.mkfifo(stage.folder / "actor-ends")
    stage.script("actor", [READY, {"until": "SIGTERM"}, {"write_fifo": "actor-ends"}, {"exit": 0}])
    waits = {"read_fifo": "actor-ends", "bytes": 1}
    told = [{"until": "SIGTERM"}, {"touch": "told"}, {"exit": 0}]
    stage.script("evaluator", [READY, waits, {"signal_parent": "SIGINT"}, *told])
    stage.script("trainer", [ready_after(stage, 2), *FINISH])

    assert stage.controller().run() == Finished()

    assert (stage.folder / "told").exists()
    assert_gone(stage.pids(), timeout=0)


def test_the_evaluators_of_an_interrupted_run_are_asked_to_end(stage: Stage) -> None:
    stage.script("evaluator", [READY, {"until": "SIGTERM"}, {"touch": "told"}, {"exit": 0}])
    stage.script("trainer", [ready_after(stage, 1), {"signal_parent": "SIGINT"}, {"until": "SIGTERM"}, {"exit": 0}])

    assert stage.controller().run() == Interrupted(signum=signal.SIGINT, killed=False)

    assert (stage.folder / "told").exists()
    assert stage.display.notes == [
        "Storing a last checkpoint and ending; Ctrl-C again, a second later, kills all processes."
    ]


def test_the_watching_program_ends_the_run_as_a_signal_does(stage: Stage) -> None:
    stage.script("trainer", [READY, {"until": "SIGTERM"}, {"touch": "told"}, {"exit": 0}])
    os.mkfifo(stage.folder / "ready")
    reader = os.open(stage.folder / "ready", os.O_RDONLY | os.O_NONBLOCK)
    looks = []

    def watch() -> bool:
        looks.append(bool(select.select([reader], [], [], 0)[0]))
        return looks[-1]

    try:
        assert stage.controller(watch=watch).run() == Interrupted(signum=signal.SIGINT, killed=False)
    finally:
        os.close(reader)

    assert looks[-1]
    assert looks.count(True) == 1, "it does not look while the run ends"
    assert (stage.folder / "told").exists()
    assert stage.display.notes == [
        "The program that watches the run ends it.",
        "Storing a last checkpoint and ending; Ctrl-C again, a second later, kills all processes.",
    ]


@pytest.mark.parametrize(
    ("role", "end", "what"),
    [
        ("trainer", {"exit": 1}, "trainer-0 exited with code 1"),
        ("trainer", {"exit": 0}, "trainer-0 exited with code 0"),
        ("actor", {"die": "SIGKILL"}, "actor-0 was killed by SIGKILL"),
        ("coordinator", {"die": "SIGSEGV"}, "coordinator-0 was killed by SIGSEGV"),
        ("actor", {"exit": 0}, "actor-0 exited with code 0"),
    ],
)
def test_a_process_that_ends_too_early_is_restarted(stage: Stage, role: str, end: dict, what: str) -> None:
    """The second life of the failed process ends the run, and no other process restarts."""
    scripts = {each: [UNTIL_TOLD] for each in ("coordinator", "trainer", "actor")}
    scripts[role] = [[end], [{"touch": "finished"}, {"exit": 0}]]
    for each, lives in scripts.items():
        stage.script(each, *lives)

    assert stage.controller().run() == Finished()

    assert stage.journal.restarts == [role]
    assert [len(stage.lives(each)) <= 1 for each in scripts if each != role] == [True, True]
    assert len(stage.lives(role)) == 2
    assert stage.display.notes[0] == f"{what}; restarting now (restart 1 of 5)"
    said = [note for note in stage.display.notes if "resumes" in note]
    assert said == (["trainer-0 resumes from version 1.7"] if role == "trainer" else [])
    if role == "trainer":
        assert [life["attempt"] for life in stage.lives("trainer")] == [1, 2]
    assert_gone(stage.pids(), timeout=0)


def test_a_process_that_is_killed_for_lack_of_memory_is_reported_as_such(stage: Stage) -> None:
    """The kernel counts its kills; of the two here the first has another cause."""
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", UNTIL_TOLD)
    stage.script("actor", [{"die": "SIGKILL"}])
    counts = iter([7, 7, 8])

    outcome = stage.controller(budget=1, oom_kills=lambda: next(counts)).run()

    assert stage.display.notes[0] == "actor-0 was killed by SIGKILL; restarting now (restart 1 of 1)"
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith(
        "actor-0 was killed by SIGKILL (the kernel has just killed a process for lack of memory): all 1 restarts"
    )


def test_a_role_that_keeps_failing_ends_the_run_with_its_last_output(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", UNTIL_TOLD)
    stage.script("actor", [{"print": "first words"}, {"exit": 1}], [{"print": "no such device"}, {"exit": 7}])

    outcome = stage.controller(budget=1).run()

    assert isinstance(outcome, Failed)
    assert (outcome.process, outcome.what, outcome.configuration) == ("actor-0", "exited with code 7", False)
    assert outcome.lines == ("no such device",)
    assert outcome.log == stage.folder / "actor-0.out"
    assert outcome.log.read_text() == "first words\nno such device\n"
    assert outcome.message.startswith("actor-0 exited with code 7: all 1 restarts of this role are spent")
    assert "\n  no such device" in outcome.message
    assert str(outcome.log) in outcome.message
    assert_gone(stage.pids(), timeout=0)


def test_a_restart_is_reported_with_the_last_line_of_the_failed_process(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script(
        "trainer", [{"print": "Traceback"}, {"print": "MemoryError: " + "no room " * 100}, {"exit": 1}], FINISH
    )

    assert stage.controller().run() == Finished()

    (note, *_) = stage.display.notes
    assert note.startswith("trainer-0 exited with code 1: MemoryError: no room no room")
    assert note.endswith("...; restarting now (restart 1 of 5)")
    assert len(note) < 250


def test_a_process_that_never_works_ends_the_run_before_its_budget_is_spent(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", UNTIL_TOLD)
    stage.script("actor", [{"print": "ImportError: no module named robot"}, {"exit": 1}])

    outcome = stage.controller(budget=1000).run()

    assert isinstance(outcome, Failed)
    assert len(stage.lives("actor")) == FUTILE_STARTS
    assert "failed in the same way" in outcome.message
    assert "\n  ImportError: no module named robot" in outcome.message


FAILS = [{"print": "KeyError: 'x'"}, {"exit": 1}]


def test_a_trainer_that_gets_no_further_ends_the_run_after_two_restarts(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", FAILS)

    outcome = stage.controller(budget=1000).run()

    assert isinstance(outcome, Failed)
    assert stage.journal.restarts == ["trainer"] * (FUTILE_STARTS - 1)
    assert outcome.reason == f"it failed in the same way after each of {FUTILE_STARTS} starts, without progress"


def test_a_trainer_that_gets_further_keeps_its_budget(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", *[[{"append": "trained"}, *FAILS]] * FUTILE_STARTS, FINISH)

    assert stage.controller(budget=1000).run() == Finished()

    assert stage.journal.restarts == ["trainer"] * FUTILE_STARTS


def test_a_trainer_that_reaches_nobody_keeps_its_budget(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    lost = [{"print": "JoinTimeout: no lease"}, {"exit": TEMPORARY_FAILURE}]
    stage.script("trainer", *[lost] * FUTILE_STARTS, FINISH)

    assert stage.controller(budget=1000).run() == Finished()


def test_a_last_version_that_cannot_be_stored_ends_the_run_without_a_restart(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", [{"print": "rlsrl: the last version, 1.9, could not be stored"}, {"exit": 4}])

    outcome = stage.controller().run()

    assert isinstance(outcome, Failed)
    assert not outcome.configuration
    assert outcome.lines == ("rlsrl: the last version, 1.9, could not be stored",)
    assert stage.journal.restarts == []


def test_a_trainer_that_ends_badly_after_a_signal_is_quoted(stage: Stage) -> None:
    said = {"print": "rlsrl: the last version, 1.9, could not be stored"}
    stage.script("trainer", [{"signal_parent": "SIGTERM"}, {"until": "SIGTERM"}, said, {"exit": 1}])

    assert stage.controller().run() == Interrupted(signum=signal.SIGTERM, killed=False)

    (note,) = [note for note in stage.display.notes if "instead of ending cleanly" in note]
    assert note.startswith(f"trainer-0 exited with code 1 instead of ending cleanly: {said['print']}; see ")


def test_a_configuration_error_is_not_retried(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", [{"print": "spec.environment.id: no such environment"}, {"exit": 2}])

    outcome = stage.controller().run()

    assert isinstance(outcome, Failed)
    assert outcome.configuration
    assert outcome.lines == ("spec.environment.id: no such environment",)
    assert len(stage.lives("trainer")) == 1
    assert stage.journal.restarts == []


@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_run_cleanly(stage: Stage, signum: str) -> None:
    handler_before = signal.getsignal(signal.SIGINT)
    stage.script("trainer", [{"signal_parent": signum}, {"until": "SIGTERM"}, {"touch": "checkpoint"}, {"exit": 0}])

    assert stage.controller().run() == Interrupted(signum=signal.Signals[signum], killed=False)

    assert (stage.folder / "checkpoint").exists()
    assert len(stage.lives("trainer")) == 1
    assert stage.journal.restarts == []
    assert signal.getsignal(signal.SIGINT) is handler_before, "the handlers are those from before"


def test_a_run_that_finishes_while_it_is_interrupted_has_finished(stage: Stage) -> None:
    stage.script("trainer", [{"signal_parent": "SIGINT"}, {"until": "SIGTERM"}, *FINISH])

    assert stage.controller().run() == Finished()


def test_a_second_signal_kills_everything_at_once(stage: Stage) -> None:
    """The trainer waits for a signal that no process sends, and no process ends the actor."""
    os.mkfifo(stage.folder / "ready")
    stage.script("actor", [{"write_fifo": "ready"}, {"until": "SIGTERM"}, {"touch": "asked"}])
    stage.script(
        "trainer",
        [
            {"read_fifo": "ready", "bytes": 1},
            {"signal_parent": "SIGINT"},
            {"until": "SIGTERM"},
            {"signal_parent": "SIGINT"},
            {"until": "SIGUSR1"},
        ],
    )

    controller = stage.controller(deadlines=EndDeadlines(repeat=0.0))
    assert controller.run() == Interrupted(signum=signal.SIGINT, killed=True)

    assert not (stage.folder / "asked").exists()
    assert_gone(stage.pids(), timeout=0)


def test_signals_within_a_moment_are_one_request(stage: Stage) -> None:
    """As from ``timeout``, which signals its child and the child's group, and from systemd, which adds a SIGHUP."""
    again = [{"signal_parent": "SIGTERM"}, {"signal_parent": "SIGHUP"}]
    stage.script("trainer", [*again, {"until": "SIGTERM"}, *again, {"touch": "checkpoint"}, {"exit": 0}])
    controller = stage.controller(deadlines=EndDeadlines(repeat=3600.0))

    outcome = controller.run()
    assert isinstance(outcome, Interrupted)
    assert not outcome.killed
    assert outcome.signum in (signal.SIGTERM, signal.SIGHUP), "the lower of two that wait comes first"
    assert (stage.folder / "checkpoint").exists()


def test_a_process_that_does_not_end_in_time_is_killed(stage: Stage) -> None:
    stage.script("trainer", [{"signal_parent": "SIGINT"}, {"until": "SIGUSR1"}])

    controller = stage.controller(deadlines=EndDeadlines(trainer=0.1))
    assert controller.run() == Interrupted(signum=signal.SIGINT, killed=False)

    assert "killing the processes that did not end within 0.1 s" in stage.display.notes
    assert_gone(stage.pids(), timeout=0)


def test_child_processes_of_a_worker_are_killed_with_it(stage: Stage) -> None:
    stage.script("trainer", [{"fork": "grandchild"}, *FINISH])

    assert stage.controller().run() == Finished()

    assert_gone([int((stage.folder / "grandchild").read_text())])


def test_the_display_shows_running_and_waiting_processes(stage: Stage) -> None:
    """A third failure in a row restarts with a delay, so the display refreshes while the process is away."""
    stage.script("trainer", [{"exit": 1}], [{"exit": 1}], FINISH)

    assert stage.controller().run() == Finished()

    states = [process for shown in stage.display.shown for process in shown]
    assert {(state.role, state.number) for state in states} == {("trainer", 0)}
    assert {"running", "restarting"} <= {state.state for state in states}
    assert all((state.pid is None) == (state.state in ("restarting", "ended")) for state in states)


def test_the_last_state_is_shown(stage: Stage) -> None:
    """Also by a display that refreshes once a minute: the first state is the start, and the last one the end."""
    stage.display.interval_seconds = 3600.0
    stage.script("trainer", FINISH)

    assert stage.controller().run() == Finished()

    assert [[process.state for process in shown] for shown in stage.display.shown] == [["running"], ["ended"]]


def test_an_error_in_the_controller_leaves_no_process(stage: Stage) -> None:
    class BrokenJournal(MemoryJournal):
        def count_restart(self, role: str) -> None:
            raise OSError(28, "No space left on device")

    stage.journal = BrokenJournal(stage.folder)
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("trainer", [{"exit": 1}])

    with pytest.raises(OSError, match="No space left"):
        stage.controller().run()

    assert_gone(stage.pids(), timeout=0)


CONTROLLER_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_local_controller import Stage, run_in_folder
run_in_folder(Path(sys.argv[1]))
"""


def run_in_folder(folder: Path) -> None:
    """The other process of the test below: a controller over a real run folder, with scripts beside it."""
    stage = Stage(folder)
    ready = {"write_fifo": "ready"}
    stage.script("coordinator", [ready, *UNTIL_TOLD])
    stage.script("actor", [ready, *UNTIL_TOLD], replicas=2)
    stage.script("trainer", [{"read_fifo": "ready", "bytes": 3}, {"signal_parent": "SIGKILL"}, {"until": "SIGUSR1"}])
    with RunFolder.open(folder / "run") as run:
        if not run.holds_run:
            run.create(as_given=b"", resolved=b"", package_version="0")
        stage.journal = run
        run.begin_life(modules=folder)
        stage.controller(keep_fds=(run.lock_fd,)).run()


def test_a_killed_controller_leaves_no_process_and_the_run_can_go_on(stage: Stage) -> None:
    os.mkfifo(stage.folder / "ready")
    program = CONTROLLER_PROGRAM.format(tests=str(Path(__file__).parent))
    for attempt in (1, 2):
        killed = subprocess.run([sys.executable, "-c", program, str(stage.folder)], timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL
        # The workers hold the lock too: whoever has it next knows that they are gone.
        with RunFolder.open(stage.folder / "run") as run:
            assert_gone(stage.pids(), timeout=0)
            assert run.record.attempt == attempt
            assert run.record.lives[-1].ended_at is None
    assert [life["attempt"] for life in stage.lives("trainer")] == [1, 2]
    assert len(stage.lives("actor")) == 4


def test_an_edit_replaces_the_processes_of_changed_roles_and_adds_others(stage: Stage) -> None:
    stage.script("coordinator", UNTIL_TOLD)
    stage.script("actor", [{"append": "asked"}, *UNTIL_TOLD], [{"touch": "finished"}, {"exit": 0}])
    before = tuple(stage.plans)
    changed = replace(before[1], config_name="other")

    class OneEdit:
        def take(self) -> RunPlan | None:
            if not (stage.folder / "asked").exists():
                return None
            (stage.folder / "asked").unlink()
            return RunPlan(roles=(before[0], changed), limits=RestartLimits(budget=0, decay_seconds=600.0))

    assert stage.controller(edits=OneEdit()).run() == Finished()
    assert len(stage.lives("actor")) == 2
    assert len(stage.lives("coordinator")) == 1
    assert stage.journal.restarts == [], "an edit spends no restart"
