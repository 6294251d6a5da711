"""An experiment's life: which attempt and phase its pods call for, and who should be there in it. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from rlsrl.api.pods import ROLE_LABEL, terminations
from rlsrl.api.reasons import FINISHED, GANG_COMPLETE, READY, EndReason, GangReason
from rlsrl.api.status import ExperimentStatus, Phase
from rlsrl_operator import status as statuses
from rlsrl_operator.gang import Life, attempt_of, configuration_error, judge, parse_time, template_of
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION, ExperimentContext
from rlsrl_operator.manifests.kueue import is_held
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import COORDINATOR, EVALUATOR, TRAINER
from rlsrl_operator.status import TERMINAL

Templates = Mapping[str, str]
"""By role: the mark of the template that its pods are to be made from."""

EVALUATION_SECONDS = 600.0
"""How long evaluators may play on once the experiment has its result."""
QUEUED_SECONDS = 30.0
"""How long trainers of an experiment that ran may be held back by their queue until the others make room, too."""


def decide(
    status: ExperimentStatus, context: ExperimentContext, templates: Templates, pods: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    """The attempt and the phase that the pods call for."""
    return _queued(_decide(status, context, templates, pods, now), context, _of(TRAINER, pods), now)


def _decide(
    status: ExperimentStatus, context: ExperimentContext, templates: Templates, pods: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    generation = context.generation
    attempt = status.attempt or 1
    first = {
        "attempt": attempt,
        "restarts": status.restarts or 0,
        "phase": status.phase or ("Queued" if context.queue else "Pending"),
    }
    status = status.model_copy(update=first)
    if status.phase in TERMINAL:
        return status
    present = [pod for pod in pods if template_of(pod) == templates.get(pod["metadata"]["labels"][ROLE_LABEL])]
    if (wrong := configuration_error(present)) is not None:
        return _ended(status, "Failed", "ConfigurationError", ": ".join(wrong), generation, now)
    trainers = _of(TRAINER, pods)
    complete = statuses.condition(status, GANG_COMPLETE)
    since = parse_time(complete.last_transition_time) if complete is not None and complete.status == "True" else None
    num_pods = context.experiment.spec.trainers.num_pods
    life = Life(attempt=attempt, template=templates[TRAINER], num_pods=num_pods, complete_since=since)
    verdict = judge(trainers, life)
    if verdict.done:
        training, message = statuses.outcome(status.training, verdict.result, now)
        status = status.model_copy(update={"training": training})
        return _ended(status, "Succeeded", "Succeeded", message, generation, now)

    def gang(status: ExperimentStatus, holds: bool, reason: GangReason, message: str) -> ExperimentStatus:
        return statuses.with_condition(
            status, GANG_COMPLETE, "True" if holds else "False", reason, message, generation=generation, now=now
        )

    if context.experiment.spec.suspend:
        # Trainers that end are meant to.
        new_status = status.model_copy(update={"phase": "Suspended"})
        return gang(new_status, False, "Suspended", "spec.suspend is true")
    if status.phase == "Suspended":
        resumed = status.model_copy(update={"attempt": attempt + 1, "phase": "Queued" if context.queue else "Starting"})
        return gang(resumed, False, "Starting", f"attempt {attempt + 1} goes on from where attempt {attempt} ended")
    if verdict.loss is not None:
        restarts = context.experiment.spec.restarts
        count, counted_at = statuses.failures(status, decay_seconds=restarts.decay_seconds, now=now)
        if verdict.loss.counts:
            count, counted_at = count + 1, now
        update = {"recent_failures": count, "last_failure_at": statuses.stamp(counted_at)}
        status = status.model_copy(update=update)
        if verdict.loss.counts and count > restarts.budget:
            message = (
                f"{count} failures are more than restarts.budget {restarts.budget}; the last: {verdict.loss.message}"
            )
            return _ended(status, "Failed", "BudgetExhausted", message, generation, now)
        lost = 0 if verdict.loss.edited else 1
        status = status.model_copy(update={"attempt": attempt + 1, "restarts": (status.restarts or 0) + lost})
        return gang(status, False, "Restarting", f"attempt {attempt} is over: {verdict.loss.message}")
    if verdict.complete:
        return gang(status, True, "Complete", f"all {num_pods} trainer pods of attempt {attempt} are ready")
    if complete is None:
        return gang(status, False, "Starting", f"attempt {attempt} begins")
    return status


def _queued(
    status: ExperimentStatus, context: ExperimentContext, trainers: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    """Whether the trainers wait in a queue. They do from the first moment, and until all of them are admitted; a gang
    that is made anew, and so is queued again, only if that lasts.
    """
    if context.queue is None or status.phase in (*TERMINAL, "Suspended"):
        return status
    ours = [pod for pod in trainers if attempt_of(pod) == status.attempt]
    held = [pod for pod in ours if is_held(pod)]
    if status.phase == "Queued":
        admitted = len(ours) == context.experiment.spec.trainers.num_pods and not held
        return status.model_copy(update={"phase": "Starting"}) if admitted else status
    lasting = timedelta(seconds=QUEUED_SECONDS)
    out = any(now > parse_time(pod["metadata"]["creationTimestamp"]) + lasting for pod in held)
    return status.model_copy(update={"phase": "Queued"}) if out else status


def overlaid(manifest: Manifest, status: ExperimentStatus, pods: Sequence[Manifest], now: datetime) -> Manifest:
    """A rendered object as it should be at this moment: the trainers of this attempt, and nobody once all is over.

    The trainers end first, so that none of them waits in vain for the others; evaluators play what is left to play; the
    coordinator stays for the result, or goes last when the experiment is suspended. In a queue trainers alone wait.
    """
    role = manifest["metadata"]["labels"].get(ROLE_LABEL)
    if manifest["kind"] not in ("Deployment", "StatefulSet"):
        return manifest
    suspended, queued = status.phase == "Suspended", status.phase == "Queued"
    if role == COORDINATOR:
        others = any(pod["metadata"]["labels"][ROLE_LABEL] != COORDINATOR and not is_held(pod) for pod in pods)
        return _resized(manifest, 0) if (suspended or queued) and not others else manifest
    made = copy.deepcopy(manifest)
    over = suspended or status.phase in TERMINAL
    if role != TRAINER and queued:
        made["spec"]["replicas"] = 0
    elif role == TRAINER:
        # None of them begins before the last of the attempt before has gone: it would meet that one.
        ending = any(attempt_of(pod) not in (0, status.attempt) for pod in _of(TRAINER, pods))
        made["spec"]["template"]["metadata"]["annotations"][ATTEMPT_ANNOTATION] = str(status.attempt)
        made["spec"]["replicas"] = 0 if over or ending else made["spec"]["replicas"]
    elif over and not _of(TRAINER, pods) and not (role == EVALUATOR and _plays_on(status, pods, now)):
        made["spec"]["replicas"] = 0
    return made


def is_settled(status: ExperimentStatus, templates: Templates, pods: Sequence[Manifest]) -> bool:
    """Whether nobody needs any more what earlier generations were made of: the pods are of this one, which runs or has
    ended its trainers. Pods of roles that it has not are among what goes.
    """
    roles = ((pod["metadata"]["labels"][ROLE_LABEL], template_of(pod)) for pod in pods)
    if any(template != templates.get(role, template) for role, template in roles):
        return False
    if status.phase == "Suspended" or status.phase in TERMINAL:
        return not _of(TRAINER, pods)
    ready = statuses.condition(status, READY)
    return ready is not None and ready.status == "True"


def _resized(manifest: Manifest, replicas: int) -> Manifest:
    return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}


def _plays_on(status: ExperimentStatus, pods: Sequence[Manifest], now: datetime) -> bool:
    """Whether an evaluator may still have a version to play: each ends by itself once it has none."""
    if status.phase != "Succeeded" or status.finished_at is None:
        return False
    late = now > parse_time(status.finished_at) + timedelta(seconds=EVALUATION_SECONDS)
    return not late and any(all(end.get("exitCode") for end in terminations(pod)) for pod in _of(EVALUATOR, pods))


def _of(role: str, pods: Sequence[Manifest]) -> list[Manifest]:
    return [pod for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == role]


def _ended(
    status: ExperimentStatus, phase: Phase, reason: EndReason, message: str, generation: int, now: datetime
) -> ExperimentStatus:
    status = status.model_copy(update={"phase": phase, "finished_at": statuses.stamp(now)})
    return statuses.with_condition(status, FINISHED, "True", reason, message, generation=generation, now=now)
