"""Decide what a pass over one experiment does: observed and time in, plan out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from rlsrl.api.edits import refused
from rlsrl.api.pods import ROLE_LABEL
from rlsrl.api.reasons import ACCEPTED, AcceptedReason, is_trouble
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.spec import API_VERSION, KIND
from rlsrl.api.status import ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.drift import Action, Child, Write, digest, key_of, write_for
from rlsrl_operator.gang import parse_time, template_of
from rlsrl_operator.lifecycle import decide, for_phase, is_settled
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    Revision,
    revision_object,
    token_secret,
    volume_claim,
)
from rlsrl_operator.manifests.context import MANAGER, SETTINGS_ANNOTATION, SETTINGS_KEY
from rlsrl_operator.manifests.templates import disallowed
from rlsrl_operator.observe import Observed, RevisionProblem
from rlsrl_operator.operator_key import token_of
from rlsrl_operator.pod_deletions import PodDeletion, pod_deletions
from rlsrl_operator.status import TERMINAL

RETRY_SECONDS = 0.2
"""Delay of the next pass after a conflict."""
QUEUE_SECONDS = 2.0
"""Delay of the next pass over trainers that their queue refuses: the last pod of the earlier attempt must be gone."""
TROUBLE_SECONDS = 30.0
"""Delay of the next pass over an experiment that only a user or an administrator can repair."""
_PRUNED = frozenset({"Deployment", "NetworkPolicy", "ConfigMap"})
"""Kinds of objects that an earlier generation may have and a later one may not."""


@dataclass(frozen=True, kw_only=True)
class StatusUpdate:
    """One write of the status, and the events that report it to ``kubectl describe``."""

    status: ExperimentStatus
    events: tuple[Manifest, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PodAnnotation:
    """Annotations to write on one pod."""

    pod: Manifest
    annotations: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one pass does, in the order of the fields."""

    attempt: StatusUpdate | None = None
    """A new attempt or phase, written before the pass acts on it: an operator that takes over comes to the same."""
    writes: tuple[Write, ...] = ()
    """The objects to create, apply, replace or remember."""
    pod_deletions: tuple[PodDeletion, ...] = ()
    pod_annotations: tuple[PodAnnotation, ...] = ()
    deletions: tuple[Manifest, ...] = ()
    """Other objects to delete."""
    final: StatusUpdate | None = None
    """The status at the end of the pass; None if it stays as it is."""
    status: ExperimentStatus | None = None
    """The status after the pass; None if the pass comes to no judgement."""
    context: ExperimentContext | None = None
    """The experiment that runs: that of the revision."""
    is_steady: bool = False
    """Whether only the run's numbers change from now on, until a watch reports something."""
    requeue_after: float | None = None
    """Seconds until the next pass; None: when a watch reports something."""


@dataclass(frozen=True, kw_only=True)
class _Blocker:
    """Why the writes after an object wait: it is somebody else's, or its own write was refused."""

    reason: AcceptedReason
    message: str
    retry_seconds: float = TROUBLE_SECONDS


@dataclass(frozen=True, kw_only=True)
class _Run:
    """An experiment with a revision: what the rest of the plan follows from."""

    observed: Observed
    written: ExperimentContext
    """The experiment as its document has it."""
    running: ExperimentContext
    """The experiment of the revision: without an edit that was refused."""
    revision: Revision
    now: datetime

    @property
    def templates(self) -> dict[str, str]:
        """The mark of each role's pod template."""
        return {
            each["metadata"]["labels"][ROLE_LABEL]: template_of(each["spec"]["template"])
            for each in self.revision.manifests
            if "template" in each.get("spec", {})
        }


def plan(observed: Observed, *, key: bytes, now: datetime) -> Plan:
    """Return what to do about the experiment. ``key`` signs its revision, and its token derives from it."""
    context, revision = observed.context, observed.revision
    if context is None:
        return _not_accepted(observed, "InvalidSpec", observed.spec_error, now)
    time_left = _time_left(observed.status, context, now)
    if time_left is not None and time_left <= 0:
        return Plan(deletions=(observed.document,))
    if observed.revision_problem is not None:
        return _without_revision(observed, context, observed.revision_problem, now)
    if revision is None:
        faults = disallowed(context.experiment, context.settings)
        return _not_accepted(observed, "InvalidSpec", "\n".join(faults), now)
    running = context
    if revision.experiment != context.experiment:
        running = replace(context, experiment=revision.experiment)
    run = _Run(observed=observed, written=context, running=running, revision=revision, now=now)
    return _with_revision(run, key)


