"""``rlsrl plot``: draw learning curves."""

from __future__ import annotations

from pathlib import Path

import click

from rlsrl.cli.errors import UserError


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The picture; its suffix selects the format. By default curve.png in the run folder.",
)  # fmt: skip
def plot(runs: tuple[Path, ...], output: Path | None) -> None:
    """Draw the learning curves of runs in one picture.

    Each RUN is a run folder, or the name of one in runs/.
    """
    from rlsrl.cli.runs import find_run
    from rlsrl.local.plot import read_curve, save
    from rlsrl.local.run_folder import METRICS, RECORD

    runs = tuple(find_run(run, RECORD, METRICS) for run in runs)
    if output is None:
        if len(runs) > 1:
            raise UserError("several runs need a file for their common picture: -o FILE")
        output = runs[0] / "curve.png"
    curves = [read_curve(run / METRICS, label=run.absolute().name) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve.has_points:
            raise UserError(f"{run / METRICS} has no returns: no episode has ended yet")
    try:
        save(curves, output)
    except (OSError, ValueError) as error:
        raise UserError(f"{output}: {error}") from error
    click.echo(output)
