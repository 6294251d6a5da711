"""``rlsrl plot`` and ``rlsrl compare``: learning curves and results of runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlsrl.cli.errors import UserError
from rlsrl.cli.text import UNKNOWN, columns

if TYPE_CHECKING:
    from rlsrl.local.comparison import ComparedGroup, RunResult, SeedEstimate
    from rlsrl.local.curves import Axis

AXES = ("env-steps", "train-steps", "seconds")
_HEADER = ("EXPERIMENT", "RUNS", "RETURN", "EVALUATION", "ENV STEPS", "SECONDS", "GOAL", "STEPS TO GOAL")

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
def plot(runs: tuple[Path, ...], output: Path | None, axis: Axis, smooth: int, seeds: bool) -> None:
    """Draw the learning curves of runs in one picture.

    Each RUN is a run folder, or the name of one in runs/. A line marks `stop.returnMean`. With --seeds the line of a
    band is the interquartile mean of its seeds, and the band its 95 % bootstrap interval.
    """
    from rlsrl.local.comparison import ComparedGroup, grouped

    results = _read(runs, axis)
    if output is None:
        if len(results) > 1:
            raise UserError("several runs need a file for their common picture: -o FILE")
        output = results[0].path / "curve.png"
    for result in results:
        if not result.curve.has_points:
            raise UserError(f"{result.path}: metrics.jsonl has no returns: no episode has ended yet")
    single = [ComparedGroup(label=result.curve.label, runs=[result]) for result in results]
    _save(grouped(results) if seeds else single, output, axis, smooth)
    click.echo(output)


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
    from rlsrl.local.comparison import grouped

    groups = grouped(_read(runs, axis))
    if output is not None:
        _save(groups, output, axis, smooth)
    click.echo(json.dumps([described(group) for group in groups]) if as_json else table(groups))


def table(groups: Sequence[ComparedGroup]) -> str:
    """Return the groups as the table of ``rlsrl compare``."""
    return columns([_HEADER, *(_row(group) for group in groups)])


def described(group: ComparedGroup) -> dict[str, Any]:
    """Return a group as a JSON value."""
    names = ("return_mean", "evaluation", "env_steps", "seconds", "steps_to_goal")
    estimates = {name: group.estimate(name) for name in names}
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


def _row(group: ComparedGroup) -> tuple[str, ...]:
    goal = UNKNOWN if group.goal is None else f"{group.goal:g} ({group.num_reached} of {len(group.runs)})"
    return (
        group.label,
        str(len(group.runs)),
        _shown(group.estimate("return_mean"), ".4g"),
        _shown(group.estimate("evaluation"), ".4g"),
        _shown(group.estimate("env_steps"), ",.0f"),
        _shown(group.estimate("seconds"), ",.1f"),
        goal,
        _shown(group.estimate("steps_to_goal"), ",.0f"),
    )


def _shown(estimate: SeedEstimate | None, style: str) -> str:
    if estimate is None:
        return UNKNOWN
    if estimate.low == estimate.high:
        return format(estimate.value, style)
    return f"{estimate.value:{style}} ({estimate.low:{style}} to {estimate.high:{style}})"


def _read(runs: Sequence[Path], axis: Axis) -> list[RunResult]:
    from rlsrl.cli.runs import find_run
    from rlsrl.local.comparison import read_result
    from rlsrl.local.run_folder import METRICS
    from rlsrl.local.run_names import RECORD

    return [read_result(find_run(run, RECORD, METRICS), axis) for run in runs]


def _save(groups: Sequence[ComparedGroup], output: Path, axis: Axis, smooth: int) -> None:
    from rlsrl.local.plot import DrawnGroup, draw, save

    drawn = [DrawnGroup(label=group.label, curves=[run.curve for run in group.runs]) for group in groups]
    goals = sorted({group.goal for group in groups if group.goal is not None})
    try:
        save(draw(drawn, axis=axis, smooth=smooth, goals=goals), output)
    except (OSError, ValueError) as error:
        raise UserError(f"{output}: {error}") from error
