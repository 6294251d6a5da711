"""``rlsrl run --seeds``: several runs one after the other, compared in the end, resumed by the same command."""

from __future__ import annotations

import json
from pathlib import Path

from rlsrl.testing.live_runs import Desk

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 32, epochs: 1}}
  actors: {environments: 2, rolloutLength: 32}
  trainers: {compile: "off"}
  seed: 7
  stop: {trainSteps: 80}
"""


def test_seeds_are_trained_compared_and_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXPERIMENT)
    done = desk.call("run", "live.yaml", "--seeds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    folders = [tmp_path / "runs" / f"live-seed-{seed}" for seed in (7, 8)]
    assert sorted((tmp_path / "runs").iterdir()) == folders
    for seed, folder in zip((7, 8), folders, strict=True):
        assert json.loads((folder / "summary.json").read_text())["seed"] == seed
        assert f"seed {seed} of 7 to 8: runs/live-seed-{seed}" in done.stdout
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        assert len(rows) >= 50, "also a run of a second has a curve"
    header, row = done.stdout.splitlines()[-2:]
    assert header.split()[:3] == ["EXPERIMENT", "RUNS", "RETURN"]
    assert row.split()[:2] == ["live", "2"]

    again = desk.call("run", "live.yaml", "--seeds", "3", "--set", "stop.trainSteps=80")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("has finished; --fresh renames its folder") == 2
    assert again.stdout.splitlines()[-1].split()[:2] == ["live", "3"]
    compared = desk.call("compare", *(f"live-seed-{seed}" for seed in (7, 8, 9)))
    assert compared.stdout.splitlines() == again.stdout.splitlines()[-2:]


def test_a_seed_that_fails_ends_the_command(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXPERIMENT)
    done = desk.call("run", "live.yaml", "--seeds", "3", "--seed", "4", "--set", "environment.kwargs={gravity: 3}")
    assert done.returncode == 2
    assert "gravity" in done.stderr
    assert not (tmp_path / "runs" / "live-seed-5").exists()
    assert desk.call("run", "live.yaml", "--seeds", "0").returncode == 2
