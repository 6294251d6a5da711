"""What a pass does about what it observed: a table, without a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlsrl.api.pods import ROLE_LABEL
from rlsrl.api.reasons import ACCEPTED, FINISHED, GANG_COMPLETE, READY, VOLUME_INTACT
from rlsrl.api.retry import RETRY_ANNOTATION
from rlsrl.api.status import ExperimentStatus, Training
from rlsrl.testing.documents import minimal
from rlsrl_operator.drift import Action, Child, RefusedWrite, applied
from rlsrl_operator.gang import template_of
from rlsrl_operator.lifecycle import for_phase
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    first_revision,
    next_revision,
    revision_object,
    volume_claim,
)
from rlsrl_operator.manifests.context import SETTINGS_ANNOTATION
from rlsrl_operator.manifests.types import digest, key_of
from rlsrl_operator.observe import Blocker, Observed, RevisionProblem
from rlsrl_operator.operator_key import own_token_secret
from rlsrl_operator.plan import QUEUE_SECONDS, RETRY_SECONDS, TROUBLE_SECONDS, Plan, plan
from rlsrl_operator.status import condition, events, stamp, with_condition
from rlsrl_operator.status import write as written
from rlsrl_operator.testing import SETTINGS, context_of, ended, pod

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
RETRY_AT = NOW + timedelta(seconds=TROUBLE_SECONDS)
"""When a write that has just been refused is tried again."""
KEY = b"key"
SERVICE, SETTINGS_MAP, SECRET = (
    ("Service", "a-coordinator"),
    ("ConfigMap", "a-settings"),
    ("Secret", "a-token-0b1e5a7c"),
)
REVISION = ("ConfigMap", "a-record-0b1e5a7c-1")
CLAIM = ("PersistentVolumeClaim", "a-data")
TRAINERS, ACTORS = ("StatefulSet", "a-trainer"), ("Deployment", "a-actor")


def context(generation: int = 1, **spec: Any) -> ExperimentContext:
    document = minimal()
    document["spec"] |= {"trainers": {"replicas": 2}, **spec}
    return context_of(document, generation=generation)


def running(context: ExperimentContext) -> ExperimentStatus:
    """The status that an experiment keeps while all is well."""
    numbers = Training(env_steps=2048, env_steps_per_second=1000)
    first = observed(context, ExperimentStatus(phase="Running", attempt=1, restarts=0, training=numbers))
    status = plan(first, key=KEY, now=NOW).status
    assert status is not None
    return status


def pods_of(context: ExperimentContext) -> list[Manifest]:
    """Ready pods, as the revision wants them."""
    pods = []
    for manifest in first_revision(context).manifests:
        if "template" in manifest.get("spec", {}):
            role = manifest["metadata"]["labels"][ROLE_LABEL]
            marks = {"template": template_of(manifest["spec"]["template"])}
            pods += [pod(role, index, **marks) for index in range(manifest["spec"]["replicas"])]
    settings = next(each for each in first_revision(context).manifests if key_of(each) == SETTINGS_MAP)
    for each in pods:
        if each["metadata"]["labels"][ROLE_LABEL] == "coordinator":
            each["metadata"]["annotations"][SETTINGS_ANNOTATION] = digest(settings["data"])[:10]
    return pods


def observed(context: ExperimentContext, status: ExperimentStatus | None = None, **seen: Any) -> Observed:
    """An experiment with all its objects as they should be, unless said otherwise."""
    status = running(context) if status is None else status
    revision, pods = first_revision(context), seen.get("pods", pods_of(context))
    claim = volume_claim(context)
    assert claim is not None
    wanted = [
        revision_object(context, revision, KEY),
        own_token_secret(context, KEY),
        claim,
        *(for_phase(each, status, pods, NOW) for each in revision.manifests),
    ]
    metadata = {"name": "a", "namespace": "research", "uid": context.uid, "generation": context.generation}
    about = Observed(
        document={"metadata": {**metadata, "resourceVersion": "7"}, "status": written(status)},
        status=status,
        context=context,
        revision=revision,
        children={key_of(each): unchanged(each) for each in wanted},
        pods=pods,
    )
    return replace(about, **seen)


def unchanged(wanted: Manifest) -> Child:
    """An object as the operator wrote it."""
    found = served(wanted)
    return Child(found=found, applied=applied(wanted, found), is_unchanged=True)


def served(wanted: Manifest) -> Manifest:
    return {**wanted, "metadata": {**wanted["metadata"], "uid": f"uid-{key_of(wanted)}", "resourceVersion": "1"}}


def with_child(about: Observed, key: tuple[str, str], child: Child) -> Observed:
    return replace(about, children={**about.children, key: child})


def said(decided: Plan, name: str) -> tuple[str, str] | None:
    """The status and the reason of a condition after the pass."""
    assert decided.status is not None
    found = condition(decided.status, name)
    return None if found is None else (found.status, found.reason)


def actions(decided: Plan) -> list[tuple[Action, tuple[str, str]]]:
    return [(write.action, key_of(write.wanted)) for write in decided.writes]


CONTEXT = context()
STEADY = observed(CONTEXT)


def of_new_experiment() -> Observed:
    """Nothing of it exists."""
    fresh = observed(CONTEXT, ExperimentStatus(), pods=[])
    return replace(fresh, children=dict.fromkeys(fresh.children, Child()))


def test_a_steady_experiment_needs_nothing() -> None:
    decided = plan(STEADY, key=KEY, now=NOW)
    nothing = Plan(status=STEADY.status, training=CONTEXT, is_steady=True, requeue_after=SETTINGS.status_seconds)
    assert decided == nothing


def test_a_new_experiment_is_made_in_order_after_its_attempt_is_written() -> None:
    decided = plan(of_new_experiment(), key=KEY, now=NOW)
    assert decided.written_ahead is not None
    assert decided.written_ahead.attempt == 1
    made = actions(decided)
    assert made[:3] == [(Action.CREATE, REVISION), (Action.CREATE, SECRET), (Action.CREATE, CLAIM)]
    immutable = {key for action, key in made if action is Action.CREATE}
    assert {key for action, key in made if action is Action.APPLY} == {
        key_of(w.wanted) for w in decided.writes
    } - immutable
    assert not decided.is_steady
    assert decided.requeue_after == SETTINGS.status_seconds


def test_planning_again_from_the_status_written_ahead_gives_the_same_plan() -> None:
    first = of_new_experiment()
    before = plan(first, key=KEY, now=NOW)
    assert before.written_ahead is not None
    document = {**first.document, "status": written(before.written_ahead)}
    again = plan(replace(first, status=before.written_ahead, document=document), key=KEY, now=NOW)
    assert again == replace(before, written_ahead=None)


def of_trained_experiment() -> Observed:
    trained = Training(version="1.2500", train_steps=2500)
    return observed(CONTEXT, STEADY.status.model_copy(update={"training": trained}))


def test_a_claim_that_is_being_deleted_is_reported_and_left_alone() -> None:
    about = of_trained_experiment()
    found = about.children[CLAIM].found
    assert found is not None
    leaving = {**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-01-01T00:09:00Z"}}
    decided = plan(with_child(about, CLAIM, Child(found=leaving)), key=KEY, now=NOW)
    assert said(decided, VOLUME_INTACT) == ("False", "ClaimDeleting")
    assert CLAIM not in [key for _, key in actions(decided)]
    assert decided.status is not None
    again = replace(about, status=decided.status)
    assert said(plan(again, key=KEY, now=NOW), VOLUME_INTACT) == ("False", "ClaimReplaced"), "somebody made another"


def test_what_a_deleted_claim_held_is_reported_for_good_when_another_is_made() -> None:
    about = of_trained_experiment()
    decided = plan(with_child(about, CLAIM, Child()), key=KEY, now=NOW)
    assert actions(decided) == [(Action.CREATE, CLAIM)]
    assert decided.status is not None
    lost = condition(decided.status, VOLUME_INTACT)
    assert lost is not None
    assert lost.reason == "ClaimReplaced"
    assert "PersistentVolumeClaim a-data was deleted" in lost.message
    assert "version 1.2500 after 2500 training steps" in lost.message
    later = plan(replace(about, status=decided.status), key=KEY, now=NOW + timedelta(hours=1)).status
    assert later is not None
    assert condition(later, VOLUME_INTACT) == lost


SHARDS = context(
    algorithm={"dqn": {}}, pacing={"trainStepsPerEnvStep": 1}, bufferWorkers={"replicas": 1}, trainers={"replicas": 1}
)


def shard_claim(index: int, *, deleting: bool) -> dict[tuple[str, str], Manifest]:
    name = f"state-a-buffer-{index}"
    leaving = {"deletionTimestamp": "2026-01-01T00:09:00Z"} if deleting else {}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": name, "labels": {}, **leaving}}
    return {("PersistentVolumeClaim", name): claim}


def test_a_deleted_claim_of_a_buffer_worker_is_reported_and_so_is_that_another_took_its_place() -> None:
    about = observed(SHARDS, labelled=shard_claim(0, deleting=True))
    decided = plan(about, key=KEY, now=NOW)
    assert said(decided, VOLUME_INTACT) == ("False", "ShardClaimDeleting")
    assert decided.status is not None
    again = plan(replace(about, status=decided.status, labelled=shard_claim(0, deleting=False)), key=KEY, now=NOW)
    assert said(again, VOLUME_INTACT) == ("False", "ShardClaimReplaced")
    assert again.status is not None
    lost = condition(again.status, VOLUME_INTACT)
    assert lost is not None
    assert lost.message.startswith("PersistentVolumeClaim state-a-buffer-0 was deleted with what it held by 2026")


@pytest.mark.parametrize(("index", "deleting"), [(0, False), (1, True)])
def test_claims_that_stay_and_those_of_buffer_workers_that_an_edit_took_away_are_no_loss(
    index: int, deleting: bool
) -> None:
    about = observed(SHARDS, labelled=shard_claim(index, deleting=deleting))
    assert said(plan(about, key=KEY, now=NOW), VOLUME_INTACT) is None


def test_what_is_said_of_the_weights_volume_stays() -> None:
    about = observed(SHARDS, of_trained_experiment().status)
    lost = plan(with_child(about, CLAIM, Child()), key=KEY, now=NOW).status
    assert lost is not None
    later = replace(about, status=lost, labelled=shard_claim(0, deleting=True))
    assert said(plan(later, key=KEY, now=NOW), VOLUME_INTACT) == ("False", "ClaimReplaced")


def test_the_first_claim_replaces_nothing() -> None:
    assert said(plan(of_new_experiment(), key=KEY, now=NOW), VOLUME_INTACT) is None


@pytest.mark.parametrize("exit_code", [1, 137])
def test_a_lost_trainer_begins_an_attempt_that_is_written_before_its_pods_go(exit_code: int) -> None:
    lost = [*STEADY.pods]
    index = next(i for i, each in enumerate(lost) if each["metadata"]["name"] == "a-trainer-1")
    lost[index] = {**lost[index], "status": pod(index=1, state=ended(exit_code))["status"]}
    decided = plan(replace(STEADY, pods=lost), key=KEY, now=NOW)
    assert decided.written_ahead is not None
    assert decided.written_ahead.attempt == 2
    posted = events(STEADY.document, STEADY.status, decided.written_ahead, NOW)
    assert [event["reason"] for event in posted] == ["Restarting"]
    assert actions(decided) == [(Action.APPLY, TRAINERS)]
    (write,) = decided.writes
    assert write.wanted["spec"]["replicas"] == 0, "no trainer of attempt 2 begins beside one of attempt 1"
    gone = [(each.pod["metadata"]["name"], each.reason) for each in decided.pod_deletions]
    assert gone == [("a-trainer-0", "earlier attempt"), ("a-trainer-1", "earlier attempt")]
    assert said(decided, READY) == ("False", "Starting")


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """What keeps an experiment from being accepted, and what the pass does then."""

    about: Callable[[], Observed]
    reason: str
    message: str
    at: tuple[str, str] | None = None
    """The object behind which nothing is written or read."""


def foreign(key: tuple[str, str]) -> Callable[[], Observed]:
    """Somebody else's object has a name that the experiment needs."""
    found = {"apiVersion": "v1", "kind": key[0], "metadata": {"name": key[1], "uid": "x", "resourceVersion": "1"}}
    return lambda: with_child(STEADY, key, Child(found=found))


