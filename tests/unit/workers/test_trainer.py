"""A trainer checks for a result before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.data.version import Version
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.testing.contexts import make_context
from rlsrl.testing.parameter_dbs import make_parameters
from rlsrl.workers.build.parameters import open_parameter_store
from rlsrl.workers.trainer import TrainerWorker

TEXT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: one}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  actors: {environments: 8}
  stop: {envSteps: 5000}
"""
RECORD = {"reason": "envSteps", "version": "1.3", "result": {"env_steps": 5000}}


def test_a_finished_run_is_not_trained(tmp_path: Path) -> None:
    config = resolve(load_text(TEXT), local_placement(run_uid="0f3a", run_folder=tmp_path)).trainer
    db = open_parameter_store(config.parameter_store)
    db.push(config.policy_name, make_parameters(Version(1, 3)))
    db.annotate(config.policy_name, Version(1, 3), {TERMINAL_KEY: RECORD})
    context = make_context("trainer", tmp_path / "ledger", attempt=2)
    trainer = TrainerWorker(context, build=lambda *_, **__: pytest.fail("the trainer trains"))
    trainer.configure(config)
    trainer.start()
    trainer.run()
    assert trainer.result == RECORD
    assert [str(info.version) for info in db.versions(config.policy_name)] == ["1.3"]
