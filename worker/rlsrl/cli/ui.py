"""``rlsrl ui``: show the runs of this machine in a browser."""

from __future__ import annotations

import ipaddress
import re
from contextlib import nullcontext, suppress
from pathlib import Path

import click

from rlsrl.cli.errors import UserError
from rlsrl.runtime.extras import extras_named

_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?", re.IGNORECASE)


def _host_names(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names as requests have them: in lower case, IPv6 addresses without brackets."""
    del context, parameter
    return tuple(dict.fromkeys(_host_name(value) for value in values))


def _host_name(value: str) -> str:
    with suppress(ValueError):
        return str(ipaddress.ip_address(value.removeprefix("[").removesuffix("]")))
    if not _NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a host name: give the name alone, such as lab.example")
    return value.lower()


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--host", metavar="NAME", default="127.0.0.1", show_default=True, help="The address where it listens.")
@click.option(
    "--name",
    "names",
    metavar="HOST",
    multiple=True,
    callback=_host_names,
    help="A further host name under which browsers reach the page, such as a proxy's. Repeatable.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8266,
    show_default=True,
    help="Its port; 0: any free one.",
)
def ui(runs: Path, host: str, names: tuple[str, ...], port: int) -> None:
    """Show the runs in the folder RUNS (by default runs/) in a browser, until Ctrl-C.

    The page shows what each worker does and waits for, curves, versions, the ledger and logs. It reads files alone, and
    needs the extra ui. Whoever reaches the address can read it: by default only programs on this machine can.
    """
    with extras_named("ui"):
        from rlsrl.ui.folder import FolderRuns
        from rlsrl.ui.server import serve
    if not runs.is_dir():
        raise UserError(f"{runs} is not a folder; `rlsrl run` makes runs/ in the current one")
    try:
        with suppress(KeyboardInterrupt):
            serve(
                lambda: nullcontext(FolderRuns(runs)),
                host=host,
                port=port,
                names=names,
                on_start=lambda url: click.echo(f"showing {runs}: {url} (Ctrl-C ends)"),
            )
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
