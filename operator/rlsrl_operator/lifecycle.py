"""Decide an experiment's attempt and phase from its pods, and which roles run in that phase. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

from rlsrl.api.failures import FUTILE_STARTS
from rlsrl.api.pods import ROLE_LABEL, terminations
from rlsrl.api.reasons import FINISHED, GANG_COMPLETE, READY, RESUMED, EndReason, GangReason
from rlsrl.api.role_names import COORDINATOR, EVALUATOR, TRAINER
from rlsrl.api.status import TERMINAL, ExperimentStatus, LastFailure, Phase
from rlsrl_operator import status as statuses
from rlsrl_operator.gang import FINAL_CODES, AttemptEnd, attempt_of, final_error, judge, parse_time, template_of
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION, ExperimentContext
from rlsrl_operator.manifests.kueue import is_gated
from rlsrl_operator.manifests.types import Manifest

Templates = Mapping[str, str]
"""By role: the digest of the template that its pods should be made from."""

EVALUATION_SECONDS = 600.0
"""How long evaluators may finish their work after the experiment has succeeded."""
QUEUED_SECONDS = 30.0
"""How long the queue may hold the trainers of a running experiment before the other roles are scaled down."""


def decide(
    status: ExperimentStatus, context: ExperimentContext, templates: Templates, pods: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    """Return the status with the attempt and the phase that follow from the pods."""
    return _queued(_decide(status, context, templates, pods, now), context, _of(TRAINER, pods), now)


def _decide(
    status: ExperimentStatus, context: ExperimentContext, templates: Templates, pods: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    attempt = status.attempt or 1
    first = {
        "attempt": attempt,
        "restarts": status.restarts or 0,
        "phase": status.phase or ("Queued" if context.queue else "Pending"),
    }
    status = status.model_copy(update=first)
    if status.phase in TERMINAL:
        return status
    current = [pod for pod in pods if template_of(pod) == templates.get(pod["metadata"]["labels"][ROLE_LABEL])]
    if (error := final_error([pod for pod in current if not _is_dispensable(pod, context)])) is not None:
        return _finished(status, "Failed", error.reason, error.message, context, now)
    complete = statuses.condition(status, GANG_COMPLETE)
    since = parse_time(complete.last_transition_time) if complete is not None and complete.status == "True" else None
    num_pods = context.experiment.spec.trainers.num_pods
    trainers = _of(TRAINER, pods)
    verdict = judge(trainers, attempt=attempt, template=templates[TRAINER], num_pods=num_pods, complete_since=since)
    if verdict.done:
        training, message = statuses.outcome(status.training, verdict.result, now)
        status = status.model_copy(update={"training": training})
        if (failure := statuses.failure(verdict.result)) is not None:
            return _finished(status, "Failed", "UpdatesSkipped", failure, context, now)
        return _finished(status, "Succeeded", "Succeeded", message, context, now)
    if context.experiment.spec.suspend:
        # An end of a trainer is no failure now.
        return _gang(_in_phase(status, "Suspended"), "Suspended", "spec.suspend is true", context, now)
    if status.phase == "Suspended":
        resumed = _in_phase(
            status.model_copy(update={"attempt": attempt + 1}), "Queued" if context.queue else "Starting"
        )
        return _gang(resumed, "Starting", f"attempt {attempt + 1} continues attempt {attempt}", context, now)
    if verdict.end is not None:
        return _after(verdict.end, status, attempt, context, now)
    if verdict.complete:
        return _gang(status, "Complete", f"all {num_pods} trainer pods of attempt {attempt} are ready", context, now)
    if complete is None:
        return _gang(status, "Starting", f"attempt {attempt} begins", context, now)
    return status


def _after(
    end: AttemptEnd, status: ExperimentStatus, attempt: int, context: ExperimentContext, now: datetime
) -> ExperimentStatus:
    """Return the status with the next attempt, or with the phase Failed if no further attempt is made."""
    restarts = context.experiment.spec.restarts
    count, counted_at = statuses.failures(status, decay_seconds=restarts.decay_seconds, now=now)
    if end.is_failure:
        count, counted_at = count + 1, now
    status = status.model_copy(update={"recent_failures": count, "last_failure_at": statuses.stamp(counted_at)})
    if end.is_failure and count > restarts.budget:
        message = f"{count} failures exceed restarts.budget {restarts.budget}; the last: {end.message}"
        return _finished(status, "Failed", "BudgetExhausted", message, context, now)
    status = status.model_copy(update={"last_failure": _last_failure(status, end)})
    if (last := status.last_failure) is not None and end.signature and last.times >= FUTILE_STARTS:
        message = f"the trainers failed in the same way {last.times} times, without a training step: {end.message}"
        return _finished(status, "Failed", "RepeatedFailure", message, context, now)
    num_restarts = (status.restarts or 0) + (1 if end.is_failure else 0)
    status = status.model_copy(update={"attempt": attempt + 1, "restarts": num_restarts})
    message = f"attempt {attempt} is over: {end.message}"
    status = statuses.with_condition(
        status, RESUMED, "False", "Restarting", message, generation=context.generation, now=now
    )
    return _gang(status, "Restarting", message, context, now)


def _last_failure(status: ExperimentStatus, end: AttemptEnd) -> LastFailure | None:
    """Return the last failure that says something about the trainers, with how often in a row it was the same.

    A failure after which training got further than at the one before is another one, even if it looks the same. The
    numbers are those of the coordinator's last answer, so this may be noticed one failure late.
    """
    last = status.last_failure
    if not end.signature:
        return last
    trained = (status.training.env_steps or 0) if status.training is not None else 0
    if last is None or last.signature != end.signature or trained > last.env_steps:
        return LastFailure(signature=end.signature, env_steps=trained, times=1)
    return last.model_copy(update={"times": last.times + 1})


def _queued(
    status: ExperimentStatus, context: ExperimentContext, trainers: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    """Return the status with the phase Queued, or Starting once the queue has admitted every trainer.

    A new experiment is queued from the start. The trainers of a new attempt are queued again as well, which usually
    takes a moment: the phase changes only if it takes longer than ``QUEUED_SECONDS``.
    """
    if context.queue is None or status.phase in (*TERMINAL, "Suspended"):
        return status
    ours = [pod for pod in trainers if attempt_of(pod) == status.attempt]
    gated = [pod for pod in ours if is_gated(pod)]
    if status.phase == "Queued":
        admitted = len(ours) == context.experiment.spec.trainers.num_pods and not gated
        return _in_phase(status, "Starting") if admitted else status
    limit = timedelta(seconds=QUEUED_SECONDS)
    waits_long = any(now > parse_time(pod["metadata"]["creationTimestamp"]) + limit for pod in gated)
    return _in_phase(status, "Queued") if waits_long else status


def for_phase(
    manifest: Manifest, status: ExperimentStatus, pods: Sequence[Manifest], now: datetime, *, makes_way: bool = False
) -> Manifest:
    """Return a rendered object with the replicas and the attempt of this moment.

    At the end the trainers are scaled to 0 first, since they need the others for their last checkpoint. Evaluators
    finish their versions. The coordinator stays to serve the result. It ends last if the experiment is suspended, if
    ``makes_way`` says that a failed experiment is tried again, or if its own failure would repeat for ever. While an
    experiment is queued only its trainers exist.
    """
    role = manifest["metadata"]["labels"].get(ROLE_LABEL)
    if manifest["kind"] not in ("Deployment", "StatefulSet"):
        return manifest
    made = copy.deepcopy(manifest)
    suspended, queued = status.phase == "Suspended", status.phase == "Queued"
    over = suspended or status.phase in TERMINAL
    if role == COORDINATOR:
        others = any(pod["metadata"]["labels"][ROLE_LABEL] != COORDINATOR and not is_gated(pod) for pod in pods)
        ends_last = suspended or queued or makes_way or _is_at_fault(manifest["metadata"]["name"], status)
        absent = ends_last and not others
    elif role == TRAINER:
        # No rank of this attempt starts before the last pod of an earlier attempt is gone: the two would connect.
        ending = any(attempt_of(pod) not in (0, status.attempt) for pod in _of(TRAINER, pods))
        made["spec"]["template"]["metadata"]["annotations"][ATTEMPT_ANNOTATION] = str(status.attempt)
        absent = over or ending
    else:
        plays_on = role == EVALUATOR and _plays_on(status, pods, now)
        absent = queued or (over and not _of(TRAINER, pods) and not plays_on)
    if absent:
        made["spec"]["replicas"] = 0
    return made


def is_rolled_out(status: ExperimentStatus, templates: Templates, pods: Sequence[Manifest]) -> bool:
    """Return whether this generation is rolled out, so that the objects of earlier ones can be deleted.

    It is if every pod is of this generation and the experiment is ready, or has ended or been suspended and has no
    trainer pods. Pods of roles that this generation lacks disappear with the earlier objects.
    """
    roles = ((pod["metadata"]["labels"][ROLE_LABEL], template_of(pod)) for pod in pods)
    if any(template != templates.get(role, template) for role, template in roles):
        return False
    if status.phase == "Suspended" or status.phase in TERMINAL:
        return not _of(TRAINER, pods)
    ready = statuses.condition(status, READY)
    return ready is not None and ready.status == "True"


def _plays_on(status: ExperimentStatus, pods: Sequence[Manifest], now: datetime) -> bool:
    """Return whether an evaluator may still have a version to evaluate: each exits when it has none."""
    if status.phase != "Succeeded" or status.finished_at is None:
        return False
    late = now > parse_time(status.finished_at) + timedelta(seconds=EVALUATION_SECONDS)
    return not late and any(all(end.get("exitCode") for end in terminations(pod)) for pod in _of(EVALUATOR, pods))


def _is_at_fault(workload: str, status: ExperimentStatus) -> bool:
    """Return whether a pod of the workload made the experiment fail, in a way that no restart helps."""
    finished = statuses.condition(status, FINISHED)
    if finished is None or finished.status != "True" or finished.reason not in FINAL_CODES.values():
        return False
    return finished.message.startswith(f"{workload}-")


def _is_dispensable(pod: Manifest, context: ExperimentContext) -> bool:
    """Return whether training goes on if the pod's worker cannot run: the evaluator of a fixed version (0057).

    The version may be tagged later.
    """
    evaluators = context.experiment.spec.evaluators
    plays_fixed_version = evaluators is not None and evaluators.parameters is not None
    return plays_fixed_version and pod["metadata"]["labels"][ROLE_LABEL] == EVALUATOR


def _of(role: str, pods: Sequence[Manifest]) -> list[Manifest]:
    return [pod for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == role]


def _in_phase(status: ExperimentStatus, phase: Phase) -> ExperimentStatus:
    return status.model_copy(update={"phase": phase})


def _gang(
    status: ExperimentStatus, reason: GangReason, message: str, context: ExperimentContext, now: datetime
) -> ExperimentStatus:
    """Return the status with the condition GangComplete."""
    holds: Literal["True", "False"] = "True" if reason == "Complete" else "False"
    return statuses.with_condition(
        status, GANG_COMPLETE, holds, reason, message, generation=context.generation, now=now
    )


def _finished(
    status: ExperimentStatus, phase: Phase, reason: EndReason, message: str, context: ExperimentContext, now: datetime
) -> ExperimentStatus:
    status = status.model_copy(update={"phase": phase, "finished_at": statuses.stamp(now)})
    status = _gang(status, "Finished", "the experiment has finished", context, now)
    return statuses.with_condition(status, FINISHED, "True", reason, message, generation=context.generation, now=now)
