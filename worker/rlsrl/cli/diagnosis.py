"""The diagnosis behind ``why``: from API objects to findings, each with its age and its cure. Pure.

Conditions come first: they are the operator's judgement. Then come unready pods and unbound claims, each with the last
lines of its container and the last warning event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rlsrl.api.pods import (
    CONTAINER,
    ROLE_LABEL,
    disruption,
    is_evicted_by_taint,
    is_ready,
    restarts,
    terminations,
    unready_since,
)
from rlsrl.api.reasons import (
    CLAIM_PENDING,
    ENDS,
    EVICTED_BY_TAINT,
    FACTS,
    FINISHED,
    PROGRESSING,
    REASONS,
    STALE,
    UNSEEN,
    VOLUME_INTACT,
    Explanation,
    explain,
    is_trouble,
)
from rlsrl.api.status import ExperimentStatus
from rlsrl.cli.kubectl import Object, last_seen
from rlsrl.cli.status_view import is_over, is_stale
from rlsrl.runtime.tracebacks import end_of_output

LAST_LINES = 8
"""Lines shown of a container's termination message, or more: a traceback at its end is shown whole."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One problem of an experiment."""

    what: str
    """A condition, a pod or a claim."""
    reason: str
    since: str | None
    """RFC 3339, as Kubernetes writes times."""
    message: str = ""
    last_lines: tuple[str, ...] = ()
    """The end of the container's termination message."""
    event: str = ""
    """The last warning event."""
    explanation: Explanation | None = None


def diagnose(
    experiment: Object,
    status: ExperimentStatus,
    objects: Sequence[Object],
    warnings: Sequence[Object],
    *,
    now: datetime,
) -> list[Diagnosis]:
    """Return every problem, or an empty list.

    Args:
        experiment: the custom resource.
        status: its status, parsed.
        objects: the experiment's objects.
        warnings: warning events of the namespace, oldest first.
        now: the time.
    """
    if status.phase is None:
        made = experiment["metadata"].get("creationTimestamp")
        return [Diagnosis(what="status", reason="missing", since=made, explanation=UNSEEN)]
    judged = [*_conditions(status)]
    if is_over(status):
        return [finding for finding in judged if finding.what in (FINISHED, VOLUME_INTACT)]
    if status.phase in ("Queued", "Suspended"):
        return judged  # its pods are absent on purpose
    # Starting is no trouble, but it explains why the experiment does not train yet if nothing else does.
    judged = [finding for finding in judged if is_trouble(finding.reason)] or judged
    if status.training is not None and is_stale(status, now):
        judged.append(
            Diagnosis(what="numbers", reason="out of date", since=status.training.updated_at, explanation=STALE)
        )
    by_uid = {each["involvedObject"].get("uid"): each for each in warnings}
    unwell = [finding for each in objects if (finding := _unwell(each, by_uid)) is not None]
    return list(_explained_once([*judged, *unwell]))


def past_restarts(objects: Sequence[Object]) -> list[str]:
    """Return a line for each ready pod whose worker's container was restarted within it, with its last termination.

    The last lines of its output follow. A restart that replaced the pod is not among them.
    """
    lines: list[str] = []
    for pod in objects:
        if pod["kind"] == "Pod" and is_ready(pod) and restarts(pod) and (ended := terminations(pod)):
            name = pod["metadata"]["name"]
            lines.append(f"{name} restarted {restarts(pod)}x; last termination: {_end(ended[0])}")
            lines += [f"  {line}" for line in _last_lines(ended[0])]
    return lines


def past_events(status: ExperimentStatus) -> list[str]:
    """Return what happened while training went on: errors of environments, and resumptions."""
    return [each.message for each in status.conditions if each.type in FACTS and each.status == "True"]


