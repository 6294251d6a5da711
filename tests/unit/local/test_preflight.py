"""Checks of a run before its first process starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.local.preflight import require_wandb
from rlsrl.runtime.errors import ConfigurationError

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: quick}}
spec:
  environment: {{id: CartPole-v1}}
  algorithm: {{ppo: {{minibatchSize: 64}}}}
  actors: {{environments: 2, rolloutLength: 64}}
  stop: {{envSteps: 1000}}
  tracking: {tracking}
"""


def coordinator(tmp_path: Path, tracking: str) -> CoordinatorConfig:
    experiment = load_text(EXPERIMENT.format(tracking=tracking))
    return resolve(experiment, local_placement(run_uid="1", run_folder=tmp_path)).coordinator


def test_a_tracker_whose_package_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked, untracked = (coordinator(tmp_path, each) for each in ("{wandb: {project: toys}}", "{}"))
    require_wandb(tracked)
    monkeypatch.setitem(sys.modules, "wandb", None)
    says = r"^tracking\.wandb: the package 'wandb' is not installed: pip install 'rlsrl\[wandb\]', or remove the field$"
    with pytest.raises(ConfigurationError, match=says):
        require_wandb(tracked)
    require_wandb(untracked)
