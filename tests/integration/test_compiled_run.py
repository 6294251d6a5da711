"""Real runs whose training step is compiled: all ranks switch after the same step, and the run ends as usual."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rlsrl.testing.live_runs import Desk, LiveRun

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{id: CartPole-v1}}
  policy: {{network: {{mlp: {{hiddenSizes: [16]}}}}}}
  algorithm: {{ppo: {{epochs: 2, minibatchSize: 128}}}}
  actors: {{replicas: 1, environments: 8, rolloutLength: 32}}
  trainers: {{replicas: {ranks}, compile: {mode}}}
  stop: {{trainSteps: 1000000}}
"""


def logged(run: LiveRun, ranks: int, event: str) -> list[dict[str, Any]]:
    """Return the newest log line with this event of each rank that has one."""
    logs = (run.facts.logged(f"trainer-{rank}", event) for rank in range(ranks))
    return [events[-1] for events in logs if events]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["upfront", "background"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_switch_to_the_compiled_step_at_once(tmp_path: Path, ranks: int, mode: str) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    desk = Desk(tmp_path, EXPERIMENT.format(ranks=ranks, mode=mode))
    with desk.begin(environment=cache) as run:
        compiled = run.until(
            lambda: len(found := logged(run, ranks, "compiled")) == ranks and found, "compiled", timeout=400.0
        )
        (step,) = {line["step"] for line in compiled}
        assert (step == 0) == (mode == "upfront")
        run.until(lambda: run.facts.train_steps() > step + 50, "training goes on")
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    assert logged(run, ranks, "not_compiled") == []


def test_without_a_compiler_a_run_trains_uncompiled(tmp_path: Path) -> None:
    """With compile mode upfront, training starts at once and one log line says why it is not compiled."""
    text = EXPERIMENT.format(ranks=1, mode="upfront").replace("1000000", "20")
    desk = Desk(tmp_path, text)
    with desk.begin(environment={"CXX": "/nowhere/g++"}) as run:
        assert run.wait() == 0, run.output
    (line,) = run.facts.logged("trainer-0", "not_compiled")
    assert line["reason"] == "there is no C++ compiler /nowhere/g++"
    assert run.facts.json("summary.json")["train_steps"] == 20