def refused(key: tuple[str, str]) -> Callable[[], Observed]:
    """The API server has refused to create the object."""

    def about() -> Observed:
        decided = plan(with_child(STEADY, key, Child()), key=KEY, now=NOW)
        (write,) = decided.writes
        refusal = RefusedWrite(digest=digest(write.wanted), message="exceeded quota", retry_at=RETRY_AT)
        return with_child(STEADY, key, Child(refused=refusal))

    return about


BLOCKED = {
    "an invalid spec": Blocked(
        about=lambda: replace(STEADY, context=None, revision=None, spec_error="spec.stop: no"),
        reason="InvalidSpec",
        message="spec.stop: no",
    ),
    "a pod template that is not allowed from the first generation on": Blocked(
        about=lambda: replace(
            STEADY,
            context=context(actors={"environments": 8, "podTemplate": {"spec": {"hostNetwork": True}}}),
            revision=None,
        ),
        reason="InvalidSpec",
        message="hostNetwork",
    ),
    "somebody else's object in the revision's place": Blocked(
        about=lambda: replace(STEADY, revision=None, revision_problem=RevisionProblem.NOT_OWNED),
        reason="NameConflict",
        message=f"ConfigMap {REVISION[1]} exists and does not belong to this experiment",
        at=REVISION,
    ),
    **{
        f"somebody else's {kind}": Blocked(
            about=foreign((kind, name)),
            reason="NameConflict",
            message=f"{kind} {name} exists and does not belong",
            at=(kind, name),
        )
        for kind, name in (SERVICE, SETTINGS_MAP, SECRET, CLAIM, TRAINERS, ACTORS)
    },
    **{
        f"a refused {kind}": Blocked(
            about=refused((kind, name)),
            reason="ObjectRefused",
            message=f"{kind} {name}: exceeded quota",
            at=(kind, name),
        )
        for kind, name in (SERVICE, SETTINGS_MAP, SECRET, CLAIM, TRAINERS, ACTORS)
    },
}


