"""Decide what a pass over one experiment does: observed and time in, plan out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from rlsrl.api.edits import refused
from rlsrl.api.pods import ROLE_LABEL, is_ready
from rlsrl.api.reasons import ACCEPTED, READY, AcceptedReason
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.status import TERMINAL, ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.drift import Action, Write, write_for
from rlsrl_operator.gang import parse_time, template_of
from rlsrl_operator.lifecycle import decide, for_phase, is_rolled_out
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    Revision,
    revision_object,
    shard_claims,
    volume_claim,
)
from rlsrl_operator.manifests.context import SETTINGS_ANNOTATION, SETTINGS_KEY
from rlsrl_operator.manifests.network import with_server_rule
from rlsrl_operator.manifests.permissions import disallowed
from rlsrl_operator.manifests.types import ObjectKey, digest, key_of
from rlsrl_operator.observe import Blocker, Observed, RevisionProblem
from rlsrl_operator.operator_key import own_token_secret, way_to_source
from rlsrl_operator.pod_deletions import PodDeletion, pod_deletions
from rlsrl_operator.retries import Retry, begin_retry, requested_retry

RETRY_SECONDS = 0.2
"""Delay of the next pass after a conflict."""
TROUBLE_SECONDS = 30.0
"""Delay of the next pass over an experiment that only a user or an administrator can repair."""
QUEUE_SECONDS = 2.0
"""Delay of the next pass over trainers that their queue refuses: the last pod of the earlier attempt must be gone. A
queue that refuses them for longer than ``TROUBLE_SECONDS`` has another reason."""
_PRUNED = frozenset({"Deployment", "StatefulSet", "NetworkPolicy", "ConfigMap"})
"""Kinds of objects that an earlier generation may have and a later one may not."""


@dataclass(frozen=True, kw_only=True)
class PodAnnotation:
    """Annotations to write on one pod."""

    pod: Manifest
    annotations: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one pass does, in the order of the fields."""

    written_ahead: ExperimentStatus | None = None
    """The status with a new attempt or phase, if the pass acts on it: an operator that takes over reads the same
    decision."""
    writes: tuple[Write, ...] = ()
    """The objects to create, apply, replace or remember."""
    pod_deletions: tuple[PodDeletion, ...] = ()
    """Pods to delete, each with its reason."""
    pod_annotations: tuple[PodAnnotation, ...] = ()
    deletions: tuple[Manifest, ...] = ()
    """Objects to delete that are not pods."""
    status: ExperimentStatus | None = None
    """The status after the pass, without the run's present numbers; None if it stays as it is."""
    training: ExperimentContext | None = None
    """The experiment, if it is starting or running and its coordinator can report on the run."""
    is_steady: bool = False
    """Whether only the run's numbers change from now on, until a watch reports something."""
    blocker: Blocker | None = None
    """What keeps the experiment from going on."""
    requeue_after: float | None = None
    """Seconds until the next pass; None: when a watch reports something."""


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
        """The digest of each role's pod template, by role."""
        return {
            each["metadata"]["labels"][ROLE_LABEL]: template_of(each["spec"]["template"])
            for each in self.revision.manifests
            if "template" in each.get("spec", {})
        }

    @cached_property
    def retry(self) -> Retry | None:
        """The user's request to try the failed experiment again, or None."""
        is_edit_accepted = self.revision.experiment == self.written.experiment
        return requested_retry(
            self.observed.status, self.observed.document, self.running, is_edit_accepted=is_edit_accepted
        )

    @property
    def is_edit_refused(self) -> bool:
        """Whether the revision leaves out an edit of the spec."""
        return self.revision.experiment.spec != self.written.experiment.spec

    @property
    def is_vacant(self) -> bool:
        """Whether no pod is left, and none will be created: not even the coordinator's."""
        if (coordinator := self.observed.children.get(("StatefulSet", self.running.name_of(COORDINATOR)))) is None:
            return False
        is_wanted = coordinator.found is not None and coordinator.found["spec"]["replicas"] > 0
        return not self.observed.pods and not is_wanted

    @cached_property
    def judged(self) -> ExperimentStatus:
        """The status with the attempt and the phase that follow from the pods."""
        return decide(self.observed.status, self.running, self.templates, self.observed.pods, self.now)


def plan(observed: Observed, *, key: bytes, now: datetime) -> Plan:
    """Return what to do about the experiment. ``key`` signs its revision, and its token derives from it."""
    context, revision = observed.context, observed.revision
    if context is None:
        return _not_accepted(observed, "InvalidSpec", observed.spec_error, now)
    time_left = _time_left(observed.status, context, now)
    if time_left is not None and time_left <= 0:
        # With a next pass: what this pass decides after a refused write is its status alone.
        return Plan(deletions=(observed.document,), requeue_after=RETRY_SECONDS)
    if observed.revision_problem is not None:
        return _without_revision(observed, context, observed.revision_problem, now)
    if revision is None:
        if faults := disallowed(context.experiment, context.settings):
            return _not_accepted(observed, "InvalidSpec", "\n".join(faults), now)
        if fault := context.server.fault:
            return _not_accepted(observed, context.server.reason, fault, now)
        return _not_accepted(observed, "SourceUnusable", context.source_fault, now)
    running = context
    if revision.experiment != context.experiment:
        running = replace(context, experiment=revision.experiment)
    run = _Run(observed=observed, written=context, running=running, revision=revision, now=now)
    return _with_revision(run, key)


