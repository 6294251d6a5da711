"""Evaluators of a real run: a kill during an episode, shared versions, and the last version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlsrl.parameters.evaluations import BEST_TAG, NUMBER_KEY, evaluation_of
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, RunFolderFacts, rlsrl_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole-evaluated.yaml"

WATCHED_ENVIRONMENT = '''
"""A GatedEnv that records evaluators; the first evaluator hangs at the third step of an episode."""

import os
import sys
from pathlib import Path

from rlsrl.testing.environments import GatedEnv

HERE = Path(__file__).parent


class WatchedEnv(GatedEnv):
    def step(self, action):
        if "evaluator" in sys.argv and self._taken == 2:
            first = not list(HERE.glob("evaluating.*"))
            (HERE / f"evaluating.{os.getpid()}").write_text(str("torch" in sys.modules))
            if first:
                (HERE / "never").read_bytes()
        return super().step(action)
'''


def evaluation_rows(facts: RunFolderFacts) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (facts.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["role"] == "evaluator"]


def evaluated(facts: RunFolderFacts) -> dict[str, Any]:
    """Return the mean return of every stored and evaluated version."""
    found = {str(info.version): evaluation_of(info) for info in facts.versions()}
    return {version: evaluation["return_mean"] for version, evaluation in found.items() if evaluation is not None}


@pytest.mark.slow
def test_a_killed_evaluator_plays_its_version_again_and_affects_no_other_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    experiment = (
        GATED_EXPERIMENT.format(gate=gate)
        .replace("rlsrl.testing.environments:GatedEnv", "watched_environment:WatchedEnv")
        .replace("everySteps: 10", "everySeconds: 3600")  # the first version and the last
        + "  evaluators: {environments: 2, episodesPerEnvironment: 3}\n"
    )
    desk = Desk(tmp_path, experiment)
    (tmp_path / "watched_environment.py").write_text(WATCHED_ENVIRONMENT)
    os.mkfifo(tmp_path / "never")

    def sighted() -> list[Path]:
        return sorted(tmp_path.glob("evaluating.*"), key=lambda path: path.stat().st_mtime_ns)

    with desk.begin() as run:
        (first,) = run.until(sighted, "an episode of the evaluator")
        run.until(run.is_complete, "all processes at work")
        (victim,) = run.workers("evaluator")
        assert first.suffix == f".{victim.pid}"
        others = set(run.workers()) - {victim}
        assert evaluated(run.facts) == {}
        os.kill(victim.pid, signal.SIGKILL)
        run.until(lambda: evaluated(run.facts), "an evaluation")
        assert evaluated(run.facts) == {"1.0": 0.0}
        assert len(sighted()) == 2
        assert others <= set(run.workers()), "everybody else is still there"
        gate.touch()
        assert run.wait() == 0, run.output

    facts = desk.facts()
    summary, last = facts.json("summary.json"), facts.versions()[-1]
    assert evaluated(facts) == {"1.0": 0.0, str(last.version): 8.0}, "the last version is evaluated before the end"
    assert last.tags == (BEST_TAG,)
    assert (summary["evaluation"]["version"], summary["evaluation"]["return_mean"]) == (str(last.version), 8.0)
    assert summary["evaluation"]["episodes"] == 6
    assert (summary["restarts"], summary["attempts"]) == ({"evaluator": 1}, 1)
    assert summary["ledger"]["balanced"]
    assert set(summary["ledger"]["lost"].values()) == {0}
    means = [(row["step"], row["scalars"]["evaluation/return_mean"]) for row in evaluation_rows(facts)]
    assert means == [(0, 0.0), (last.version.step, 8.0)]
    assert facts.leftovers() == []
    assert {path.read_text() for path in sighted()} == {"False"}, "no torch where the policy exports a program"

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [rlsrl_command(), "eval", str(facts.folder), "--tag", "best", "--episodes", "4", "--json"]
    played = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=60, check=False)
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["return_mean"] == 8.0, "its modules are found from anywhere"


@pytest.mark.slow
def test_two_evaluators_of_the_example_share_the_versions(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXAMPLE.read_text().replace("name: cartpole-evaluated", "name: live"))
    changes = ("evaluators.replicas=2", "stop.trainSteps=30", "parameters={everySteps: 5, keepLast: 100}")
    with desk.begin(*(argument for change in changes for argument in ("--set", change))) as run:
        assert run.wait() == 0, run.output

    facts = desk.facts()
    summary = facts.json("summary.json")
    numbers = {info.version.step: info.metadata[NUMBER_KEY] for info in facts.versions()}
    assert sorted(numbers.values()) == list(range(len(numbers)))
    rows = evaluation_rows(facts)
    assert rows
    assert all(row["index"] == numbers[row["step"]] % 2 for row in rows), "each version is played by its evaluator"
    assert max(Counter(row["step"] for row in rows).values()) == 1, "and by no other"
    assert {f"1.{row['step']}": row["scalars"]["evaluation/return_mean"] for row in rows} == evaluated(facts)
    assert summary["evaluation"]["version"] == summary["versions"]["last"]
    assert summary["evaluation"]["episodes"] == 10, "each of the two has 5 of the 10 environments"
    assert summary["best"]["return_mean"] == max(evaluated(facts).values())
    assert summary["versions"]["tagged"][BEST_TAG] == summary["best"]["version"]
    assert (facts.folder / "curve.png").exists()
    listed = desk.call("params", "list", "live")
    (best,) = [line for line in listed.stdout.splitlines() if line.split()[1] == BEST_TAG]
    assert f"{summary['best']['return_mean']:.6g}" in best.split()
