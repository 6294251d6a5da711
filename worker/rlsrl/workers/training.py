"""The training thread of a trainer rank: the one busy thread of its process.

No other Python thread of the process is busy, on purpose. The training thread calls many small kernels; beside another
busy thread it would spend its time waiting for the interpreter lock. The main thread blocks in receives, the checkpoint
writer blocks on its queue. The helper of ``rlsrl.algorithms.spare_core`` runs compiled code, which needs no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlsrl.algorithms.learner import Learner, StepResult
from rlsrl.algorithms.schedules import Scheduled
from rlsrl.buffers.replay.ratio import Pace
from rlsrl.data.episodes import EndedEpisodes, info_scalars
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters, TrainerState
from rlsrl.parameters.terminal import UPDATES_SKIPPED
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.compiling import StepCompiler
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.experience import Experience, TrainingBatch
from rlsrl.workers.gang import Gang
from rlsrl.workers.progress import ENV_STEPS, Progress, SkipWindow, StopConditions
from rlsrl.workers.status import NO_MORE_SAMPLES

WAKE_SECONDS = 0.2
"""How long the thread waits for a batch before it checks whether it should stop."""
OTHER_RANKS = "other ranks"
"""The reason to wait of a rank that has a batch while another one has none, or is slower."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A version to be stored, with the state that resuming from it needs."""

    parameters: Parameters
    state: TrainerState
    metadata: Mapping[str, Any]
    is_permanent: bool = False
    """Whether the version is never removed; see ``rlsrl.workers.checkpoints.permanent_tag``."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When to report statistics, to store a version, and to store a permanent version."""

    report: FrequencyControl
    push: FrequencyControl
    tag: FrequencyControl


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings that may change while training runs."""

    stop_conditions: StopConditions
    cadence: Cadence
    learning_rate: Scheduled
    coefficients: Mapping[str, Scheduled]
    """Coefficients of the loss, by name."""
    pace: Pace | None = None
    """None where nothing is replayed."""
    store_request: str | None = None
    """A version is stored when this changes to another text."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How the thread trains."""

    learner: Learner
    compiler: StepCompiler
    settings: TrainingSettings
    """The learner already has them."""
    read_settings: Callable[[Mapping[str, Any]], TrainingSettings]
    """Reads live settings, the JSON values that ``TrainingThread.adopt`` receives."""


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where this attempt starts."""

    version: Version
    progress: Progress
    skip_window: SkipWindow = field(default_factory=SkipWindow)
    absent_ledgers: Sequence[Mapping[str, Any]] = ()
    """Ledgers, by rank, of ranks that an earlier attempt had and this one lacks. The weights contain what they
    trained, and a gang that grows again resumes these ledgers."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go."""

    publish: Callable[[Parameters], None]
    """Makes a version available to the actors."""
    store: Callable[[Checkpoint], None]
    """Makes a checkpoint durable."""
    metadata: Mapping[str, Any]
    """Metadata of every checkpoint."""
    on_end: Callable[[], None]
    """Called from the training thread when it ends."""


@dataclass(kw_only=True)
class Ending:
    """Why training has ended. The thread writes it; others read it after the thread's end."""

    stop_reason: str | None = None
    """The stop condition that ended training, ``UPDATES_SKIPPED``, or None."""
    run_failure: str | None = None
    """Why the run has failed, if ``stop_reason`` is ``UPDATES_SKIPPED``, else None."""
    is_last_permanent: bool = False
    """Whether a permanent version is due at the step that ended training."""


