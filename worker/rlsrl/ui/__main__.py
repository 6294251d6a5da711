"""Serve the page of a cluster, as the chart does: ``python -m rlsrl.ui``. ``rlsrl ui`` shows run folders."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from rlsrl.ui.cluster import cluster_runs
from rlsrl.ui.server import serve

PORT = 8266
EVERYWHERE = "0.0.0.0"  # noqa: S104 - a pod has an address of its own, and a NetworkPolicy restricts access


@click.command()
@click.option("--key-file", type=click.Path(path_type=Path), required=True, help="The operator's viewing key.")
@click.option("--namespace", "namespaces", multiple=True, help="Show only this one's experiments. Repeatable.")
@click.option("--name", "names", multiple=True, help="A host name under which browsers reach the page. Repeatable.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True)
def main(key_file: Path, namespaces: tuple[str, ...], names: tuple[str, ...], port: int) -> None:
    """Show the experiments of the cluster in a browser, until SIGTERM."""
    try:
        key = key_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"--key-file: {key_file} cannot be read: {error}") from error
    if not key:
        raise click.ClickException(f"--key-file: {key_file} is empty")
    with suppress(KeyboardInterrupt):
        serve(
            partial(cluster_runs, key, namespaces),
            host=EVERYWHERE,
            port=port,
            names=[name.lower() for name in names],
            on_start=lambda url: click.echo(f"showing the cluster: {url}"),
        )


if __name__ == "__main__":
    main()
