"""An actor waits for weights before it fills a slot."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from rlsrl.data.slots import Slot
from rlsrl.data.version import Version
from rlsrl.envs.faults import EnvironmentFaults, NonFiniteValue
from rlsrl.parameters.broadcast import SourceTimeout
from rlsrl.parameters.protocols import Parameters
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.testing.parameter_dbs import make_parameters
from rlsrl.workers.actor import ActorWorker
from rlsrl.workers.build.actor import LocalPolicy
from rlsrl.workers.env_groups import LockstepEnvGroup


class Stage:
    """The surroundings of an actor: one slot that asks for newer weights, and weights that the test provides."""

    def __init__(self, folder: Path, asked: Version) -> None:
        self.newest: Parameters | None = None
        self.acted_with: list[Version] = []
        self.posted: list[Slot] = []
        self.discarded: list[tuple[str, int]] = []
        self.num_touches = 0
        slot = Slot(arrays={"mask": np.ones((2, 1), np.bool_)}, min_version=asked, credit=0, handle=0)
        loaded: list[Version] = []
        self.parts: Any = SimpleNamespace(
            groups=(
                LockstepEnvGroup(
                    cast("Any", SimpleNamespace(begin=lambda arrays: None, step=lambda arrays, step, action: None)),
                    cast(
                        "Any",
                        SimpleNamespace(
                            begin=lambda slot: None,
                            act=lambda step: self.acted_with.append(loaded[-1]) or np.zeros(1),
                            finish=lambda: None,
                        ),
                    ),
                    num_steps=2,
                ),
            ),
            producer=SimpleNamespace(acquire=lambda timeout: slot, touch=self._touch, post=self.posted.append),
            policy=LocalPolicy(
                source=cast("Any", SimpleNamespace(get=self._get, wait=self._wait)),
                load=lambda parameters: loaded.append(parameters.version),
            ),
            ledger=SimpleNamespace(end=lambda: None, discarded=lambda *count: self.discarded.append(count)),
            faults=EnvironmentFaults(),
            resources=ExitStack(),
        )
        self.context = make_context("actor", folder)

    def _touch(self) -> None:
        self.num_touches += 1

    def _get(self, *, newer_than: Version) -> Parameters | None:
        return self.newest if self.newest is not None and self.newest.version > newer_than else None

    def _wait(self, min_version: Version, timeout: float) -> Parameters:
        raise SourceTimeout(f"nothing as new as {min_version} came in {timeout} s")


def test_a_slot_is_filled_with_weights_of_at_least_its_minimum_version(tmp_path: Path) -> None:
    stage = Stage(tmp_path, asked=Version(1, 2))
    worker: Any = ActorWorker(stage.context, build=lambda config, context, *, still_wanted: stage.parts)
    worker.configure(None)
    for step in (1, 1, 2):
        assert (stage.acted_with, stage.posted) == ([], [])
        stage.newest = make_parameters(Version(1, step))
        worker._poll()
    assert stage.acted_with == [Version(1, 2)] * 2
    assert [slot.num_transitions for slot in stage.posted] == [2]
    (work,) = cast("RecordingSession", stage.context.join_session).work
    assert work.keys() == {"environment", "inference", "copy"}
    assert stage.num_touches >= 2, "it held on to its credit while it waited"


def test_what_faults_keep_out_of_slots_is_in_the_ledger_before_a_slot_and_at_the_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path, asked=Version(1, 0))
    worker: Any = ActorWorker(stage.context, build=lambda config, context, *, still_wanted: stage.parts)
    worker.configure(None)
    stage.newest = make_parameters(Version(1, 1))
    for step, seen in ((7, 1), (0, 1), (8, 2)):
        stage.parts.faults.non_finite(NonFiniteValue(rank=0, step=step, key="reward", value=float("nan")))
        worker._poll()
        assert stage.discarded == [("non_finite", 1)] * seen, "a reset is no transition"
    stage.parts.faults.non_finite(NonFiniteValue(rank=0, step=9, key="reward", value=float("nan")))
    worker._shutdown()
    assert len(stage.discarded) == 3
