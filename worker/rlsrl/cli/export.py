"""``rlsrl export``: write a stored policy for programs without rlsrl."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlsrl.cli.errors import UserError, require_free
from rlsrl.cli.runs import policy_options

if TYPE_CHECKING:
    from rlsrl.runs.export import ExportFormat

FORMATS = ("torch", "onnx", "safetensors")


@click.command()
@policy_options
@click.option("--format", "kind", type=click.Choice(FORMATS), required=True, help="The form of the file.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default the name of RUN and the version, in the current folder.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
def export(
    run: Path,
    experiment: Path | None,
    version: str | None,
    tag: str | None,
    kind: ExportFormat,
    output: Path | None,
    force: bool,
) -> None:
    """Write the policy of RUN, or of an exported file, to a file for programs without rlsrl.

    RUN is a run folder, or the name of one in runs/. With --experiment it is a file that `rlsrl params export` or
    `kubectl rlsrl params export` wrote.

    torch: a program that `torch.export.load` reads. onnx: a graph for onnxruntime and others (needs the extra onnx).
    Both take raw observations and return the most probable actions: normalisation, action mask and scaling are inside.
    Such a file is compared with the policy on 1000 observations before it is written. safetensors: the weights by
    the names of the network's parameters, and the statistics that normalise observations.
    """
    from rlsrl.api.load import SpecError
    from rlsrl.envs.codec import CodecError
    from rlsrl.local.run_folder import RunFolderError
    from rlsrl.parameters.protocols import ParameterError
    from rlsrl.policies.exported import LayoutMismatch
    from rlsrl.runs.export import CHECKED, SUFFIXES, ExportRefused, export_version
    from rlsrl.runs.stored_version import open_version
    from rlsrl.runtime.durable import write_durably
    from rlsrl.runtime.errors import ConfigurationError

    try:
        stored = open_version(run, version=version, tag=tag, experiment=experiment)
        target = output or Path(f"{stored.name}-{stored.parameters.version}{SUFFIXES[kind]}")
        require_free(target, force=force)
        data = export_version(stored, kind)
        write_durably(target, data)
    except (
        CodecError, ConfigurationError, ExportRefused, LayoutMismatch, ParameterError, RunFolderError, SpecError
    ) as error:  # fmt: skip
        raise UserError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"the file cannot be written: {error}") from error
    compared = "" if kind == "safetensors" else f", equal to the policy on {CHECKED} observations"
    click.echo(f"{stored.parameters.version}: {target} ({len(data):,} bytes){compared}")
