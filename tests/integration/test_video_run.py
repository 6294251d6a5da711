"""A real run whose evaluator records the versions that it plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np

from rlsrl.parameters.evaluations import evaluation_of
from rlsrl.testing.live_runs import Desk
from rlsrl.testing.tensorboard import shown_pictures

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [16]}}}
  algorithm: {ppo: {epochs: 2, minibatchSize: 256}}
  actors: {environments: 8, rolloutLength: 64}
  parameters: {everySteps: 10, keepLast: 100}
  evaluators: {environments: 1, episodesPerEnvironment: 1, replicas: 1, video: {everyEvaluations: 1, maxSteps: 60}}
  stop: {trainSteps: 30}
"""


def frames_of(path: Path) -> np.ndarray[Any, Any]:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_each_version_that_is_evaluated_has_its_video(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXPERIMENT)
    with desk.begin() as run:
        assert run.wait() == 0, run.output

    facts = desk.facts()
    evaluated = {info.version: evaluation for info in facts.versions() if (evaluation := evaluation_of(info))}
    videos = {path.name: frames_of(path) for path in (facts.folder / "videos").iterdir()}
    assert videos.keys() == {f"0-{version}.mp4" for version in evaluated}
    for version, evaluation in evaluated.items():
        frames = videos[f"0-{version}.mp4"]
        assert frames.shape[1:] == (400, 600, 3), "CartPole's size"
        # The video begins as the evaluation's only episode, which is its return long.
        assert len(frames) == min(int(evaluation["return_mean"]), 60) + 1
        assert (frames[0] != frames[-1]).any(), "the pole moves"
    pictures = shown_pictures(facts.folder)
    assert [(tag, step, size) for tag, step, size, _ in pictures] == [
        ("videos/evaluation", version.step, (240, 160)) for version in sorted(evaluated)
    ]
    assert all(gif.startswith(b"GIF89a") for *_, gif in pictures)
    recorded = facts.logged("evaluator-0", "recorded")
    assert [event["version"] for event in recorded] == [str(version) for version in sorted(evaluated)]
    summary = facts.json("summary.json")
    assert summary["ledger"]["balanced"]
    assert summary["restarts"] == {}
    assert facts.leftovers() == []
