"""Episodes of environments that render: each frame is what the environment renders after a step.

``rlsrl video``, ``policy.record`` and the evaluators use it. ``rlsrl.envs.ffmpeg`` makes files of the frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import failed_in, not_made
from rlsrl.runtime.call_board import CallName
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError

if TYPE_CHECKING:
    import gymnasium

RENDER_MODE = "rgb_array"
DEFAULT_FPS = 30.0
"""Frames a second of environments that do not say how many."""

Frame = NDArray[np.uint8]
"""Red, green and blue, [height, width, 3]."""

_Result = TypeVar("_Result")


class ActingPolicy(Protocol):
    """Chooses actions: a ``TrainedPolicy``, for example."""

    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Return the action for an observation."""

    def restart(self) -> None:
        """Forget what was observed: the next observation is the first of an episode."""


class EnvironmentCaller(Protocol):
    """Makes the calls of an environment: ``on_board``, for example."""

    def __call__(self, name: CallName, call: Callable[..., _Result], /, *arguments: Any, **options: Any) -> _Result:
        """Return the result of ``call``, and raise what it raises."""


class NoVideo(Exception):
    """The environment cannot be rendered, or a package is missing; the text says what to do."""


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """One episode of a video."""

    episode_return: float
    """Undiscounted return."""
    num_steps: int
    """Steps of the environment."""
    is_cut: bool
    """Whether it reached the limit of steps before its end."""


def call_plainly(name: CallName, call: Callable[..., _Result], /, *arguments: Any, **options: Any) -> _Result:
    """Return the result of ``call``. An ``EnvironmentCaller``."""
    del name
    return call(*arguments, **options)


def rendering_environment(
    source: EnvironmentSource, *, caller: EnvironmentCaller = call_plainly
) -> gymnasium.Env[Any, Any]:
    """Return the environment of ``source`` in the mode in which it renders arrays. The caller closes it.

    Raises:
        NoVideo: the environment is behind HTTP, or its class does not render arrays.
        ConfigurationError: the environment cannot be made.
        EnvironmentFailed: the environment's own code raised.
    """
    if source.http is not None:
        raise NoVideo("an environment behind HTTP sends no pictures; allowed: environment.id or environment.factory")
    wanted = replace(source, kwargs={**source.kwargs, "render_mode": RENDER_MODE})
    try:
        env = caller("make", make_environment, wanted)
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


def frames_per_second(env: gymnasium.Env[Any, Any]) -> float:
    """Return how many frames a second the environment wants to be shown with."""
    return float(env.metadata.get("render_fps") or DEFAULT_FPS)


def episode_frames(
    policy: ActingPolicy,
    env: gymnasium.Env[Any, Any],
    seeds: Sequence[int],
    *,
    max_steps: int,
    deterministic: bool,
    played: list[RecordedEpisode],
    caller: EnvironmentCaller = call_plainly,
) -> Iterator[Frame]:
    """Play an episode for each seed, and yield its frames, all of one size. One step is taken for each frame.

    Args:
        policy: ActingPolicy.
        env: That of ``rendering_environment``.
        seeds: The seed of each episode.
        max_steps: Steps after which an episode is cut.
        deterministic: Whether to take the most probable actions.
        played: Gets each episode that is over.
        caller: Makes the calls of the environment.

    Raises:
        NoVideo: what the environment renders is no frame, or of another size than before.
        EnvironmentFailed: the environment's own code raised.
    """

    def call(method: CallName, *arguments: Any, **options: Any) -> Any:
        try:
            return caller(method, getattr(env, method), *arguments, **options)
        except USERS_ERRORS as error:
            raise failed_in(f"{method}()", error) from error

    size = None
    for seed in seeds:
        observation, _ = call("reset", seed=seed)
        policy.restart()
        total, has_ended, steps = 0.0, False, 0
        while True:
            frame = _checked(call("render"))
            if size is not None and frame.shape != size:
                raise NoVideo(f"the environment renders {frame.shape} after {size}; one size is needed")
            size = frame.shape
            yield frame
            if has_ended or steps == max_steps:
                break
            observation, reward, terminated, truncated, _ = call(
                "step", policy.act(observation, deterministic=deterministic)
            )
            total, steps, has_ended = total + float(reward), steps + 1, bool(terminated or truncated)
        played.append(RecordedEpisode(episode_return=total, num_steps=steps, is_cut=not has_ended))


def _checked(rendered: Any) -> Frame:
    frame = np.asarray(rendered)
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8 or not frame.size:
        raise NoVideo(f"render() returned an array of {frame.dtype} {frame.shape}; allowed: uint8 (height, width, 3)")
    return frame