def progress(
    document: Manifest, status: ExperimentStatus, page: Mapping[str, Any] | None, now: datetime
) -> tuple[ExperimentStatus, StatusUpdate | None]:
    """Return the status of a steady experiment with the coordinator's numbers, and the write if they differ."""
    new_status = _with_training(status, page, document["metadata"]["generation"], now)
    return new_status, _update(document, status, new_status, now)


def _without_revision(observed: Observed, context: ExperimentContext, problem: RevisionProblem, now: datetime) -> Plan:
    if problem is RevisionProblem.OTHER_OPERATOR:
        return Plan(requeue_after=TROUBLE_SECONDS)
    if problem is RevisionProblem.NOT_OWNED:
        return _not_accepted(observed, "NameConflict", _name_conflict("ConfigMap", context.revision_name), now)
    assert observed.revision_found is not None, "an unreadable revision was found"
    return Plan(deletions=(observed.revision_found,), requeue_after=RETRY_SECONDS)


def _with_revision(run: _Run, key: bytes) -> Plan:
    observed, now = run.observed, run.now
    judged = decide(observed.status, run.running, run.templates, observed.pods, now)
    writes, blocker = _writes(run, _wanted(run, judged, key))
    if blocker is None:
        decided = _accepted(run, judged)
    else:
        decided = _not_accepted(replace(observed, status=judged), blocker.reason, blocker.message, now)
        decided = replace(decided, requeue_after=blocker.retry_seconds)
    decided = replace(decided, writes=writes, context=run.running)
    before = observed.status
    if (judged.attempt, judged.phase) != (before.attempt, before.phase) and _acts(decided):
        decided = replace(decided, attempt=_update(observed.document, before, judged, now))
        before = judged
    assert decided.status is not None, "an experiment with a revision is judged"
    return replace(decided, final=_update(observed.document, before, decided.status, now))


def _acts(decided: Plan) -> bool:
    """Return whether the plan changes anything but the status."""
    writes = [write for write in decided.writes if write.action is not Action.KEEP]
    return bool(writes or decided.pod_deletions or decided.pod_annotations or decided.deletions)


def _accepted(run: _Run, judged: ExperimentStatus) -> Plan:
    """Return the plan without its writes, for an experiment none of whose objects blocks the others."""
    observed, now = run.observed, run.now
    is_edit_refused = run.revision.experiment != run.written.experiment
    status = statuses.summarize(
        judged,
        run.running,
        observed.pods,
        now,
        failed_create=observed.queue_refusal or observed.failed_create,
        refused_edits=refused(run.revision.experiment, run.written.experiment),
        disallowed=disallowed(run.written.experiment, run.written.settings) if is_edit_refused else (),
    )
    if status.phase == "Running":
        status = _with_training(status, observed.coordinator_page, run.written.generation, now)
    is_over = status.phase in TERMINAL
    settled = is_settled(status, run.templates, observed.pods)
    seconds = run.written.settings.status_seconds
    return Plan(
        pod_deletions=pod_deletions(judged, observed.pods, now),
        pod_annotations=tuple(_settings_annotations(run)),
        deletions=tuple(_obsolete(run)) if settled else (),
        status=status,
        is_steady=settled and not is_over,
        requeue_after=_time_left(status, run.written, now)
        if is_over
        else seconds
        if observed.queue_refusal is None
        else min(seconds, QUEUE_SECONDS),
    )


def _not_accepted(observed: Observed, reason: AcceptedReason, message: str, now: datetime) -> Plan:
    """Return the plan that reports why the experiment is not accepted; its status is otherwise as observed."""
    generation = observed.document["metadata"]["generation"]
    status = observed.status.model_copy(
        update={"phase": observed.status.phase or "Pending", "observed_generation": generation}
    )
    status = statuses.with_condition(status, ACCEPTED, "False", reason, message, generation=generation, now=now)
    final = _update(observed.document, observed.status, status, now)
    return Plan(status=status, final=final, requeue_after=TROUBLE_SECONDS)


def _time_left(status: ExperimentStatus, context: ExperimentContext, now: datetime) -> float | None:
    """Return the seconds until a finished experiment is deleted, or None if it is kept."""
    ttl = context.experiment.spec.ttl_seconds_after_finished
    if ttl is None or status.phase not in TERMINAL or status.finished_at is None:
        return None
    return (parse_time(status.finished_at) + timedelta(seconds=ttl) - now).total_seconds()


