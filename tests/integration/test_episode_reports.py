"""What episodes of real runs report, by every road from environments to trainers; and that their starts are spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsrl.testing.environments import PhaseEnv
from rlsrl.testing.live_runs import Desk, RunFolderFacts

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment:
    factory: "rlsrl.testing.environments:PhaseEnv"
    episodeInfo: [is_success, in_step, is_succes]
  policy: {network: {mlp: {hiddenSizes: [16]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {environments: 8, rolloutLength: 32}
  trainers: {compile: "off"}
  stop: {trainSteps: 10}
"""


def finished(folder: Path, *changes: str) -> tuple[Desk, str]:
    """Return a finished run with these changes of its spec, and its output."""
    desk = Desk(folder, EXPERIMENT)
    with desk.begin(*(argument for change in changes for argument in ("--set", change))) as run:
        assert run.wait() == 0, run.output
        return desk, run.output


def last_scalars(facts: RunFolderFacts) -> dict[str, Any]:
    rows = [json.loads(line) for line in (facts.folder / "metrics.jsonl").read_text().splitlines()]
    scalars: dict[str, Any] = [row["scalars"] for row in rows if row["role"] == "trainer"][-1]
    return scalars


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["evaluators={environments: 2, episodesPerEnvironment: 3}"], id="loop"),
        pytest.param(["actors.vectorization=threads"], id="threads", marks=pytest.mark.slow),
        pytest.param(["policyWorkers={}", "actors.ringSize=2"], id="policy worker", marks=pytest.mark.slow),
        pytest.param(["bufferWorkers={}", "trainers.replicas=2"], id="buffer worker, 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_a_run_reports_lengths_and_values_of_info(tmp_path: Path, changes: list[str]) -> None:
    desk, output = finished(tmp_path, *changes)

    facts = desk.facts()
    scalars, summary = last_scalars(facts), facts.json("summary.json")
    assert scalars["length_mean"] == summary["length_mean"] == PhaseEnv.LENGTH
    assert scalars["episode_info/is_success/count"] == scalars["episodes"] > 80
    assert scalars["episode_info/is_success/mean"] == pytest.approx(0.5, abs=0.1)
    assert summary["episode_info"]["is_success"] == {
        "mean": scalars["episode_info/is_success/mean"],
        "count": scalars["episodes"],
    }
    assert facts.versions()[-1].metadata["episode_info"] == summary["episode_info"]
    assert summary["episode_info"]["is_succes"] == {"mean": None, "count": 0}
    assert "no episode had a finite number under is_succes in info" in output
    (missing,) = facts.logged("actor-0", "episode_info_missing")
    assert (missing["keys"], missing["found"]) == (["is_succes"], ["in_step", "is_success", "word"])
    assert desk.call("plot", "live").returncode == 0
    if "evaluators" in changes[0]:
        assert summary["evaluation"]["length_mean"] == PhaseEnv.LENGTH
        assert summary["evaluation"]["episode_info"]["is_success"] == {"mean": pytest.approx(2 / 3), "count": 6}


def test_a_value_that_is_not_a_number_ends_the_run_with_key_and_value(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXPERIMENT)
    with desk.begin("--set", "environment.episodeInfo=[word]") as run:
        assert run.wait() == 2, run.output
        assert "environment.episodeInfo: info['word'] of environment rank 0 is 'done', of type str" in run.output
    assert desk.facts().json("summary.json")["restarts"] == {}, "another start would change nothing"


def test_decorrelation_spreads_the_episodes_of_a_real_run(tmp_path: Path) -> None:
    """Without decorrelation, all environments are as far in their episodes whenever one of them ends."""
    together, spread = (tmp_path / name for name in ("together", "spread"))
    for folder, steps in ((together, 0), (spread, 4 * PhaseEnv.LENGTH)):
        folder.mkdir()
        desk, _ = finished(folder, f"actors.maxDecorrelationSteps={steps}")
        in_step = last_scalars(desk.facts())["episode_info/in_step/mean"]
        assert in_step == 1.0 if folder is together else in_step < 0.5
