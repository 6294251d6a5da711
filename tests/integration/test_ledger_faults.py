"""The ledger check detects a trainer that loses a slot silently, takes one twice or trains one twice.

The real actor and trainer run in two threads with the real stream between them. Only the buffer is faulty.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.buffers.fifo import FifoBuffer, LaneBatch
from rlsrl.data.slots import Slot
from rlsrl.local.session import read_ledger
from rlsrl.testing.contexts import make_context
from rlsrl.workers.actor import ActorWorker
from rlsrl.workers.trainer import TrainerWorker

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: faulty}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 32}}
  actors: {replicas: 1, environments: 4, rolloutLength: 16}
  trainers: {batchEnvironments: 8}
  stop: {STOP}
"""
DEADLINE_SECONDS = 60.0


class FaultyBuffer(FifoBuffer):
    """A buffer with one fault, at the third slot or batch."""

    fault: str

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self._num_slots = 0
        self._num_batches = 0
        self._repeated: LaneBatch | None = None

    def put(self, slots: Sequence[Slot], *, oldest_outstanding: int | None) -> None:
        accepted: list[Slot] = []
        for slot in slots:
            self._num_slots += 1
            if self._num_slots == 3 and self.fault == "silently lost":
                continue
            accepted += [slot] * (2 if self._num_slots == 3 and self.fault == "doubled" else 1)
        super().put(accepted, oldest_outstanding=oldest_outstanding)

    def sample(self, timeout: float) -> LaneBatch | None:
        if self._repeated is not None:
            batch, self._repeated = self._repeated, None
            return batch
        batch = super().sample(timeout)
        self._num_batches += batch is not None
        if self._num_batches == 3 and self.fault == "trained twice":
            self._num_batches += 1
            self._repeated = batch
        return batch


def run_workers(folder: Path, stop: str = "trainSteps: 6") -> None:
    """Train the experiment with its actor and trainer in this process, until both end cleanly."""
    placement = local_placement(run_uid=uuid.uuid4().hex[:12], run_folder=folder)
    resolved = resolve(load_text(EXPERIMENT.replace("STOP", stop).encode()), placement)
    ledger = folder / "ledger"
    actor = ActorWorker(make_context("actor", ledger))
    trainer = TrainerWorker(make_context("trainer", ledger))
    failures: list[BaseException] = []

    def run(worker: ActorWorker | TrainerWorker, config) -> None:
        try:
            worker.configure(config)
            worker.start()
            worker.run()
        except BaseException as failure:  # noqa: BLE001 - raised again in the test's thread
            failures.append(failure)

    threads = [
        threading.Thread(target=run, args=(actor, resolved.actor)),
        threading.Thread(target=run, args=(trainer, resolved.trainer)),
    ]
    for thread in threads:
        thread.start()
    threads[1].join(DEADLINE_SECONDS)
    actor.exit()
    threads[0].join(DEADLINE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    for failure in failures:
        raise failure
    assert trainer.done


def test_without_a_fault_the_ledger_balances(tmp_path: Path) -> None:
    run_workers(tmp_path)
    ledger = read_ledger(tmp_path / "ledger")
    assert ledger["balanced"], ledger
    assert ledger["trained"] > 0


@pytest.mark.parametrize("fault", ["silently lost", "doubled", "trained twice"])
def test_a_fault_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(FaultyBuffer, "fault", fault, raising=False)
    monkeypatch.setattr("rlsrl.workers.build.trainer.FifoBuffer", FaultyBuffer)
    # A run of six steps gathers for six steps and no more: it would wait for the lost slot.
    run_workers(tmp_path, "wallSeconds: 3" if fault == "silently lost" else "trainSteps: 6")
    ledger = read_ledger(tmp_path / "ledger")
    assert not ledger["balanced"], ledger
    assert "consumers were left holding" in ledger["problem"]
