"""``rlsrl plot``: learning curves as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from rlsrl.cli.errors import UserError

METRICS = "metrics.jsonl"


@click.command()
@click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The picture; its suffix says the format. By default curve.png in the run's folder.",
)  # fmt: skip
def plot(runs: tuple[Path, ...], output: Path | None) -> None:
    """Draw the learning curves of run folders, all in one picture."""
    from rlsrl.local.plot import read_curve, save

    if output is None:
        if len(runs) > 1:
            raise UserError("several runs go into one picture: say by -o FILE where it goes")
        output = runs[0] / "curve.png"
    curves = [read_curve(run / METRICS, label=run.absolute().name) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve.has_points:
            raise UserError(f"{run / METRICS} holds no returns yet: no episode has ended, or {run} is no run folder")
    try:
        save(curves, output)
    except (OSError, ValueError) as error:
        raise UserError(f"{output}: {error}") from error
    click.echo(output)