@pytest.mark.parametrize("case", BLOCKED.values(), ids=BLOCKED)
def test_a_blocked_experiment_is_reported_once_and_nothing_else_happens(case: Blocked) -> None:
    about = case.about()
    decided = plan(about, key=KEY, now=NOW)
    assert said(decided, ACCEPTED) == ("False", case.reason)
    assert decided.status is not None
    (event,) = events(about.document, about.status, decided.status, NOW)
    assert (event["type"], event["reason"]) == ("Warning", case.reason)
    assert case.message in event["message"]
    assert decided.blocker is not None
    assert (decided.blocker.reason, decided.blocker.at) == (case.reason, case.at)
    assert case.message in decided.blocker.message
    assert replace(decided, status=None, blocker=None) == Plan(requeue_after=TROUBLE_SECONDS)
    document = {**about.document, "status": written(decided.status)}
    later = NOW + timedelta(seconds=TROUBLE_SECONDS - 1)
    again = plan(replace(about, status=decided.status, document=document), key=KEY, now=later)
    assert again.status == decided.status, "it settles"


def test_objects_before_the_blocking_one_are_written() -> None:
    about = with_child(of_new_experiment(), SERVICE, foreign(SERVICE)().children[SERVICE])
    decided = plan(about, key=KEY, now=NOW)
    assert (Action.CREATE, REVISION) in actions(decided)
    assert SERVICE not in {key for _, key in actions(decided)}
    assert not {"Deployment", "StatefulSet"} & {kind for _, (kind, _) in actions(decided)}
    assert decided.written_ahead is not None
    assert decided.status is not None
    assert decided.status.attempt == 1, "the status that was written ahead is not taken back"


