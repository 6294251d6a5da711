"""``rlsrl params``: list, show, tag, export and prune the stored weights of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import structlog

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.cli import is_kubectl
from rlsrl.cli.errors import UserError, require_free
from rlsrl.cli.runs import find_run
from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import EVALUATION_KEY
from rlsrl.parameters.protocols import ParameterDB, ParameterError, Parameters, VersionInfo
from rlsrl.parameters.weights_file import encode_weights
from rlsrl.runs.text_table import UNKNOWN, columns
from rlsrl.runs.versions import VersionRow, stored_infos, tag_version, version_rows
from rlsrl.runtime.durable import write_durably
from rlsrl.workers.build.run_database import RESOLVED, open_run_database

_HEADER = ("VERSION", "TAGS", "ENV STEPS", "RETURN", "EVALUATION", "CREATED", "SIZE", "RESUMABLE")
_LONGEST_VALUE = 120
"""Characters shown of one metadata value outside JSON output: an exported actor fills pages."""


def _run(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument RUN and the option --namespace."""
    option = click.option(
        "-n", "--namespace", metavar="NAME", help="RUN is an experiment on the cluster, in this namespace."
    )
    return click.argument("run", type=click.Path(path_type=Path))(option(command))


_version = click.argument("version", default="latest")
_policy = click.option(
    "--policy", metavar="NAME", default=POLICY_NAME, show_default=True, help="Which of the run's policies."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def params() -> None:
    """List, show, tag, export and prune the weights of a run.

    RUN is a run folder, or the name of one in runs/. With --namespace, and in `kubectl rlsrl`, it is an experiment on
    the cluster. VERSION is a version such as 1.2500, a tag, or latest.
    """
    # Log events about damaged files go to stderr, not into the output.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


@params.command("list")
@_run
@_policy
@_json
def list_versions(run: Path, namespace: str | None, policy: str, as_json: bool) -> None:
    """List the stored versions, oldest first.

    All versions are read in full, on the cluster by the coordinator, and damaged ones are marked. RESUMABLE: whether
    training can resume from the version. Only the newest ones keep the optimizer's state, which that needs.
    """
    with _user_errors(), _opened(run, namespace) as db:
        rows = version_rows(db, policy)
    if as_json:
        click.echo(json.dumps([_describe_listed(row, policy) for row in rows]))
        return
    click.echo(columns([_HEADER, *map(_cells, rows)]))
    for row in rows:
        if row.damage is not None:
            click.echo(f"{row.version} is damaged: {row.damage}")


@params.command()
@_run
@_version
@_policy
@_json
def show(run: Path, namespace: str | None, version: str, policy: str, as_json: bool) -> None:
    """Show one version in full, after a check of its digest."""
    with _user_errors(), _opened(run, namespace) as db:
        info, parameters = _one(db, policy, version)
        damage = db.damage(policy).get(info.version)
    described = _describe(VersionRow.of(info), policy) | {
        "has_state": info.has_state and damage is None,
        "damage": damage,
        "layout": parameters.layout,
        "statistics": {name: list(array.shape) for name, array in parameters.statistics.items()},
    }
    click.echo(json.dumps(described) if as_json else _lines(described))


@params.command()
@_run
@click.argument("version")
@click.argument("tags", metavar="TAG...", nargs=-1, required=True)
@_policy
def tag(run: Path, namespace: str | None, version: str, tags: tuple[str, ...], policy: str) -> None:
    """Tag VERSION. A tagged version is never pruned. A tag of another version moves to VERSION."""
    with _user_errors(), _opened(run, namespace) as db:
        info = tag_version(db, policy, version, *tags)
    click.echo(f"{info.version}: {', '.join(info.tags)}")


@params.command()
@_run
@_version
@click.option(
    "-o", "--output", metavar="FILE", required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="The safetensors file to write.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
@_policy
def export(run: Path, namespace: str | None, version: str, output: Path, force: bool, policy: str) -> None:
    """Write one version to a safetensors file.

    The file contains the weights by the names of the network's parameters, the statistics of the normalisation and, as
    JSON in its header, the metadata. `parameters.from.file`, `rlsrl eval` and `rlsrl.load` read it.
    """
    require_free(output, force=force)
    with _user_errors(), _opened(run, namespace) as db:
        info, parameters = _one(db, policy, version)
        data = encode_weights(parameters, created_at=info.created_at, metadata=info.metadata)
        write_durably(output, data)
    click.echo(f"{info.version}: {output} ({_size(len(data))})")


@params.command()
@_run
@click.option(
    "--keep-last",
    metavar="N",
    required=True,
    type=click.IntRange(min=0),
    help="Keep the newest N versions, tagged or not.",
)
@_policy
@_json
def prune(run: Path, namespace: str | None, keep_last: int, policy: str, as_json: bool) -> None:
    """Remove old versions without a tag. The newest version and the state for resuming always stay."""
    with _user_errors(), _opened(run, namespace) as db:
        before = stored_infos(db, policy)
        removed = db.prune(policy, keep_last=keep_last)
    freed = sum(info.nbytes for info in before if info.version in removed)
    if as_json:
        click.echo(json.dumps({"removed": [str(version) for version in removed], "nbytes": freed}))
    else:
        names = f": {_span(removed)}" if removed else ""
        click.echo(f"removed {len(removed)} of {len(before)} versions ({_size(freed)} of weights){names}")


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turn errors of the store into messages for the user."""
    try:
        yield
    except (ParameterError, ValueError, OSError) as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _opened(run: Path, namespace: str | None) -> Iterator[ParameterDB]:
    """Yield the run's parameter DB, on this machine or on the cluster."""
    if namespace is None and not is_kubectl():
        yield open_run_database(find_run(run, PARAMETERS, RESOLVED))
        return
    from rlsrl.cli.on_cluster import cluster_database

    with cluster_database(str(run), namespace) as db:
        yield db


def _one(db: ParameterDB, policy: str, version: str) -> tuple[VersionInfo, Parameters]:
    """Return a version with its weights; ``version`` is a version, a tag or latest."""
    parameters = db.get(policy, version)
    assert parameters is not None, "None only where newer_than is given"
    for info in db.versions(policy):
        if info.version == parameters.version:
            return info, parameters
    raise UserError(f"version {parameters.version} was pruned while it was read; try again")


def _describe(row: VersionRow, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "version": row.version,
        "tags": list(row.tags),
        "created_at": _date(row.created_at),
        "num_parameters": row.num_parameters,
        "nbytes": row.nbytes,
        "has_state": row.has_state,
        "metadata": dict(row.metadata),
    }


def _describe_listed(row: VersionRow, policy: str) -> dict[str, Any]:
    """Return the JSON value of a version; only its name and its damage if its header cannot be read."""
    described = {"version": row.version} if row.created_at is None else _describe(row, policy)
    return described | {"damage": row.damage}


def _cells(row: VersionRow) -> tuple[str, ...]:
    """Return the cells of a version's line; ``-`` for what it does not have, or what cannot be read."""
    return (
        row.version,
        ",".join(row.tags) or UNKNOWN,
        _number(row.env_steps, ",.0f"),
        _number(row.return_mean, ".6g"),
        _evaluation(row),
        _date(row.created_at),
        _size(row.nbytes),
        _resumable(row),
    )


def _evaluation(row: VersionRow) -> str:
    """Return the evaluation's mean return, or the reason why it is missing."""
    if row.evaluation is None and EVALUATION_KEY in row.metadata:
        return "unfinished"
    return _number(row.evaluation, ".6g")


def _resumable(row: VersionRow) -> str:
    if row.damage is not None:
        return "damaged"
    return "yes" if row.has_state else UNKNOWN


def _number(value: float | None, style: str) -> str:
    return UNKNOWN if value is None else format(value, style)


def _lines(described: Mapping[str, Any]) -> str:
    shown: dict[str, Callable[[Any], str]] = {
        "tags": lambda tags: ", ".join(tags) or "-",
        "num_parameters": lambda number: f"{number:,}",
        "nbytes": _size,
        "has_state": lambda has_state: "yes, training can resume here" if has_state else "no",
        "damage": lambda damage: damage or "none",
    }
    lines = [
        f"{key.removeprefix('num_').removeprefix('has_')}: {shown.get(key, _value)(value)}"
        for key, value in described.items()
        if key != "metadata"
    ]
    lines += [f"metadata.{key}: {_value(value)}" for key, value in described["metadata"].items()]
    return "\n".join(lines)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters: see --json)"


def _span(versions: Sequence[Version]) -> str:
    return ", ".join(map(str, versions)) if len(versions) <= 5 else f"{versions[0]} to {versions[-1]}"


def _date(unix_seconds: float | None) -> str:
    if unix_seconds is None:
        return UNKNOWN
    return datetime.fromtimestamp(unix_seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return UNKNOWN
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