def _without_revision(observed: Observed, context: ExperimentContext, problem: RevisionProblem, now: datetime) -> Plan:
    if problem is RevisionProblem.OTHER_OPERATOR:
        message = "an operator with another key manages the experiment"
        blocker = Blocker(reason="OtherOperator", message=message, at=_revision_key(context))
        return Plan(blocker=blocker, requeue_after=TROUBLE_SECONDS)
    if problem is RevisionProblem.NOT_OWNED:
        return _name_conflict(observed, _revision_key(context), now)
    found = observed.children[_revision_key(context)].found
    assert found is not None, "only what was read is unreadable or outdated"
    return Plan(deletions=(found,), requeue_after=RETRY_SECONDS)


def _with_revision(run: _Run, key: bytes) -> Plan:
    if run.retry is not None and run.is_vacant:
        # The next pass acts on it: its objects follow from this status.
        status = begin_retry(run.observed.status, run.retry, run.running, run.now)
        return Plan(status=status, requeue_after=RETRY_SECONDS)
    before, judged = run.observed.status, run.judged
    writes, blocked = _writes(run, _wanted(run, key))
    decided = replace(_accepted(run) if blocked is None else blocked, writes=writes)
    if run.retry is not None and blocked is None and not run.observed.pods:
        decided = replace(decided, requeue_after=RETRY_SECONDS)  # No pod is left whose end would cause a pass.
    is_new = (judged.attempt, judged.phase) != (before.attempt, before.phase)
    return replace(decided, written_ahead=judged) if is_new and _acts(decided) else decided


def _acts(decided: Plan) -> bool:
    """Return whether the plan changes anything but the status."""
    writes = [write for write in decided.writes if write.action is not Action.KEEP]
    return bool(writes or decided.pod_deletions or decided.pod_annotations or decided.deletions)


def _accepted(run: _Run) -> Plan:
    """Return the plan without its writes, for an experiment none of whose objects blocks the others."""
    observed, now = run.observed, run.now
    status = statuses.summarize(
        run.judged,
        run.running,
        observed.pods,
        now,
        failed_create=observed.queue_refusal or observed.failed_create,
        refused_edits=refused(run.revision.experiment, run.written.experiment),
        disallowed=disallowed(run.written.experiment, run.written.settings) if run.is_edit_refused else (),
        server=run.running.server,
    )
    if (claim := volume_claim(run.running)) is not None and (child := observed.children.get(key_of(claim))) is not None:
        name = claim["metadata"]["name"]
        status = statuses.with_claim(status, name, child.found, generation=run.running.generation, now=now)
    status = statuses.with_shard_claims(status, _deleted_claims(run), generation=run.running.generation, now=now)
    rolled_out = is_rolled_out(status, run.templates, observed.pods)
    coordinators = [pod for pod in observed.pods if pod["metadata"]["labels"][ROLE_LABEL] == COORDINATOR]
    is_reported = status.phase in ("Starting", "Running") and any(map(is_ready, coordinators))
    blocker = _pod_blocker(run, status)
    return Plan(
        pod_deletions=pod_deletions(run.judged, observed.pods, now),
        pod_annotations=tuple(_settings_annotations(run)),
        deletions=tuple(_obsolete(run)) if rolled_out else (),
        status=status,
        training=run.running if is_reported else None,
        is_steady=rolled_out and status.phase not in TERMINAL,
        blocker=blocker,
        requeue_after=_seconds_to_next_pass(run, status) if blocker is None else TROUBLE_SECONDS,
    )


def _deleted_claims(run: _Run) -> list[str]:
    """Return the claims of the experiment's buffer workers that are being deleted."""
    claims = {name: run.observed.labelled.get(("PersistentVolumeClaim", name)) for name in shard_claims(run.running)}
    return [name for name, found in claims.items() if found and "deletionTimestamp" in found["metadata"]]


def _pod_blocker(run: _Run, status: ExperimentStatus) -> Blocker | None:
    """Return what keeps pods from being created, or None."""
    observed, ready = run.observed, statuses.condition(status, READY)
    if ready is None or ready.status == "True":
        return None
    if ready.reason == "FailedCreate" and observed.failed_create is not None:
        return Blocker(reason=ready.reason, message=observed.failed_create)
    if observed.queue_refusal is None or observed.queue_refused_since is None:
        return None
    lasts = run.now - observed.queue_refused_since >= timedelta(seconds=TROUBLE_SECONDS)
    return Blocker(reason=ready.reason, message=observed.queue_refusal) if lasts else None