def test_a_refused_write_is_tried_again_when_the_manifest_has_changed() -> None:
    refusal = RefusedWrite(digest="of another manifest", message="exceeded quota", retry_at=RETRY_AT)
    decided = plan(with_child(STEADY, ACTORS, Child(refused=refusal)), key=KEY, now=NOW)
    assert actions(decided) == [(Action.APPLY, ACTORS)]


def test_a_refused_write_is_tried_again_when_its_time_has_come() -> None:
    assert actions(plan(refused(ACTORS)(), key=KEY, now=RETRY_AT)) == [(Action.APPLY, ACTORS)]


def test_a_pass_in_between_does_not_delay_the_next_try_of_a_refused_write() -> None:
    later = NOW + timedelta(seconds=TROUBLE_SECONDS - 1)
    assert plan(refused(ACTORS)(), key=KEY, now=later).requeue_after == 1


def test_an_experiment_of_another_operator_is_left_alone() -> None:
    about = replace(STEADY, revision=None, revision_problem=RevisionProblem.OTHER_OPERATOR)
    decided = plan(about, key=KEY, now=NOW)
    assert decided.blocker is not None
    assert (decided.blocker.reason, decided.blocker.at) == ("OtherOperator", REVISION)
    assert replace(decided, blocker=None) == Plan(requeue_after=TROUBLE_SECONDS)