class TrainingThread:
    """Repeats until stopped: take a batch, make a step, publish the version, grant credits for the next batch.

    ``start`` starts the thread, ``stop`` ends it at the next step boundary on all ranks, ``check`` raises its failure.
    While rank 0 is paused, no rank takes a step. The thread waits for batches, until the buffer's ``put`` or ``close``
    wakes it, and for the other ranks, until all have arrived or one has died.
    """

    def __init__(
        self,
        *,
        learning: Learning,
        experience: Experience,
        start: StartingPoint,
        outputs: Outputs,
        context: WorkerContext,
        gang: Gang,
    ) -> None:
        self._learner = learning.learner
        self._compiler = learning.compiler
        self._settings = learning.settings
        self._read_settings = learning.read_settings
        self._new_settings: deque[Mapping[str, Any]] = deque(maxlen=1)
        """Live settings that rank 0 has not sent to all ranks yet."""
        self._experience = experience
        self._first_version = self._version = start.version
        self._progress = start.progress
        self._absent_ledgers = start.absent_ledgers
        self._outputs = outputs
        self._context = context
        self._gang = gang
        self._stopping = threading.Event()
        self._asks_for_pause: Callable[[], bool] = lambda: False
        self._is_paused = False
        self._attention = threading.Event()
        """Wakes the paused thread."""
        self._failure: BaseException | None = None
        self.ending = Ending()
        self._skip_window = start.skip_window
        self._needs_no_samples = False
        """Whether this rank has granted all that it can still train, as reported."""
        self._step_ended_at = 0.0
        self._unreported: dict[str, float] | None = None
        self._due_checkpoint: bool | None = None
        """Whether the checkpoint that is due is permanent; None while none is due."""
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    @property
    def has_stepped(self) -> bool:
        """Whether the thread has made a training step."""
        return self._version > self._first_version

    def start(self, *, is_paused: Callable[[], bool] = lambda: False) -> None:
        """Start the thread: publish the first version, grant the first credits and train.

        The thread asks ``is_paused`` at each step boundary. While rank 0's answer is True, no rank takes a step.
        """
        self._asks_for_pause = is_paused
        self._thread.start()

    def stop(self) -> None:
        """End training at the next step boundary. Return at once: ``join`` waits."""
        self._stopping.set()
        self._attention.set()

    @property
    def is_paused(self) -> bool:
        """Whether all ranks have agreed to pause, and take no steps."""
        return self._is_paused

    def wake(self) -> None:
        """Have a paused thread ask at once whether it still is to be paused."""
        self._attention.set()

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Use these live settings, JSON values, from a step boundary on. Only rank 0's count, for all ranks."""
        self._new_settings.append(settings)
        self._attention.set()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end.

        Raises:
            TimeoutError: a step took longer than ``timeout`` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the training thread is still in a step after {timeout} s")

    def check(self) -> None:
        """Raise an error if the thread failed, with the failure as its cause."""
        if self._failure is not None:
            raise RuntimeError("the training thread failed") from self._failure

    def checkpoint(self, *, is_permanent: bool = False) -> Checkpoint:
        """Return the state of training with every rank's ledger. A collective call of the gang; rank 0 stores it.

        Call it at a step boundary only: from the thread itself, or after its end.
        """
        answers = self._gang.agree(
            {"ledger": self._experience.ledger_snapshot(), "limiter": self._experience.state_dict()}
        )
        arrays, values = self._learner.state_dict()
        state = {
            "learner": values,
            "limiters": [answer["limiter"] for answer in answers],
            "progress": self._progress.state_dict(),
            "minibatches_taken": self._skip_window.taken,
            "ledgers": [*(answer["ledger"] for answer in answers), *self._absent_ledgers],
        }
        return Checkpoint(
            parameters=self._learner.parameters(self._version),
            state=TrainerState(version=self._version, arrays=arrays, values=state),
            metadata={**self._progress.metadata, **self._outputs.metadata},
            is_permanent=is_permanent,
        )

    def _run(self) -> None:
        try:
            self._learner.use_threads()
            self._outputs.publish(self._learner.parameters(self._version))
            self._step_ended_at = self._context.clock.monotonic()
            # If the process was killed between its last checkpoint and its terminal record, training is complete.
            self._look_ahead()
            self._take_store_request()
            self._train_until_stopped()
            self._report()
        except BaseException as failure:  # noqa: BLE001 - check() raises it in the thread that can act on it
            self._failure = failure
        finally:
            self._compiler.close()
            self._outputs.on_end()

    def _train_until_stopped(self) -> None:
        """Train until all ranks leave after the same step. At each boundary they agree what comes next."""
        batch: TrainingBatch | None = None
        while True:
            if self._is_paused:
                self._attention.wait(WAKE_SECONDS)
                self._attention.clear()
            else:
                self._grant_credits()
                if batch is None:
                    with self._context.waiting(self._experience.waits_for):
                        batch = self._experience.next_batch(timeout=WAKE_SECONDS)
            if batch is not None and self._compiler.blocks_training:
                self._compiler.wait(WAKE_SECONDS)
            is_blocked = self._compiler.blocks_training
            answers = self._agree(
                {
                    "batch": None if batch is None or is_blocked else self._experience.shared(batch),
                    "compiling": self._compiler.stage(),
                    "stop": self._stopping.is_set(),
                    "checkpoint": self._due_checkpoint,
                    "settings": self._new_settings.pop() if self._new_settings else None,
                    "pause": self._asks_for_pause(),
                }
            )
            if (settings := answers[0]["settings"]) is not None:
                self._apply_settings(self._read_settings(settings))
            if (is_permanent := answers[0]["checkpoint"]) is not None:
                self._due_checkpoint = None
                self._store(self.checkpoint(is_permanent=is_permanent))
            if any(answer["stop"] for answer in answers):
                break
            self._pause(answers[0]["pause"])
            if self._is_paused:
                continue
            self._compiler.follow([answer["compiling"] for answer in answers], self._gang, self._version)
            of_ranks = [answer["batch"] for answer in answers]
            if batch is not None and None not in of_ranks:
                self._learner.learn_statistics(batch.moments)
                if (completed := self._experience.completed(batch, of_ranks)) is not None:
                    self._train(completed)
                else:
                    self._experience.passed(batch)
                    self._count_passed(batch)
                batch = None
        if batch is not None:
            self._experience.abandon(batch)

    def _agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's values. A rank with a batch waits here for one without: then it does not work."""
        if self._gang.size == 1:
            return self._gang.agree(mine)
        with self._context.waiting(OTHER_RANKS):
            return self._gang.agree(mine)

    def _pause(self, pause: bool) -> None:
        """Pause or go on, on all ranks between the same two steps."""
        if pause == self._is_paused:
            return
        self._is_paused = pause
        self._step_ended_at = self._context.clock.monotonic()  # a pause is no training time
        self._context.log.info("training_paused" if pause else "training_resumed", step=self._version.step)

    def _apply_settings(self, settings: TrainingSettings) -> None:
        """Use new settings, on all ranks between the same two steps."""
        self._settings = settings
        self._learner.adopt(settings.learning_rate, settings.coefficients)
        self._experience.tune(settings.pace)
        self._context.log.info("tuned", step=self._version.step, **self._experience.figures())
        self._take_store_request()
        self._look_ahead()

    def _take_store_request(self) -> None:
        """Have a version stored at the next boundary if one is requested that no stored version has fulfilled."""
        request = self._settings.store_request
        if request is not None and request != self._progress.store_request:
            self._progress.store_request = request
            self._due_checkpoint = bool(self._due_checkpoint)

    def _store(self, checkpoint: Checkpoint) -> None:
        if self._gang.rank == 0:
            with self._context.waiting("store"):  # a healthy store takes the checkpoint at once
                self._outputs.store(checkpoint)

    def _grant_credits(self) -> None:
        if (needs_none := self._experience.grant(self._version)) != self._needs_no_samples:
            self._needs_no_samples = needs_none
            self._context.report_stats({NO_MORE_SAMPLES: float(needs_none)})

    def _train(self, batch: TrainingBatch) -> None:
        policy_lag = self._version.step - batch.oldest_version.step
        started = self._context.clock.monotonic()
        result = self._learner.step(batch.arrays, env_steps=batch.env_steps)
        updated = self._context.clock.monotonic()
        self._version = Version(self._version.attempt, self._version.step + 1)
        self._context.metrics.transitions_trained.inc(self._experience.trained(batch, result))
        publishing = self._context.clock.monotonic()
        self._outputs.publish(self._learner.parameters(self._version))
        copy_seconds = self._context.clock.monotonic() - publishing
        self._context.metrics.step_seconds.observe(updated - started)
        self._context.spent({"update": updated - started, "copy": copy_seconds})
        self._grant_credits()
        self._record_step(batch, result, policy_lag)

    def _record_step(self, batch: TrainingBatch, result: StepResult, policy_lag: int) -> None:
        """Add up all ranks' parts of the step, so that every rank has the same progress."""
        now = self._context.clock.monotonic()
        parts = self._count_gathered(batch, policy_lag=policy_lag, seconds=now - self._step_ended_at)
        self._step_ended_at = now
        self._progress.trained(seconds=parts[0]["seconds"], minibatches=len(result.taken), skipped=result.skipped)
        self._skip_window.add(result.taken)
        _show_step(self._context.metrics, result, policy_lag, most=self._experience.max_policy_lag)
        self._look_ahead()
        lag = float(max(part["policy_lag"] for part in parts))
        of_step = {f"train/{name}": value for name, value in result.metrics.items()}
        self._unreported = _scalars(self._progress, self._experience) | {"policy_lag": lag} | of_step
        if self._settings.cadence.report.check():
            self._report()
        push, tag = self._settings.cadence.push.check(), self._settings.cadence.tag.check()
        if self.ending.stop_reason is not None:
            self.ending.is_last_permanent = tag
        elif push or tag:
            self._due_checkpoint = tag

    def _count_passed(self, batch: TrainingBatch) -> None:
        """Count what came with a batch that no rank trains on. The learning curve shows it with the next step."""
        parts = self._count_gathered(batch)
        self._learner.count_env_steps(sum(part["env_steps"] for part in parts))
        self._look_ahead()
        if self._settings.cadence.report.check():
            self._report()
            self._context.report_stats(_scalars(self._progress, self._experience))

    def _count_gathered(self, batch: TrainingBatch, **values: float) -> list[dict[str, Any]]:
        """Count all ranks' env steps and episodes. Return the ranks' answers, with these values in them."""
        parts = self._agree({"env_steps": batch.env_steps, "episodes": vars(batch.episodes), **values})
        self._progress.gathered(
            EndedEpisodes.joined([EndedEpisodes(**part["episodes"]) for part in parts]),
            env_steps=sum(part["env_steps"] for part in parts),
        )
        _show_episodes(self._context.metrics, batch.episodes, self._progress)
        return parts

    def _look_ahead(self) -> None:
        """Set how many lanes may still be granted, and end training if a stop condition holds."""
        stop, experience = self._settings.stop_conditions, self._experience
        experience.expect(self._progress, stop)
        self.ending.stop_reason = self._progress.stop_reason(stop)
        if self.ending.stop_reason == ENV_STEPS:  # on all ranks, since their progress is the same
            answers = self._agree({"behind": experience.is_behind})
            if all(answer["behind"] for answer in answers):  # what was gathered is still to be trained
                self.ending.stop_reason = self._progress.stop_reason(replace(stop, env_steps=None))
        self.ending.run_failure = self._skip_window.failure(at_end=self.ending.stop_reason is not None)
        if self.ending.run_failure is not None:
            self.ending.stop_reason = UPDATES_SKIPPED
        if self.ending.stop_reason is not None:
            self._stopping.set()

    def _report(self) -> None:
        """Report the last step's scalars, unless they were reported already."""
        scalars, self._unreported = self._unreported, None
        if scalars is None:
            return
        self._context.report_version(self._version)
        self._context.report_stats(scalars)
        if self._gang.rank == 0:
            self._context.join_session.record(self._version.step, scalars)