def _wanted(run: _Run, judged: ExperimentStatus, key: bytes) -> Iterator[Manifest]:
    """Yield the objects that the experiment needs, in the order in which they are written."""
    context, observed = run.running, run.observed
    if not observed.is_recorded:
        yield revision_object(context, run.revision, key)
    elif (found := observed.children[_revision_key(context)].found) is not None:
        yield {**found, "metadata": context.metadata(context.revision_name), "immutable": True}
    yield token_secret(context, token_of(key, context.uid))
    if (claim := volume_claim(context)) is not None:
        yield claim
    for manifest in run.revision.manifests:
        yield for_phase(manifest, judged, observed.pods, run.now)


def _writes(run: _Run, wanted: Iterator[Manifest]) -> tuple[tuple[Write, ...], _Blocker | None]:
    """Return the writes, and why the rest of them waits, if it does."""
    writes: list[Write] = []
    for manifest in wanted:
        child = run.observed.children.get(key_of(manifest), Child())
        write = write_for(manifest, child)
        if write is None:
            continue
        if write.action is Action.NOT_OWNED:
            return tuple(writes), _Blocker(reason="NameConflict", message=_name_conflict(*key_of(manifest)))
        if child.refused is not None and child.refused.digest == digest(write.wanted):
            seconds = (child.refused.retry_at - run.now).total_seconds()
            return tuple(writes), _Blocker(reason="InvalidSpec", message=child.refused.message, retry_seconds=seconds)
        writes.append(write)
    return tuple(writes), None


def _name_conflict(kind: str, name: str) -> str:
    return (
        f"{kind} {name} exists and does not belong to this experiment: rename or delete it, "
        "or give the experiment another name"
    )


def _settings_annotations(run: _Run) -> Iterator[PodAnnotation]:
    """Yield the annotations that make nodes refresh the live settings: a node reads a pod's volumes again about once a
    minute, and at once when the pod has changed.
    """
    settings = next(each for each in run.revision.manifests if SETTINGS_KEY in each.get("data", {}))
    wanted = {SETTINGS_ANNOTATION: digest(settings["data"])[:10]}
    for pod in run.observed.pods:
        known = pod["metadata"].get("annotations", {})
        if pod["metadata"]["labels"][ROLE_LABEL] == COORDINATOR and wanted.items() - known.items():
            yield PodAnnotation(pod=pod, annotations=wanted)


def _obsolete(run: _Run) -> Iterator[Manifest]:
    """Yield the objects that earlier generations needed and this one does not."""
    context = run.running
    if context.generation == 1:
        return
    needed = {_revision_key(context), *map(key_of, run.revision.manifests)}
    for key, found in run.observed.labelled.items():
        owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}
        if key[0] in _PRUNED and key not in needed and context.uid in owners:
            yield found


def _revision_key(context: ExperimentContext) -> tuple[str, str]:
    return "ConfigMap", context.revision_name


def _with_training(
    status: ExperimentStatus, page: Mapping[str, Any] | None, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status with the coordinator's numbers; unchanged if there are none."""
    if page is None:
        return status
    new_status = status.model_copy(update={"training": statuses.training(page, now)})
    return statuses.durable(new_status, page, generation=generation, now=now)


def _update(
    document: Manifest, before: ExperimentStatus, after: ExperimentStatus, now: datetime
) -> StatusUpdate | None:
    """Return the write that turns one status into the other, or None if they are equal."""
    if statuses.write(before) == statuses.write(after):
        return None
    return StatusUpdate(status=after, events=tuple(_events(document, before, after, now)))


def _events(document: Manifest, before: ExperimentStatus, after: ExperimentStatus, now: datetime) -> Iterator[Manifest]:
    """Yield an event for each condition with a new status or reason. Equal news have equal names, and so come once."""
    metadata, stamp = document["metadata"], statuses.stamp(now)
    about = {"apiVersion": API_VERSION, "kind": KIND, **{name: metadata[name] for name in ("name", "namespace", "uid")}}
    for each in after.conditions:
        was = statuses.condition(before, each.type)
        if was is not None and (was.status, was.reason) == (each.status, each.reason):
            continue
        mark = digest([metadata["uid"], each.type, each.reason, each.last_transition_time])[:16]
        yield {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{mark}", "namespace": metadata["namespace"]},
            "involvedObject": about,
            "type": "Warning" if is_trouble(each.reason) else "Normal",
            "reason": each.reason,
            "message": each.message,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
