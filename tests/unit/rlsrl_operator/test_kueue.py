"""Experiments whose trainers wait in a queue of Kueue: their pods, their status, their manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlsrl.api.pods import REMOVED_CONDITION, ROLE_LABEL
from rlsrl.api.reasons import GANG_COMPLETE, READY, is_trouble
from rlsrl.api.roles import ROLES
from rlsrl.api.status import ExperimentStatus, Phase
from rlsrl.testing.documents import minimal
from rlsrl_operator.lifecycle import QUEUED_SECONDS, decide, for_phase
from rlsrl_operator.manifests import ExperimentContext, Manifest, first_revision, next_revision, render
from rlsrl_operator.manifests.kueue import (
    PRIORITY_LABEL,
    QUEUE_LABEL,
    begins_in_queue,
    next_size,
    queue_labels,
)
from rlsrl_operator.roles import is_queued
from rlsrl_operator.status import blocker, condition, stamp, summarize, with_condition
from rlsrl_operator.testing import context_of, pod

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=5)
LABELS = {QUEUE_LABEL: "team", PRIORITY_LABEL: "urgent"}
KINDS = ("Deployment", "StatefulSet")


def context(
    *, labels: dict[str, str] = LABELS, suspend: bool = False, generation: int = 1, **spec: Any
) -> ExperimentContext:
    document = minimal()
    document["metadata"]["labels"] = labels
    others: dict[str, Any] = {role: {} for role in ("policyWorkers", "bufferWorkers", "evaluators")}
    document["spec"] |= {"suspend": suspend, "trainers": {"replicas": 2}, **others, **spec}
    return context_of(document, generation=generation)


def decided(
    status: ExperimentStatus, pods: Sequence[Manifest], *, now: datetime = NOW, about: ExperimentContext | None = None
) -> ExperimentStatus:
    return decide(status, about or context(), dict.fromkeys(ROLE_NAMES, "1"), pods, now)


def running(attempt: int = 1) -> ExperimentStatus:
    status = ExperimentStatus(phase="Running", attempt=attempt, restarts=attempt - 1)
    return with_condition(status, GANG_COMPLETE, "True", "Complete", "", generation=1, now=EARLIER)


def restarting(attempt: int) -> ExperimentStatus:
    return with_condition(running(attempt), GANG_COMPLETE, "False", "Restarting", "", generation=1, now=EARLIER)


def gang(*, attempt: int = 1, **about: Any) -> list[Manifest]:
    return [pod(index=index, attempt=attempt, **about) for index in range(2)]


def waiting_gang(*, seconds: float, attempt: int = 1) -> list[Manifest]:
    return gang(attempt=attempt, held=True, ready=False, created=stamp(NOW - timedelta(seconds=seconds)))


def test_only_queued_roles_name_the_queue() -> None:
    labelled = {
        each["metadata"]["labels"][ROLE_LABEL]: queue_labels(each["metadata"]["labels"])
        for each in render(context())
        if each["kind"] in KINDS
    }
    assert labelled == {role.name: LABELS if is_queued(role) else {} for role in ROLES}
    assert labelled["trainer"] == LABELS
    assert not any(queue_labels(each["metadata"]["labels"]) for each in render(context(labels={"team": "a"})))


def test_a_run_stays_in_its_queue_until_it_is_suspended() -> None:
    before = first_revision(context())
    moved = context(labels={QUEUE_LABEL: "another"}, generation=2, stop={"trainSteps": 7})
    after = next_revision(before, moved)
    assert queue_labels(after.experiment.metadata.labels) == LABELS
    (trainers,) = (
        each for each in after.manifests if (each["kind"], each["metadata"]["name"][-8:]) == ("StatefulSet", "-trainer")
    )
    assert queue_labels(trainers["metadata"]["labels"]) == LABELS
    assert first_revision(moved).experiment.metadata.labels == {QUEUE_LABEL: "another"}


PHASES: dict[str, tuple[ExperimentStatus, list[Manifest], Phase]] = {
    "it begins in the queue": (ExperimentStatus(), [], "Queued"),
    "its trainers are held": (ExperimentStatus(phase="Queued", attempt=1), waiting_gang(seconds=3600), "Queued"),
    "one of them is": (
        ExperimentStatus(phase="Queued", attempt=1),
        [pod(ready=False), *waiting_gang(seconds=1)[1:]],
        "Queued",
    ),
    "one of them is not there yet": (ExperimentStatus(phase="Queued", attempt=1), [pod(ready=False)], "Queued"),
    "only those of the attempt before are there": (ExperimentStatus(phase="Queued", attempt=2), gang(), "Queued"),
    "they are admitted": (ExperimentStatus(phase="Queued", attempt=1), gang(ready=False), "Starting"),
    "it runs": (running(), gang(), "Running"),
    "a restarted gang waits for a short time": (
        restarting(2),
        waiting_gang(attempt=2, seconds=QUEUED_SECONDS),
        "Running",
    ),
    "it lost its place": (restarting(2), waiting_gang(attempt=2, seconds=QUEUED_SECONDS + 1), "Queued"),
    "it was suspended": (ExperimentStatus(phase="Suspended", attempt=1), [], "Queued"),
}


@pytest.mark.parametrize("name", PHASES)
def test_the_phase(name: str) -> None:
    before, pods, phase = PHASES[name]
    made = decided(before, pods)
    assert made.phase == phase
    assert decided(made, pods) == made


def test_without_a_queue_nothing_waits() -> None:
    about = context(labels={})
    assert decided(ExperimentStatus(), [], about=about).phase == "Pending"
    assert decided(ExperimentStatus(phase="Suspended", attempt=1), [], about=about).phase == "Starting"
    held_by_another = gang(held=True, ready=False, created=stamp(EARLIER))
    assert decided(running(), held_by_another, about=about).phase == "Running"


def test_suspending_goes_before_waiting() -> None:
    about = context(suspend=True)
    waiting = ExperimentStatus(phase="Queued", attempt=1)
    assert decided(waiting, waiting_gang(seconds=60), about=about).phase == "Suspended"


def test_an_eviction_by_the_queue_is_no_failure() -> None:
    removed = {"type": REMOVED_CONDITION, "status": "True", "reason": "WorkloadEvictedDueToClusterQueueStopped"}
    made = decided(running(), gang(deleted=stamp(NOW), conditions=[removed]))
    assert (made.attempt, made.recent_failures, made.restarts) == (2, 0, 0)
    seen_late = decided(running(), waiting_gang(seconds=5))
    assert (seen_late.attempt, seen_late.recent_failures, seen_late.restarts) == (2, 0, 0)


ROLE_NAMES = [role.name for role in ROLES]
TRAINERS_ALONE = dict.fromkeys(ROLE_NAMES, 0) | {"trainer": 2}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], TRAINERS_ALONE),
        (waiting_gang(seconds=60), TRAINERS_ALONE),
        ([*waiting_gang(seconds=60), pod("coordinator")], TRAINERS_ALONE),
        ([*waiting_gang(seconds=60), pod("actor"), pod("coordinator")], TRAINERS_ALONE | {"coordinator": 1}),
        ([pod(attempt=1), pod("coordinator")], TRAINERS_ALONE | {"coordinator": 1, "trainer": 0}),
    ],
)
def test_a_queued_experiment_keeps_only_trainers_and_the_coordinator_goes_last(
    pods: Sequence[Manifest], expected: dict[str, int]
) -> None:
    attempt = 2 if expected["trainer"] == 0 else 1
    status = ExperimentStatus(phase="Queued", attempt=attempt)
    made = [for_phase(each, status, pods, NOW) for each in render(context())]
    replicas = {
        each["metadata"]["labels"][ROLE_LABEL]: each["spec"]["replicas"] for each in made if each["kind"] in KINDS
    }
    assert replicas == expected


def test_a_queued_experiment_is_reported_without_a_warning() -> None:
    status = summarize(ExperimentStatus(phase="Queued", attempt=1), context(), waiting_gang(seconds=60), NOW)
    said = condition(status, READY)
    assert said is not None
    assert (said.status, said.reason) == ("False", "Queued")
    assert said.message == "queue team has not admitted the trainers"
    assert not is_trouble(said.reason)
    assert status.phase == "Queued"
    assert status.actors is not None
    assert status.actors.replicas == 0
    refused = summarize(status, context(), [], NOW, failed_create="scaling down is still in progress")
    said = condition(refused, READY)
    assert said is not None
    assert said.message.endswith(": scaling down is still in progress")


def test_a_short_wait_in_the_queue_names_the_pod() -> None:
    assert blocker([pod("actor"), *waiting_gang(seconds=1)], attempt=1) == (
        "Queued",
        f"a-trainer-0 has waited for its queue since {stamp(NOW - timedelta(seconds=1))}",
    )


def workload(replicas: int | None, **labels: str) -> Manifest:
    return {"metadata": {"labels": labels}, "spec": {} if replicas is None else {"replicas": replicas}}


@pytest.mark.parametrize(
    ("wanted", "observed", "asked", "begins"),
    [
        (3, 0, 3, True),
        (3, 3, 3, False),
        (3, 2, 0, False),
        (3, None, 0, False),
        (1, None, 1, False),
        (0, 3, 0, False),
        (0, 0, 0, False),
    ],
)
def test_a_queued_workload_is_resized_by_way_of_zero(
    wanted: int, observed: int | None, asked: int, begins: bool
) -> None:
    queued = workload(wanted, **{QUEUE_LABEL: "team"})
    there = workload(observed, **{QUEUE_LABEL: "team"})
    assert next_size(queued, there) == workload(asked, **{QUEUE_LABEL: "team"})
    assert begins_in_queue(queued, there) == begins
    assert queued["spec"]["replicas"] == wanted, "a manifest is a value"
    free = workload(wanted)
    assert next_size(free, there) is free
    assert not begins_in_queue(free, there)


def test_a_new_queued_workload_gets_its_size_at_once() -> None:
    queued = workload(3, **{QUEUE_LABEL: "team"})
    assert next_size(queued, None) is queued
    secret = {"metadata": {"labels": {QUEUE_LABEL: "team"}}}
    assert next_size(secret, secret) is secret


def test_the_queue_is_the_recorded_one_after_an_edit() -> None:
    about = context()
    assert about.queue == "team"
    assert replace(about, experiment=context(labels={"a": "b"}).experiment).queue is None
