"""``rlsrl serve-environment``: put environments into a server, for experiments with ``environment.http``."""

from __future__ import annotations

import ipaddress
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from rlsrl.cli.errors import UserError
from rlsrl.runtime.extras import extras_named


def _arguments(_context: click.Context, _option: click.Parameter, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object, such as '{{\"level\": 3}}'")
    return value


@click.command(name="serve-environment")
@click.option("--id", "name", metavar="ID", help="A registered Gymnasium id, such as CartPole-v1.")
@click.option("--factory", metavar="MODULE:ATTR", help="A callable that returns an environment.")
@click.option(
    "--kwargs", metavar="JSON", default="{}", callback=_arguments,
    help="Arguments of every environment. Those of the experiment (environment.kwargs) take precedence.",
)  # fmt: skip
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="The port; 0: any free one.",
)
@click.option(
    "--token-file", type=click.Path(dir_okay=False, path_type=Path),
    help="A file with a token that each request needs.",
)  # fmt: skip
@click.option(
    "--max-sessions",
    metavar="N",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="The most environments at a time.",
)
@click.option(
    "--idle-seconds", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True,
    help="Seconds without a request after which an environment is closed.",
)  # fmt: skip
@click.option(
    "--steps-file", type=click.Path(dir_okay=False, path_type=Path),
    help="A file with the number of steps, which survives the end of the server.",
)  # fmt: skip
def serve_environment(
    name: str | None,
    factory: str | None,
    kwargs: dict[str, Any],
    host: str,
    port: int,
    token_file: Path | None,
    max_sessions: int,
    idle_seconds: float,
    steps_file: Path | None,
) -> None:
    """Serve environments over HTTP, for experiments with environment.http.

    Each environment of an experiment has one session, in a thread of its own. /docs describes the interface. Your own
    modules are imported from the current folder and from PYTHONPATH. SIGTERM and Ctrl-C end the server.
    """
    if (name is None) == (factory is None):
        raise UserError(f"--id is {name!r} and --factory is {factory!r}: give exactly one of them")
    sys.path[:0] = [folder for folder in [str(Path.cwd())] if folder not in sys.path]
    with extras_named("http"):
        from rlsrl.envs.http_server.app import environment_app, listen, serve
        from rlsrl.envs.http_server.sessions import Sessions, StepCounter
    from rlsrl.envs.factory import EnvironmentSource, check_reference
    from rlsrl.runtime.errors import ConfigurationError

    try:
        source = EnvironmentSource(id=name, factory=factory, kwargs=kwargs)
        check_reference(source)
        counter = StepCounter(steps_file)
        sessions = Sessions(source, counter=counter, max_sessions=max_sessions, idle_seconds=idle_seconds)
        token = "" if token_file is None else _read_token(token_file)
        listener = listen(host, port)
    except ConfigurationError as error:
        raise UserError(str(error)) from error
    if not token and not _is_loopback(host):
        click.echo(f"warning: everybody who reaches {host} can use this server; set --token-file", err=True)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    click.echo(f"serving {source} at {address} (interface: {address}/docs)")
    with suppress(KeyboardInterrupt):
        serve(environment_app(sessions, token=token), listener)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--token-file: cannot read {path}: {error}") from error
    if not token:
        raise UserError(f"--token-file: {path} is empty; write a token into it")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
