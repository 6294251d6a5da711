"""The experiment's status from what was observed. Pure: it is told the time, and what the status was before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from rlsrl.api.pods import CONTAINER, ROLE_LABEL, is_ready, terminations
from rlsrl.api.reasons import (
    ACCEPTED,
    DURABLE,
    GANG_COMPLETE,
    READY,
    AcceptedReason,
    ConditionType,
    PodReason,
    ReadyReason,
    Reason,
)
from rlsrl.api.status import Condition, ExperimentStatus, Phase, RoleStatus, Training
from rlsrl_operator.gang import attempt_of, parse_time
from rlsrl_operator.manifests.context import ExperimentContext
from rlsrl_operator.manifests.kueue import is_held
from rlsrl_operator.manifests.pods import TLS_KEYS
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import COORDINATOR, TRAINER, roles_of

TERMINAL: tuple[Phase, ...] = ("Succeeded", "Failed")
_MESSAGE_LENGTH = 1024
_MAX_NUMBER = 1e15
"""What counts of a run stay below."""
_MAX_VERSION_LENGTH = 64
_STEADY = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons for which a container waits that are no trouble."""


def read(document: Mapping[str, Any]) -> ExperimentStatus:
    """The status of an experiment; an empty one for none."""
    return ExperimentStatus.model_validate(document.get("status") or {}, by_alias=True, by_name=False)


def write(status: ExperimentStatus) -> dict[str, Any]:
    """The status as the API server takes it."""
    written: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written


def stamp(now: datetime) -> str:
    """A time as Kubernetes writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(status: ExperimentStatus, name: str) -> Condition | None:
    """One condition_type."""
    return next((each for each in status.conditions if each.type == name), None)


def with_condition(
    status: ExperimentStatus,
    name: ConditionType,
    holds: Literal["True", "False", "Unknown"],
    reason: Reason | PodReason,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> ExperimentStatus:
    """The status with one condition_type said anew; since when it holds moves only with whether it holds."""
    before = condition(status, name)
    same = before is not None and before.status == holds
    made = Condition(
        type=name,
        status=holds,
        reason=reason,
        message=message[:_MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if same and before is not None else stamp(now),
        observed_generation=generation,
    )
    others = [each for each in status.conditions if each.type != name]
    return status.model_copy(update={"conditions": tuple(sorted([*others, made], key=lambda each: each.type))})


def failures(status: ExperimentStatus, *, decay_seconds: float, now: datetime) -> tuple[int, datetime]:
    """Failures that are not forgotten yet, and since when that many: one is forgotten each ``decay_seconds``."""
    count = status.recent_failures or 0
    since = parse_time(status.last_failure_at) if status.last_failure_at is not None else now
    # It may have been written by a clock that is ahead of ours.
    elapsed = max(0.0, (now - since).total_seconds())
    forgotten = int(min(count, elapsed // decay_seconds))
    return count - forgotten, since + timedelta(seconds=forgotten * decay_seconds)


def role_status(pods: Sequence[Manifest], *, replicas: int, selector: Mapping[str, str]) -> RoleStatus:
    """How many pods of a role there are."""
    return RoleStatus(
        replicas=replicas,
        ready=min(replicas, sum(map(is_ready, pods))),
        selector=",".join(f"{name}={value}" for name, value in sorted(selector.items())),
    )


def durable(status: ExperimentStatus, page: Mapping[str, Any], *, generation: int, now: datetime) -> ExperimentStatus:
    """The status with what the coordinator's ``/status`` says of storing versions, if it says anything."""
    unstored = _number(page, "unstored_versions")
    if unstored is None:
        return status
    if unstored < 1:
        return with_condition(
            status, DURABLE, "True", "Stored", "versions are stored when they are due", generation=generation, now=now
        )
    message = f"the last {unstored:.0f} versions that were due could not be stored; the trainer's log says why"
    return with_condition(status, DURABLE, "False", "NotStored", message, generation=generation, now=now)


def training(page: Mapping[str, Any], now: datetime) -> Training:
    """The run's numbers from the coordinator's ``/status``."""

    def whole(name: str) -> int | None:
        return None if (value := _number(page, name)) is None else max(0, round(value))

    mean, version = _number(page, "return_mean"), _totals(page).get("version")
    return Training(
        env_steps=whole("env_steps"),
        train_steps=whole("train_steps"),
        env_steps_per_second=whole("env_steps_per_second"),
        version=version if isinstance(version, str) and len(version) <= _MAX_VERSION_LENGTH else None,
        policy_lag=whole("policy_lag"),
        return_mean=None if mean is None else f"{mean:.1f}",
        updated_at=stamp(now),
    )


def _number(page: Mapping[str, Any], name: str) -> float | None:
    """One of the totals. What is no number was not told: workers run users' code."""
    value = _totals(page).get(name)
    return value if isinstance(value, int | float) and abs(value) < _MAX_NUMBER else None


def _totals(page: Mapping[str, Any]) -> Mapping[str, Any]:
    said = page.get("totals")
    return said if isinstance(said, dict) else {}


def outcome(before: Training | None, record: Mapping[str, Any] | None, now: datetime) -> tuple[Training | None, str]:
    """The last numbers, and what is to be said of the end, from the run's terminal record if there is one."""
    result = (record or {}).get("result")
    if record is None or not isinstance(result, dict):
        return before, "the experiment has its result"
    final = training({"totals": {**result, "version": record.get("version")}}, now)
    known = final.model_dump(exclude_none=True)
    merged = final if before is None else before.model_copy(update=known)
    return (
        merged,
        f"stop.{record.get('reason')} holds: mean return {merged.return_mean} after {merged.env_steps} transitions",
    )


