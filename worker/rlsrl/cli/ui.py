"""``rlsrl ui``: show the runs of this machine in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from rlsrl.cli.errors import UserError


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--host", metavar="NAME", default="127.0.0.1", show_default=True, help="The address where it listens.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8266,
    show_default=True,
    help="Its port; 0: any free one.",
)
def ui(runs: Path, host: str, port: int) -> None:
    """Show the runs in the folder RUNS (by default runs/) in a browser, until Ctrl-C.

    The page shows what each worker does and waits for, curves, versions, the ledger and logs. It reads files alone, and
    needs the extra ui. Whoever reaches the address can read it: by default only programs on this machine can.
    """
    try:
        from rlsrl.ui.server import serve
    except ImportError as error:
        raise UserError(f"the page needs more packages: pip install 'rlsrl[ui]' ({error})") from error
    if not runs.is_dir():
        raise UserError(f"{runs} is not a folder; `rlsrl run` makes runs/ in the current one")
    try:
        with suppress(KeyboardInterrupt):
            serve(runs, host=host, port=port, on_start=lambda url: click.echo(f"showing {runs}: {url} (Ctrl-C ends)"))
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
