"""The coordinator keeps videos under names of its own, within limits, and shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.heartbeat_queue import MAX_GIF_BYTES, MAX_MP4_BYTES
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.tensorboard import shown_pictures, shown_scalars
from rlsrl.workers.kept_videos import MAX_BURST, VIDEO_SECONDS, KeptVideos
from rlsrl.workers.learning_curve import CurveRow, LearningCurve
from rlsrl.workers.leases import Claim
from rlsrl.workers.worker_messages import MalformedMessage, video_of

LOG = structlog.stdlib.get_logger()
MP4 = b"\x00\x00\x00\x20ftypisom" + bytes(100)
GIF = b"GIF89a\xf0\x00\xa0\x00" + bytes(200)
"""240 pixels wide, 160 high."""


class Bench:
    """A coordinator's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = Metrics(CollectorRegistry())
        self.curve = LearningCurve(folder, now=0.0, log=LOG)
        self.videos = self.open()

    def open(self, limit: int | None = None) -> KeptVideos:
        return KeptVideos(self.folder / "videos", self.curve, limit=limit, metrics=self.metrics, log=LOG)

    def restart(self) -> None:
        self.curve.close()
        self.curve = LearningCurve(self.folder, now=1.0, log=LOG)
        self.videos = self.open()

    def take(self, number: int, *, now: float = 0.0, index: int = 0, instance: str = "a", **video: Any) -> None:
        asyncio.run(self.videos.take(video_of(heartbeat(number, **video), claim(index, instance)), now))

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / "videos").glob("*"))}

    def count(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("rlsrl_videos_total", {"outcome": outcome}) or 0.0


def claim(index: int = 0, instance: str = "a", role: str = "evaluator") -> Claim:
    return Claim(role=role, instance=instance, index=index)


def heartbeat(number: int, **video: Any) -> pb.Heartbeat:
    version = pb.Version(attempt=1, step=10 * number)
    defaults = {"sequence": number, "version": version, "wall_time": 5.0, "mp4": MP4, "gif": GIF}
    return pb.Heartbeat(video=pb.Video(**(defaults | video)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.curve.close()


def test_a_video_is_a_file_and_a_picture_at_tensorboard(bench: Bench) -> None:
    bench.take(1)
    bench.take(2, index=3, is_fixed=True, mp4=MP4 + b"2")
    bench.take(3, gif=b"")
    assert bench.files() == {"0-1.10.mp4": MP4, "0-1.30.mp4": MP4, "3-1.20.mp4": MP4 + b"2"}
    assert shown_pictures(bench.folder) == [
        ("videos/evaluation", 10, (240, 160), GIF),
        ("videos/fixed_evaluation", 20, (240, 160), GIF),
    ]
    assert [(row.step, row.tag, row.file) for row in bench.videos.shown] == [
        (10, "videos/evaluation", "videos/0-1.10.mp4"),
        (20, "videos/fixed_evaluation", "videos/3-1.20.mp4"),
        (30, "videos/evaluation", "videos/0-1.30.mp4"),
    ]
    assert bench.count("taken") == 3


def test_pictures_hide_no_missing_row_from_a_restarted_coordinator(bench: Bench) -> None:
    rows = [
        CurveRow(
            step=step, wall=1.0, scalars={"loss": 0.5}, role="trainer", index=0, attempt=1, instance="t", sequence=step
        )
        for step in range(3)
    ]
    bench.curve.append(rows[:1])
    bench.take(1)
    bench.take(2)
    (events,) = (bench.folder / "tensorboard").iterdir()
    kept = events.read_bytes()
    bench.curve.append(rows[1:])
    events.write_bytes(kept)  # As if the disk had lost the events of the last two rows.
    bench.restart()
    assert [step for _, step, _ in shown_scalars(bench.folder)] == [0, 1, 2]
    assert len(shown_pictures(bench.folder)) == 2
    bench.restart()
    assert [step for _, step, _ in shown_scalars(bench.folder)] == [0, 1, 2]


def test_a_video_that_is_sent_again_is_shown_once(bench: Bench) -> None:
    bench.take(1)
    bench.take(1)
    bench.take(2)
    bench.take(1)
    assert len(shown_pictures(bench.folder)) == 2
    bench.take(1, instance="b")
    assert len(shown_pictures(bench.folder)) == 3, "another process counts anew"


@pytest.mark.parametrize(
    ("video", "claim_of", "says"),
    [
        ({}, claim(role="actor"), "a video of a worker of the role 'actor'"),
        ({"mp4": MP4 + bytes(MAX_MP4_BYTES)}, claim(), f"allowed: {MAX_MP4_BYTES} bytes of mp4"),
        ({"gif": GIF + bytes(MAX_GIF_BYTES)}, claim(), f"{MAX_GIF_BYTES} of GIF"),
        ({"mp4": b"#!/bin/sh\n"}, claim(), "no mp4 file"),
        ({"mp4": b""}, claim(), "no mp4 file"),
        ({"gif": b"<svg/>"}, claim(), "has no GIF"),
        ({"gif": b"GIF89a"}, claim(), "has no GIF"),
        ({"version": pb.Version(attempt=-1, step=2)}, claim(), "must not be negative"),
        ({"version": pb.Version(attempt=1, step=-2)}, claim(), "must not be negative"),
        ({"sequence": -1}, claim(), "must not be negative"),
    ],
    ids=[
        *("actor", "large mp4", "large GIF", "other file", "no file", "other picture", "torn GIF"),
        *("negative attempt", "negative step", "negative sequence"),
    ],
)
def test_what_no_evaluator_sends_is_refused(video: dict[str, Any], claim_of: Claim, says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        video_of(heartbeat(1, **video), claim_of)


def test_videos_that_come_too_fast_are_refused(bench: Bench) -> None:
    with capture_logs() as logs:
        for number in range(MAX_BURST + 2):
            bench.take(number)
    assert len(bench.files()) == MAX_BURST
    assert bench.count("refused") == 2
    assert [log["event"] for log in logs] == ["video_refused"] * 2
    bench.take(100, instance="b")
    assert bench.count("refused") == 3, "another process at the same index makes no difference"
    bench.take(100, index=1)
    bench.take(200, instance="b", now=VIDEO_SECONDS)
    bench.take(201, instance="b", now=VIDEO_SECONDS)
    assert bench.count("refused") == 4
    assert len(bench.files()) == MAX_BURST + 2


def test_a_full_disk_costs_the_files_alone(bench: Bench) -> None:
    (bench.folder / "videos").write_text("in the way")
    with capture_logs() as logs:
        bench.take(1)
        bench.take(2)
    assert [log["event"] for log in logs] == ["video_not_written"], "once"
    assert bench.count("not_written") == 2
    assert len(shown_pictures(bench.folder)) == 2
    assert not bench.videos.shown


@pytest.mark.parametrize(("limit", "kept"), [(0, []), (2, ["0-1.20.mp4", "0-1.30.mp4"])])
def test_without_a_lasting_folder_files_only_pass_through(bench: Bench, limit: int, kept: list[str]) -> None:
    bench.videos = bench.open(limit)
    for number in (1, 2, 3):
        bench.take(number)
    assert list(bench.files()) == kept
    assert len(bench.videos.shown) == (3 if limit else 0)
    assert len(shown_pictures(bench.folder)) == 3
