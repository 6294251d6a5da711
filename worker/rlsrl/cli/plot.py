"""``rlsrl plot`` and ``rlsrl compare``: learning curves and results of runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlsrl.cli.errors import UserError

if TYPE_CHECKING:
    from rlsrl.local.curves import Axis
    from rlsrl.runs.comparison import ComparedGroup

AXES = ("env-steps", "train-steps", "seconds")

_runs = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))


def _drawing(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a picture's curves."""
    axis = click.option(
        "--x", "axis", type=click.Choice(AXES), default=AXES[0], show_default=True,
        help="What the curves are drawn over; seconds are those of training.",
    )  # fmt: skip
    smooth = click.option(
        "--smooth", metavar="N", type=click.IntRange(min=1), default=1, help="Draw the mean of N neighbouring points."
    )
    return axis(smooth(command))


@click.command()
@_runs
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The picture; its suffix selects the format. By default curve.png in the run folder.",
)  # fmt: skip
@_drawing
@click.option("--seeds", is_flag=True, help="Draw runs that differ in the seed alone as one band.")
@click.option(
    "--metric", "metrics", metavar="NAME", multiple=True,
    help="Draw this metric in a panel of its own, too, for example train/entropy. May be repeated.",
)  # fmt: skip
def plot(
    runs: tuple[Path, ...], output: Path | None, axis: Axis, smooth: int, seeds: bool, metrics: tuple[str, ...]
) -> None:
    """Draw the learning curves of runs in one picture.

    Each RUN is a run folder, or the name of one in runs/. A line marks `stop.returnMean`. With --seeds the line of a
    band is the interquartile mean of its seeds, and the band its 95 % bootstrap interval.
    """
    from rlsrl.local.run_folder import CURVE
    from rlsrl.runs import comparison

    if output is None and len(runs) > 1:
        raise UserError("several runs need a file for their common picture: -o FILE")
    with _user_errors(output):
        picture = output or comparison.run_with_metrics(runs[0]) / CURVE
        click.echo(comparison.plot(*runs, path=picture, axis=axis, smooth=smooth, seeds=seeds, metrics=metrics))


@click.command()
@_runs
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the curves into this file, too; its suffix selects the format.",
)  # fmt: skip
@_drawing
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(runs: tuple[Path, ...], output: Path | None, axis: Axis, smooth: int, as_json: bool) -> None:
    """Compare runs: a row for each experiment, with the seeds of RUN... that it was run with.

    Each RUN is a run folder, or the name of one in runs/. Runs that differ in the seed alone belong together. RETURN is
    the mean return of the last episodes at the end, EVALUATION that of the last evaluated version, STEPS TO GOAL the
    env steps until `stop.returnMean` was reached, by the runs that reached it. Numbers are interquartile means over the
    seeds (means of fewer than four), with 95 % bootstrap intervals.
    """
    from rlsrl.runs import comparison

    with _user_errors(output):
        compared = comparison.compare(*runs, axis=axis)
        if output is not None:
            compared.plot(output, smooth=smooth)
    click.echo(json.dumps([_described(group) for group in compared.groups]) if as_json else compared)


@contextlib.contextmanager
def _user_errors(output: Path | None) -> Iterator[None]:
    """Turn what the Python interface raises into messages for the user. ``output`` is the picture that is written."""
    from rlsrl.local.run_folder import RunFolderError

    try:
        yield
    except OSError as error:
        file = error.filename or output  # a full disk names no file
        raise UserError(str(error) if file is None else f"{file}: {error.strerror or error}") from error
    except (RunFolderError, ValueError) as error:
        raise UserError(str(error)) from error


def _described(group: ComparedGroup) -> dict[str, Any]:
    """Return a group as a JSON value."""
    names = ("return_mean", "evaluation", "env_steps", "seconds", "steps_to_goal")
    estimates = {name: getattr(group, name) for name in names}
    return {
        "experiment": group.label,
        "goal": group.goal,
        "reached": group.num_reached,
        **{name: None if estimate is None else asdict(estimate) for name, estimate in estimates.items()},
        "runs": [
            {
                "path": str(run.path),
                "seed": None if run.experiment is None else run.experiment.spec.seed,
                **{name: getattr(run, name) for name in names},
            }
            for run in group.runs
        ],
    }