def _not_accepted(
    observed: Observed,
    reason: AcceptedReason,
    message: str,
    now: datetime,
    *,
    at: ObjectKey | None = None,
    retry_seconds: float = TROUBLE_SECONDS,
) -> Plan:
    """Return the plan that reports why the experiment is not accepted, and at which object, if it is one. Its status is
    otherwise as observed.
    """
    generation = observed.document["metadata"]["generation"]
    status = observed.status.model_copy(
        update={"phase": observed.status.phase or "Pending", "observed_generation": generation}
    )
    status = statuses.with_condition(status, ACCEPTED, "False", reason, message, generation=generation, now=now)
    return Plan(status=status, blocker=Blocker(reason=reason, message=message, at=at), requeue_after=retry_seconds)


def _seconds_to_next_pass(run: _Run, status: ExperimentStatus) -> float | None:
    """Return the seconds to the next pass of an accepted experiment; None if only a watch's report causes one.

    A finished experiment gets passes as long as pods may need to be deleted by force, which no watch reports.
    """
    seconds = run.written.settings.status_seconds
    if status.phase not in TERMINAL:
        seconds = statuses.seconds_to_next_look(status, run.now, seconds)
        return seconds if run.observed.queue_refusal is None else min(seconds, QUEUE_SECONDS)
    time_left = _time_left(status, run.written, run.now)
    if not any(map(_is_ending, run.observed.pods)):
        return time_left
    return seconds if time_left is None else min(seconds, time_left)


def _is_ending(pod: Manifest) -> bool:
    """Return whether a pod of a finished experiment must disappear: any but the coordinator's, or a terminating one."""
    metadata = pod["metadata"]
    return metadata["labels"][ROLE_LABEL] != COORDINATOR or "deletionTimestamp" in metadata


def _time_left(status: ExperimentStatus, context: ExperimentContext, now: datetime) -> float | None:
    """Return the seconds until a finished experiment is deleted, or None if it is kept."""
    ttl = context.experiment.spec.ttl_seconds_after_finished
    if ttl is None or status.phase not in TERMINAL or status.finished_at is None:
        return None
    return (parse_time(status.finished_at) + timedelta(seconds=ttl) - now).total_seconds()


def _wanted(run: _Run, key: bytes) -> Iterator[Manifest]:
    """Yield the objects that the experiment needs, in the order in which they are written."""
    context, observed = run.running, run.observed
    if (found := observed.children[_revision_key(context)].found) is None:
        yield revision_object(context, run.revision, key)
    else:
        yield {**found, "metadata": context.metadata(context.revision_name), "immutable": True}
    yield own_token_secret(context, key)
    if (way := way_to_source(context, key)) is not None:
        yield way
    if (claim := volume_claim(context)) is not None:
        yield claim
    server = context.server
    for manifest in run.revision.manifests:
        if manifest["kind"] == "NetworkPolicy":
            yield with_server_rule(manifest, context, server.rule)
        else:
            yield for_phase(manifest, run.judged, observed.pods, run.now, makes_way=run.retry is not None)


def _writes(run: _Run, wanted: Iterator[Manifest]) -> tuple[tuple[Write, ...], Plan | None]:
    """Return the writes up to an object that is somebody else's or refused, and the plan that reports this object.

    The writes end at an object that was not read, too. The next pass reads it, after the one before is written.
    """
    judged = replace(run.observed, status=run.judged)
    writes: list[Write] = []
    for manifest in wanted:
        key = key_of(manifest)
        if (child := run.observed.children.get(key)) is None:
            return tuple(writes), Plan(requeue_after=RETRY_SECONDS)
        write = write_for(manifest, child)
        if write is None:
            continue
        if write.action is Action.NOT_OWNED:
            return tuple(writes), _name_conflict(judged, key, run.now)
        if (refusal := child.refused) is not None and refusal.digest == digest(write.wanted):
            seconds = (refusal.retry_at - run.now).total_seconds()
            if seconds > 0:
                message = f"{' '.join(key)}: {refusal.message}"
                return tuple(writes), _not_accepted(
                    judged, "ObjectRefused", message, run.now, at=key, retry_seconds=seconds
                )
        writes.append(write)
    return tuple(writes), None


def _name_conflict(observed: Observed, key: ObjectKey, now: datetime) -> Plan:
    message = (
        f"{' '.join(key)} exists and does not belong to this experiment: delete it, "
        "or apply the experiment under another name"
    )
    return _not_accepted(observed, "NameConflict", message, now, at=key)


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
    """Yield the objects that earlier generations needed and this one does not. While an edit is refused, the earlier
    revisions stay: if the administrator allows the edit later, the revision is derived from them anew.
    """
    context = run.running
    if context.generation == 1 and context.first_attempt == 1:
        return
    needed = {_revision_key(context), *map(key_of, run.revision.manifests)}
    for key, found in run.observed.labelled.items():
        if run.is_edit_refused and context.revision_order(key[1]) is not None:
            continue
        owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}
        if key[0] in _PRUNED and key not in needed and context.uid in owners:
            yield found


def _revision_key(context: ExperimentContext) -> ObjectKey:
    return "ConfigMap", context.revision_name
