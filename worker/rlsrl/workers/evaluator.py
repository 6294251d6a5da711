"""The evaluator: plays stored versions beside training, independent of it.

One poll takes one step of all environments in its one thread, so the worker obeys a command within a step. Without a
version to play it checks the parameter DB periodically; ``exit`` and ``pause`` wake it. Once the run has its terminal
record and the last version is evaluated, it exits.

With ``video`` it records some of the versions after their results. A poll then records one frame.

An evaluator with ``parameters`` plays that one version instead. It writes nothing to the store: its results are on the
learning curve, under names of their own.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from typing_extensions import override

from rlsrl.api.resolved import EvaluatorConfig, ParameterStoreConfig
from rlsrl.data.episodes import info_scalars
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.unreachable import WaitAbandoned
from rlsrl.envs.vector import VectorEnv
from rlsrl.parameters.evaluations import EVALUATION_KEY, FIXED_EVALUATION, tag_best
from rlsrl.parameters.protocols import Corrupt, ParameterDB, Parameters, VersionInfo, VersionNotFound
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.policies.exported import LayoutMismatch
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed, EnvironmentFault
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.evaluator import EvaluationPlan, begin_evaluation, evaluator_plan
from rlsrl.workers.build.parameters import open_parameter_store
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.evaluation import Evaluation, EvaluationResult, EvaluationUnfinished
from rlsrl.workers.evaluation_choice import EvaluationInterval, Share, choose
from rlsrl.workers.fixed_version import FixedVersionReader
from rlsrl.workers.server_waits import ServerWaitReport
from rlsrl.workers.status import FAILED_EVALUATIONS
from rlsrl.workers.version_videos import VersionVideos

CHECK_SECONDS = 0.5
"""Seconds between two checks for a version to play, or for the end of the run."""

NOTHING = PollResult()

EvaluationOutcome = Literal["stored", "played", "unfinished", "pruned", "corrupt", "failed"]
"""The outcome of an evaluation. stored: the result is stored with the version; played: it is the result of
``evaluators.parameters``, which is not stored; unfinished: some episodes did not end, and the result is that of the
others; pruned: the version is gone; corrupt: the version is damaged; failed: the store failed to read or to write."""


_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True)
class EvaluatorParts:
    """The parts of an evaluator."""

    db: ParameterDB
    policy_name: str
    plan: EvaluationPlan
    reports: EpisodeReports
    share: Share
    interval: EvaluationInterval
    fixed: FixedVersionReader | None
    """Reads the one version to play; None: the versions of the run as training stores them."""
    videos: VersionVideos | None
    """Records versions; None: no version is recorded."""


@dataclass(frozen=True, kw_only=True)
class _Playing:
    """The version that is being played."""

    info: VersionInfo
    parameters: Parameters
    envs: VectorEnv
    evaluation: Evaluation
    began: float


class EvaluatorWorker(Worker[EvaluatorConfig]):
    """Evaluates the versions of its share until the run is over."""

    def __init__(
        self, context: WorkerContext, *, open_db: Callable[[ParameterStoreConfig], ParameterDB] = open_parameter_store
    ) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._open_db = open_db
        self._parts: EvaluatorParts | None = None
        self._playing: _Playing | None = None
        self._last: VersionInfo | None = None
        self._logged_failure = ""
        """The store's last error, until an evaluation begins."""
        self._done = False
        self._statistics: dict[str, float] = {}
        self._num_failed = 0
        """The newest consecutive evaluations that the store failed to read or to write."""
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    @override
    def done(self) -> bool:
        """Whether the run has ended and every version of this evaluator's share that counts is played."""
        return self._done

    @override
    def pause(self) -> None:
        """Make ``run`` wait after the present step."""
        super().pause()
        self._wake.put(None)

    @override
    def exit(self) -> None:
        """Make ``run`` return after the present step. An unfinished evaluation or video is lost."""
        super().exit()
        self._wake.put(None)

    @override
    def _configure(self, config: EvaluatorConfig) -> None:
        db, plan = self._open_db(config.parameter_store), evaluator_plan(config, self._context.index)
        is_fixed, videos = config.parameters is not None, config.video
        self._parts = EvaluatorParts(
            db=db,
            policy_name=config.policy_name,
            plan=plan,
            reports=EpisodeReports(config.environment.episode_info, log=self._context.log),
            share=Share(index=self._context.index, num_evaluators=config.num_evaluators),
            interval=EvaluationInterval(every_seconds=config.every_seconds, every_versions=config.every_versions),
            fixed=None if config.parameters is None else FixedVersionReader(config.parameters, db, config.policy_name),
            videos=None if videos is None else VersionVideos(videos, plan, self._context, is_fixed=is_fixed),
        )

    @override
    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "configured before it polls"
        self._context.join_session.check()
        if parts.videos is not None and parts.videos.is_recording:
            parts.videos.step()
            return NOTHING
        try:
            if self._playing is None:
                self._begin_next(parts)
            return NOTHING if self._playing is None else self._step(parts, self._playing)
        except WaitAbandoned:
            return NOTHING  # it exits: no poll follows

    @override
    def _rest(self) -> bool:
        self._context.join_session.check()
        return super()._rest()

    def _begin_next(self, parts: EvaluatorParts) -> None:
        """Begin to play the version that is due. Without one, wait briefly, or exit if the run has ended."""
        versions = self._tried(lambda: parts.db.versions(parts.policy_name))
        if versions is not None and self._begin_due(parts, versions):
            return
        if versions and versions[-1].metadata.get(TERMINAL_KEY) is not None:
            self._done = True
            self.exit()
        else:
            with self._context.waiting("version"), contextlib.suppress(queue.Empty):
                self._wake.get(timeout=CHECK_SECONDS)

    def _begin_due(self, parts: EvaluatorParts, versions: Sequence[VersionInfo]) -> bool:
        """Begin to play the version that is due. Return whether there was one, although it may be gone."""
        if parts.fixed is not None:
            return self._begin_fixed(parts, parts.fixed, versions)
        info = choose(versions, share=parts.share, interval=parts.interval, last=self._last)
        if info is not None:
            self._begin(parts, info)
        return info is not None

    def _begin_fixed(self, parts: EvaluatorParts, fixed: FixedVersionReader, versions: Sequence[VersionInfo]) -> bool:
        """Begin to play the version of ``evaluators.parameters``, unless it was played or the store fails."""
        played = None if self._last is None else self._last.version
        found = self._tried(lambda: fixed.read(versions, played))
        if found is None:
            return False
        self._last, parameters = found
        try:
            self._play(parts, self._last, parameters, began=self._clock.monotonic())
        except LayoutMismatch as error:
            raise fixed.error(error) from error
        return True

    def _tried(self, read: Callable[[], _Read]) -> _Read | None:
        """Return what ``read`` returns, or None while the store fails. Log a failure once."""
        try:
            return read()
        except ConfigurationError:
            raise
        except OSError as error:
            if str(error) != self._logged_failure:
                self._context.log.warning("store_unreachable", error=str(error))
            self._logged_failure = str(error)
            return None

    def _begin(self, parts: EvaluatorParts, info: VersionInfo) -> None:
        self._last = info
        began = self._clock.monotonic()
        try:
            parameters = parts.db.get(parts.policy_name, info.version)
        except (VersionNotFound, Corrupt) as error:
            self._count("pruned" if isinstance(error, VersionNotFound) else "corrupt", info, error=str(error))
            return
        except OSError as error:
            self._count("failed", info, error=str(error))
            return
        assert parameters is not None, "None only where newer_than is given"
        self._play(parts, info, parameters, began=began)

    def _play(self, parts: EvaluatorParts, info: VersionInfo, parameters: Parameters, *, began: float) -> None:
        context = self._context
        envs, evaluation = begin_evaluation(
            parts.plan,
            parameters,
            info.metadata,
            reports=parts.reports,
            log=context.log,
            board=context.call_board,
            still_wanted=lambda: not self.exiting,
            on_wait=ServerWaitReport(context),
        )
        self._logged_failure = ""
        self._playing = _Playing(info=info, parameters=parameters, envs=envs, evaluation=evaluation, began=began)
        self._context.report_version(info.version)

    def _step(self, parts: EvaluatorParts, playing: _Playing) -> PollResult:
        try:
            result = playing.evaluation.step()
        except (EvaluationUnfinished, EnvironmentFailed, EnvironmentFault) as error:
            self._end_play(playing)
            self._store(parts, playing.info, {"unfinished": str(error)}, "unfinished")
            if isinstance(error, EvaluationUnfinished):
                self._record_video(parts, playing)
            return PollResult(num_samples=playing.envs.num_envs, num_batches=1)
        if result is None:
            return PollResult(num_samples=playing.envs.num_envs)
        self._end_play(playing)
        self._record(parts, playing.info, result)
        self._record_video(parts, playing)
        return PollResult(num_samples=playing.envs.num_envs, num_batches=1)

    def _end_play(self, playing: _Playing) -> None:
        self._playing = None
        self._context.metrics.evaluation_seconds.observe(self._clock.monotonic() - playing.began)
        playing.envs.close()

    def _record(self, parts: EvaluatorParts, info: VersionInfo, result: EvaluationResult) -> None:
        """Record the result: on the learning curve, in metrics, and with the version if that still exists."""
        summary = {**result.to_json(), "greedy": parts.plan.greedy}
        self._context.join_session.record(info.version.step, _scalars(info, result, is_fixed=parts.fixed is not None))
        self._store(parts, info, summary, "unfinished" if result.unfinished else "stored")
        if result.unfinished:
            return
        self._statistics |= _statistics(info, result, is_fixed=parts.fixed is not None)
        if parts.fixed is None:
            self._set_metrics(result)
        self._context.report_stats(self._statistics)

    def _record_video(self, parts: EvaluatorParts, playing: _Playing) -> None:
        """Let the next polls record the version that was played, if a video is due."""
        if parts.videos is not None:
            parts.videos.begin(playing.info, playing.parameters)

    def _set_metrics(self, result: EvaluationResult) -> None:
        metrics = self._context.metrics
        metrics.evaluation_return_mean.set(result.return_mean)
        metrics.evaluation_length_mean.set(result.length_mean)
        for key, statistics in result.episode_info.items():
            if (mean := statistics["mean"]) is not None:
                metrics.evaluation_info_mean.labels(key=key).set(mean)

    def _store(
        self, parts: EvaluatorParts, info: VersionInfo, evaluation: Mapping[str, Any], outcome: EvaluationOutcome
    ) -> None:
        """Store the evaluation with the version, and move the tag to the best version.

        If the store fails, this result is lost, but the evaluator goes on with the next version. The result of a fixed
        version is not stored: the version may belong to another run, and `best` does not compare it with this run's.
        """
        if parts.fixed is not None:
            self._count("played" if outcome == "stored" else outcome, info, **evaluation)
            return
        best = None
        try:
            parts.db.annotate(parts.policy_name, info.version, {EVALUATION_KEY: evaluation})
            best = tag_best(parts.db, parts.policy_name)
        except VersionNotFound:
            outcome = "pruned"
        except OSError as error:
            self._context.log.exception("evaluation_not_stored", errno=error.errno)
            self._count("failed", info, error=str(error), **evaluation)
            return
        self._count(outcome, info, best=None if best is None else str(best), **evaluation)

    def _count(self, outcome: EvaluationOutcome, info: VersionInfo, *, error: str = "", **details: Any) -> None:
        self._context.metrics.evaluations.labels(outcome=outcome).inc()
        if outcome == "failed":
            self._num_failed += 1
            self._context.report_failure(FAILED_EVALUATIONS, self._num_failed, f"{info.version}: {error}")
        elif outcome in ("stored", "unfinished") and self._num_failed:
            self._num_failed = 0
            self._context.report_failure(FAILED_EVALUATIONS, 0, "")
        details |= {"error": error} if error else {}
        self._statistics["evaluations"] = self._statistics.get("evaluations", 0.0) + 1
        self._context.log.info("evaluated", version=str(info.version), outcome=outcome, **details)

    @override
    def _shutdown(self) -> None:
        if self._parts is not None and self._parts.videos is not None:
            self._parts.videos.close()
        if self._playing is not None:
            self._playing.envs.close()

    @override
    def _stats(self) -> Mapping[str, float]:
        return self._statistics


