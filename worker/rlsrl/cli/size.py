"""``rlsrl size``: estimate the speed of an experiment, its bottleneck and the effect of changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlsrl.api.load import SpecError, load_file
from rlsrl.cli.errors import UserError, environment_failed
from rlsrl.cli.text import width_of, wrapped
from rlsrl.runs.text_table import columns

if TYPE_CHECKING:
    from rlsrl.api.spec import ExperimentSpec, RLExperiment
    from rlsrl.data.specs import EnvSpec
    from rlsrl.sizing.advice import SpecChange
    from rlsrl.sizing.costs import Costs
    from rlsrl.sizing.workload import Hardware, Workload

DEFAULT_GIGABITS = 10.0
"""Gbit/s of a pod's link."""
NETWORK_HOP_SECONDS = 50e-6
"""One-way latency between two pods of one zone."""
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field before; can be repeated.")
@click.option(
    "--cores", metavar="N", type=click.IntRange(min=1),
    help="Estimate for `rlsrl run` on N cores. By default each worker is a pod with one core.",
)  # fmt: skip
@click.option(
    "--bandwidth", metavar="GBIT", type=POSITIVE,
    help=f"Gbit/s of each pod's link; by default {DEFAULT_GIGABITS:g}.",
)  # fmt: skip
@click.option(
    "--env-step-seconds", metavar="SECONDS", type=POSITIVE,
    help="Compute time of one environment step. By default one environment is stepped here for a second.",
)  # fmt: skip
@click.option(
    "--minibatch-seconds", metavar="SECONDS", type=POSITIVE,
    help="Time of one minibatch on one trainer, for example on a GPU.",
)  # fmt: skip
def size(
    file: Path,
    overrides: tuple[str, ...],
    cores: int | None,
    bandwidth: float | None,
    env_step_seconds: float | None,
    minibatch_seconds: float | None,
) -> None:
    """Estimate the speed of the experiment in FILE, its bottleneck, and the effect of changes.

    The estimate comes from a model of the system, from costs measured on the machine that the output names, and from
    the speed of the environment. Nothing is trained. The model tries changes one at a time.
    """
    from rlsrl.envs.unreachable import EnvironmentUnreachable
    from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed

    try:
        experiment = load_file(file, overrides)
        hardware = _hardware(cores, bandwidth)
        _find_modules(file)
        for line in _lines(
            experiment,
            hardware,
            env_step_seconds,
            minibatch_seconds,
            again=lambda change: load_file(file, (*overrides, *change.overrides)),
        ):
            click.echo(line if "\n" in line else wrapped(line, width_of(sys.stdout)))  # tables stay whole
    except (SpecError, ConfigurationError) as error:
        raise UserError(str(error)) from error
    except EnvironmentUnreachable as error:
        raise click.ClickException(str(error)) from error
    except EnvironmentFailed as error:
        raise environment_failed(error) from error


