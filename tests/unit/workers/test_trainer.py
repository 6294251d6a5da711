"""A trainer checks for a result before it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Built(Exception):
    """The trainer is far enough for the test."""


def test_the_end_of_training_is_no_request_to_exit(tmp_path: Path) -> None:
    """The last version may wait for room until the user asks the trainer to exit."""
    config = resolve(load_text(TEXT), local_placement(run_uid="0f3a", run_folder=tmp_path)).trainer
    asked: list[bool] = []

    def build(*_: Any, on_training_end: Callable[[], None], wait_for_exit: Callable[[float], bool]) -> Any:
        on_training_end()
        asked.append(wait_for_exit(0.0))
        trainer.exit()
        asked.extend(wait_for_exit(60.0) for _ in range(2))
        raise Built

    trainer = TrainerWorker(make_context("trainer", tmp_path / "ledger"), build=build)
    with pytest.raises(Built):
        trainer.configure(config)
    assert trainer.exiting
    assert asked == [False, True, True]
