"""The end of an attempt that follows from the trainers' pods: a table."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from rlsrl.api.failures import signature
from rlsrl.api.pods import restarts
from rlsrl.runtime.errors import shortened
from rlsrl_operator.gang import AttemptEnd, FinalError, Verdict, final_error, judge
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.testing import ended, pod, waiting

BEFORE, SINCE, AFTER = "2026-01-01T00:00:00Z", datetime(2026, 1, 1, 0, 1, tzinfo=UTC), "2026-01-01T00:02:00Z"
DISRUPTION = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}
CAUSE = "a-trainer-1 was disrupted: EvictionByEvictionAPI: Eviction API: evicting"


def judged(pods: list[Manifest], *, complete: bool = True) -> Verdict:
    """What the pods show of attempt 2, which has two pods."""
    return judge(pods, attempt=2, template="3", num_pods=2, complete_since=SINCE if complete else None)


def ours(index: int = 0, **about: Any) -> Manifest:
    return pod(index=index, **({"attempt": 2, "template": "3"} | about))


def pair(**about: Any) -> list[Manifest]:
    """Return a healthy pod of rank 0, and another pod."""
    return [ours(), ours(1, **about)]


def lost(message: str, *, counts: bool = True) -> AttemptEnd:
    return AttemptEnd(message=message, is_failure=counts)


ALIVE: dict[str, tuple[list[Manifest], Verdict]] = {
    "all are ready": (pair(), Verdict(complete=True)),
    "all are ready, made within the second in which the last became so": (
        pair(created="2026-01-01T00:01:00Z"),
        Verdict(complete=True),
    ),
    "one is not ready": (pair(ready=False), Verdict()),
    "rank 0 has its result": ([ours(state=ended(0, "done\n")), ours(1)], Verdict(done=True)),
    "rank 0 had its result and was started again": (
        [ours(restarts=1, last_state=ended(0, "done"), ready=False), ours(1)],
        Verdict(done=True),
    ),
    "rank 0 has its result, and another rank failed": (
        [ours(state=ended(0, "done")), ours(1, state=ended(1))],
        Verdict(done=True),
    ),
    "rank 0 has its result, and the experiment was edited since": (
        [ours(state=ended(0, "done"), template="2")],
        Verdict(done=True),
    ),
    "a clean end of another rank is no loss": (pair(state=ended(0), ready=False), Verdict()),
    "a clean end and restart of another rank is no loss": (
        pair(restarts=1, last_state=ended(0), ready=False),
        Verdict(),
    ),
    "another rank's result does not count": (pair(state=ended(0, "done"), ready=False), Verdict()),
    "pods of an older attempt are ignored": (
        [*pair(), pod(index=2, attempt=1, template="3", state=ended(1)), pod(index=3, attempt=1, deleted=AFTER)],
        Verdict(complete=True),
    ),
    "a result of an older attempt does not count": (
        [pod(attempt=1, template="3", state=ended(0, "done")), *pair()],
        Verdict(complete=True),
    ),
}
LOST = {
    "failed": (
        pair(state=ended(1, "Traceback\nValueError: x")),
        lost("a-trainer-1 ended: Error, exit code 1: ValueError: x"),
    ),
    "failed and was started again": (
        pair(restarts=1, last_state=ended(137), ready=False),
        lost("a-trainer-1 ended: Error, exit code 137"),
    ),
    "rank 0 ended without a result": (
        [ours(state=ended(0)), ours(1)],
        lost("a-trainer-0 ended: Completed, exit code 0"),
    ),
    "rank 0 said something else": (
        [ours(state=ended(0, "nearly done")), ours(1)],
        lost("a-trainer-0 ended: Completed, exit code 0: nearly done"),
    ),
    "rank 0 failed while it said that it was done": (
        [ours(state=ended(1, "done")), ours(1)],
        lost("a-trainer-0 ended: Error, exit code 1: done"),
    ),
    "restarted without a recorded reason": (
        pair(restarts=1, ready=False),
        lost("the worker of a-trainer-1 was restarted"),
    ),
    "the pod as such failed": (pair(phase="Failed", state={}), lost("a-trainer-1 ended: Failed")),
    "edited": (pair(template="2"), AttemptEnd(message="the experiment was edited", is_failure=False)),
    "evicted by the kubelet": (
        pair(phase="Failed", reason="Evicted", message="The node was low on resource: memory.", state={}),
        lost("a-trainer-1 was disrupted: Evicted: The node was low on resource: memory.", counts=False),
    ),
    "evicted, its worker killed": (
        pair(phase="Failed", reason="Evicted", state=ended(137)),
        lost("a-trainer-1 was disrupted: Evicted", counts=False),
    ),
    "preempted": (
        pair(conditions=[DISRUPTION], state=ended(143)),
        lost(CAUSE, counts=False),
    ),
    "rank 0 failed because another had to go": (
        [ours(state=ended(1)), ours(1, conditions=[DISRUPTION])],
        lost(CAUSE, counts=False),
    ),
}
ONCE_COMPLETE = {
    "rank 0 ended because another had to go": (
        [ours(state=ended(0)), ours(1, deleted=AFTER, conditions=[DISRUPTION])],
        lost(CAUSE, counts=False),
    ),
    "deleted": (pair(deleted=AFTER), lost("a-trainer-1 was deleted")),
    "evicted": (pair(deleted=AFTER, conditions=[DISRUPTION]), lost(CAUSE, counts=False)),
    "replaced": (pair(created=AFTER), lost("a-trainer-1 was replaced")),
    "gone": ([ours()], lost("1 of 2 trainer pods are gone")),
    "all gone": ([], lost("2 of 2 trainer pods are gone")),
    "only those of an older attempt are left": ([pod(attempt=1)], lost("2 of 2 trainer pods are gone")),
}


@pytest.mark.parametrize("name", ALIVE)
@pytest.mark.parametrize("complete", [False, True])
def test_an_attempt_goes_on(name: str, complete: bool) -> None:
    pods, expected = ALIVE[name]
    assert judged(pods, complete=complete) == expected


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("complete", [False, True])
def test_an_attempt_is_over(name: str, complete: bool) -> None:
    pods, expected = LOST[name]
    verdict = judged(pods, complete=complete)
    assert verdict.end is not None
    assert (verdict.done, replace(verdict.end, signature="")) == (False, expected)


FAILED = "Traceback (most recent call last):\n  File \"robot.py\", line 3, in step\nKeyError: 'elbow'"
NO_FAILURES = {
    "killed": pair(state=ended(137, FAILED)),
    "cannot reach another": pair(state=ended(75, FAILED)),
    "failed, and another was killed": [ours(state=ended(1, FAILED)), ours(1, state=ended(137))],
    "disrupted": pair(conditions=[DISRUPTION], state=ended(1, FAILED)),
    "silent": pair(state=ended(1)),
    "deleted": pair(deleted=AFTER),
}


def signature_of(pods: list[Manifest]) -> str:
    end = judged(pods).end
    assert end is not None
    return end.signature


def test_the_same_failure_of_any_rank_has_one_signature() -> None:
    expected = signature(1, FAILED.splitlines())
    assert expected
    assert signature_of(pair(state=ended(1, FAILED))) == expected
    assert signature_of([ours(state=ended(1, FAILED)), ours(1, state=ended(1, FAILED))]) == expected
    assert signature_of(pair(restarts=1, last_state=ended(1, FAILED), ready=False)) == expected
    assert signature_of(pair(state=ended(1, FAILED.replace("step", "reset")))) != expected


@pytest.mark.parametrize("name", NO_FAILURES)
def test_an_end_that_says_nothing_about_the_worker_has_no_signature(name: str) -> None:
    assert signature_of(NO_FAILURES[name]) == ""


@pytest.mark.parametrize("name", ONCE_COMPLETE)
def test_no_pod_joins_a_gang_that_was_complete(name: str) -> None:
    pods, expected = ONCE_COMPLETE[name]
    verdict = judged(pods)
    assert (verdict.done, verdict.end) == (False, expected)


@pytest.mark.parametrize("name", ["deleted", "evicted", "replaced", "gone", "all gone"])
def test_a_pod_may_be_replaced_before_the_gang_is_complete(name: str) -> None:
    assert judged(ONCE_COMPLETE[name][0], complete=False).end is None


def test_a_terminating_pod_is_not_ready() -> None:
    assert not judged(pair(deleted=AFTER), complete=False).complete


def test_an_attempt_waits_for_pods_that_cannot_be_created_yet() -> None:
    unscheduled = pod(attempt=2, template="3", ready=False)
    unscheduled["status"] = {"phase": "Pending"}
    assert judged([unscheduled], complete=False) == Verdict()
    assert judged([], complete=False) == Verdict()


def test_only_the_workers_container_counts() -> None:
    own = ours(restarts=1, last_state=ended(0, "done"))
    own["status"]["containerStatuses"].append({"name": "sidecar", "restartCount": 7, "state": ended(2)})
    assert restarts(own) == 1
    assert final_error([own]) is None


def test_a_long_configuration_error_keeps_its_beginning_and_its_end() -> None:
    log = '{"event": "configuring"}\n' * 50 + f"rlsrl: {shortened('my_env: ' + 'k' * 10_000 + ': no such level')}\n"
    kept = log[-2048:]  # by a kubelet
    found = final_error([ours(state=ended(2, kept))])
    assert found is not None
    assert found.message.startswith("a-trainer-0: my_env: kkk")
    assert found.message.endswith("kkk: no such level")
    assert len(found.message) <= 1024, "a condition shows all of it"


@pytest.mark.parametrize(
    "state",
    [
        {"state": ended(2, " no such field\n")},
        {"last_state": ended(2, "no such field")},
        {"state": ended(2, '{"event": "configuring"}\nrlsrl: no such field\nE1121 launcher.py: failed\n')},
    ],
)
def test_a_configuration_error_names_its_pod(state: dict[str, Any]) -> None:
    pods = [ours(), pod("actor", 3, **state), pod("actor", 4, state=waiting("CrashLoopBackOff"), last_state=ended(1))]
    assert final_error(pods) == FinalError(reason="ConfigurationError", message="a-actor-3: no such field")