def test_writes_end_before_an_object_that_was_not_read() -> None:
    about = of_new_experiment()
    keys = list(about.children)
    read = {key: about.children[key] for key in keys[: keys.index(SERVICE) + 1]}
    decided = plan(replace(about, children=read), key=KEY, now=NOW)
    assert actions(decided)[-1] == (Action.APPLY, SERVICE)
    assert [key for _, key in actions(decided)] == list(read)
    assert (decided.status, decided.blocker, decided.requeue_after) == (None, None, RETRY_SECONDS)


def test_pods_that_are_refused_are_looked_at_rarely() -> None:
    actors = [each for each in STEADY.pods if each["metadata"]["labels"][ROLE_LABEL] != "actor"]
    reason = "Deployment a-actor: exceeded quota"
    waiting = replace(STEADY, pods=actors[:1], failed_create=reason, status=ExperimentStatus(phase="Starting"))
    training = replace(STEADY, pods=actors, failed_create=reason)
    for about in (waiting, training):
        decided = plan(about, key=KEY, now=NOW)
        assert decided.blocker == Blocker(reason="FailedCreate", message=reason)
        assert decided.requeue_after == TROUBLE_SECONDS
    assert plan(replace(waiting, failed_create=None), key=KEY, now=NOW).requeue_after == SETTINGS.status_seconds


@pytest.mark.parametrize(("seconds", "is_blocked"), [(0, False), (TROUBLE_SECONDS - 1, False), (TROUBLE_SECONDS, True)])
def test_a_queue_that_refuses_for_long_blocks(seconds: float, is_blocked: bool) -> None:
    since = NOW - timedelta(seconds=seconds)
    about = replace(STEADY, pods=[COORDINATOR_POD], queue_refusal="no", queue_refused_since=since)
    status = running(CONTEXT).model_copy(update={"phase": "Queued", "conditions": ()})
    decided = plan(replace(about, status=status), key=KEY, now=NOW)
    assert (decided.blocker is not None) is is_blocked
    assert decided.requeue_after == (TROUBLE_SECONDS if is_blocked else QUEUE_SECONDS)


@pytest.mark.parametrize("problem", [RevisionProblem.UNREADABLE, RevisionProblem.OUTDATED])
def test_a_revision_that_cannot_stay_is_deleted_and_made_again_by_the_next_pass(problem: RevisionProblem) -> None:
    found = STEADY.children[REVISION].found
    about = replace(STEADY, revision=None, revision_problem=problem)
    assert found is not None
    assert plan(about, key=KEY, now=NOW) == Plan(deletions=(found,), requeue_after=RETRY_SECONDS)


@pytest.mark.parametrize(("seconds_left", "expected"), [(1, None), (0, "deleted"), (-1, "deleted")])
def test_a_finished_experiment_is_deleted_when_its_time_is_over(seconds_left: int, expected: str | None) -> None:
    about = context(ttlSecondsAfterFinished=60)
    finished_at = stamp(NOW - timedelta(seconds=60 - seconds_left))
    status = running(about).model_copy(update={"phase": "Succeeded", "finished_at": finished_at})
    decided = plan(observed(about, status), key=KEY, now=NOW)
    if expected is None:
        assert decided.requeue_after == seconds_left
    else:
        assert decided == Plan(deletions=(observed(about, status).document,), requeue_after=RETRY_SECONDS)


COORDINATOR_POD = next(each for each in STEADY.pods if each["metadata"]["name"] == "a-coordinator-0")
TERMINATING = {"deletionTimestamp": stamp(NOW)}


