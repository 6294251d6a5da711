"""A trainer checks for a result before it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import TrainerConfig
from rlsrl.data.slots import ProducerId
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.parameters.terminal import TERMINAL_KEY, WITHDRAWN_KEY, failure_of, withdrawn_failure
from rlsrl.runtime.ledger import TrainerLedger, read_pages
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.testing.parameter_dbs import make_parameters, make_state
from rlsrl.workers.build.parameters import open_parameter_store
from rlsrl.workers.trainer import TrainerWorker
from rlsrl.workers.training import Checkpoint, Ending

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


def test_a_trainer_that_was_killed_after_the_end_of_its_run_gives_its_store_up_later(tmp_path: Path) -> None:
    """Between the terminal record and the removal of the store."""
    replays = """
  algorithm: {dqn: {}}
  pacing: {trainStepsPerEnvStep: 1}
"""
    config = resolve(load_text(TEXT + replays), local_placement(run_uid="0f3a", run_folder=tmp_path)).trainer
    db = open_parameter_store(config.parameter_store)
    db.push(config.policy_name, make_parameters(Version(1, 3)))
    db.annotate(config.policy_name, Version(1, 3), {TERMINAL_KEY: RECORD})
    store = tmp_path / "replay" / "trainer-0.store"
    store.parent.mkdir()
    store.touch()
    with closing(make_context("trainer", tmp_path / "ledger").open_ledger_page()) as page:
        ledger = TrainerLedger(page)
        ledger.resume(None, keeps=True)
        ledger.take(ProducerId(0, 0), 0, 40, 40)
        ledger.trained(10)
    context = make_context("trainer", tmp_path / "ledger", attempt=2, incarnation=1)
    trainer = TrainerWorker(context, build=lambda *_, **__: pytest.fail("the trainer trains"))
    trainer.configure(config)
    assert not store.exists()
    (record,) = read_pages(tmp_path / "ledger")
    counted = {term: count for term, count in record.counters.items() if count}
    assert counted == {"trained": 10, "dropped.end_of_run": 30}
    assert record.ended


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


class Checkpoints:
    """A checkpoint writer with one text about a late version at each poll, which then ends the trainer."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)

    def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    @property
    def late(self) -> str:
        if (text := next(self._texts, None)) is None:
            raise Built
        return text


