"""The training thread of a trainer rank: the one busy thread of its process.

Its process has no other busy Python thread on purpose: beside one, a thread that calls many small kernels spends its
time waiting for the interpreter lock. The main thread blocks in receives, the checkpoint writer blocks on its queue.
What the Learner may have done on an idle core (``rlsrl.algorithms.spare_core``) is compiled, and needs no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsrl.algorithms.learner import Learner, StepResult
from rlsrl.algorithms.schedules import Scheduled
from rlsrl.buffers.fifo import Discard, FifoBuffer, LaneBatch
from rlsrl.buffers.limiter import RateLimiter
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters, TrainerState
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.workers.compiling import StepCompiler
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.gang import Gang
from rlsrl.workers.progress import Progress, StopConditions, episode_returns

WAKE_SECONDS = 0.2
"""How long the thread waits for a batch before it looks whether it should stop."""


class TrainingLedger(Protocol):
    """What the training thread writes of the ledger."""

    def trained(self, num_transitions: int) -> None:
        """Transitions left the buffer and were trained."""

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Transitions left the buffer untrained."""

    def snapshot(self) -> dict[str, Any]:
        """JSON values to resume from."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A version with what resuming from it needs, to be stored."""

    parameters: Parameters
    state: TrainerState
    metadata: Mapping[str, Any]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When to report, to store and to store for good."""

    report: FrequencyControl
    push: FrequencyControl
    tag: FrequencyControl


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What of training may change while it goes on."""

    stop_conditions: StopConditions
    cadence: Cadence
    learning_rate: Scheduled
    coefficients: Mapping[str, Scheduled]
    """Of the loss, by name."""


