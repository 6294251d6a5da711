"""``rlsrl run``: train an experiment on this machine."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlsrl.api.load import SpecError, load_file, load_with_fewest_actors
from rlsrl.api.spec import RLExperiment
from rlsrl.cli.errors import UserError, environment_failed
from rlsrl.local.auto_actors import choose_actors
from rlsrl.local.controller import Failed, Finished, Interrupted, RecordsLost, RunOutcome
from rlsrl.local.display import UnbreakableOutput
from rlsrl.local.edits import ClaimedRun, claim, describe, recorded_experiment
from rlsrl.local.folder_check import NothingToResume, check_versions
from rlsrl.local.replay_room import require_room_for_stores
from rlsrl.local.run_folder import RUNS, RunFolder, RunFolderError
from rlsrl.local.session import draw_curve, run_life, write_summary
from rlsrl.local.summary import closing_lines
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.runtime.ledger import LedgerError

FINISHED, FAILED, BAD_INPUT, SIGNALLED = 0, 1, 2, 128


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Rename an existing run folder to <name>.<n> and start a new run.")
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field; can be repeated.")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Short for --set spec.seed=N.")
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="The run folder; by default runs/<name>.",
)
def run(file: Path, fresh: bool, overrides: tuple[str, ...], seed: int | None, run_dir: Path | None) -> None:
    """Train the experiment in FILE on this machine, or resume its unfinished run.

    Ctrl-C stores a last checkpoint and ends the run. Another Ctrl-C, a second or more later, kills it. The same
    command resumes an unfinished run and reports a finished one. FILE may have changed in most fields: see
    `rlsrl edit --help`. With a further `stop` a finished run continues. A closed output, as after `| head`, does not
    end the run; `rlsrl top` still shows it.

    Exit status: 0 when the run has finished, 1 when it failed, 2 when the experiment is invalid, 128 plus the signal's
    number (Ctrl-C: 130) when it was interrupted.
    """
    given = (*overrides, *([] if seed is None else [f"spec.seed={seed}"]))
    try:
        name = load_with_fewest_actors(file, given).metadata.name
        with RunFolder.open(run_dir or RUNS / name, fresh=fresh) as folder:
            experiment = load_file(file, given, auto_actors=lambda: _num_actors(folder, file, given))
            if not folder.holds_run:  # before it does: a run's capacity cannot be lowered
                _require_room(folder, experiment, file)
            claimed = claim(folder, experiment, as_given=file.read_bytes())
            _show_changes(claimed)
            status = _run(folder, claimed.experiment, file, _again(file, overrides, seed, run_dir))
    except (SpecError, RunFolderError, ConfigurationError) as error:
        raise UserError(str(error)) from error
    except EnvironmentFailed as error:
        raise environment_failed(error) from error
    except (OSError, LedgerError, NothingToResume) as error:
        raise click.ClickException(f"the run cannot continue: {error}") from error
    except RecordsLost as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # before the processes start, or after they have ended
        status = SIGNALLED + signal.SIGINT
    sys.exit(status)


def _show_changes(claimed: ClaimedRun) -> None:
    for change in claimed.changes:
        _say(f"changed: {describe(change)}")
    for change in claimed.ignored:
        _say(f"not applied, since the run has ended: {describe(change)}")
    if claimed.is_reopened:
        _say("the run had ended, and continues")


def _num_actors(folder: RunFolder, file: Path, overrides: Sequence[str]) -> int:
    """Return the number of actors that ``auto`` stands for: the recorded one of a run that resumes."""
    if folder.holds_run:
        return recorded_experiment(folder.path).spec.actors.replicas
    _say("actors.replicas: auto: measuring one environment")
    choice = choose_actors(file, overrides, modules=file.absolute().parent)
    _say(
        f"actors.replicas: auto is {choice.num_actors} (cores: {choice.cores}, estimated env steps/s: "
        f"{choice.env_steps_a_second:,.0f})"
    )
    return choice.num_actors


def _require_room(folder: RunFolder, experiment: RLExperiment, file: Path) -> None:
    for text in require_room_for_stores(experiment.spec, folder.path, modules=file.absolute().parent):
        _say(f"warning: {text}")


def _run(folder: RunFolder, experiment: RLExperiment, file: Path, again: str) -> int:
    """Run an unfinished run, report, and return the exit status."""
    shown = _short(folder.path)
    if folder.is_finished():
        summary = write_summary(folder, experiment)
        ended = "finished" if summary["finished"] else "failed"
        _say(f"{shown} has {ended}; --fresh renames its folder and starts a new run")
        return _report(summary, folder, Finished(), again)
    if folder.record.attempt:
        lost = check_versions(folder)
        _say(f"resuming {shown}, attempt {folder.record.attempt + 1}")
        for text in lost:
            _say(f"warning: {text}")
        _require_room(folder, experiment, file)
    outcome = run_life(folder, experiment, modules=file.absolute().parent, output=sys.stdout)
    summary = write_summary(folder, experiment)
    if (problem := draw_curve(folder, experiment)) is not None:
        _say(f"no curve.png: {problem}", err=True)
    return _report(summary, folder, outcome, again)


def _report(summary: Mapping[str, Any], folder: RunFolder, outcome: RunOutcome, again: str) -> int:
    for line in closing_lines(summary, _short(folder.path), failed=isinstance(outcome, Failed)):
        _say(line)
    if (failure := summary["failure"]) is not None:
        _say(f"error: {failure}", err=True)
        return FAILED
    if isinstance(outcome, Finished):
        return FINISHED
    if isinstance(outcome, Interrupted) and outcome.killed:
        _say(f"killed without a last checkpoint: training after version {summary['versions']['last']} is lost")
    _say(f"to resume: {again}")
    if isinstance(outcome, Failed):
        _say(f"error: {outcome.message}", err=True)  # last, where users look first
        return BAD_INPUT if outcome.configuration else FAILED
    return SIGNALLED + outcome.signum


def _say(text: str, *, err: bool = False) -> None:
    """Print the text; a console that is gone does not fail the run."""
    console: Any = UnbreakableOutput(sys.stderr if err else sys.stdout)
    click.echo(text, file=console)


def _again(file: Path, overrides: tuple[str, ...], seed: int | None, run_dir: Path | None) -> str:
    """Return the command that resumes the run."""
    changes = [argument for override in overrides for argument in ("--set", override)]
    seeded = [] if seed is None else ["--seed", str(seed)]
    folder = [] if run_dir is None else ["--run-dir", str(run_dir)]
    return shlex.join(["rlsrl", "run", str(file), *changes, *seeded, *folder])


def _short(path: Path) -> Path:
    """Return the path relative to the current folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
