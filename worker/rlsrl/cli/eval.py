"""``rlsrl eval``: play a stored version of a run's policy over fresh episodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlsrl.cli.errors import UserError
from rlsrl.data.version import Version

if TYPE_CHECKING:
    from rlsrl.api.resolved import TrainerConfig
    from rlsrl.parameters.protocols import Parameters, Ref
    from rlsrl.workers.evaluation import EpisodeShare, EvaluationResult


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated."""

    config: TrainerConfig
    """What its trainer was told: environment, network, seed."""
    parameters: Parameters
    metadata: Mapping[str, Any]
    """The version's, with the exported actor if the policy has one."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--experiment", type=click.Path(path_type=Path, dir_okay=False),
    help="What was trained, if RUN is a file that `params export` wrote.",
)  # fmt: skip
@click.option("--version", "version", metavar="VERSION", help="A version such as 1.2500; by default the last.")
@click.option("--tag", metavar="TAG", help="The version that has this tag.")
@click.option("--episodes", type=click.IntRange(min=1), default=100, show_default=True, help="At least so many.")
@click.option(
    "--environments", type=click.IntRange(min=1), default=10, show_default=True,
    help="Played side by side; each plays equally many episodes.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Unrelated to training's seeds.")
@click.option("--stochastic", is_flag=True, help="Draw actions, as training does, instead of taking the most probable.")
@click.option(
    "--max-steps", type=click.IntRange(min=1), default=1_000_000, show_default=True,
    help="Steps of each environment after which to give up.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    run: Path,
    experiment: Path | None,
    version: str | None,
    tag: str | None,
    episodes: int,
    environments: int,
    seed: int,
    stochastic: bool,
    max_steps: int,
    as_json: bool,
) -> None:
    """Play the policy of the run folder RUN, or of an exported file, over fresh episodes and report its returns.

    Every environment plays the same number of episodes, so that short ones are not favoured. Modules of your own are
    looked for where the run found them, then in the folder this is called from and on PYTHONPATH.
    """
    from rlsrl.envs.vector import EnvironmentFailed
    from rlsrl.local.run_folder import RunFolderError
    from rlsrl.parameters.protocols import ParameterError
    from rlsrl.policies.program import LayoutMismatch
    from rlsrl.runtime.errors import ConfigurationError
    from rlsrl.workers.evaluation import EvaluationUnfinished, share_episodes

    if experiment is not None and (version or tag):
        raise UserError("--experiment is for an exported file, which holds one version: leave --version and --tag out")
    share = share_episodes(episodes, environments)
    try:
        _find_modules(run if experiment is None else experiment)
        subject = load_subject(run, _ref(version, tag)) if experiment is None else load_exported(run, experiment)
        result = play(subject, share, seed=seed, greedy=not stochastic, max_steps=max_steps)
    except (ConfigurationError, ParameterError, LayoutMismatch, RunFolderError) as error:
        raise UserError(str(error)) from error
    except (EnvironmentFailed, EvaluationUnfinished, OSError) as error:
        raise click.ClickException(str(error)) from error
    conditions = {
        "run": str(run),
        "version": str(subject.parameters.version),
        "environments": share.num_environments,
        "seed": seed,
        "greedy": not stochastic,
    }
    click.echo(json.dumps({**conditions, **result.to_json()}) if as_json else _lines(conditions, result))


def _find_modules(run: Path) -> None:
    """Look for the user's modules first beside the experiment, that was run or is told, then in the current folder."""
    from rlsrl.local.run_folder import read_record

    if run.is_file():
        folders = [str(run.absolute().parent)]
    else:
        record = read_record(run)
        folders = [record.modules] if record is not None and record.modules else []
    sys.path[:0] = [folder for folder in (*folders, str(Path.cwd())) if folder not in sys.path]


def _ref(version: str | None, tag: str | None) -> Ref:
    if version is not None and tag is not None:
        raise UserError("--version and --tag both name a version; give one of them")
    if version is None:
        return tag or "latest"
    try:
        return Version.parse(version)
    except ValueError as error:
        raise UserError(str(error)) from error


def load_subject(run: Path, ref: Ref) -> Subject:
    """What the run folder holds under ``ref``.

    Raises:
        UserError: it is no run folder, or not one of this version of rlsrl.
        ConfigurationError: the place where it keeps its versions cannot be used from here.
        ParameterError: it has no such version, or a damaged one.
        OSError: that place failed.
    """
    from rlsrl.api.resolved import ResolvedExperiment
    from rlsrl.workers.build.run_database import RESOLVED, open_run_database

    resolved = run / RESOLVED
    try:
        config = ResolvedExperiment.from_json(resolved.read_bytes()).trainer
    except OSError as error:
        raise UserError(f"{run} is no run folder: cannot read {resolved}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{resolved} is not what this version of rlsrl writes: {error}") from error
    db = open_run_database(run)
    parameters = db.get(config.policy_name, ref)
    assert parameters is not None, "None only where newer_than is given"  # noqa: S101 - the protocol's promise
    # A run that is still training may have pruned the version since; then torch does what the program would have done.
    metadata = (info.metadata for info in db.versions(config.policy_name) if info.version == parameters.version)
    return Subject(config=config, parameters=parameters, metadata=next(metadata, {}))


def load_exported(path: Path, experiment: Path) -> Subject:
    """What ``rlsrl params export`` wrote, to be played in the experiment's environment.

    Raises:
        UserError: a file cannot be read, or is none of those.
        ParameterError: the exported file is damaged.
    """
    from rlsrl.api.load import SpecError, load_file
    from rlsrl.api.placement import LocalPlacement
    from rlsrl.api.resolve import resolve
    from rlsrl.parameters.encoding import decode_header, decode_parameters

    try:
        config = resolve(load_file(experiment), LocalPlacement(run_uid="exported", run_folder=Path.cwd())).trainer
        data = path.read_bytes()
    except SpecError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    parameters, header = decode_parameters(data, str(path)), decode_header(data, str(path))
    return Subject(config=config, parameters=parameters, metadata=header.metadata)


def play(subject: Subject, share: EpisodeShare, *, seed: int, greedy: bool, max_steps: int) -> EvaluationResult:
    """Make the environments and the actor, and evaluate."""
    from rlsrl.workers.build.evaluator import EvaluationPlan, begin_evaluation

    plan = EvaluationPlan(
        environment=subject.config.environment,
        network=subject.config.network,
        network_seed=subject.config.seed,
        num_environments=share.num_environments,
        episodes_per_environment=share.episodes_per_environment,
        max_steps=max_steps,
        seed=seed,
        greedy=greedy,
    )
    envs, evaluation = begin_evaluation(plan, subject.parameters, subject.metadata)
    try:
        return evaluation.play()
    finally:
        envs.close()


def _lines(conditions: dict[str, Any], result: EvaluationResult) -> str:
    summary = result.to_json()
    actions = "greedy" if conditions["greedy"] else "drawn"
    return (
        f"{conditions['run']}: version {conditions['version']}, {summary['episodes']} episodes in "
        f"{conditions['environments']} environments, {actions} actions, seed {conditions['seed']}\n"
        f"return: mean {summary['return_mean']:.2f}, std {summary['return_std']:.2f}, "
        f"min {summary['return_min']:.2f}, max {summary['return_max']:.2f}\n"
        f"length: mean {summary['length_mean']:.1f} steps"
    )
