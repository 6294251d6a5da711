"""The coordinator's side of videos: keeps the files, and passes them to the trackers.

The coordinator makes each file's name from the worker's lease and the checked numbers of a version. So no worker writes
elsewhere, or another worker's videos. ``rlsrl.workers.worker_messages`` bounds the sizes; here the rate is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import EVALUATION_KEY, FIXED_EVALUATION
from rlsrl.runtime.budget import Spent
from rlsrl.runtime.durable import write_durably
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.event_file import gif_record
from rlsrl.workers.learning_curve import VIDEOS_PREFIX, LearningCurve
from rlsrl.workers.video_rows import VideoRow

VIDEOS_FOLDER = "videos"
"""The folder of videos in a run folder, or on a volume."""
MAX_BURST = 8
"""Videos of one index that may come at once."""
VIDEO_SECONDS = 0.5
"""Least seconds between the videos of one index on average. A worker sends at most one in each heartbeat."""
KEPT_FOR_WANDB = 8
"""Files that are kept for W&B's process where no folder outlives the coordinator."""
MAX_SHOWN = 64
"""Videos that wait for the coordinator's main thread, which passes them to W&B's process every second."""


@dataclass(frozen=True, kw_only=True)
class SentVideo:
    """A video of an evaluator, as it has come."""

    index: int
    """The evaluator's leased index."""
    instance: str
    """UUID of its process."""
    sequence: int
    """The process's number of the video."""
    version: Version
    is_fixed: bool
    """Whether the version is that of ``evaluators.parameters``."""
    wall: float
    """Unix seconds."""
    mp4: bytes
    gif: bytes
    """Empty for none."""

    @property
    def file_name(self) -> str:
        """The name of the mp4 file."""
        return f"{self.index}-{self.version}.mp4"

    @property
    def tag(self) -> str:
        """The name at trackers."""
        return f"{VIDEOS_PREFIX}{FIXED_EVALUATION if self.is_fixed else EVALUATION_KEY}"


class KeptVideos:
    """Keeps videos in files. The coordinator's event loop uses it; files are written in threads."""

    def __init__(
        self,
        folder: Path,
        curve: LearningCurve,
        *,
        limit: int | None,
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """Keep the newest ``limit`` files in ``folder``; None: all. The first video creates the folder."""
        self._folder = folder
        self._curve = curve
        self._limit = limit
        self._outcomes = metrics.videos
        self._log = log
        self._newest: dict[int, tuple[str, int]] = {}
        """The process and the sequence of each index's last video."""
        self._spent: dict[int, Spent] = {}
        """By index: how many videos have come."""
        self._is_failing = False
        self.shown: deque[VideoRow] = deque(maxlen=MAX_SHOWN)
        """Files for W&B. Another thread takes them out."""

    async def take(self, video: SentVideo, now: float) -> None:
        """Keep and show a video, unless it is known, or videos come too fast. ``now``: monotonic seconds.

        If the disk fails, the mp4 file is lost. That is logged once, and counted each time.
        """
        process, sequence = self._newest.get(video.index, ("", -1))
        if process == video.instance and video.sequence <= sequence:
            return
        self._newest[video.index] = video.instance, video.sequence
        if not self._may_come(video.index, now):
            self._outcomes.labels(outcome="refused").inc()
            self._log.warning("video_refused", evaluator=video.index, version=str(video.version))
            return
        is_written = await asyncio.to_thread(self._write, video)
        if is_written:
            self.shown.append(
                VideoRow(step=video.version.step, tag=video.tag, file=f"{VIDEOS_FOLDER}/{video.file_name}")
            )
        if video.gif:
            record = await asyncio.to_thread(gif_record, video.version.step, video.wall, video.tag, video.gif)
            if not self._curve.show_record(record):
                self._outcomes.labels(outcome="not_shown").inc()
        self._outcomes.labels(outcome="taken").inc()

    def _may_come(self, index: int, now: float) -> bool:
        amount = self._spent.get(index, Spent()).amount_at(now, decay_seconds=VIDEO_SECONDS)
        if amount > MAX_BURST - 1:
            return False
        self._spent[index] = Spent(amount=amount + 1, at=now)
        return True

    def _write(self, video: SentVideo) -> bool:
        """Write the file; return whether it is there."""
        if self._limit == 0:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._folder / video.file_name, video.mp4)
            if self._limit is not None:
                files = sorted(self._folder.glob("*.mp4"), key=lambda path: path.stat().st_mtime_ns)
                for old in files[: -self._limit]:
                    old.unlink(missing_ok=True)
        except OSError as error:
            self._outcomes.labels(outcome="not_written").inc()
            if not self._is_failing:
                self._log.warning("video_not_written", file=video.file_name, error=str(error))
            self._is_failing = True
            return False
        self._is_failing = False
        return True