def _show_step(metrics: Metrics, result: StepResult, policy_lag: int, *, most: int | None) -> None:
    """Count this rank's part of a step. ``most``: the largest allowed policy lag; None: any."""
    metrics.train_steps.inc()
    metrics.minibatches.labels(outcome="taken").inc(len(result.taken) - result.skipped)
    metrics.minibatches.labels(outcome="skipped").inc(result.skipped)
    metrics.policy_lag.observe(policy_lag)
    metrics.policy_lag_exceeded.inc(most is not None and policy_lag > most)


def _show_episodes(metrics: Metrics, episodes: EndedEpisodes, progress: Progress) -> None:
    """Count this rank's episodes, and show the means over all ranks'."""
    metrics.episodes.inc(len(episodes.returns))
    for key, values in episodes.info.items():
        metrics.episode_info.labels(key=key).inc(len(values))
    if (mean := progress.return_mean) is not None:
        metrics.return_mean.set(mean)
    if (mean := progress.length_mean) is not None:
        metrics.episode_length_mean.set(mean)
    for key, statistics in progress.episode_info.items():
        if (mean := statistics["mean"]) is not None:
            metrics.episode_info_mean.labels(key=key).set(mean)


def _scalars(progress: Progress, experience: Experience) -> dict[str, float]:
    """Return what a row of the learning curve says of the whole run."""
    scalars = {
        **experience.figures(),
        "env_steps": float(progress.env_steps),
        "train_steps": float(progress.train_steps),
        "episodes": float(progress.num_episodes),
        **info_scalars(progress.episode_info),
        "train_seconds": progress.train_seconds,
        "env_steps_per_second": progress.env_steps / max(progress.train_seconds, 1e-9),
        "minibatches_skipped": float(progress.minibatches_skipped),
        "non_finite_returns": float(progress.non_finite_returns),
    }
    means = {"return_mean": progress.return_mean, "length_mean": progress.length_mean}
    return scalars | {name: mean for name, mean in means.items() if mean is not None}