class TrainingThread:
    """Takes a batch, makes a step, publishes the version, hands out credits for the next: until told to stop.

    ``start`` begins, ``stop`` ends it at the next step boundary, on all ranks; ``check`` raises what it died of. It
    waits for batches, woken by the buffer's ``put`` and ``close``, and for the other ranks, woken by them or by the
    end of one. ``on_end`` is called from the thread when it ends by itself.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        compiler: StepCompiler,
        buffer: FifoBuffer,
        limiter: RateLimiter,
        batch_lanes: int,
        max_policy_lag: int,
        version: Version,
        progress: Progress,
        tuning: Tuning,
        tuned: Callable[[Mapping[str, Any]], Tuning],
        ledger: TrainingLedger,
        absent_ledgers: Sequence[Mapping[str, Any]],
        context: WorkerContext,
        gang: Gang,
        metadata: Mapping[str, Any],
        grant: Callable[[int, Version], None],
        publish: Callable[[Parameters], None],
        store: Callable[[Checkpoint], None],
        on_end: Callable[[], None],
    ) -> None:
        """``tuned`` reads live settings, as ``adopt`` gets them; the learner begins with those of ``tuning``.

        ``absent_ledgers`` are those of ranks that the gang had and has not now, by rank: what they trained is in the
        weights, and a gang that grows again goes on from there.
        """
        self._learner = learner
        self._compiler = compiler
        self._buffer = buffer
        self._limiter = limiter
        self._batch_lanes = batch_lanes
        self._max_policy_lag = max_policy_lag
        self._version = version
        self._progress = progress
        self._tuning = tuning
        self._tuned = tuned
        self._settings: deque[Mapping[str, Any]] = deque(maxlen=1)
        """Live settings that rank 0 has not put before all yet."""
        self._ledger = ledger
        self._absent_ledgers = absent_ledgers
        self._context = context
        self._gang = gang
        self._metadata = metadata
        self._grant = grant
        self._publish = publish
        self._store = store
        self._on_end = on_end
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._stop_reason: str | None = None
        self._boundary = 0.0
        self._unreported: dict[str, float] | None = None
        self._due: tuple[str, ...] | None = None
        """Tags of a checkpoint that is due; None when none is."""
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    @property
    def version(self) -> Version:
        """The newest version made."""
        return self._version

    @property
    def stop_reason(self) -> str | None:
        """The stop condition that ended training, None if none did."""
        return self._stop_reason

    def start(self) -> None:
        """Publish the version to begin with, hand out the first credits and train."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next step boundary. Does not wait: ``join`` does."""
        self._stopping.set()

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Go on with these live settings, JSON values, from a step boundary on. Rank 0's count, for all ranks."""
        self._settings.append(settings)

    def join(self, timeout: float) -> None:
        """Wait for the end.

        Raises:
            TimeoutError: a step took longer than ``timeout`` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the training thread is still in a step after {timeout} s")

    def check(self) -> None:
        """Raise what the thread died of, with its cause."""
        if self._failure is not None:
            raise RuntimeError("the training thread failed") from self._failure

    def checkpoint(self, *tags: str) -> Checkpoint:
        """Training as it stands, with every rank's ledger: a collective call of the gang, for rank 0 to store.

        Only at a step boundary: from the thread itself, or when it has ended.
        """
        ledgers = [said["ledger"] for said in self._gang.agree({"ledger": self._ledger.snapshot()})]
        arrays, values = self._learner.state_dict()
        state = {
            "learner": values,
            "limiter": self._limiter.state_dict(),
            "progress": self._progress.state_dict(),
            "ledgers": [*ledgers, *self._absent_ledgers],
        }
        return Checkpoint(
            parameters=self._learner.parameters(self._version),
            state=TrainerState(version=self._version, arrays=arrays, values=state),
            metadata={
                "env_steps": self._progress.env_steps,
                "train_steps": self._progress.train_steps,
                "return_mean": self._progress.return_mean,
                "train_seconds": round(self._progress.train_seconds, 3),
                **self._metadata,
            },
            tags=tags,
        )

    def _run(self) -> None:
        try:
            self._publish(self._learner.parameters(self._version))
            self._boundary = self._context.clock.monotonic()
            # A life that was killed between its last checkpoint and its terminal record left nothing to train.
            self._judge_progress()
            self._train_until_stopped()
            self._report()
        except BaseException as failure:  # noqa: BLE001 - raised again by check(), in the thread that can act on it
            self._failure = failure
        finally:
            self._compiler.close()
            self._on_end()

    def _train_until_stopped(self) -> None:
        """All ranks leave after the same step: at each boundary they agree whether to go on, and with what."""
        batch: LaneBatch | None = None
        while True:
            self._hand_out_credits()
            batch = batch or self._next_batch()
            if batch is not None and self._compiler.holds_training:
                self._compiler.wait(WAKE_SECONDS)
            wishes = self._gang.agree(
                {
                    "ready": batch is not None and not self._compiler.holds_training,
                    "compiling": self._compiler.stage(),
                    "stop": self._stopping.is_set(),
                    "checkpoint": self._due,
                    "settings": self._settings.pop() if self._settings else None,
                }
            )
            if (settings := wishes[0]["settings"]) is not None:
                self._tune(self._tuned(settings))
            if (tags := wishes[0]["checkpoint"]) is not None:
                self._due = None
                self._keep(self.checkpoint(*tags))
            if any(wish["stop"] for wish in wishes):
                break
            self._compiler.follow([wish["compiling"] for wish in wishes], self._gang, self._version)
            if batch is not None and all(wish["ready"] for wish in wishes):
                self._train(batch)
                batch = None
        if batch is not None:
            self._ledger.dropped("end_of_run", batch.num_transitions)

    def _tune(self, tuning: Tuning) -> None:
        """On all ranks at once, between two steps."""
        self._tuning = tuning
        self._learner.adopt(tuning.learning_rate, tuning.coefficients)
        self._context.log.info("tuned", step=self._version.step)
        self._judge_progress()

    def _keep(self, checkpoint: Checkpoint) -> None:
        if self._gang.rank == 0:
            self._store(checkpoint)

    def _hand_out_credits(self) -> None:
        for discard in self._buffer.discard_stale(self._version):
            self._ledger.dropped(discard.reason, discard.num_transitions)
            self._limiter.discarded(discard.num_lanes)
        if lanes := self._limiter.take():
            self._grant(lanes, self._version)

    def _next_batch(self) -> LaneBatch | None:
        with self._context.waiting("batch"):
            return self._buffer.sample(timeout=WAKE_SECONDS)

    def _train(self, batch: LaneBatch) -> None:
        policy_lag = self._version.step - batch.oldest_version.step
        began = self._context.clock.monotonic()
        result = self._learner.step(batch.arrays)
        updated = self._context.clock.monotonic()
        self._version = Version(self._version.attempt, self._version.step + 1)
        self._ledger.trained(batch.num_transitions)
        self._limiter.sampled(self._batch_lanes)
        publishing = self._context.clock.monotonic()
        self._publish(self._learner.parameters(self._version))
        copying = self._context.clock.monotonic() - publishing
        self._context.metrics.step_seconds.observe(updated - began)
        self._context.spent({"update": updated - began, "copy": copying})
        self._hand_out_credits()
        self._account(batch, result, policy_lag)

    def _account(self, batch: LaneBatch, result: StepResult, policy_lag: int) -> None:
        """Count the step, all ranks' parts of it, so that every rank knows the same progress."""
        now = self._context.clock.monotonic()
        returns = episode_returns(batch.arrays)
        mine = {
            "transitions": batch.num_transitions,
            "returns": returns,
            "policy_lag": policy_lag,
            "seconds": now - self._boundary,
        }
        self._boundary = now
        parts = self._gang.agree(mine)
        self._progress.add(
            returns=[each for part in parts for each in part["returns"]],
            num_transitions=sum(part["transitions"] for part in parts),
            seconds=parts[0]["seconds"],
        )
        self._count(batch, policy_lag, num_episodes=len(returns))
        self._judge_progress()
        self._unreported = self._scalars(result, max(part["policy_lag"] for part in parts))
        cadence = self._tuning.cadence
        if cadence.report.check():
            self._report()
        push, tag = cadence.push.check(), cadence.tag.check()
        if (push or tag) and self._stop_reason is None:
            self._due = (f"step-{self._version.step}",) if tag else ()

    def _judge_progress(self) -> None:
        self._stop_reason = self._progress.stop_reason(self._tuning.stop_conditions)
        if self._stop_reason is not None:
            self._stopping.set()

    def _count(self, batch: LaneBatch, policy_lag: int, *, num_episodes: int) -> None:
        metrics = self._context.metrics
        metrics.train_steps.inc()
        metrics.transitions_trained.inc(batch.num_transitions)
        metrics.episodes.inc(num_episodes)
        metrics.policy_lag.observe(policy_lag)
        metrics.policy_lag_exceeded.inc(policy_lag > self._max_policy_lag)
        if self._progress.return_mean is not None:
            metrics.return_mean.set(self._progress.return_mean)

    def _report(self) -> None:
        """Say how the last step went, unless that is known already."""
        scalars, self._unreported = self._unreported, None
        if scalars is None:
            return
        self._context.report_version(self._version)
        self._context.report_stats(scalars)
        if self._gang.rank == 0:
            self._context.join_session.record(self._version.step, scalars)

    def _scalars(self, result: StepResult, policy_lag: int) -> dict[str, float]:
        progress = self._progress
        scalars = {
            "env_steps": float(progress.env_steps),
            "train_steps": float(progress.train_steps),
            "episodes": float(progress.num_episodes),
            "train_seconds": progress.train_seconds,
            "env_steps_per_second": progress.env_steps / max(progress.train_seconds, 1e-9),
            "policy_lag": float(policy_lag),
            **{f"train/{name}": value for name, value in result.metrics.items()},
        }
        if progress.return_mean is not None:
            scalars["return_mean"] = progress.return_mean
        return scalars


def count_discards(ledger: TrainingLedger, discards: list[Discard]) -> None:
    """Write down what was never trained, by its reason."""
    for discard in discards:
        ledger.dropped(discard.reason, discard.num_transitions)