def _statistics(info: VersionInfo, result: EvaluationResult, *, is_fixed: bool) -> dict[str, float]:
    """Return the result for the status document. Readers take ``step`` for that of the run's newest evaluation."""
    mean, std, step = result.return_mean, result.return_std, float(info.version.step)
    if not is_fixed:
        return {"return_mean": mean, "return_std": std, "step": step}
    version = {"version_attempt": float(info.version.attempt), "version_step": step}
    return {"fixed_return_mean": mean, "fixed_return_std": std, **version}


def _scalars(info: VersionInfo, result: EvaluationResult, *, is_fixed: bool) -> dict[str, float]:
    """Return the row of the learning curve at the version's step.

    A result with missing episodes has other names, and so has that of a fixed version.
    """
    prefix = FIXED_EVALUATION if is_fixed else EVALUATION_KEY
    scalars = {
        "return_mean": result.return_mean,
        "return_std": result.return_std,
        "length_mean": result.length_mean,
        "episodes": float(result.num_episodes),
        **info_scalars(result.episode_info),
    }
    env_steps = info.metadata.get("env_steps")
    if isinstance(env_steps, int | float):
        scalars["env_steps"] = float(env_steps)
    if is_fixed:
        scalars["attempt"] = float(info.version.attempt)
    return {f"{'unfinished_' if result.unfinished else ''}{prefix}/{name}": each for name, each in scalars.items()}