def test_a_late_version_is_reported_when_the_text_changes(tmp_path: Path) -> None:
    config = resolve(load_text(TEXT), local_placement(run_uid="0f3a", run_folder=tmp_path)).trainer
    session = RecordingSession()

    def nothing(*_: object, **__: object) -> list[Any]:
        return []

    def build(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(
            training=SimpleNamespace(start=nothing, wake=nothing),
            consumer=SimpleNamespace(receive=nothing, outstanding=()),
            experience=SimpleNamespace(receive=nothing),
            checkpoints=Checkpoints("", "1.9 is late", "1.9 is late", "", ""),
        )

    trainer = TrainerWorker(make_context("trainer", tmp_path / "ledger", join_session=session), build=build)
    trainer.configure(config)
    trainer.start()
    with pytest.raises(Built):
        trainer.run()
    assert session.reported("texts") == [{"late_version": "1.9 is late"}, {"late_version": ""}]


WITHDRAWN = "150 of the last 200"


def failed_run(folder: Path, *, is_retry: bool) -> tuple[TrainerConfig, ParameterDB]:
    """Return a run's config and its store with the version 1.3, with which it has failed if it is tried again."""
    config = resolve(load_text(TEXT), local_placement(run_uid="0f3a", run_folder=folder)).trainer
    db = open_parameter_store(config.parameter_store)
    db.push(config.policy_name, make_parameters(Version(1, 3)))
    if is_retry:
        db.annotate(config.policy_name, Version(1, 3), {TERMINAL_KEY: None, WITHDRAWN_KEY: WITHDRAWN})
    return config, db


def run_trainer(
    config: TrainerConfig,
    db: ParameterDB,
    folder: Path,
    *,
    resumes: Version,
    reason: str | None,
    has_stepped: bool,
    calls: list[Any] | None = None,
) -> Mapping[str, Any] | None:
    """Run a trainer that resumes from a version, and store its last version. Return the terminal record.

    ``reason``: the stop condition that ends training; None: a signal. ``calls`` gets what ends the trainer, in order.
    """
    called = [] if calls is None else calls
    version = Version(resumes.attempt + 1, resumes.step)
    numbers = ("env_steps", "train_steps", "return_mean", "train_seconds", "minibatches", "minibatches_skipped")
    final = Checkpoint(
        parameters=make_parameters(version),
        state=make_state(version),
        metadata=dict.fromkeys((*numbers, "length_mean", "episode_info", "non_finite_returns"), 0),
        is_permanent=True,
    )
    records: list[Mapping[str, Any] | None] = []

    def nothing(*_: object, **__: object) -> list[Any]:
        return []

    def checkpoint(*, is_permanent: bool) -> Checkpoint:
        assert is_permanent
        return final

    def store_last(last: Checkpoint, *, record: Mapping[str, Any] | None) -> None:
        db.push(config.policy_name, last.parameters, metadata=last.metadata)
        records.append(record)
        called.append("store_last")

    def give_up(*, run_ended: bool) -> None:
        called.append(("give_up", run_ended))

    def build(*_: Any, on_training_end: Callable[[], None], **__: Any) -> Any:
        on_training_end()
        ending = Ending(stop_reason=reason, is_last_permanent=True)
        steps = dict.fromkeys(("start", "wake", "stop", "join", "check"), nothing)
        return SimpleNamespace(
            training=SimpleNamespace(checkpoint=checkpoint, ending=ending, has_stepped=has_stepped, **steps),
            consumer=SimpleNamespace(receive=nothing, close=nothing, outstanding=()),
            experience=SimpleNamespace(
                receive=nothing, close=nothing, give_up=give_up, sync=lambda: called.append("sync")
            ),
            checkpoints=SimpleNamespace(
                start=nothing, close=nothing, check=nothing, num_unstored=0, store_last=store_last
            ),
            withdrawn_failure=withdrawn_failure(db, config.policy_name, resumes),
            ledger=SimpleNamespace(end=lambda: called.append("end")),
            gang=SimpleNamespace(rank=0, close=nothing),
            resources=ExitStack(),
        )

    trainer = TrainerWorker(make_context("trainer", folder, attempt=version.attempt), build=build)
    trainer.configure(config)
    trainer.start()
    trainer.run()
    (record,) = records
    return record


@pytest.mark.parametrize(("has_stepped", "is_retry"), [(False, True), (True, True), (False, False)])
def test_a_retry_that_trains_nothing_does_not_turn_a_failure_into_a_success(
    tmp_path: Path, has_stepped: bool, is_retry: bool
) -> None:
    config, db = failed_run(tmp_path, is_retry=is_retry)
    record = run_trainer(
        config, db, tmp_path / "ledger", resumes=Version(1, 3), reason="envSteps", has_stepped=has_stepped
    )
    assert record is not None
    fails = is_retry and not has_stepped
    assert record["reason"] == ("updatesSkipped" if fails else "envSteps")
    assert (failure_of(record) or "").startswith(f"{WITHDRAWN}. The retry trained no step" if fails else "")
    assert (failure_of(record) is not None) == fails


@pytest.mark.parametrize("reason", ["envSteps", None])
def test_what_a_later_life_could_train_is_given_up_after_the_last_version_is_durable(
    tmp_path: Path, reason: str | None
) -> None:
    config, db = failed_run(tmp_path, is_retry=False)
    calls: list[Any] = []
    run_trainer(config, db, tmp_path / "ledger", resumes=Version(1, 3), reason=reason, has_stepped=True, calls=calls)
    assert calls == ["store_last", ("give_up", reason is not None), "end", "sync"]


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_retry_that_is_killed_before_its_first_step_stays_a_failure(tmp_path: Path, has_stepped: bool) -> None:
    config, db = failed_run(tmp_path, is_retry=True)
    killed = run_trainer(config, db, tmp_path / "a", resumes=Version(1, 3), reason=None, has_stepped=has_stepped)
    assert killed is None
    record = run_trainer(config, db, tmp_path / "b", resumes=Version(2, 3), reason="envSteps", has_stepped=False)
    assert record is not None
    assert record["reason"] == ("envSteps" if has_stepped else "updatesSkipped")
    assert (failure_of(record) or "").startswith("" if has_stepped else f"{WITHDRAWN}. The retry trained no step")