@pytest.mark.parametrize(
    ("ttl", "left", "expected"),
    [
        (None, [COORDINATOR_POD], None),
        (60, [COORDINATOR_POD], 60),
        (None, [COORDINATOR_POD, pod("actor", **TERMINATING)], SETTINGS.status_seconds),
        (60, [COORDINATOR_POD, pod("actor", **TERMINATING)], SETTINGS.status_seconds),
        (5, [COORDINATOR_POD, pod("actor", **TERMINATING)], 5),
        (None, [{**COORDINATOR_POD, "metadata": COORDINATOR_POD["metadata"] | TERMINATING}], SETTINGS.status_seconds),
    ],
)
def test_a_finished_experiment_gets_passes_until_its_pods_are_gone(
    ttl: int | None, left: list[Manifest], expected: float | None
) -> None:
    about = context(**({} if ttl is None else {"ttlSecondsAfterFinished": ttl}))
    status = running(about).model_copy(update={"phase": "Failed", "finished_at": stamp(NOW)})
    assert plan(observed(about, status, pods=left), key=KEY, now=NOW).requeue_after == expected


def test_an_experiment_without_time_left_is_deleted_soon_after_a_pass_with_a_refused_write() -> None:
    about = context(ttlSecondsAfterFinished=0)
    pods = pods_of(about)
    first = next(i for i, each in enumerate(pods) if each["metadata"]["name"] == "a-trainer-0")
    pods[first] = {**pods[first], "status": pod(state=ended(0, "done"))["status"]}
    seen = observed(about, running(about), pods=pods)
    decided = plan(seen, key=KEY, now=NOW)
    assert decided.written_ahead is not None
    after = plan(replace(seen, status=decided.written_ahead, queue_refusal="no"), key=KEY, now=NOW)
    assert after.requeue_after == RETRY_SECONDS


def test_an_experiment_that_has_just_ended_gets_a_pass_while_its_trainers_end() -> None:
    about = context(ttlSecondsAfterFinished=60)
    pods = pods_of(about)
    first = next(i for i, each in enumerate(pods) if each["metadata"]["name"] == "a-trainer-0")
    pods[first] = {**pods[first], "status": pod(state=ended(0, "done"))["status"]}
    decided = plan(observed(about, running(about), pods=pods), key=KEY, now=NOW)
    assert said(decided, FINISHED) == ("True", "Succeeded")
    assert decided.requeue_after == SETTINGS.status_seconds


def test_a_retry_waits_until_the_coordinators_workload_wants_no_pod() -> None:
    about = context()
    status = running(about).model_copy(update={"phase": "Failed", "finished_at": stamp(NOW)})
    document = {"metadata": {**STEADY.document["metadata"], "annotations": {RETRY_ANNOTATION: "1"}}}
    seen = observed(about, status, pods=[], document=document)
    decided = plan(seen, key=KEY, now=NOW)
    assert actions(decided) == [(Action.APPLY, ("StatefulSet", "a-coordinator"))]
    assert decided.status is not None
    assert (decided.status.attempt, decided.requeue_after) == (1, RETRY_SECONDS)
    gone = {**decided.writes[0].wanted, "spec": {**decided.writes[0].wanted["spec"], "replicas": 0}}
    after = plan(with_child(seen, ("StatefulSet", "a-coordinator"), unchanged(gone)), key=KEY, now=NOW)
    assert after.status is not None
    assert (after.status.attempt, after.writes, after.requeue_after) == (2, (), RETRY_SECONDS)


def test_an_edit_that_is_refused_is_reported_and_changes_nothing() -> None:
    edited = context(generation=2, environment={"id": "Acrobot-v1"})
    decided = plan(replace(STEADY, context=edited, children=observed(context(generation=2)).children), key=KEY, now=NOW)
    assert said(decided, ACCEPTED) == ("False", "EditRefused")
    assert decided.writes == ()
    assert decided.pod_deletions == ()


