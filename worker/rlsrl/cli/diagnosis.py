"""What is wrong with an experiment, since when, and the cure. Pure: from what the API server shows to findings.

Conditions first: they are the operator's judgement. Then the pods and claims that are not as they should be, each with
what its container said last and the last warning about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rlsrl.api.pods import CONTAINER, ROLE_LABEL, is_ready, restarts, terminations
from rlsrl.api.reasons import CLAIM_PENDING, ENDS, FINISHED, REASONS, STALE, UNSEEN, Explanation, explain, is_trouble
from rlsrl.api.status import ExperimentStatus
from rlsrl.cli.kubectl import Object, last_seen
from rlsrl.cli.story import is_old, is_over

LAST_LINES = 8
"""How much of a container's last words is shown."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be."""

    what: str
    """A condition, a pod or a claim."""
    reason: str
    since: str | None
    """As Kubernetes writes times."""
    message: str = ""
    said: tuple[str, ...] = ()
    """The container's last words."""
    event: str = ""
    """The last warning about it."""
    explanation: Explanation | None = None


def diagnose(
    experiment: Object,
    status: ExperimentStatus,
    objects: Sequence[Object],
    warnings: Sequence[Object],
    *,
    now: datetime,
) -> list[Finding]:
    """What is wrong; nothing if all is well.

    Args:
        experiment: with its metadata.
        status: what its operator says.
        objects: what was made for it.
        warnings: events of the namespace, oldest first.
    """
    if status.phase is None:
        made = experiment["metadata"].get("creationTimestamp")
        return [Finding(what="status", reason="None", since=made, explanation=UNSEEN)]
    judged = [*_conditions(status)]
    if is_over(status):
        return [finding for finding in judged if finding.what == FINISHED]
    if status.phase in ("Queued", "Suspended"):
        return judged  # its pods are not there, and are not meant to be
    # Starting calls for nobody, and yet it is why an experiment does not train, if nothing else is.
    judged = [finding for finding in judged if is_trouble(finding.reason)] or judged
    if status.training is not None and is_old(status, now):
        judged.append(Finding(what="numbers", reason="Old", since=status.training.updated_at, explanation=STALE))
    told = {each["involvedObject"].get("uid"): each for each in warnings}
    unwell = [finding for each in objects if (finding := _unwell(each, told)) is not None]
    return list(_explained_once([*judged, *unwell]))


def has_ended_before(objects: Sequence[Object]) -> list[str]:
    """The pods that are well now and whose worker was started again: how it ended."""
    return [
        f"{pod['metadata']['name']} was started again ({restarts(pod)}x); it had ended: {_end(terminations(pod)[0])}"
        for pod in objects
        if pod["kind"] == "Pod" and is_ready(pod) and restarts(pod) and terminations(pod)
    ]


def _explained_once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """A condition and the pods that it is about have one cure."""
    explained: set[Explanation] = set()
    for each in findings:
        yield each if each.explanation not in explained else replace(each, explanation=None)
        explained |= {each.explanation} if each.explanation is not None else set()


def _conditions(status: ExperimentStatus) -> Iterator[Finding]:
    order = list(REASONS)
    for each in sorted(status.conditions, key=lambda condition: [*order, condition.type].index(condition.type)):
        if is_trouble(each.reason) or each.reason in ("Starting", "Queued"):
            yield Finding(
                what=each.type,
                reason=each.reason,
                since=each.last_transition_time,
                message=each.message,
                explanation=explain(each.type, each.reason),
            )


def _unwell(found: Object, told: Mapping[str, Object]) -> Finding | None:
    event = _event(told.get(found["metadata"].get("uid", "")))
    if found["kind"] == "Pod":
        return None if is_ready(found) else _pod(found, event)
    if found["kind"] == "PersistentVolumeClaim" and (phase := found.get("status", {}).get("phase")) != "Bound":
        return Finding(
            what=f"volume claim {found['metadata']['name']}",
            reason=str(phase),
            since=found["metadata"].get("creationTimestamp"),
            event=event,
            explanation=CLAIM_PENDING,
        )
    if event and not found.get("status", {}).get("readyReplicas"):
        return Finding(what=f"{found['kind']} {found['metadata']['name']}", reason="Warning", since=None, event=event)
    return None


def _pod(pod: Object, event: str) -> Finding:
    metadata, status = pod["metadata"], pod.get("status", {})
    ended = terminations(pod)
    reason, message, explanation = _state(pod)
    return Finding(
        what=f"pod {metadata['name']} ({metadata.get('labels', {}).get(ROLE_LABEL, 'no role')})",
        reason=reason or str(status.get("phase", "Unknown")),
        since=metadata.get("deletionTimestamp") or metadata.get("creationTimestamp"),
        message=message if not ended else f"its worker ended: {_end(ended[0])}",
        said=tuple((ended[0].get("message") or "").strip().splitlines()[-LAST_LINES:]) if ended else (),
        event=event,
        explanation=(ENDS.get(ended[0].get("reason", "")) if ended else None) or explanation,
    )


def _state(pod: Object) -> tuple[str, str, Explanation | None]:
    """Why a pod does not run, in Kubernetes' word, with its message and what the word means."""
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating", "", None
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


def _end(ended: Object) -> str:
    at = f" at {ended['finishedAt']}" if ended.get("finishedAt") else ""
    return f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode')}{at}"


def _event(event: Object | None) -> str:
    if event is None:
        return ""
    times = f", {event['count']} times" if (event.get("count") or 1) > 1 else ""
    return f"{event.get('reason')} at {last_seen(event)}{times}: {' '.join(event.get('message', '').split())}"
