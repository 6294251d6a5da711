"""The videos of one evaluator: which evaluations are recorded, and what becomes of a recording that fails.

A recording never ends the evaluator, and costs no evaluation: the result is recorded before. But a renderer may end the
process, or hang until the call watch ends it. So a file marks each recording, and after two that ended with the process
the evaluator records no more.
"""

from __future__ import annotations

import contextlib
from typing import Literal

from rlsrl.api.spec import EvaluationVideos
from rlsrl.data.version import Version
from rlsrl.envs.rendering import NoVideo
from rlsrl.parameters.protocols import Parameters, VersionInfo
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.evaluator import EvaluationPlan
from rlsrl.workers.build.recording import begin_recording
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.recording import FinishedVideo, VideoRecording, VideoTooLarge

MAX_DEATHS = 2
"""Recordings in a row that may end with the process."""

VideoOutcome = Literal["sent", "no_pictures", "failed", "too_large", "unsent", "died"]
"""The outcome of a recording: see ``rlsrl.runtime.metrics.Metrics.videos``."""


class VersionVideos:
    """Records the videos. One thread uses it; no method raises, but for what ends a process."""

    def __init__(
        self, videos: EvaluationVideos, plan: EvaluationPlan, context: WorkerContext, *, is_fixed: bool
    ) -> None:
        """``plan``: how versions are played. ``is_fixed``: whether they are that of ``evaluators.parameters``."""
        self._videos = videos
        self._plan = plan
        self._context = context
        self._is_fixed = is_fixed
        self._num_evaluations = 0
        self._recording: VideoRecording | None = None
        self._version: Version | None = None
        self._mark = context.ledger_folder / f"{context.role}-{context.index}.recording"
        self._num_deaths = self._read_mark()
        self._is_over = self._num_deaths >= MAX_DEATHS
        if self._is_over:
            self._remove_mark()
            self._fail("died", "the process ended during the last two recordings")

    @property
    def is_recording(self) -> bool:
        """Whether ``step`` has work."""
        return self._recording is not None

    def begin(self, info: VersionInfo, parameters: Parameters) -> None:
        """Take note of an evaluation of that version, and begin to record the version if it is due."""
        is_due = self._num_evaluations % self._videos.every_evaluations == 0
        self._num_evaluations += 1
        if not is_due or self._is_over:
            return
        self._version = info.version
        if not self._context.join_session.has_room_for_video:
            self._fail("unsent", "earlier videos wait for the coordinator")
            return
        try:
            self._write_mark()
            self._recording = begin_recording(
                self._plan, self._videos, parameters, info.metadata, board=self._context.call_board
            )
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a video must cost nothing else
            self._end(error)

    def step(self) -> None:
        """Record a frame. The last one also sends the video."""
        assert self._recording is not None, "begun before it steps"
        try:
            video = self._recording.step()
            if video is not None:
                self._send(video)
                self._end(None)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a video must cost nothing else
            self._end(error)

    def close(self) -> None:
        """Give up the present recording. Idempotent."""
        if self._recording is not None:
            self._end(None)

    def _send(self, video: FinishedVideo) -> None:
        assert self._version is not None, "set where the recording began"
        sent = self._context.join_session.send_video(
            self._version, is_fixed=self._is_fixed, mp4=video.mp4, gif=video.gif
        )
        if not sent:
            self._fail("unsent", "earlier videos wait for the coordinator")
            return
        self._context.metrics.videos.labels(outcome="sent").inc()
        self._context.log.info(
            "recorded",
            version=str(self._version),
            frames=video.num_frames,
            bytes=len(video.mp4),
            gif_bytes=len(video.gif),
            returns=[episode.episode_return for episode in video.episodes],
            cut=sum(episode.is_cut for episode in video.episodes),
        )

    def _end(self, error: BaseException | None) -> None:
        """End the present recording, and count its failure, if it has failed."""
        if error is not None:
            # Another try would fail in the same way.
            self._is_over = isinstance(error, NoVideo | ConfigurationError)
            too_large = isinstance(error, VideoTooLarge)
            self._fail("no_pictures" if self._is_over else "too_large" if too_large else "failed", str(error))
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        self._num_deaths = 0
        self._remove_mark()

    def _fail(self, outcome: VideoOutcome, reason: str) -> None:
        self._context.metrics.videos.labels(outcome=outcome).inc()
        self._context.log.warning(
            "not_recorded",
            version=None if self._version is None else str(self._version),
            outcome=outcome,
            error=reason,
            records_more=not self._is_over,
        )

    def _read_mark(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._mark.read_text(encoding="ascii"))
        return 0

    def _write_mark(self) -> None:
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.write_text(str(self._num_deaths + 1), encoding="ascii")

    def _remove_mark(self) -> None:
        with contextlib.suppress(OSError):
            self._mark.unlink()
