"""A trainer checks for a result before it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.data.version import Version
from rlsrl.parameters.terminal import TERMINAL_KEY, WITHDRAWN_KEY, failure_of
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


@pytest.mark.parametrize(("has_stepped", "withdrawn"), [(False, True), (True, True), (False, False)])
def test_a_retry_that_trains_nothing_does_not_turn_a_failure_into_a_success(
    tmp_path: Path, has_stepped: bool, withdrawn: bool
) -> None:
    config = resolve(load_text(TEXT), local_placement(run_uid="0f3a", run_folder=tmp_path)).trainer
    db = open_parameter_store(config.parameter_store)
    db.push(config.policy_name, make_parameters(Version(1, 3)))
    if withdrawn:
        db.annotate(config.policy_name, Version(1, 3), {TERMINAL_KEY: None, WITHDRAWN_KEY: "150 of the last 200"})
    numbers = ("env_steps", "train_steps", "return_mean", "train_seconds", "minibatches", "minibatches_skipped")
    metadata = dict.fromkeys((*numbers, "non_finite_returns"), 0)
    final = SimpleNamespace(parameters=make_parameters(Version(2, 3)), metadata=metadata)
    stored: list[dict[str, Any]] = []

    def nothing(*_: object, **__: object) -> list[Any]:
        return []

    def checkpoint(*, is_permanent: bool) -> Any:
        assert is_permanent
        return final

    def build(*_: Any, on_training_end: Callable[[], None], **__: Any) -> Any:
        on_training_end()
        training = {
            "stop_reason": "envSteps",
            "run_failure": None,
            "has_stepped": has_stepped,
            "is_last_permanent": True,
        }
        steps = dict.fromkeys(("start", "stop", "join", "check"), nothing)
        return SimpleNamespace(
            training=SimpleNamespace(checkpoint=checkpoint, **training, **steps),
            consumer=SimpleNamespace(receive=nothing, close=nothing, outstanding=()),
            buffer=SimpleNamespace(put=nothing, close=nothing),
            checkpoints=SimpleNamespace(
                start=nothing,
                close=nothing,
                check=nothing,
                num_unstored=0,
                store_last=lambda _, *, record: stored.append(record),
            ),
            ledger=SimpleNamespace(end=nothing),
            gang=SimpleNamespace(rank=0, close=nothing),
            resources=ExitStack(),
        )

    trainer = TrainerWorker(make_context("trainer", tmp_path / "ledger", attempt=2), build=build)
    trainer.configure(config)
    trainer.start()
    trainer.run()
    (record,) = stored
    fails = withdrawn and not has_stepped
    assert record["reason"] == ("updatesSkipped" if fails else "envSteps")
    assert (failure_of(record) or "").startswith("150 of the last 200. The retry trained no step" if fails else "")
    assert (failure_of(record) is not None) == fails
