"""Real runs that end by steps: actors gather what is trained, and nothing that training cannot use."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.testing.live_runs import Desk, LiveRun

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "rlsrl.testing.environments:GatedEnv", kwargs: {{gate: nowhere, step_seconds: {seconds}}}}}
  policy: {{network: {{mlp: {{hiddenSizes: [16]}}}}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 64}}}}
  actors: {{replicas: {actors}, environments: 8, rolloutLength: 16}}
  pacing: {{maxPolicyLag: 4}}
  parameters: {{everySteps: 1, keepLast: 1000}}
  stop: {stop}
  {more}
"""
BATCH = 8 * 16
TWO_RANKS = "trainers: {replicas: 2}"
BUFFER_WORKER = "bufferWorkers: {replicas: 1}"


def experiment(stop: str, more: str = "", *, actors: int = 2, seconds: float = 0.0) -> str:
    return EXPERIMENT.format(stop=stop, more=more, actors=actors, seconds=seconds)


def summary_of_finished(desk: Desk) -> dict[str, Any]:
    """Return the summary, after checks that hold for every finished run."""
    facts = desk.facts()
    summary = facts.json("summary.json")
    newest = facts.newest()
    assert newest is not None
    assert newest.metadata[TERMINAL_KEY]["version"] == str(newest.version) == summary["versions"]["last"]
    assert newest.version.step == summary["train_steps"] == newest.metadata["train_steps"]
    ledger = summary["ledger"]
    assert ledger["balanced"], ledger
    assert ledger["trained"] == summary["env_steps"]
    assert summary["untrained"] == ledger["produced"] - ledger["trained"]
    assert facts.leftovers() == []
    return summary


@pytest.mark.parametrize(
    ("stop", "more"),
    [
        pytest.param("{trainSteps: 20}", "", id="train steps"),
        pytest.param(f"{{envSteps: {20 * BATCH - 5}}}", TWO_RANKS, id="env steps, two ranks"),
        pytest.param("{trainSteps: 20, returnMean: 1000}", BUFFER_WORKER, id="buffer worker"),
        pytest.param(
            f"{{envSteps: {20 * BATCH}}}", f"{TWO_RANKS}\n  {BUFFER_WORKER}", id="both", marks=pytest.mark.slow
        ),
        pytest.param("{trainSteps: 20}", "transport: grpc", id="grpc", marks=pytest.mark.slow),
    ],
)
def test_all_that_is_gathered_is_trained(tmp_path: Path, stop: str, more: str) -> None:
    desk = Desk(tmp_path, experiment(stop, more))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
        assert ", 0 of them not trained" in run.output
    summary = summary_of_finished(desk)
    assert summary["reason"] in stop
    assert summary["restarts"] == {}
    assert summary["untrained"] == 0, summary["ledger"]
    assert summary["max_policy_lag"] <= 4


def test_of_rollouts_that_do_not_fill_batches_less_than_one_is_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path, experiment("{trainSteps: 19}", "trainers: {batchEnvironments: 4}", actors=3))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    summary = summary_of_finished(desk)
    assert 0 <= summary["untrained"] < 3 * 16, "actors have 3, 3 and 2 environments"


@pytest.mark.parametrize(
    "more", ["", pytest.param(TWO_RANKS, marks=pytest.mark.slow), pytest.param(BUFFER_WORKER, marks=pytest.mark.slow)]
)
def test_the_last_credits_of_a_killed_actor_go_to_others(tmp_path: Path, more: str) -> None:
    # 0.64 s a rollout; a lag of 4 and 5 steps: all credits of the run are granted at its start.
    desk = Desk(tmp_path, experiment("{trainSteps: 5}", more, seconds=0.01))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        run.until(lambda: len(run.facts.versions()) > 1, "a trained version")
        assert needs_no_more_samples(run)
        psutil.Process(run.workers("actor")[0].pid).send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.output
    summary = summary_of_finished(desk)
    assert (summary["train_steps"], summary["restarts"]) == (5, {"actor": 1})
    assert summary["untrained"] < BATCH, summary["ledger"]


def needs_no_more_samples(run: LiveRun) -> bool:
    """Return whether trainer rank 0 has granted all that the run can still train."""
    status = run.until(run.facts.status, "the coordinator's picture")
    return bool(status["roles"]["trainer"][0]["stats"]["needs_no_more_samples"])
