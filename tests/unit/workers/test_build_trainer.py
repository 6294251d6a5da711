"""Settings on which all ranks must agree before training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlsrl.data.version import Version
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import TrainerState
from rlsrl.runtime.errors import ConfigurationError, RunDamaged
from rlsrl.runtime.ledger import PageRecord
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.testing.parameter_dbs import POLICY, make_parameters, make_state
from rlsrl.workers.build import trainer
from rlsrl.workers.gang import SoloGang


class Met(SoloGang):
    """A gang whose other rank trains on the CPU."""

    def __init__(self, *, timeout_seconds: float, on_gpus: bool) -> None:
        self.asked = (timeout_seconds, on_gpus)

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(mine), {"device": "cpu"}]


def test_ranks_train_on_devices_of_one_kind() -> None:
    config: Any = SimpleNamespace(num_trainers=2, device="auto")
    gang = trainer.gang_of(config, torch.device("cpu"), join_ranks=Met)
    assert isinstance(gang, Met)
    assert gang.asked == (trainer.GANG_SECONDS, False)
    with pytest.raises(ConfigurationError, match=r"trainers\.device is auto.* cuda, cpu; allowed: one kind of device"):
        trainer.gang_of(config, torch.device("cuda", 0), join_ranks=Met)


class OneStarting(SoloGang):
    """A gang whose other rank starts with the parameters of this digest."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(mine), {"learner": self.digest}]


def test_ranks_start_with_the_same_parameters() -> None:
    learner: Any = SimpleNamespace(digest=lambda: "one")
    trainer.check_equal(learner, OneStarting("one"))
    with pytest.raises(ConfigurationError, match="start with different parameters"):
        trainer.check_equal(learner, OneStarting("other"))


def test_a_trainer_does_not_begin_again_if_no_version_is_intact(tmp_path: Path) -> None:
    db = FilesystemParameterDB(tmp_path)
    assert trainer.state_to_resume(db, POLICY, has_trained=False, attempt=1) == (None, None)
    for step in (1, 20):
        db.push(POLICY, make_parameters(Version(1, step)), state=make_state(Version(1, step)))
    state, rollback = trainer.state_to_resume(db, POLICY, has_trained=True, attempt=2)
    assert state is not None
    assert (state.version, rollback) == (Version(1, 20), None)
    older, newest = sorted(tmp_path.glob("*/versions/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    state, rollback = trainer.state_to_resume(db, POLICY, has_trained=True, attempt=2)
    assert state is not None
    assert rollback is not None
    assert state.version == Version(1, 1)
    assert (rollback.attempt, rollback.version, rollback.newest, rollback.lost_steps) == (2, "1.1", "1.20", 19)
    assert newest.name in rollback.reason
    older.write_bytes(b"")
    with pytest.raises(RunDamaged, match=f"no stored version is intact with its state: .*{newest.name}.*retry --fresh"):
        trainer.state_to_resume(db, POLICY, has_trained=False, attempt=2)
    for path in tmp_path.glob("*/*/*.safetensors"):
        path.unlink()
    with pytest.raises(RunDamaged, match="no stored version is intact"):
        trainer.state_to_resume(db, POLICY, has_trained=True, attempt=2)


@pytest.mark.parametrize(("is_retry", "expected"), [(False, [True, False]), (True, [])])
def test_a_retry_judges_minibatches_anew(tmp_path: Path, is_retry: bool, expected: list[bool]) -> None:
    progress = {"env_steps": 40, "train_steps": 5, "num_episodes": 0, "train_seconds": 1.0, "returns": []}
    saved: dict[str, Any] = {"progress": progress, "ledgers": ["of rank 0", "of rank 1"]}
    state = TrainerState(version=Version(1, 5), arrays={}, values={**saved, "minibatches_taken": [True, False]})
    config: Any = SimpleNamespace(stop=SimpleNamespace(episodes=2))
    context = make_context("trainer", tmp_path, attempt=2)
    start = trainer.starting_point(config, context, state, num_ranks=1, is_retry=is_retry)
    assert (start.version, start.progress.env_steps, start.skip_window.taken) == (Version(2, 5), 40, expected)
    assert start.absent_ledgers == ["of rank 1"]
    older = TrainerState(version=Version(1, 5), arrays={}, values=saved)
    assert trainer.starting_point(config, context, older, num_ranks=2, is_retry=False).skip_window.taken == []


@pytest.mark.parametrize("trained", [0, 7])
def test_the_ledger_knows_whether_a_trainer_has_trained(tmp_path: Path, trained: int) -> None:
    session = RecordingSession()
    context = make_context("trainer", tmp_path, join_session=session)
    assert not trainer.has_trained(context)
    session.ledger_copy = PageRecord(role="trainer", index=0).count(trained=trained).encode()
    assert trainer.has_trained(context) == bool(trained)
