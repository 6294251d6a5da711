"""Records episodes of a trained policy as an mp4 file: each frame is what the environment renders after a step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import failed_in, not_made
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError

if TYPE_CHECKING:
    import gymnasium

RENDER_MODE = "rgb_array"
DEFAULT_FPS = 30.0
"""Frames a second of environments that do not say how many."""
MAX_STEPS = 10_000
"""Steps after which an episode is cut, by default."""

Frame = NDArray[np.uint8]
"""Red, green and blue, [height, width, 3]."""


class ActingPolicy(Protocol):
    """Chooses actions: a ``TrainedPolicy``."""

    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Return the action for an observation."""


class NoVideo(Exception):
    """The environment cannot be rendered, or a package is missing; the text says what to do."""


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """One episode of a video."""

    episode_return: float
    num_steps: int
    is_cut: bool
    """Whether it reached the limit of steps before its end."""


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
        policy: ActingPolicy.
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
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]
    except ImportError as error:
        raise NoVideo(f"videos need one more package: pip install 'rlsrl[video]' ({error})") from error
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, not {episodes}")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    env = _rendering(source)
    played: list[RecordedEpisode] = []
    part = path.with_name(f".{path.stem}-{os.getpid()}.mp4")
    try:
        frames = _frames(policy, env, range(seed, seed + episodes), max_steps, deterministic, played)
        first = next(frames)
        size, fps = (first.shape[1], first.shape[0]), float(env.metadata.get("render_fps") or DEFAULT_FPS)
        writer = imageio_ffmpeg.write_frames(str(part), size, fps=fps, macro_block_size=2, ffmpeg_log_level="error")
        with closing(writer):
            writer.send(None)
            for frame in chain([first], frames):
                if frame.shape != first.shape:
                    raise NoVideo(f"the environment renders {frame.shape} after {first.shape}; one size is needed")
                writer.send(np.ascontiguousarray(frame))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
        env.close()
    return played


def _rendering(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    """Return the environment with the wrappers of its observations. Actions are the environment's own."""
    if source.http is not None:
        raise NoVideo("an environment behind HTTP sends no pictures; allowed: environment.id or environment.factory")
    wanted = replace(source, kwargs={**source.kwargs, "render_mode": RENDER_MODE}, vector_actions="gaussian")
    try:
        env = make_environment(wanted)
    except ConfigurationError:
        raise
    except USERS_ERRORS as error:
        raise not_made(str(source), error) from error
    if env.render_mode != RENDER_MODE:
        env.close()
        raise NoVideo(
            f"{source} has render_mode {env.render_mode!r} although it was made with {RENDER_MODE!r}; its class has to "
            f"set self.render_mode, and metadata['render_modes'] to name it"
        )
    return env


def _frames(
    policy: ActingPolicy,
    env: gymnasium.Env[Any, Any],
    seeds: range,
    max_steps: int,
    deterministic: bool,
    played: list[RecordedEpisode],
) -> Iterator[Frame]:
    """Play an episode for each seed, and yield its frames. Each episode that is over is in ``played``."""
    for seed in seeds:
        observation, _ = _call(env, "reset", seed=seed)
        yield _frame(env)
        total, has_ended, steps = 0.0, False, 0
        while not has_ended and steps < max_steps:
            action = policy.act(observation, deterministic=deterministic)
            observation, reward, terminated, truncated, _ = _call(env, "step", action)
            total, steps, has_ended = total + float(reward), steps + 1, bool(terminated or truncated)
            yield _frame(env)
        played.append(RecordedEpisode(episode_return=total, num_steps=steps, is_cut=not has_ended))


def _frame(env: gymnasium.Env[Any, Any]) -> Frame:
    frame = np.asarray(_call(env, "render"))
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        raise NoVideo(f"render() returned an array of {frame.dtype} {frame.shape}; allowed: uint8 (height, width, 3)")
    return frame


def _call(env: gymnasium.Env[Any, Any], method: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return getattr(env, method)(*arguments, **keywords)
    except USERS_ERRORS as error:
        raise failed_in(f"{method}()", error) from error
