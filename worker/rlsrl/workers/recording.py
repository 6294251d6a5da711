"""The recording of one video of an evaluated version, one frame at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.envs.ffmpeg import FfmpegProcess, MemoryFile, Mp4Writer, begin_gif
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.rendering import (
    ActingPolicy,
    EnvironmentCaller,
    Frame,
    RecordedEpisode,
    episode_frames,
    frames_per_second,
)
from rlsrl.envs.spaces import action_decoder
from rlsrl.policies.one_step import OneStepActor
from rlsrl.runtime.call_board import CallBoard, CallEntry, CallName, close_entry, on_board, private_entry
from rlsrl.runtime.heartbeat_queue import MAX_GIF_BYTES, MAX_MP4_BYTES

if TYPE_CHECKING:
    import gymnasium

WAIT_SECONDS = 0.05
"""How long one step may wait for ffmpeg at the end of a file."""
ENCODE_SECONDS = 120.0
"""How long ffmpeg may take for the end of both files."""

_Result = TypeVar("_Result")


class VideoTooLarge(Exception):
    """The video has more bytes than may be sent; the text says how many, and what to do."""


@dataclass(frozen=True, kw_only=True)
class FinishedVideo:
    """A whole video."""

    mp4: bytes
    gif: bytes
    """Empty if it is too large: TensorBoard then shows none."""
    num_frames: int
    episodes: tuple[RecordedEpisode, ...]


class BoardCaller(EnvironmentCaller):
    """Makes the calls of one environment, and shows them to the call watch."""

    def __init__(self, board: CallBoard | None, rank: int) -> None:
        """``board``: that of the call watch, if there is one. ``rank``: the environment's."""
        self._entry: CallEntry = private_entry() if board is None else board.open_entry(rank)

    @override
    def __call__(self, name: CallName, call: Callable[..., _Result], /, *arguments: Any, **options: Any) -> _Result:
        return on_board(self._entry, 0, name, call, *arguments, **options)

    def close(self) -> None:
        """Take the calls off the board. Idempotent."""
        close_entry(self._entry)


class VersionPolicy(ActingPolicy):
    """The policy of one version, for an environment with the wrappers of the experiment."""

    def __init__(self, actor: OneStepActor, env: gymnasium.Env[Any, Any]) -> None:
        """Act by ``actor``. Whether its actions are the most probable ones is decided already."""
        self._actor = actor
        self._interface = EnvironmentInterface.of(env)
        self._decode: Callable[[NDArray[Any]], Any] = action_decoder(env.action_space)

    @override
    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        del deterministic
        (action,) = self._decode(self._actor.act(self._interface.arrays(observation)))
        return action

    @override
    def restart(self) -> None:
        self._actor.restart()


class VideoRecording:
    """Records one video: each ``step`` takes one step of the environment, or waits briefly for ffmpeg.

    One thread uses it.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        env: gymnasium.Env[Any, Any],
        caller: BoardCaller,
        *,
        seeds: tuple[int, ...],
        max_steps: int,
    ) -> None:
        """Prepare the recording of an episode for each seed, each of at most ``max_steps`` steps.

        ``close`` closes ``env`` and ``caller``, also if this raises.

        Raises:
            NoVideo: the package is missing.
            OSError: the system has no memory for the files.
        """
        self._closing = ExitStack()
        self._closing.callback(caller.close)
        self._closing.callback(_close, env, caller)
        self._played: list[RecordedEpisode] = []
        self._gif_process: FfmpegProcess | None = None
        self._deadline: float | None = None
        try:
            self._fps = frames_per_second(env)
            self._mp4, self._gif = (self._file(name) for name in ("rlsrl-mp4", "rlsrl-gif"))
            self._writer = Mp4Writer(self._mp4, fps=self._fps)
            self._closing.callback(self._writer.close)
        except BaseException:
            self.close()
            raise
        self._frames: Iterator[Frame] = episode_frames(
            policy, env, seeds, max_steps=max_steps, deterministic=True, played=self._played, caller=caller
        )

    def step(self) -> FinishedVideo | None:
        """Record a frame, or wait up to ``WAIT_SECONDS`` for ffmpeg; return the video once it is whole.

        Raises:
            NoVideo: what the environment renders is no frame, or of another size than before.
            VideoTooLarge: the mp4 file may not be sent.
            EnvironmentFailed: the environment's own code raised.
            OSError: ffmpeg failed.
        """
        if (frame := next(self._frames, None)) is not None:
            self._writer.write(frame)
            self._check_size()
            return None
        now = time.monotonic()
        self._deadline = self._deadline or now + ENCODE_SECONDS
        if now > self._deadline:
            raise TimeoutError(f"ffmpeg has not ended the files within {ENCODE_SECONDS:g} s")
        return self._finished()

    def close(self) -> None:
        """Close the environment, and end ffmpeg. Idempotent."""
        self._closing.close()

    def _file(self, name: str) -> MemoryFile:
        file = MemoryFile(name)
        self._closing.callback(file.close)
        return file

    def _finished(self) -> FinishedVideo | None:
        if self._gif_process is None:
            if not self._writer.is_done(WAIT_SECONDS):
                return None
            self._check_size()
            self._gif_process = begin_gif(self._mp4, self._gif, num_frames=self._writer.num_frames, fps=self._fps)
            self._closing.callback(self._gif_process.close)
        if not self._gif_process.is_done(WAIT_SECONDS):
            return None
        return FinishedVideo(
            mp4=self._mp4.read(),
            gif=self._gif.read() if self._gif.num_bytes <= MAX_GIF_BYTES else b"",
            num_frames=self._writer.num_frames,
            episodes=tuple(self._played),
        )

    def _check_size(self) -> None:
        if self._mp4.num_bytes > MAX_MP4_BYTES:
            raise VideoTooLarge(
                f"the video has more than {MAX_MP4_BYTES:,} bytes after {self._writer.num_frames:,} frames; lower "
                "evaluators.video.maxSteps or episodes"
            )


def _close(env: gymnasium.Env[Any, Any], caller: BoardCaller) -> None:
    """Close the environment. What it raises costs nothing: the episodes are over."""
    with contextlib.suppress(Exception, SystemExit):
        caller("close", env.close)
