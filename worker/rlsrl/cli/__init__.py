"""The rlsrl command. A command's module is imported when that command runs, so ``rlsrl --help`` is quick."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
from typing_extensions import override

from rlsrl.cli.errors import SIGNALLED, UserError
from rlsrl.runtime.errors import did_you_mean
from rlsrl.runtime.extras import NotInstalled, extras_named


class _Entry(NamedTuple):
    """A command: its ``module:attribute`` and its line in ``rlsrl --help``."""

    target: str
    help: str


COMMANDS = {
    "run": _Entry("rlsrl.cli.run:run", "Train an experiment on this machine."),
    "edit": _Entry("rlsrl.cli.edit:edit", "Change fields of a run, also while it trains."),
    "control": _Entry("rlsrl.cli.control:control", "Pause, resume or stop a run, or store a version now."),
    "eval": _Entry("rlsrl.cli.eval:evaluate", "Play a run's policy and report its returns."),
    "plot": _Entry("rlsrl.cli.plot:plot", "Draw the learning curves of runs."),
    "compare": _Entry("rlsrl.cli.plot:compare", "Compare the results of runs, over seeds."),
    "params": _Entry("rlsrl.cli.params:params", "List, show, tag, export and prune a run's weights."),
    "video": _Entry("rlsrl.cli.video:video", "Record episodes of a run's policy."),
    "export": _Entry("rlsrl.cli.export:export", "Write a run's policy for programs without rlsrl."),
    "status": _Entry("rlsrl.cli.status:status", "Show the state of an experiment on the cluster."),
    "top": _Entry("rlsrl.cli.top:top", "Show the workers of a run live: load, waits, throughput."),
    "why": _Entry("rlsrl.cli.why:why", "Explain why an experiment on the cluster does not train."),
    "retry": _Entry("rlsrl.cli.retry:retry", "Try a failed experiment on the cluster again."),
    "volumes": _Entry("rlsrl.cli.volumes:volumes", "List volumes on the cluster that no experiment uses."),
    "logs": _Entry("rlsrl.cli.logs:logs", "Print the logs of an experiment's pods on the cluster."),
    "validate": _Entry("rlsrl.cli.spec:validate", "Check experiment files and list every error."),
    "ui": _Entry("rlsrl.cli.ui:ui", "Show the runs of this machine in a browser."),
    "size": _Entry("rlsrl.cli.size:size", "Estimate the speed of an experiment and its bottleneck."),
    "explain": _Entry("rlsrl.cli.spec:explain", "Describe a field of the experiment."),
    "schema": _Entry("rlsrl.cli.spec:schema", "Print the experiment's JSON schema."),
    "serve-environment": _Entry(
        "rlsrl.cli.serve_environment:serve_environment", "Serve environments over HTTP, for environment.http."
    ),
    "init": _Entry("rlsrl.cli.init:init", "Create a project with your own environment and network."),
    "doctor": _Entry("rlsrl.cli.doctor:doctor", "Check this machine and show the cure of each problem."),
}
"""Every command, in the order of ``rlsrl --help``."""


class _LazyGroup(click.Group):
    """Lists commands from the table. Imports a command to run it or to show its own help."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{entry.target} is not a command"
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. The error of an unknown one names the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(f"{error.message}{did_you_mean(args[0], COMMANDS)}", ctx) from error

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Import and run the command. A missing package is an error that names its extra.

        Ctrl-C ends with a signal's exit status, also while modules are imported, which takes seconds.
        """
        try:
            with extras_named():
                return super().invoke(ctx)
        except NotInstalled as error:
            raise UserError(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(SIGNALLED + signal.SIGINT)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def is_kubectl() -> bool:
    """Return whether this process is kubectl's plugin, whose runs are on the cluster."""
    return Path(sys.argv[0]).name == "kubectl-rlsrl"


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rlsrl")
def main() -> None:
    """Distributed reinforcement learning on one machine or a Kubernetes cluster, from one YAML.

    To begin: `rlsrl doctor` checks this machine, and `rlsrl init DIR` creates a project.
    """
    _open_missing_streams()


def _open_missing_streams() -> None:
    """Open ``/dev/null`` for each standard stream that the caller has closed (``>&-``).

    Otherwise the next opened file, such as the lock of a run folder, would get the descriptor of a standard stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
