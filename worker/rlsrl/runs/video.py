"""Records episodes of a trained policy as an mp4 file: each frame is what the environment renders after a step."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rlsrl.envs.factory import EnvironmentSource
from rlsrl.envs.ffmpeg import Mp4Writer, ffmpeg_path
from rlsrl.envs.rendering import (
    ActingPolicy,
    NoVideo,
    RecordedEpisode,
    episode_frames,
    frames_per_second,
    rendering_environment,
)

__all__ = ["MAX_STEPS", "NoVideo", "RecordedEpisode", "record"]

MAX_STEPS = 10_000
"""Steps after which an episode is cut, by default."""
END_SECONDS = 600.0
"""How long ffmpeg may take for the end of a file."""


def record(
    policy: ActingPolicy,
    source: EnvironmentSource,
    path: Path,
    *,
    episodes: int = 1,
    seed: int = 0,
    max_steps: int = MAX_STEPS,
    deterministic: bool = True,
) -> list[RecordedEpisode]:
    """Play episodes and write them to one mp4 file, or replace the file; return what was played.

    Args:
        policy: ActingPolicy, whose actions are the environment's own.
        source: How the experiment's environment is made.
        path: The file, which ends in ``.mp4``.
        episodes: How many are played, one after the other.
        seed: Of the first episode; the following ones have the following numbers.
        max_steps: Steps after which an episode is cut.
        deterministic: Whether to take the most probable actions.

    Raises:
        NoVideo: the environment does not render, the package is missing, or the suffix is another one.
        ValueError: no episode is to be played.
        ConfigurationError: the environment cannot be made.
        EnvironmentFailed: the environment's own code raised.
        OSError: the file cannot be written.
    """
    if path.suffix != ".mp4":
        raise NoVideo(f"{path} has the suffix {path.suffix!r}; allowed: .mp4")
    ffmpeg_path()
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, not {episodes}")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    env = rendering_environment(replace(source, vector_actions="gaussian"))
    played: list[RecordedEpisode] = []
    part = path.with_name(f".{path.stem}-{os.getpid()}.mp4")
    try:
        frames = episode_frames(
            policy, env, range(seed, seed + episodes), max_steps=max_steps, deterministic=deterministic, played=played
        )
        with closing(Mp4Writer(str(part), fps=frames_per_second(env))) as writer:
            for frame in frames:
                writer.write(frame)
            if not writer.is_done(END_SECONDS):
                raise TimeoutError(errno.ETIMEDOUT, f"ffmpeg has not ended {path} within {END_SECONDS:g} s")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
        env.close()
    return played
