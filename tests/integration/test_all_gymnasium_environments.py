"""Every environment of Gymnasium's classic control, toy text, box2d and mujoco (v5) trains in a real run."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.testing.live_runs import Desk

PACKAGES = ("classic_control", "toy_text", "box2d", "mujoco")
TRAIN_STEPS, MINIBATCHES = 10, 4
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{id: {name}}}
  algorithm: {{ppo: {{minibatchSize: 16, epochs: 1}}}}
  actors: {{environments: 4, rolloutLength: 16}}
  parameters: {{everySteps: 1, keepLast: 1000}}
  stop: {{trainSteps: {train_steps}}}
"""


def current_ids() -> list[str]:
    """Return the newest version of each name of these packages."""
    newest: dict[str, int] = {}
    for spec in gymnasium.registry.values():
        if any(f"gymnasium.envs.{package}" in str(spec.entry_point) for package in PACKAGES):
            newest[spec.name] = max(newest.get(spec.name, 0), spec.version or 0)
    return sorted(f"{name}-v{version}" for name, version in newest.items())


def test_the_ids_are_those_of_all_four_packages() -> None:
    found = current_ids()
    assert {"CartPole-v1", "Blackjack-v1", "LunarLander-v3", "Humanoid-v5"} <= set(found)
    assert len(found) >= 27


@pytest.mark.slow
@pytest.mark.parametrize("name", current_ids())
def test_an_environment_trains(tmp_path: Path, name: str) -> None:
    desk = Desk(tmp_path, EXPERIMENT.format(name=name, train_steps=TRAIN_STEPS))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["restarts"], summary["ledger"]["balanced"]) == ("trainSteps", {}, True)
    database = FilesystemParameterDB(desk.run_folder / "parameters")
    state, first, last = (
        database.load_state(POLICY_NAME),
        database.get(POLICY_NAME, min(info.version for info in desk.facts().versions())),
        database.get(POLICY_NAME),
    )
    assert state is not None and first is not None and last is not None
    assert int(state.arrays["optimizer/num_steps"]) == TRAIN_STEPS * MINIBATCHES, "no update was skipped"
    assert np.isfinite(last.vector).all()
    assert not np.array_equal(first.vector, last.vector)