def summarize(
    status: ExperimentStatus,
    context: ExperimentContext,
    pods: Sequence[Manifest],
    now: datetime,
    *,
    refusal: str | None = None,
    refused_edits: Sequence[str] = (),
    not_to_say: Sequence[str] = (),
) -> ExperimentStatus:
    """The status with what the pods show beside the gang's life; ``refusal`` says why some cannot even be made,
    ``refused_edits`` are the fields that the document has otherwise and that cannot be edited, ``not_to_say`` is what
    it says of its pods that is not its own to say."""
    generation, suspended, queued = context.generation, status.phase == "Suspended", status.phase == "Queued"
    over = suspended or status.phase in TERMINAL
    by_role = {
        role: [pod for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == role.name]
        for role in roles_of(context.configs)
    }
    counts = {
        role.name: role_status(
            found,
            replicas=0
            if suspended or (queued and not role.queued) or (over and role.name != COORDINATOR)
            else role.pods(context.experiment, context.configs),
            selector=context.selector(role.name),
        )
        for role, found in by_role.items()
    }
    status = with_condition(status, ACCEPTED, *_accepted(refused_edits, not_to_say), generation=generation, now=now)
    missing = [
        f"{name} {count.ready}/{count.replicas}" for name, count in counts.items() if count.ready < count.replicas
    ]
    reason: ReadyReason | PodReason
    if suspended:
        reason, message = "Suspended", f"{len(pods)} pods are still ending" if pods else "no pod is left"
    elif over:
        reason, message = "Finished", "the experiment is over"
    elif queued:
        reason, message = "Queued", f"queue {context.queue} has not admitted the trainers"
        message += "" if refusal is None else f": {refusal}"
    elif missing:
        reason, message = blocker(pods, attempt=status.attempt or 1) or ("Starting", "pods are being made")
        if reason == "Starting" and refusal is not None:
            reason, message = "FailedCreate", refusal
        elif reason == "Starting" and (secret := context.experiment.spec.security.tls_secret) is not None:
            # What a volume lacks is told in events of the pod alone.
            message += f"; pods wait for a Secret {secret} with the keys {', '.join(TLS_KEYS)}"
        message = f"{', '.join(missing)} ready: {message}"
    else:
        reason, message = "Ready", "every pod is ready"
    holds: Literal["True", "False"] = "False" if over or queued or missing else "True"
    status = with_condition(status, READY, holds, reason, message, generation=generation, now=now)
    complete = condition(status, GANG_COMPLETE)
    running = complete is not None and complete.status == "True"
    return status.model_copy(
        update={
            "phase": status.phase if over or queued else "Running" if running else "Starting",
            "observed_generation": generation,
            "actors": counts["actor"],
            "trainers": counts[TRAINER],
        }
    )


def _accepted(
    refused_edits: Sequence[str], not_to_say: Sequence[str]
) -> tuple[Literal["True", "False"], AcceptedReason, str]:
    if not_to_say:
        return "False", "InvalidSpec", "\n".join(not_to_say)
    if not refused_edits:
        return "True", "Accepted", "every object is as it should be"
    fields = ", ".join(refused_edits)
    return (
        "False",
        "EditRefused",
        f"{fields} cannot be edited: it would be another experiment, which takes another name",
    )


def replica_failure(deployment: Manifest) -> str | None:
    """Why a Deployment cannot make its pods; None if nothing keeps it."""
    for each in deployment.get("status", {}).get("conditions", ()):
        if each["type"] == "ReplicaFailure" and each["status"] == "True":
            return str(each.get("message", ""))
    return None


def blocker(pods: Sequence[Manifest], *, attempt: int) -> tuple[ReadyReason | PodReason, str] | None:
    """The pod that most needs somebody's attention, as a reason and a message; None if none is in the way."""
    found = [trouble for pod in pods if (trouble := _trouble(pod, attempt)) is not None]
    return min(found, key=lambda each: each[0] == "Starting", default=None)


def _trouble(pod: Manifest, attempt: int) -> tuple[ReadyReason | PodReason, str] | None:
    if is_ready(pod):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    since = pod["metadata"].get("creationTimestamp", "")
    if attempt_of(pod) not in (0, attempt):
        return "Starting", f"{name} of attempt {attempt_of(pod)} is ending"
    if is_held(pod):
        return "Queued", f"{name} waits to be admitted to its queue, since {since}"
    for each in status.get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return _pods_own(each, "Unschedulable"), f"{name}, since {since}: {each.get('message', '')}"
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if container["name"] == CONTAINER and waiting and waiting.get("reason") not in _STEADY:
            ended = terminations(pod)
            said = (ended[0].get("message") or "").strip().splitlines() if ended else []
            text = said[-1] if said else waiting.get("message", "")
            return _pods_own(waiting, "Waiting"), f"{name}, since {since}: {text}"
    return "Starting", f"{name} is not ready yet, since {since}"


def _pods_own(state: Manifest, otherwise: ReadyReason) -> ReadyReason | PodReason:
    """What Kubernetes names as the reason of a pod's state, if it does."""
    return PodReason(state["reason"]) if state.get("reason") else otherwise