def _lines(
    experiment: RLExperiment,
    hardware: Hardware,
    env_step_seconds: float | None,
    minibatch_seconds: float | None,
    *,
    again: Callable[[SpecChange], RLExperiment],
) -> Iterator[str]:
    """Yield the lines to print; ``again`` loads the experiment with a change."""
    from rlsrl.envs.factory import environment_spec
    from rlsrl.sizing.costs import measured_costs
    from rlsrl.sizing.environment import SECONDS, measure_environment
    from rlsrl.sizing.forecast import forecast, try_out
    from rlsrl.sizing.report import (
        advice_lines,
        environment_line,
        hardware_line,
        limit_lines,
        role_rows,
        speed_line,
    )
    from rlsrl.sizing.workload import EnvironmentSpeed, workload_of
    from rlsrl.workers.build.common import effort_of, environment_source

    spec = experiment.spec
    source = environment_source(spec.worker_environment)
    env_spec = environment_spec(source)
    network = effort_of(spec, env_spec)
    if env_step_seconds is None:
        environment, source_of_speed = measure_environment(source), f"one environment measured here for {SECONDS:g} s"
    else:
        environment, source_of_speed = EnvironmentSpeed(step_seconds=env_step_seconds), "--env-step-seconds"
    measured = measured_costs()

    def workload(of: ExperimentSpec) -> Workload:
        return workload_of(of, env_spec, environment=environment, network=network, hardware=hardware)

    def changed(change: SpecChange) -> Workload | None:
        try:
            return workload(again(change).spec)
        except SpecError:
            return None

    costs = _costs(measured.costs, spec, minibatch_seconds)
    found = forecast(workload(spec), costs)
    yield speed_line(experiment.metadata.name, found)
    yield f"hardware: {hardware_line(hardware)}"
    yield environment_line(environment, source_of_speed)
    yield f"costs: measured on {measured.machine}, {measured.date}"
    yield from _replay_lines(experiment, env_spec, on_this_machine=hardware.shares_memory)
    yield from limit_lines(found)
    yield columns(role_rows(found))
    yield from advice_lines(try_out(spec, costs, changed=changed), found.env_steps_a_second)


def _replay_lines(experiment: RLExperiment, env_spec: EnvSpec, *, on_this_machine: bool) -> Iterator[str]:
    """Yield the size of the replay stores, if there are some, and whether they fit."""
    from rlsrl.local.replay_room import role_of_stores, room_in, stores_folder
    from rlsrl.local.run_names import RUNS
    from rlsrl.workers.build.replay_stores import pod_shortage, stores_of

    if (stores := stores_of(experiment.spec, env_spec)) is None:
        return
    yield f"replay: {stores}"
    if on_this_machine:
        room = room_in(stores_folder(RUNS / experiment.metadata.name), role_of_stores(experiment.spec))
        found = {"cannot work here": room.shortage(stores), "slow here": room.warning(stores)}
    else:
        found = {"cannot work": pod_shortage(experiment.spec, stores)}
    yield from (f"{label}: {text}" for label, text in found.items() if text is not None)


def _hardware(cores: int | None, gigabits: float | None) -> Hardware:
    """Return the hardware that the options describe.

    Raises:
        UserError: the options contradict each other.
    """
    from rlsrl.sizing.report import BITS_A_GIGABIT
    from rlsrl.sizing.workload import Hardware

    if cores is not None and gigabits is not None:
        raise UserError("--cores is for one machine, where nothing goes through a network: leave --bandwidth out")
    if cores is not None:
        return Hardware(cores=cores)
    return Hardware(bandwidth=(gigabits or DEFAULT_GIGABITS) * BITS_A_GIGABIT / 8, hop_seconds=NETWORK_HOP_SECONDS)


def _costs(measured: Costs, spec: ExperimentSpec, minibatch_seconds: float | None) -> Costs:
    """Return the measured costs, with the trainer's own speed if it is given.

    Part of a minibatch takes that part of the time.

    Raises:
        UserError: the network is recurrent, and the trainer's speed is not given.
    """
    if minibatch_seconds is None:
        if spec.policy.network.state_sizes:
            raise UserError(
                "the costs of recurrent networks have not been measured: pass --minibatch-seconds, the time of one "
                "minibatch on one trainer"
            )
        return measured
    row_seconds = minibatch_seconds / spec.algorithm.chosen.minibatch_rows
    return replace(
        measured,
        minibatch_seconds=0.0,
        compiled_minibatch_seconds=0.0,
        training_mac_seconds=0.0,
        onednn_mac_seconds=0.0,
        bfloat16_mac_seconds=0.0,
        trained_weight_seconds=0.0,
        row_seconds=row_seconds,
        compiled_row_seconds=row_seconds,
    )


def _find_modules(file: Path) -> None:
    """Look for the user's modules first beside the file, as ``rlsrl run`` does."""
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
