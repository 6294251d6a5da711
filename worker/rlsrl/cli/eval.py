"""``rlsrl eval``: play a stored version of a run's policy over fresh episodes."""

from __future__ import annotations

import json
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog

from rlsrl.cli.errors import UserError, environment_failed
from rlsrl.cli.runs import policy_options

if TYPE_CHECKING:
    from rlsrl.runs.stored_version import StoredVersion
    from rlsrl.workers.evaluation import EpisodeShare, EvaluationResult


@click.command()
@policy_options
@click.option(
    "--episodes",
    metavar="N",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Minimum number of episodes.",
)
@click.option(
    "--environments", metavar="N", type=click.IntRange(min=1), default=10, show_default=True,
    help="Number of environments. Each plays the same number of episodes.",
)  # fmt: skip
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the episodes, independent of the training seeds.",
)
@click.option("--stochastic", is_flag=True, help="Sample actions, as in training.")
@click.option(
    "--max-steps", metavar="N", type=click.IntRange(min=1), default=1_000_000, show_default=True,
    help="Steps of each environment after which the evaluation ends, whether or not all episodes have ended.",
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
    """Play the policy of RUN, or of an exported file, in fresh episodes and report its returns.

    RUN is a run folder, or the name of one in runs/.
    Every environment plays the same number of episodes, so that short episodes are not favoured. Your own modules are
    imported from the folder of the experiment file, then from the current folder and from PYTHONPATH.
    """
    from rlsrl.api.load import SpecError
    from rlsrl.envs.unreachable import WaitAbandoned
    from rlsrl.local.run_folder import RunFolderError
    from rlsrl.parameters.protocols import ParameterError
    from rlsrl.policies.exported import LayoutMismatch
    from rlsrl.runs.stored_version import open_version
    from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed, EnvironmentFault
    from rlsrl.workers.evaluation import EvaluationUnfinished, share_episodes

    share = share_episodes(episodes, environments)
    try:
        evaluated = open_version(run, version=version, tag=tag, experiment=experiment)
        result = play(evaluated, share, seed=seed, greedy=not stochastic, max_steps=max_steps)
    except (ConfigurationError, ParameterError, LayoutMismatch, RunFolderError, SpecError) as error:
        raise UserError(str(error)) from error
    except EnvironmentFailed as error:
        raise environment_failed(error) from error
    except (EnvironmentFault, EvaluationUnfinished, WaitAbandoned, OSError) as error:
        raise click.ClickException(str(error)) from error
    conditions = {
        "run": str(evaluated.path),
        "version": str(evaluated.parameters.version),
        "environments": share.num_environments,
        "seed": seed,
        "greedy": not stochastic,
    }
    click.echo(json.dumps({**conditions, **result.to_json()}) if as_json else _lines(conditions, result))
    if result.unfinished:
        raise click.ClickException(f"{result.unfinished}. The result is that of the episodes that ended")


def play(evaluated: StoredVersion, share: EpisodeShare, *, seed: int, greedy: bool, max_steps: int) -> EvaluationResult:
    """Make the environments and the actor, and evaluate."""
    from rlsrl.envs.episodes import EpisodeReports
    from rlsrl.workers.build.evaluator import EvaluationPlan, begin_evaluation

    plan = EvaluationPlan(
        environment=evaluated.config.environment,
        network=evaluated.config.network,
        outputs=evaluated.config.algorithm.chosen.outputs,
        network_seed=evaluated.config.seed,
        num_environments=share.num_environments,
        episodes_per_environment=share.episodes_per_environment,
        max_steps=max_steps,
        seed=seed,
        greedy=greedy,
        side_by_side=evaluated.side_by_side,
    )
    log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr), processors=[_as_warning])  # stdout has the result
    reports = EpisodeReports(plan.environment.episode_info, log=log)
    envs, evaluation = begin_evaluation(
        plan,
        evaluated.parameters,
        evaluated.metadata,
        reports=reports,
        log=log,
        still_wanted=lambda: False,  # an environment's server that is away ends the command
    )
    try:
        return evaluation.play()
    finally:
        envs.close()


def _as_warning(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """Return an event of the environments in one line. A traceback is printed with the error that ends the command."""
    details = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "traceback"))
    return f"warning: {event['event']}: {details}"


def _lines(conditions: dict[str, Any], result: EvaluationResult) -> str:
    from rlsrl.data.episodes import info_texts

    actions = "greedy" if conditions["greedy"] else "sampled"
    length = ", ".join([f"mean {result.length_mean:.1f} steps", *info_texts(result.episode_info)])
    cut = (
        f"\nWARNING: {result.num_faults} steps or resets of the environments were not finite or raised; the episodes "
        "that they cut do not count"
        if result.num_faults
        else ""
    )
    return (
        f"{conditions['run']}: version {conditions['version']}, {result.num_episodes} episodes in "
        f"{conditions['environments']} environments, {actions} actions, seed {conditions['seed']}\n"
        f"return: mean {result.return_mean:.2f}, std {result.return_std:.2f}, "
        f"min {min(result.returns):.2f}, max {max(result.returns):.2f}\n"
        f"length: {length}{cut}"
    )
