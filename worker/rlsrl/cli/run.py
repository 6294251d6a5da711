"""``rlsrl run``: train an experiment on this machine."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from rlsrl.api.load import GivenExperiment, SpecError
from rlsrl.cli.errors import SIGNALLED, UserError, environment_failed
from rlsrl.local.controller import Failed, Finished, RecordsLost
from rlsrl.local.display import UnbreakableOutput
from rlsrl.local.folder_check import NothingToResume
from rlsrl.local.run_folder import RunFolderError
from rlsrl.local.run_names import RUNS
from rlsrl.local.summary import next_commands
from rlsrl.runs.training import Console, EndedRun, train_on_this_machine
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.runtime.ledger import LedgerError

FINISHED, FAILED, BAD_INPUT = 0, 1, 2


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Rename an existing run folder to <name>.<n> and start a new run.")
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field; can be repeated.")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Short for --set spec.seed=N.")
@click.option(
    "--seeds",
    metavar="N",
    type=click.IntRange(min=1),
    help="Train N runs one after the other, with the seed and those that follow it, in <run folder>-seed-<seed>.",
)
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="The run folder; by default runs/<name>.",
)
def run(
    file: Path,
    fresh: bool,
    overrides: tuple[str, ...],
    seed: int | None,
    seeds: int | None,
    run_dir: Path | None,
) -> None:
    """Train the experiment in FILE on this machine, or resume its unfinished run.

    Ctrl-C stores a last checkpoint and ends the run. Another Ctrl-C, a second or more later, kills it. The same
    command resumes an unfinished run and reports a finished one. FILE may have changed in most fields: see
    `rlsrl edit --help`. With a further `stop` a finished run continues. A closed output, as after `| head`, does not
    end the run; `rlsrl top` still shows it.

    With --seeds the same command goes on with the runs that have not finished, and shows all in the end as `rlsrl
    compare` does. A run that fails ends it.

    Exit status: 0 when the run has finished, 1 when it failed, 2 when the experiment is invalid, 128 plus the signal's
    number (Ctrl-C: 130) when it was interrupted.
    """
    given = (*overrides, *([] if seed is None else [f"spec.seed={seed}"]))
    try:
        if seeds is None:
            status = _report(_train(file, given, run_dir, fresh=fresh), _again(file, overrides, seed, run_dir))
        else:
            again = f"{_again(file, overrides, seed, run_dir)} --seeds {seeds}"
            status = _train_seeds(file, given, run_dir, seeds, again, fresh=fresh)
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


def _train(file: Path, overrides: tuple[str, ...], run_dir: Path | None, *, fresh: bool) -> EndedRun:
    return train_on_this_machine(
        GivenExperiment.of_file(file, overrides),
        run_dir=run_dir,
        fresh=fresh,
        modules=file.absolute().parent,
        console=Console(output=sys.stdout, say=_say, warn=partial(_say, err=True), shown=_short),
    )


def _train_seeds(
    file: Path, overrides: tuple[str, ...], run_dir: Path | None, number: int, again: str, *, fresh: bool
) -> int:
    """Train a run for each seed, and compare them. Return the exit status of the first run that does not finish.

    ``again`` is the command that goes on with the others.
    """
    from rlsrl.runs.comparison import compare

    experiment = GivenExperiment.of_file(file, overrides).load_with_fewest_actors()
    base, first = run_dir or RUNS / experiment.metadata.name, experiment.spec.seed
    paths = []
    for seed in range(first, first + number):
        folder = base.absolute().with_name(f"{base.absolute().name}-seed-{seed}")
        _say(f"seed {seed} of {first} to {first + number - 1}: {_short(folder)}")
        ended = _train(file, (*overrides, f"spec.seed={seed}"), folder, fresh=fresh)
        if status := _report(ended, again):
            return status
        paths.append(ended.path)
    _say(str(compare(*paths)))
    return FINISHED


def _report(ended: EndedRun, again: str) -> int:
    """Print the result, and return the exit status."""
    outcome, summary = ended.outcome, ended.summary
    shown = _short(ended.path)
    commands = [] if isinstance(outcome, Failed) else next_commands(summary, shown, program=shlex.quote(_program()))
    for line in (*ended.result_lines(shown), *commands):  # after a failure the error follows
        _say(line)
    if (failure := summary["failure"]) is not None:
        _say(f"error: {failure}", err=True)
        return FAILED
    if isinstance(outcome, Finished):
        return FINISHED
    if isinstance(outcome, Failed) and outcome.configuration and not summary["env_steps"]:
        # The mended experiment may be another one, which a run folder refuses. Nothing is lost.
        _say(f"once it is mended: {again} --fresh")
    else:
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
    return shlex.join([_program(), "run", str(file), *changes, *seeded, *folder])


def _program() -> str:
    """Return how the user calls rlsrl: by its path where PATH leads to no or another one."""
    called, found = Path(sys.argv[0]), shutil.which("rlsrl")
    if called.name != "rlsrl" or not called.exists() or (found is not None and called.samefile(found)):
        return "rlsrl"
    return str(_short(called.absolute()))


def _short(path: Path) -> Path:
    """Return the path relative to the current folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
