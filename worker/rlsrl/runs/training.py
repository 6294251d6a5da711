"""Trains an experiment on this machine, from what the user gives to the run's end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rlsrl.api.document import write_document
from rlsrl.api.load import GivenExperiment
from rlsrl.api.spec import RLExperiment
from rlsrl.local.auto_actors import choose_actors
from rlsrl.local.controller import Failed, Finished, Interrupted, RunOutcome
from rlsrl.local.edits import ClaimedRun, claim, describe, recorded_experiment
from rlsrl.local.folder_check import check_versions
from rlsrl.local.initial_weights import require_initial_weights
from rlsrl.local.replay_room import require_room_for_stores
from rlsrl.local.run_folder import RunFolder
from rlsrl.local.run_names import RUNS
from rlsrl.local.session import draw_curve, run_life, write_summary
from rlsrl.local.summary import result_lines
from rlsrl.runs.progress import RunWatch, TrainingProgress
from rlsrl.runs.run import Run
from rlsrl.runtime.extras import require_for_training


class RunFailed(RuntimeError):
    """A run failed; the text says why."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run: Run = run
        """The run. ``train`` with the same arguments resumes it, once the cause is mended."""


def train(
    experiment: str | os.PathLike[str] | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    progress: bool = True,
    on_progress: Callable[[TrainingProgress], object] | None = None,
) -> Run:
    """Train an experiment on this machine to its end, as ``rlsrl run`` does, and return its run.

    The same call resumes a run that was interrupted, and returns one that has finished. Workers are processes of their
    own: environments and networks of the user's are imported there, from modules beside the experiment file or in the
    current folder, so classes of a notebook are not found. Main thread only.

    Args:
        experiment: An experiment file (YAML), or its content.
        changes: Fields by path with their values, for example ``{"seed": 3, "stop.envSteps": 10_000}``.
        run_dir: The run folder; None: ``runs/<name>``.
        fresh: Whether to rename an existing run folder to ``<name>.<n>`` and to start a new run.
        progress: Whether to print the progress and the result. The progress is a live view on a terminal, otherwise
            lines: every few seconds at first, later every minute.
        on_progress: Called about once a second while the run trains. It may log metrics of its own, and stop the run.
            While it works, workers that die are not restarted, so it returns soon. An error that it raises ends the
            run as Ctrl-C does, and is raised again; Ctrl-C meanwhile is such an error.

    Raises:
        RunFailed: the run failed.
        SpecError: the experiment is invalid; lists every problem.
        RunFolderError: the folder cannot be used, or holds a run of another experiment.
        ConfigurationError: the environment or the user's network cannot be made, the store refuses the access, or
            there is no room for replayed transitions, or what ``parameters.from`` names does not exist.
        EnvironmentFailed: the environment's own code raised.
        NothingToResume: no stored version is intact.
        LedgerError: a ledger page is damaged.
        RecordsLost: the run folder was removed or moved.
        OSError: a process or file cannot be created.
        NotInstalled: packages that training needs are not installed; names all of them.
        KeyboardInterrupt: Ctrl-C, or the interruption of a notebook's cell. A last checkpoint is stored before.
        SystemExit: another signal ended the run.
        RuntimeError: this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("rlsrl.train works in the main thread only: workers die with the thread that started them")
    given, modules = _given(experiment, changes or {})
    with ExitStack() as resources:
        output = sys.stdout if progress else resources.enter_context(open(os.devnull, "w", encoding="utf-8"))
        say = partial(print, file=output)
        ended = train_on_this_machine(
            given,
            run_dir=None if run_dir is None else Path(run_dir),
            fresh=fresh,
            modules=modules,
            console=Console(output=output, say=say, warn=partial(warnings.warn, stacklevel=2)),
            on_progress=on_progress,
        )
        again = ["to resume: the same call"] if isinstance(ended.outcome, Interrupted) else []
        say("\n".join([*ended.result_lines(ended.path), *again]))
    return _finished(ended)


def _finished(ended: EndedRun) -> Run:
    """Return the run, or raise what ended it otherwise."""
    run = Run(ended.path)
    if ended.error is not None:
        if ended.failure is not None:
            ended.error.add_note(f"The run failed, too: {ended.failure}")
        raise ended.error
    if ended.failure is not None:
        raise RunFailed(ended.failure, run)
    if isinstance(ended.outcome, Interrupted):
        raise (KeyboardInterrupt if ended.outcome.signum == signal.SIGINT else SystemExit(128 + ended.outcome.signum))
    return run


def _given(
    experiment: str | os.PathLike[str] | Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[GivenExperiment, Path]:
    """Return the experiment, and the folder in which Python looks first for the user's own modules."""
    overrides = tuple(f"{path}={json.dumps(value)}" for path, value in changes.items())
    if isinstance(experiment, Mapping):
        text = write_document(experiment).encode()
        return GivenExperiment(text=text, source="experiment", overrides=overrides), Path.cwd()
    file = Path(experiment)
    return GivenExperiment.of_file(file, overrides), file.absolute().parent


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run whose processes have ended, now or earlier."""

    path: Path
    outcome: RunOutcome
    """Of this life: ``Finished`` if the run had ended before."""
    summary: Mapping[str, Any]
    error: BaseException | None = None
    """What ``on_progress`` raised."""

    @property
    def failure(self) -> str | None:
        """Why the run failed, or None."""
        if (failure := self.summary["failure"]) is not None:
            return str(failure)
        return self.outcome.message if isinstance(self.outcome, Failed) else None

    def result_lines(self, shown: Path) -> list[str]:
        """Return the result for the user to read; ``shown`` is how the run folder is named."""
        lines = result_lines(self.summary, shown)
        if isinstance(self.outcome, Interrupted) and self.outcome.killed:
            last = self.summary["versions"]["last"]
            lines.append(f"killed without a last checkpoint: training after version {last} is lost")
        return lines


@dataclass(frozen=True, kw_only=True)
class Console:
    """Where a run is shown."""

    output: TextIO
    """Shows the progress: a view on a terminal, otherwise lines."""
    say: Callable[[str], None]
    """Gets what is to be said before and after."""
    warn: Callable[[str], None]
    """Gets what went wrong after the end."""
    shown: Callable[[Path], object] = str
    """How a run folder is named."""


def train_on_this_machine(
    given: GivenExperiment,
    *,
    run_dir: Path | None,
    fresh: bool,
    modules: Path,
    console: Console,
    on_progress: Callable[[TrainingProgress], object] | None = None,
) -> EndedRun:
    """Train the experiment to its end, or resume its unfinished run. Main thread only.

    Args:
        given: The experiment.
        run_dir: The run folder; None: ``runs/<name>``.
        fresh: Whether to rename an existing run folder to ``<name>.<n>`` and to start a new run.
        modules: The folder in which Python looks first for the user's own modules.
        console: Where the run is shown.
        on_progress: Called while the run trains, see ``train``.

    Raises:
        Exception: as ``train``, but the failure of the run and the error of ``on_progress`` are in the result.
        KeyboardInterrupt: Ctrl-C before the processes start, or after they have ended.
    """
    require_for_training()
    name = given.load_with_fewest_actors().metadata.name
    with RunFolder.open(run_dir or RUNS / name, fresh=fresh) as folder:
        experiment = given.load(auto_actors=lambda: _num_actors(folder, given, modules, console))
        if not folder.holds_run:  # before it does: a run's capacity cannot be lowered
            require_initial_weights(experiment, folder.path)
            _require_room(folder, experiment, modules, console)
        claimed = claim(folder, experiment, as_given=given.text)
        _show_changes(claimed, console)
        return _run(folder, claimed.experiment, modules, console, on_progress)


def _num_actors(folder: RunFolder, given: GivenExperiment, modules: Path, console: Console) -> int:
    """Return the number of actors that ``auto`` stands for: the recorded one of a run that resumes."""
    if folder.holds_run:
        return recorded_experiment(folder.path).spec.actors.replicas
    console.say("actors.replicas: auto: measuring one environment")
    choice = choose_actors(given, modules=modules)
    console.say(
        f"actors.replicas: auto is {choice.num_actors} (cores: {choice.cores}, estimated env steps/s: "
        f"{choice.env_steps_a_second:,.0f})"
    )
    return choice.num_actors


def _require_room(folder: RunFolder, experiment: RLExperiment, modules: Path, console: Console) -> None:
    for text in require_room_for_stores(experiment.spec, folder.path, modules=modules):
        console.say(f"warning: {text}")


def _show_changes(claimed: ClaimedRun, console: Console) -> None:
    for change in claimed.changes:
        console.say(f"changed: {describe(change)}")
    for change in claimed.ignored:
        console.say(f"not applied, since the run has ended: {describe(change)}")
    if claimed.is_reopened:
        console.say("the run had ended, and continues")


def _run(
    folder: RunFolder,
    experiment: RLExperiment,
    modules: Path,
    console: Console,
    on_progress: Callable[[TrainingProgress], object] | None,
) -> EndedRun:
    """Run an unfinished run."""
    shown = console.shown(folder.path)
    if folder.is_finished():
        summary = write_summary(folder, experiment)
        ended = "finished" if summary["finished"] else "failed"
        console.say(f"{shown} has {ended}; --fresh renames its folder and starts a new run")
        return EndedRun(path=folder.path, outcome=Finished(), summary=summary)
    if folder.record.attempt:
        version, lost = check_versions(folder)
        found = None if version is None else folder.resumption(version)
        console.say(", ".join(filter(None, (f"resuming {shown}", f"attempt {folder.record.attempt + 1}", found))))
        for text in lost:
            console.say(f"warning: {text}")
        _require_room(folder, experiment, modules, console)
    watch = None if on_progress is None else RunWatch(folder.path, on_progress)
    look = None if watch is None else watch.look
    try:
        outcome = run_life(folder, experiment, modules=modules, output=console.output, watch=look)
    except BaseException as failure:
        if watch is not None and watch.error is not None:
            failure.add_note(f"Before that, on_progress raised {watch.error!r}")
        raise
    summary = write_summary(folder, experiment)
    if (problem := draw_curve(folder, experiment)) is not None:
        console.warn(f"no curve.png: {problem}")
    if watch is None:
        return EndedRun(path=folder.path, outcome=outcome, summary=summary)
    if watch.num_unsent:
        console.warn(f"the last {watch.num_unsent} rows of metrics of your own were not stored before the run's end")
    return EndedRun(path=folder.path, outcome=outcome, summary=summary, error=watch.error)
