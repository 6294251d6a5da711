"""``rlsrl video``: record episodes of a stored policy."""

from __future__ import annotations

from pathlib import Path

import click

from rlsrl.cli.errors import UserError, environment_failed, require_free


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--version", metavar="VERSION", help="A version such as 1.2500; by default the newest.")
@click.option("--tag", metavar="TAG", help="The version with this tag.")
@click.option(
    "--episodes", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="Number of episodes."
)
@click.option(
    "--seed", metavar="N", type=click.IntRange(min=0), default=0, show_default=True,
    help="Seed of the first episode; the following ones have the following numbers.",
)  # fmt: skip
@click.option("--stochastic", is_flag=True, help="Sample actions, as in training.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The mp4 file to write; by default the name of the run and the version, in the current folder.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
def video(
    run: Path,
    version: str | None,
    tag: str | None,
    episodes: int,
    seed: int,
    stochastic: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Record episodes of the policy of RUN as an mp4 file (needs the extra video).

    RUN is a run folder, or the name of one in runs/. The environment is made with render_mode="rgb_array": each frame
    is what it renders after a step, and `metadata["render_fps"]` says how many a second are shown.
    """
    from rlsrl.cli.runs import find_run
    from rlsrl.envs.codec import CodecError
    from rlsrl.local.run_folder import RunFolderError
    from rlsrl.parameters.protocols import ParameterError
    from rlsrl.policies.exported import LayoutMismatch
    from rlsrl.runs.policy import load
    from rlsrl.runs.video import NoVideo
    from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
    from rlsrl.workers.build.run_database import RESOLVED

    folder, target = find_run(run, RESOLVED), output
    try:
        policy = load(folder, version=version, tag=tag, seed=seed)
        target = target or Path(f"{folder.absolute().name}-{policy.version}.mp4")
        require_free(target, force=force)
        played = policy.record(target, episodes=episodes, seed=seed, deterministic=not stochastic)
    except (CodecError, ConfigurationError, LayoutMismatch, NoVideo, ParameterError, RunFolderError) as error:
        raise UserError(str(error)) from error
    except EnvironmentFailed as error:
        raise environment_failed(error) from error
    except OSError as error:
        raise click.ClickException(f"the video cannot be written: {error}") from error
    for number, episode in enumerate(played):
        cut = ", cut" if episode.is_cut else ""
        click.echo(f"seed {seed + number}: return {episode.episode_return:g}, {episode.num_steps} steps{cut}")
    click.echo(f"{policy.version}: {target} ({target.stat().st_size:,} bytes)")
