"""``rlsrl video``: record episodes of a stored policy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from rlsrl.cli.errors import UserError, environment_failed, require_free
from rlsrl.cli.runs import policy_options


@click.command()
@policy_options
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
    help="The mp4 file to write; by default the name of RUN and the version, in the run folder. The video of an "
    "exported file is written into the current folder.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
def video(
    run: Path,
    experiment: Path | None,
    version: str | None,
    tag: str | None,
    episodes: int,
    seed: int,
    stochastic: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Record episodes of the policy of RUN, or of an exported file, as an mp4 file (needs the extra video).

    RUN is a run folder, or the name of one in runs/. With --experiment it is a file that `rlsrl params export` or
    `kubectl rlsrl params export` wrote.
    The environment is made with render_mode="rgb_array": each frame is what it renders after a step, and
    `metadata["render_fps"]` is the frame rate.
    """
    from rlsrl.api.load import SpecError
    from rlsrl.envs.codec import CodecError
    from rlsrl.local.run_folder import RunFolderError
    from rlsrl.parameters.protocols import ParameterError
    from rlsrl.policies.exported import LayoutMismatch
    from rlsrl.runs.policy import TrainedPolicy
    from rlsrl.runs.stored_version import open_version
    from rlsrl.runs.video import NoVideo
    from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed

    try:
        stored = open_version(run, version=version, tag=tag, experiment=experiment)
        policy = TrainedPolicy(stored, seed=seed)
        folder = stored.path if stored.path.is_dir() else Path()
        target = output or folder / f"{stored.name}-{policy.version}.mp4"
        require_free(target, force=force)
        with _runtime_folder():
            played = policy.record(target, episodes=episodes, seed=seed, deterministic=not stochastic)
    except (
        CodecError, ConfigurationError, LayoutMismatch, NoVideo, ParameterError, RunFolderError, SpecError
    ) as error:  # fmt: skip
        raise UserError(str(error)) from error
    except EnvironmentFailed as error:
        raise environment_failed(error) from error
    except OSError as error:
        raise click.ClickException(f"the video cannot be written: {error}") from error
    for number, episode in enumerate(played):
        cut = ", cut" if episode.is_cut else ""
        click.echo(f"seed {seed + number}: return {episode.episode_return:g}, {episode.num_steps} steps{cut}")
    click.echo(f"{policy.version}: {target} ({target.stat().st_size:,} bytes)")


@contextmanager
def _runtime_folder() -> Iterator[None]:
    """Set XDG_RUNTIME_DIR if it is missing: SDL looks there for a display, and libwayland prints an error."""
    if "XDG_RUNTIME_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_RUNTIME_DIR"]