def test_obsolete_objects_are_deleted_once_the_pods_are_of_this_generation() -> None:
    edited = context(generation=2, stop={"envSteps": 2000})
    ours = {"ownerReferences": [{"uid": edited.uid}]}
    names = {
        REVISION: ours,
        ("ConfigMap", "a-actor-earlier"): ours,
        ("ConfigMap", "theirs"): {"ownerReferences": [{"uid": "another"}]},
        ("ConfigMap", "nobodys"): {},
        ("Secret", "a-other"): ours,
        **dict.fromkeys(observed(edited).children, ours),
    }
    labelled = {key: {"kind": key[0], "metadata": {"name": key[1], **marks}} for key, marks in names.items()}
    about = replace(observed(edited), labelled=labelled)
    gone = {key_of(each) for each in plan(about, key=KEY, now=NOW).deletions}
    assert gone == {REVISION, ("ConfigMap", "a-actor-earlier")}
    earlier = pod("actor", template="of the earlier generation", ready=False)
    assert plan(replace(about, pods=[*about.pods, earlier]), key=KEY, now=NOW).deletions == ()
    refused_edit = replace(about, revision=first_revision(CONTEXT), pods=pods_of(CONTEXT))
    gone = {key_of(each) for each in plan(refused_edit, key=KEY, now=NOW).deletions}
    assert REVISION not in gone, "the administrator may allow the edit later"
    assert ("ConfigMap", "a-actor-earlier") in gone


def test_new_live_settings_are_announced_to_the_coordinators_node() -> None:
    edited = context(generation=2, stop={"envSteps": 2000})
    revision = next_revision(first_revision(CONTEXT), edited)
    about = replace(observed(edited), revision=revision, pods=pods_of(CONTEXT))
    decided = plan(about, key=KEY, now=NOW)
    assert [each.pod["metadata"]["name"] for each in decided.pod_annotations] == ["a-coordinator-0"]


@pytest.mark.parametrize(
    ("queue_refusal", "expected"), [(None, SETTINGS.status_seconds), ("still there", QUEUE_SECONDS)]
)
def test_a_queue_that_refuses_is_retried_soon(queue_refusal: str | None, expected: float) -> None:
    assert plan(replace(STEADY, queue_refusal=queue_refusal), key=KEY, now=NOW).requeue_after == expected


@pytest.mark.parametrize(
    ("phase", "without", "expected"),
    [
        ("Running", None, True),
        ("Running", "a-coordinator-0", False),
        ("Starting", None, True),
        ("Starting", "a-coordinator-0", False),
    ],
)
def test_the_coordinator_of_a_starting_or_running_experiment_is_asked(
    phase: str, without: str | None, expected: bool
) -> None:
    pods = [each for each in STEADY.pods if each["metadata"]["name"] != without]
    status = STEADY.status
    if phase == "Starting":
        pods = [each for each in pods if each["metadata"]["name"] != "a-trainer-0"]
        status = with_condition(status, GANG_COMPLETE, "False", "Restarting", "", generation=1, now=NOW)
    decided = plan(replace(STEADY, status=status, pods=pods), key=KEY, now=NOW)
    assert decided.status is not None
    assert (decided.status.phase, decided.training) == (phase, CONTEXT if expected else None)


def test_each_change_of_a_condition_is_one_event() -> None:
    decided = plan(of_new_experiment(), key=KEY, now=NOW)
    steps = [of_new_experiment().status, decided.written_ahead, decided.status]
    posted = [
        event
        for before, after in itertools.pairwise(steps)
        if before is not None and after is not None
        for event in events(STEADY.document, before, after, NOW)
    ]
    assert [event["reason"] for event in posted] == ["Starting", "Accepted", "Starting"]
    names = [event["metadata"]["name"] for event in posted]
    assert len(set(names)) == 3
    assert decided.written_ahead is not None
    again = events(STEADY.document, ExperimentStatus(), decided.written_ahead, NOW)
    assert [event["metadata"]["name"] for event in again] == names[:1]


@pytest.mark.parametrize("key", [key for key in STEADY.children if key != REVISION], ids="/".join)
def test_an_object_that_is_gone_comes_back(key: tuple[str, str]) -> None:
    decided = plan(with_child(STEADY, key, Child()), key=KEY, now=NOW)
    ((action, written_key),) = actions(decided)
    assert written_key == key
    assert action in (Action.CREATE, Action.APPLY)
    assert decided.written_ahead is None


def test_objects_are_written_in_the_order_in_which_they_need_each_other() -> None:
    kinds = [kind for _, (kind, _) in actions(plan(of_new_experiment(), key=KEY, now=NOW))]
    order = [kind for kind, _ in itertools.groupby(kinds)]
    assert order.index("ConfigMap") < order.index("Service") < order.index("StatefulSet")
