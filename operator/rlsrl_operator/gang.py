"""The trainer gang as a level: which life it is in, whether that life is over, and why. Pure.

``attempt`` numbers the lives. A pod belongs to the attempt that its annotation names; one that ended, was replaced or
is gone ends the attempt for all, since the ranks of an attempt cannot be joined by anybody later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rlsrl.api.pods import is_ready, restarts, terminations
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION, TEMPLATE_ANNOTATION
from rlsrl_operator.manifests.kueue import REMOVED_CONDITION, is_held
from rlsrl_operator.manifests.types import Manifest

DONE = "done"
"""With what rank 0's termination message begins once the experiment has its result, which follows as JSON."""
CONFIGURATION_ERROR = 2
"""Exit code of a worker that would fail again however often it is started."""
COMPLAINT = "rlsrl: "
"""With what a worker's line begins that says why it cannot run so."""
_INDEX_LABEL = "apps.kubernetes.io/pod-index"
_DISPLACING = frozenset({"DisruptionTarget", REMOVED_CONDITION})
_DISPLACED = frozenset({"Evicted", "Preempted", "NodeShutdown", "Terminated", "DisruptionTarget"})


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Why an attempt is over."""

    message: str
    counts: bool
    """Whether it is a failure; a pod that had to make room is none."""
    edited: bool = False
    """Whether it was nobody's loss: the attempt's pods are not as they should be."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the trainers' pods show."""

    done: bool = False
    """Rank 0 said that the experiment has its result."""
    result: Mapping[str, Any] | None = None
    """What it is: the run's terminal record, if rank 0 told it."""
    loss: Loss | None = None
    """Why the attempt is over, if it is."""
    complete: bool = False
    """All pods are there and ready."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """What is known of the present attempt."""

    attempt: int
    template: str
    """The mark of the template that its pods are to be made from."""
    num_pods: int
    complete_since: datetime | None
    """When all pods were ready for the first time; None before."""


def judge(pods: Sequence[Manifest], life: Life) -> Verdict:
    """What the pods, of any attempt, show of the present one."""
    ours = [pod for pod in pods if attempt_of(pod) == life.attempt]
    if (said := next((word for pod in ours if (word := _said_done(pod)) is not None), None)) is not None:
        return Verdict(done=True, result=_result(said))
    if any(template_of(pod) != life.template for pod in ours):
        return Verdict(loss=Loss(message="the experiment was edited", counts=False, edited=True))
    # One that has to make room takes the others with it, and they may have ended before it has.
    displaced = [pod for pod in ours if _is_displaced(pod)]
    why = next((found for pod in (*displaced, *ours) if (found := _end(pod, life)) is not None), None)
    if why is None and life.complete_since is not None and len(ours) < life.num_pods:
        why = f"{life.num_pods - len(ours)} of {life.num_pods} trainer pods are gone"
    loss = None if why is None else Loss(message=why, counts=not displaced)
    return Verdict(loss=loss, complete=len(ours) == life.num_pods and all(map(is_ready, ours)))


def attempt_of(pod: Manifest) -> int:
    """The attempt that a pod belongs to; 0 for a pod without one."""
    return _number(pod, ATTEMPT_ANNOTATION)


def template_of(pod: Manifest) -> str:
    """The mark of the template that a pod was made from, or that makes pods."""
    return str(pod["metadata"].get("annotations", {}).get(TEMPLATE_ANNOTATION, ""))


def configuration_error(pods: Sequence[Manifest]) -> tuple[str, str] | None:
    """The first pod whose worker cannot run as the experiment is written, and what it said."""
    for pod in pods:
        for ended in terminations(pod):
            if ended.get("exitCode") == CONFIGURATION_ERROR:
                return pod["metadata"]["name"], _complaint((ended.get("message") or "").strip())
    return None


def _complaint(message: str) -> str:
    """What a worker says of its configuration, out of the end of its log; all of it if it says nothing so."""
    said = [line.removeprefix(COMPLAINT) for line in message.splitlines() if line.startswith(COMPLAINT)]
    return said[-1] if said else message


def _end(pod: Manifest, life: Life) -> str | None:
    """How the pod ended its attempt, if it did."""
    name = pod["metadata"]["name"]
    status = pod.get("status", {})
    ended = terminations(pod)
    # Ranks end together; whether the others' quiet end is the run's, rank 0 says.
    if failed := [each for each in ended if each.get("exitCode") or _is_first(pod)]:
        how, code = failed[0].get("reason") or "Error", failed[0].get("exitCode")
        return f"{name} ended: {how}, exit code {code}{_said(failed[0])}"
    if restarts(pod) and not ended:
        return f"the worker of {name} was started again"
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"{name} ended: {status.get('reason') or status['phase']}"
    if life.complete_since is None:
        return None
    if "deletionTimestamp" in pod["metadata"]:
        return f"{name} was deleted"
    if parse_time(pod["metadata"]["creationTimestamp"]) > life.complete_since:
        return f"{name} was replaced"
    return None


def _is_displaced(pod: Manifest) -> bool:
    status = pod.get("status", {})
    conditions = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
    # One that waits in a queue is there for one that the queue may have taken away.
    return is_held(pod) or status.get("reason") in _DISPLACED or not conditions.isdisjoint(_DISPLACING)


def _is_first(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(_INDEX_LABEL) == "0")


def _said(ended: Manifest) -> str:
    lines = (ended.get("message") or "").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


def _said_done(pod: Manifest) -> str | None:
    """What rank 0 said after its word; None if it did not say it."""
    for ended in terminations(pod) if _is_first(pod) else ():
        word, _, rest = (ended.get("message") or "").strip().partition(" ")
        if ended.get("exitCode") == 0 and word == DONE:
            return str(rest)
    return None


def _result(said: str) -> Mapping[str, Any] | None:
    try:
        result = json.loads(said)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def parse_time(text: str) -> datetime:
    """A time as Kubernetes writes it."""
    return datetime.fromisoformat(text)


def _number(pod: Manifest, annotation: str) -> int:
    value = pod["metadata"].get("annotations", {}).get(annotation, "")
    return int(value) if value.isdecimal() else 0
