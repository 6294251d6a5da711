"""Judge the trainer gang from its pods: whether the present attempt is over, and why. Pure.

A pod belongs to the attempt that its annotation names. No rank can join an attempt later, so one pod that ended, was
replaced or is gone ends the attempt for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rlsrl.api.failures import CONFIGURATION_ERROR, ENVIRONMENT_FAULT, NOT_STORED, RUN_DAMAGED, signature
from rlsrl.api.pods import disruption, is_ready, restarts, terminations
from rlsrl.api.reasons import EndReason
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION, TEMPLATE_ANNOTATION
from rlsrl_operator.manifests.kueue import is_gated
from rlsrl_operator.manifests.types import Manifest

DONE = "done"
"""First word of rank 0's termination message when the experiment has finished. The result follows as JSON."""
FINAL_CODES: Mapping[int, EndReason] = {
    CONFIGURATION_ERROR: "ConfigurationError",
    ENVIRONMENT_FAULT: "EnvironmentFault",
    NOT_STORED: "NotStored",
    RUN_DAMAGED: "RunDamaged",
}
"""Exit codes of workers that would end the same way after every restart."""
ERROR_PREFIX = "rlsrl: "
"""First characters of the log line in which a worker reports why no restart would help."""
_INDEX_LABEL = "apps.kubernetes.io/pod-index"


@dataclass(frozen=True, kw_only=True)
class FinalError:
    """Why no restart of a worker would help."""

    reason: EndReason
    message: str
    """The pod's name and the worker's error."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """Why an attempt is over."""

    message: str
    is_failure: bool
    """Whether it counts as a restart and against ``restarts.budget``. Edits and the loss of a disrupted pod do not."""
    signature: str = ""
    """Of a worker's failure: equal for the same exception at the same place (``rlsrl.api.failures``); else empty."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the trainers' pods show of the present attempt."""

    done: bool = False
    """Rank 0 reported that the experiment has finished."""
    result: Mapping[str, Any] | None = None
    """The run's terminal record, if rank 0 reported one."""
    end: AttemptEnd | None = None
    """Why the attempt is over; None if it goes on."""
    complete: bool = False
    """Every pod exists and is ready."""


def judge(
    pods: Sequence[Manifest], *, attempt: int, template: str, num_pods: int, complete_since: datetime | None
) -> Verdict:
    """Return what the pods of all attempts show of the present attempt.

    Args:
        pods: the trainers' pods.
        attempt: the number of the present attempt.
        template: the digest of the pod template that its pods should be made from.
        num_pods: the number of pods that it should have.
        complete_since: when all of them were ready for the first time; None before.
    """
    ours = [pod for pod in pods if attempt_of(pod) == attempt]
    if (result := next((text for pod in ours if (text := _result_text(pod)) is not None), None)) is not None:
        return Verdict(done=True, result=_result(result))
    if any(template_of(pod) != template for pod in ours):
        return Verdict(end=AttemptEnd(message="the experiment was edited", is_failure=False))
    # The other ranks fail with a disrupted pod, and may end before it does: its reason comes first.
    disrupted = [pod for pod in ours if _is_disrupted(pod)]
    reason = next((found for pod in (*disrupted, *ours) if (found := _end_of(pod, complete_since)) is not None), None)
    if reason is None and complete_since is not None and len(ours) < num_pods:
        reason = f"{num_pods - len(ours)} of {num_pods} trainer pods are gone"
    if reason is not None:
        causes = [f"{pod['metadata']['name']} {cause}" for pod in disrupted if (cause := disruption(pod)) is not None]
        reason = causes[0] if causes else reason
    end = None
    if reason is not None:
        end = AttemptEnd(message=reason, is_failure=not disrupted, signature="" if disrupted else _signature(ours))
    return Verdict(end=end, complete=len(ours) == num_pods and all(map(is_ready, ours)))


def attempt_of(pod: Manifest) -> int:
    """Return the attempt that a pod belongs to; 0 for a pod without one."""
    value = pod["metadata"].get("annotations", {}).get(ATTEMPT_ANNOTATION, "")
    return int(value) if value.isdecimal() else 0


def template_of(pod: Manifest) -> str:
    """Return the digest in a pod's or a pod template's annotation."""
    return str(pod["metadata"].get("annotations", {}).get(TEMPLATE_ANNOTATION, ""))


def final_error(pods: Sequence[Manifest]) -> FinalError | None:
    """Return the error of the first pod whose worker ended so that no restart would help, or None."""
    for pod in pods:
        for ended in terminations(pod):
            if (reason := FINAL_CODES.get(ended.get("exitCode", 0))) is not None:
                line = _error_line((ended.get("message") or "").strip())
                return FinalError(reason=reason, message=f"{pod['metadata']['name']}: {line}")
    return None


def _error_line(message: str) -> str:
    """Return the error at the end of a worker's log; the whole text if no line has the prefix."""
    errors = [line.removeprefix(ERROR_PREFIX) for line in message.splitlines() if line.startswith(ERROR_PREFIX)]
    return errors[-1] if errors else message


def _end_of(pod: Manifest, complete_since: datetime | None) -> str | None:
    """Return how the pod ended its attempt, or None if it did not."""
    name = pod["metadata"]["name"]
    status = pod.get("status", {})
    ended = terminations(pod)
    # Exit code 0 of other ranks means nothing: rank 0 reports the end of the run.
    if failed := [each for each in ended if each.get("exitCode") or _is_rank_0(pod)]:
        reason, code = failed[0].get("reason") or "Error", failed[0].get("exitCode")
        return f"{name} ended: {reason}, exit code {code}{_last_line(failed[0])}"
    if restarts(pod) and not ended:
        return f"the worker of {name} was restarted"
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"{name} ended: {status.get('reason') or status['phase']}"
    if complete_since is None:
        return None
    if "deletionTimestamp" in pod["metadata"]:
        return f"{name} was deleted"
    if parse_time(pod["metadata"]["creationTimestamp"]) > complete_since:
        return f"{name} was replaced"
    return None


def _signature(pods: Sequence[Manifest]) -> str:
    """Return the signature of the attempt's failures; empty if one of them is a kill or may not repeat."""
    ended = [next(iter(terminations(pod)), None) for pod in pods]
    failed = [each for each in ended if each is not None and each.get("exitCode")]
    found = {signature(each["exitCode"], (each.get("message") or "").strip().splitlines()) for each in failed}
    return "" if "" in found else min(found, default="")


def _is_disrupted(pod: Manifest) -> bool:
    """Return whether an eviction, a preemption or its queue ends the pod: a disruption in Kubernetes' sense.

    A pod that waits in a queue replaces a pod that the queue may have evicted.
    """
    return is_gated(pod) or disruption(pod) is not None


def _is_rank_0(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(_INDEX_LABEL) == "0")


def _last_line(ended: Manifest) -> str:
    lines = (ended.get("message") or "").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


def _result_text(pod: Manifest) -> str | None:
    """Return what follows ``DONE`` in rank 0's termination message, or None if the message does not begin with it."""
    for ended in terminations(pod) if _is_rank_0(pod) else ():
        word, _, rest = (ended.get("message") or "").strip().partition(" ")
        if ended.get("exitCode") == 0 and word == DONE:
            return str(rest)
    return None


def _result(text: str) -> Mapping[str, Any] | None:
    try:
        result = json.loads(text)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def parse_time(text: str) -> datetime:
    """Return the time that Kubernetes wrote."""
    return datetime.fromisoformat(text)
