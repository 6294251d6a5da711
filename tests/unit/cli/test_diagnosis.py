"""Problems of an experiment on the cluster, as ``why`` reports them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rlsrl.api.pods import BY_TAINT
from rlsrl.api.reasons import CLAIM_PENDING, ENDS, EVICTED_BY_TAINT, STALE, UNSEEN, VOLUME_INTACT, explain
from rlsrl.cli.diagnosis import Diagnosis, diagnose, past_restarts
from rlsrl.cli.status_view import read_status
from rlsrl.testing.cluster_objects import MADE, NAME, condition, experiment, labels, pod, warning, workload

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 5, tzinfo=UTC)
WELL = (
    condition("Accepted", "Accepted", "every object matches the spec"),
    condition("GangComplete", "Complete", "all 1 trainer pods of attempt 1 are ready"),
    condition("Ready", "Ready", "every pod is ready"),
)


def found(document: Object, *objects: Object, warnings: tuple[Object, ...] = ()) -> list[Diagnosis]:
    return diagnose(document, read_status(document), objects, warnings, now=NOW)


def test_a_running_experiment_has_no_problems() -> None:
    trainer, actors = pod("cartpole-trainer-0", "trainer"), workload("actor", ready=2, replicas=2)
    old_news = warning(actors, "FailedCreate", "quota")
    assert found(experiment("Running", *WELL), trainer, actors, warnings=(old_news,)) == []


def test_a_missing_status_means_a_missing_operator() -> None:
    assert found(experiment(None)) == [Diagnosis(what="status", reason="missing", since=MADE, explanation=UNSEEN)]


def test_a_missing_image_is_reported_once_with_its_pod_and_cure() -> None:
    message = "trainer 0/1 ready: cartpole-trainer-0, since 12:00: Back-off pulling image"
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    trainer = pod("cartpole-trainer-0", "trainer", state=waiting)
    pulled = warning(trainer, "Failed", "no such\nimage", count=7)
    judged, blamed = found(
        experiment("Starting", WELL[0], condition("Ready", "ImagePullBackOff", message)), trainer, warnings=(pulled,)
    )
    assert (judged.what, judged.reason, judged.message) == ("Ready", "ImagePullBackOff", message)
    assert judged.explanation == explain("Ready", "ImagePullBackOff")
    assert blamed == Diagnosis(
        what="pod cartpole-trainer-0 (trainer)",
        reason="ImagePullBackOff",
        since=MADE,
        message="Back-off pulling image",
        event="Failed at 2026-01-01T12:02:00Z, 7 times: no such image",
    )


def test_the_last_output_is_reported_with_the_exit_of_the_container() -> None:
    said = "\n".join(f"line {number}" for number in range(20))
    ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-01T12:03:00Z", "message": said}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    actor = pod("cartpole-actor-x", "actor", state=waiting, lastState={"terminated": ended}, restartCount=4)
    (finding,) = found(experiment("Running", *WELL), actor)
    assert finding.reason == "CrashLoopBackOff"
    assert finding.message == "worker terminated: OOMKilled, exit code 137 at 2026-01-01T12:03:00Z"
    assert finding.last_lines == tuple(f"line {number}" for number in range(12, 20))
    assert finding.explanation == ENDS["OOMKilled"]


TRACEBACK = [
    "Traceback (most recent call last):",
    *(f'  File "/opt/arm.py", line {number}, in step' for number in range(12)),
    "ValueError: the arm is stuck",
]
FAILED = [*TRACEBACK, "rlsrl: environment rank 3 raised ValueError: the arm is stuck"]


def test_the_traceback_of_an_environment_is_reported_whole() -> None:
    ended = {"reason": "Error", "exitCode": 1, "message": "\n".join(["a log line", *FAILED])}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    actor = pod("cartpole-actor-x", "actor", state=waiting, lastState={"terminated": ended}, restartCount=4)
    (finding,) = found(experiment("Running", *WELL), actor)
    assert finding.last_lines == tuple(FAILED)


def test_an_unschedulable_pod_is_reported() -> None:
    stuck = pod("cartpole-trainer-0", "trainer", ready=False)
    stuck["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes have a GPU"}
    ]
    (finding,) = found(experiment("Starting"), stuck)
    assert (finding.reason, finding.message) == ("Unschedulable", "0/2 nodes have a GPU")
    assert finding.explanation == explain("Ready", "Unschedulable")


def test_an_unbound_volume_is_reported() -> None:
    claim = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{NAME}-data", "uid": "1", "labels": labels("coordinator"), "creationTimestamp": MADE},
        "status": {"phase": "Pending"},
    }
    (finding,) = found(experiment("Starting"), claim, warnings=(warning(claim, "ProvisioningFailed", "no class"),))
    assert finding.what == "volume claim cartpole-data"
    assert finding.event.startswith("ProvisioningFailed at")
    assert finding.explanation == CLAIM_PENDING
    assert found(experiment("Starting"), {**claim, "status": {"phase": "Bound"}}) == []


def test_a_volume_that_is_being_deleted_is_reported() -> None:
    claim = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{NAME}-data", "uid": "1", "creationTimestamp": MADE, "deletionTimestamp": MADE},
        "status": {"phase": "Bound"},
    }
    (finding,) = found(experiment("Running", *WELL), claim)
    assert (finding.what, finding.reason, finding.since) == ("volume claim cartpole-data", "Terminating", MADE)
    assert finding.explanation == explain(VOLUME_INTACT, "ClaimDeleting")


def test_a_buffer_workers_volume_that_is_being_deleted_has_no_weights() -> None:
    labels = {"rlsrl.dev/role": "buffer"}
    metadata = {"name": f"state-{NAME}-buffer-0", "uid": "1", "labels": labels, "deletionTimestamp": MADE}
    (finding,) = found(experiment("Running", *WELL), {"kind": "PersistentVolumeClaim", "metadata": metadata})
    assert (finding.what, finding.reason) == (f"volume claim state-{NAME}-buffer-0", "Terminating")
    assert finding.explanation is not None
    assert "Training goes on with the other buffer workers" in finding.explanation.cure


def test_a_lost_volume_is_reported_after_the_end_too() -> None:
    lost = condition(VOLUME_INTACT, "ClaimReplaced", "PersistentVolumeClaim cartpole-data was deleted")
    end = condition("Finished", "Succeeded", "stop.envSteps holds")
    assert [finding.reason for finding in found(experiment("Succeeded", lost, end))] == ["ClaimReplaced"]


def test_forbidden_pods_of_a_role_are_reported() -> None:
    actors = workload("actor", ready=0, replicas=2)
    (finding,) = found(experiment("Starting"), actors, warnings=(warning(actors, "FailedCreate", "exceeded quota"),))
    assert (finding.what, finding.reason) == ("Deployment cartpole-actor", "Warning")
    assert "exceeded quota" in finding.event
    assert found(experiment("Starting"), actors) == []


def test_stale_numbers_of_a_running_experiment_are_reported() -> None:
    fresh, old = ({"training": {"updatedAt": f"2026-01-01T12:0{minute}:30Z"}} for minute in (4, 3))
    assert found(experiment("Running", *WELL, **fresh)) == []
    since = "2026-01-01T12:03:30Z"
    assert found(experiment("Running", *WELL, **old)) == [
        Diagnosis(what="numbers", reason="out of date", since=since, explanation=STALE)
    ]
    assert found(experiment("Starting", *WELL, **old)) == []


def test_starting_pods_are_not_listed_beside_problems() -> None:
    conditions = (condition("GangComplete", "Starting", "x"), condition("Ready", "FailedCreate", "quota"))
    assert [finding.what for finding in found(experiment("Starting", *conditions))] == ["Ready"]


def test_a_run_that_stands_still_is_a_problem_and_one_that_need_not_move_is_none() -> None:
    message = (
        "no environment step and no training step for 61 s: environment rank 3 has been in step for 61 s (actor-0)"
    )
    (finding,) = found(experiment("Running", *WELL, condition("Progressing", "Stalled", message)))
    assert (finding.what, finding.reason, finding.message) == ("Progressing", "Stalled", message)
    assert finding.explanation is not None and "environment.stepSeconds" in finding.explanation.cure
    for reason in ("Progressing", "Paused"):
        assert found(experiment("Running", *WELL, condition("Progressing", reason, "x"))) == []
    waits = (condition("Ready", "Starting", "x"), condition("Progressing", "Starting", "y"))
    assert [each.what for each in found(experiment("Starting", *waits))] == ["Ready"]
    hangs = (condition("Ready", "Starting", "x"), condition("Progressing", "Stalled", message))
    assert [each.what for each in found(experiment("Starting", *hangs))] == ["Progressing"]


def test_a_starting_experiment_has_problems_in_the_order_of_conditions() -> None:
    gang = condition("GangComplete", "Starting", "attempt 1 begins")
    findings = found(experiment("Starting", gang, condition("Ready", "Starting", "trainer 0/1 ready"), WELL[0]))
    assert [finding.what for finding in findings] == ["Ready", "GangComplete"]


@pytest.mark.parametrize(("reason", "told"), [("Succeeded", []), ("BudgetExhausted", ["Finished"])])
def test_an_ended_experiment_reports_only_its_end(reason: str, told: list[str]) -> None:
    phase = "Succeeded" if reason == "Succeeded" else "Failed"
    conditions = (condition("Finished", reason, "x"), condition("GangComplete", "Restarting", "y"))
    leaving = pod("cartpole-actor-x", "actor", ready=False)
    assert [each.what for each in found(experiment(phase, *conditions), leaving)] == told


def test_a_budget_that_memory_exhausted_has_the_cure_of_memory_first() -> None:
    message = "3 failures exceed restarts.budget 2; the last: a-trainer-0 ended: OOMKilled, exit code 137"
    (finding,) = found(experiment("Failed", condition("Finished", "BudgetExhausted", message)))
    own = explain("Finished", "BudgetExhausted")
    assert finding.explanation is not None
    assert finding.explanation.cure == f"{ENDS['OOMKilled'].cure} {own.cure}"
    assert finding.explanation.meaning == f"{own.meaning} {ENDS['OOMKilled'].meaning}"
    failed = message.replace("OOMKilled", "Error")
    (finding,) = found(experiment("Failed", condition("Finished", "BudgetExhausted", failed)))
    assert finding.explanation == own


def test_a_suspended_experiment_has_no_problems_while_its_pods_end() -> None:
    suspended = (WELL[0], *(condition(aspect, "Suspended", "x") for aspect in ("GangComplete", "Ready")))
    training = {"training": {"updatedAt": MADE}}
    leaving = pod("cartpole-actor-x", "actor", ready=False)
    assert found(experiment("Suspended", *suspended, **training), leaving) == []
    refused = condition("Accepted", "EditRefused", "spec.environment.kwargs")
    findings = found(experiment("Suspended", refused, *suspended[1:]), leaving)
    assert [finding.reason for finding in findings] == ["EditRefused"]


def test_a_terminating_pod_is_reported_without_a_cure() -> None:
    leaving = pod("cartpole-actor-x", "actor")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T12:04:00Z"
    (finding,) = found(experiment("Running", *WELL), leaving)
    assert (finding.reason, finding.since, finding.explanation) == ("Terminating", "2026-01-01T12:04:00Z", None)


def test_a_pod_of_a_lost_node_is_reported_with_its_node() -> None:
    tainted = {"type": "DisruptionTarget", "status": "True", "reason": BY_TAINT, "message": "Taint manager: deleting"}
    lost = pod("cartpole-actor-x", "actor", ready=False)
    lost["metadata"]["deletionTimestamp"] = "2026-01-01T12:04:00Z"
    lost["spec"] = {"nodeName": "n2"}
    lost["status"]["conditions"].append(tainted)
    (finding,) = found(experiment("Running", *WELL), lost)
    assert (finding.what, finding.reason) == ("pod cartpole-actor-x (actor)", "Terminating")
    assert finding.message == "was disrupted on node n2: DeletionByTaintManager: Taint manager: deleting"
    assert finding.explanation == EVICTED_BY_TAINT


def test_a_pod_that_became_unready_is_reported_with_the_time_since_then() -> None:
    unready = pod("cartpole-actor-x", "actor", ready=False)
    unready["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T12:03:00Z"
    (finding,) = found(experiment("Running", *WELL), unready)
    assert (finding.reason, finding.since) == ("NotReady", "2026-01-01T12:03:00Z")


def test_earlier_exits_of_a_healthy_pod_are_available() -> None:
    ended = {"reason": "Error", "exitCode": 1, "finishedAt": "2026-01-01T12:03:00Z", "message": "\n".join(FAILED)}
    again = pod("cartpole-actor-x", "actor", ready=True, lastState={"terminated": ended}, restartCount=2)
    assert past_restarts([again, pod("cartpole-actor-y", "actor")]) == [
        "cartpole-actor-x restarted 2x; last termination: Error, exit code 1 at 2026-01-01T12:03:00Z",
        *(f"  {line}" for line in FAILED),
    ]