def _explained_once(findings: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """Explain a condition, but not again each of its pods with the same cure."""
    explained: set[Explanation] = set()
    for each in findings:
        yield each if each.explanation not in explained else replace(each, explanation=None)
        explained |= {each.explanation} if each.explanation is not None else set()


def _conditions(status: ExperimentStatus) -> Iterator[Diagnosis]:
    order = list(REASONS)
    for each in sorted(status.conditions, key=lambda condition: [*order, condition.type].index(condition.type)):
        if each.type in FACTS:
            continue  # Training goes on: ``past_events`` reports it.
        is_wait = each.reason in ("Starting", "Queued") and each.type != PROGRESSING  # Ready says the same
        if is_trouble(each.reason) or is_wait:
            yield Diagnosis(
                what=each.type,
                reason=each.reason,
                since=each.last_transition_time,
                message=each.message,
                explanation=explain(each.type, each.reason, each.message),
            )


def _unwell(found: Object, warnings: Mapping[str, Object]) -> Diagnosis | None:
    event = _event(warnings.get(found["metadata"].get("uid", "")))
    if found["kind"] == "Pod":
        return None if is_ready(found) else _pod(found, event)
    if found["kind"] == "PersistentVolumeClaim":
        return _claim(found, event)
    if event and not found.get("status", {}).get("readyReplicas"):
        return Diagnosis(what=f"{found['kind']} {found['metadata']['name']}", reason="Warning", since=None, event=event)
    return None


def _claim(claim: Object, event: str) -> Diagnosis | None:
    metadata, phase = claim["metadata"], claim.get("status", {}).get("phase")
    labels = metadata.get("labels", {})
    found = Diagnosis(what=f"volume claim {metadata['name']}", reason=str(phase), since=None, event=event)
    if (since := metadata.get("deletionTimestamp")) is not None:
        explanation = explain(VOLUME_INTACT, "ShardClaimDeleting" if ROLE_LABEL in labels else "ClaimDeleting")
        return replace(found, reason="Terminating", since=since, explanation=explanation)
    if phase == "Bound":
        return None
    return replace(found, since=metadata.get("creationTimestamp"), explanation=CLAIM_PENDING)


def _pod(pod: Object, event: str) -> Diagnosis:
    metadata, status = pod["metadata"], pod.get("status", {})
    ended = terminations(pod)
    reason, message, explanation = _state(pod)
    return Diagnosis(
        what=f"pod {metadata['name']} ({metadata.get('labels', {}).get(ROLE_LABEL, 'no role')})",
        reason=reason or str(status.get("phase", "Unknown")),
        since=metadata.get("deletionTimestamp") or unready_since(pod) or metadata.get("creationTimestamp"),
        message=message if not ended else f"worker terminated: {_end(ended[0])}",
        last_lines=_last_lines(ended[0]) if ended else (),
        event=event,
        explanation=(ENDS.get(ended[0].get("reason", "")) if ended else None) or explanation,
    )


def _state(pod: Object) -> tuple[str, str, Explanation | None]:
    """Return why a pod does not run: Kubernetes' reason, its message and our explanation."""
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating", disruption(pod) or "", EVICTED_BY_TAINT if is_evicted_by_taint(pod) else None
    for each in status.get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            reason = each.get("reason") or "Unschedulable"
            return reason, each.get("message", ""), explain("Ready", reason)
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if container["name"] == CONTAINER and waiting:
            reason = waiting.get("reason") or "Waiting"
            steady = reason in ("ContainerCreating", "PodInitializing")
            return reason, waiting.get("message", ""), None if steady else explain("Ready", reason)
    return str(status.get("reason") or "NotReady"), str(status.get("message") or ""), None


def _last_lines(ended: Object) -> tuple[str, ...]:
    return end_of_output((ended.get("message") or "").strip().splitlines(), LAST_LINES)


def _end(ended: Object) -> str:
    at = f" at {ended['finishedAt']}" if ended.get("finishedAt") else ""
    return f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode')}{at}"


def _event(event: Object | None) -> str:
    if event is None:
        return ""
    times = f", {event['count']} times" if (event.get("count") or 1) > 1 else ""
    return f"{event.get('reason')} at {last_seen(event)}{times}: {' '.join(event.get('message', '').split())}"
