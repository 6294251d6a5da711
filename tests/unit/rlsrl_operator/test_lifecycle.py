"""The attempt and the phase that follow from the pods, and the replicas in each phase."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.api.reasons import FINISHED, GANG_COMPLETE, READY, EndReason
from rlsrl.api.role_names import TRAINER
from rlsrl.api.status import TERMINAL, ExperimentStatus, Phase, Training
from rlsrl.testing.documents import minimal
from rlsrl_operator.lifecycle import EVALUATION_SECONDS, decide, for_phase, is_rolled_out
from rlsrl_operator.manifests import ExperimentContext, Manifest, render
from rlsrl_operator.status import condition, failures, stamp, with_condition
from rlsrl_operator.testing import TAINTED, context_of, ended, pod, waiting

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
EARLIER = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
BUDGET, DECAY_SECONDS = 2, 60.0
DID_NOT_LEARN = json.dumps(
    {
        "reason": "updatesSkipped",
        "failure": "150 of the last 200 minibatches were skipped",
        "version": "1.3",
        "result": {"env_steps": 4096, "return_mean": None},
    }
)


def context(*, generation: int = 1, budget: int = BUDGET, suspend: bool = False) -> ExperimentContext:
    document = minimal()
    document["spec"]["suspend"] = suspend
    document["spec"] |= {
        "trainers": {"replicas": 2},
        "restarts": {"budget": budget, "decaySeconds": DECAY_SECONDS},
        **{role: {} for role in ("policyWorkers", "bufferWorkers", "evaluators")},
    }
    return context_of(document, generation=generation)


def decided(
    status: ExperimentStatus, about: ExperimentContext, pods: Sequence[Manifest], now: datetime
) -> ExperimentStatus:
    """Decide with template digests that equal the generation."""
    return decide(status, about, dict.fromkeys(ROLES, str(about.generation)), pods, now)


def running(*, attempt: int = 1, failed: int = 0, seconds_ago: float = 0, **about: Any) -> ExperimentStatus:
    """Return the status of an experiment whose gang was complete five minutes ago."""
    counted = {"recent_failures": failed, "last_failure_at": stamp(NOW - timedelta(seconds=seconds_ago))}
    status = ExperimentStatus(
        phase="Running", attempt=attempt, restarts=attempt - 1, **(counted if failed else {}), **about
    )
    return with_condition(status, GANG_COMPLETE, "True", "Complete", "", generation=1, now=EARLIER)


def gang(*, attempt: int = 1, template: str = "1", **second: Any) -> list[Manifest]:
    """Return a healthy pod of rank 0, and another pod."""
    common = {"attempt": attempt, "template": template}
    return [pod(**common), pod(index=1, **(common | second))]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A status, pods and the decision. ``reason`` is that of Finished in a terminal phase, else of GangComplete."""

    before: ExperimentStatus = field(default_factory=running)
    pods: Sequence[Manifest] = field(default_factory=gang)
    generation: int = 1
    budget: int = BUDGET
    suspend: bool = False
    phase: Phase = "Running"
    attempt: int = 1
    restarts: int | None = None
    """None: as many as earlier attempts."""
    failures: int | None = None
    reason: str
    message: str = ""


CASES = {
    "begins": Case(before=ExperimentStatus(), pods=[], phase="Pending", reason="Starting", message="attempt 1 begins"),
    "is being made": Case(
        before=ExperimentStatus(),
        pods=gang(ready=False),
        phase="Pending",
        reason="Starting",
        message="attempt 1 begins",
    ),
    "is complete": Case(
        before=ExperimentStatus(),
        phase="Pending",
        reason="Complete",
        message="all 2 trainer pods of attempt 1 are ready",
    ),
    "goes on": Case(reason="Complete"),
    "goes on while one is not ready": Case(pods=gang(ready=False), reason="Complete"),
    "succeeds": Case(
        pods=[pod(state=ended(0, "done")), pod(index=1)],
        phase="Succeeded",
        reason="Succeeded",
        message="the experiment has finished",
    ),
    "does not learn": Case(
        pods=[pod(state=ended(0, f"done {DID_NOT_LEARN}")), pod(index=1)],
        phase="Failed",
        reason="UpdatesSkipped",
        message="150 of the last 200 minibatches were skipped",
    ),
    "fails once": Case(
        pods=gang(state=ended(1, "boom")),
        attempt=2,
        failures=1,
        reason="Restarting",
        message="attempt 1 is over: a-trainer-1 ended: Error, exit code 1: boom",
    ),
    "fails as often as is forgiven": Case(
        before=running(attempt=5, failed=1),
        pods=gang(attempt=5, state=ended(1)),
        attempt=6,
        failures=2,
        reason="Restarting",
    ),
    "fails once more than is forgiven": Case(
        before=running(attempt=5, failed=2),
        pods=gang(attempt=5, state=ended(1, "boom")),
        phase="Failed",
        attempt=5,
        failures=3,
        reason="BudgetExhausted",
        message="3 failures exceed restarts.budget 2; the last: a-trainer-1 ended: Error, exit code 1: boom",
    ),
    "fails after one failure was forgotten": Case(
        before=running(attempt=5, failed=2, seconds_ago=DECAY_SECONDS + 1),
        pods=gang(attempt=5, state=ended(1)),
        attempt=6,
        failures=2,
        reason="Restarting",
    ),
    "fails after all were forgotten": Case(
        before=running(attempt=5, failed=2, seconds_ago=100 * DECAY_SECONDS),
        pods=gang(attempt=5, state=ended(1)),
        attempt=6,
        failures=1,
        reason="Restarting",
    ),
    "is forgiven nothing": Case(
        budget=0, pods=gang(state=ended(1)), phase="Failed", failures=1, reason="BudgetExhausted"
    ),
    "is evicted, with nothing left to forgive": Case(
        before=running(attempt=5, failed=2),
        pods=gang(attempt=5, phase="Failed", reason="Evicted", state=ended(137)),
        attempt=6,
        failures=2,
        reason="Restarting",
        restarts=4,
        message="attempt 5 is over: a-trainer-1 was disrupted: Evicted",
    ),
    "is edited": Case(
        generation=2,
        attempt=2,
        restarts=0,
        failures=0,
        reason="Restarting",
        message="attempt 1 is over: the experiment was edited",
    ),
    "is suspended": Case(suspend=True, phase="Suspended", reason="Suspended"),
    "is suspended while its trainers begin": Case(
        before=ExperimentStatus(), pods=gang(ready=False), suspend=True, phase="Suspended", reason="Suspended"
    ),
    "is suspended, and a trainer does not end well": Case(
        suspend=True, pods=gang(state=ended(1)), phase="Suspended", reason="Suspended"
    ),
    "is done before it is suspended": Case(
        suspend=True, pods=[pod(state=ended(0, "done"))], phase="Succeeded", reason="Succeeded"
    ),
    "is resumed": Case(
        before=running().model_copy(update={"phase": "Suspended"}),
        pods=[],
        phase="Starting",
        attempt=2,
        restarts=0,
        reason="Starting",
        message="attempt 2 continues attempt 1",
    ),
    "is edited to be forgiven less than it was": Case(
        before=running(attempt=5, failed=2),
        pods=gang(attempt=5),
        generation=2,
        budget=0,
        attempt=6,
        restarts=4,
        failures=2,
        reason="Restarting",
    ),
    "pods of the attempt before end": Case(
        before=running(attempt=2),
        pods=[*gang(attempt=2), pod(index=1, attempt=1, state=ended(1))],
        attempt=2,
        reason="Complete",
    ),
    "cannot run so": Case(
        pods=[*gang(), pod("actor", 3, last_state=ended(2, "environment.id: no such environment"))],
        phase="Failed",
        reason="ConfigurationError",
        message="a-actor-3: environment.id: no such environment",
    ),
    "a trainer cannot run so": Case(
        pods=gang(state=ended(2, "no GPU")), phase="Failed", reason="ConfigurationError", message="a-trainer-1: no GPU"
    ),
    "cannot store its last version": Case(
        pods=gang(state=ended(4, "rlsrl: the last version, 1.9, could not be stored for 300 s")),
        phase="Failed",
        reason="NotStored",
        message="a-trainer-1: the last version, 1.9, could not be stored for 300 s",
    ),
    "its environments end it": Case(
        pods=[*gang(), pod("actor", 3, last_state=ended(3, "rlsrl: environment rank 7: reward is nan"))],
        phase="Failed",
        reason="EnvironmentFault",
        message="a-actor-3: environment rank 7: reward is nan",
    ),
    "its coordinator finds the run damaged": Case(
        pods=[*gang(), pod("coordinator", last_state=ended(5, "rlsrl: /data/x/roster.json is not a roster"))],
        phase="Failed",
        reason="RunDamaged",
        message="a-coordinator-0: /data/x/roster.json is not a roster",
    ),
    "could not run as it was written before": Case(
        pods=[*gang(template="2"), pod("actor", 3, last_state=ended(2, "no such environment"), template="1")],
        generation=2,
        reason="Complete",
    ),
    "a node is lost": Case(
        pods=gang(deleted=stamp(NOW), ready=False, node="n2", conditions=[TAINTED]),
        attempt=2,
        restarts=0,
        failures=0,
        reason="Restarting",
        message="attempt 1 is over: a-trainer-1 was disrupted on node n2: DeletionByTaintManager: Taint manager: ",
    ),
    "a pod is deleted": Case(
        pods=gang(deleted=stamp(NOW)),
        attempt=2,
        failures=1,
        reason="Restarting",
        message="attempt 1 is over: a-trainer-1 was deleted",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_experiment(name: str) -> None:
    case = CASES[name]
    about = context(generation=case.generation, budget=case.budget, suspend=case.suspend)
    made = decided(case.before, about, case.pods, NOW)
    over = case.phase in ("Succeeded", "Failed")
    said = condition(made, FINISHED if over else GANG_COMPLETE)
    assert said is not None
    gang_said = condition(made, GANG_COMPLETE)
    assert gang_said is not None
    assert not over or (gang_said.status, gang_said.reason) == ("False", "Finished"), "no trainer is left"
    assert (made.phase, made.attempt, made.restarts) == (
        case.phase,
        case.attempt,
        case.attempt - 1 if case.restarts is None else case.restarts,
    )
    assert made.recent_failures == case.failures
    assert said.reason == case.reason
    assert case.message in said.message
    assert said.status == ("True" if over or case.reason == "Complete" else "False")
    assert made.finished_at == (stamp(NOW) if over else None)
    again = decided(made, about, [], NOW)
    if over:
        assert again == made


TERMINAL_PODS: dict[str, list[Manifest]] = {
    "nothing": [],
    "a gang": gang(),
    "a failure": gang(state=ended(1)),
    "a result": [pod(state=ended(0, "done"))],
    "an error": [pod("actor", state=ended(2))],
}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize("pods", TERMINAL_PODS)
def test_a_terminal_phase_is_final(phase: Phase, pods: str) -> None:
    before = running(attempt=3, finished_at=stamp(EARLIER)).model_copy(update={"phase": phase})
    assert decided(before, context(generation=2), TERMINAL_PODS[pods], NOW) == before


def test_only_a_failure_restarts_the_decay() -> None:
    before = running(failed=1, seconds_ago=DECAY_SECONDS / 2)
    assert decided(before, context(), gang(state=ended(1)), NOW).last_failure_at == stamp(NOW)
    assert decided(before, context(generation=2), gang(), NOW).last_failure_at == before.last_failure_at


def test_a_restart_is_decided_once() -> None:
    """The attempt is written before the pass acts, so a second decision from the same pods is the same."""
    failed = gang(state=ended(1))
    once = decided(running(), context(), failed, NOW)
    assert decided(once, context(), failed, NOW + timedelta(seconds=1)) == once


def failing(message: str, trained: Sequence[int], *, codes: Sequence[int] = (1,)) -> ExperimentStatus:
    """Return the status after failures with this message, one for each number of trained transitions."""
    status, about = running(), context(budget=20)
    for number, env_steps in enumerate(trained):
        attempt = status.attempt or 1
        numbers = Training(env_steps=env_steps) if env_steps else None
        status = with_condition(
            status.model_copy(update={"training": numbers}),
            GANG_COMPLETE,
            "True",
            "Complete",
            "",
            generation=1,
            now=EARLIER,
        )
        pods = gang(attempt=attempt, state=ended(codes[number % len(codes)], message))
        status = decided(status, about, pods, NOW)
    return status


@pytest.mark.parametrize("trained", [(0, 0, 0), (500, 500, 500), (500, 480, 490), (500, 600, 600, 590)])
def test_trainers_that_get_no_further_fail_after_two_restarts(trained: Sequence[int]) -> None:
    before, made = failing("KeyError: 'x'", trained[:-1]), failing("KeyError: 'x'", trained)
    said = condition(made, FINISHED)
    assert before.phase == "Running"
    assert made.phase == "Failed"
    assert said is not None
    assert said.reason == "RepeatedFailure"
    assert said.message == (
        "the trainers failed in the same way 3 times, without a training step: "
        "a-trainer-1 ended: Error, exit code 1: KeyError: 'x'"
    )


@pytest.mark.parametrize(
    ("message", "trained", "codes"),
    [("KeyError: 'x'", range(500, 515), (1,)), ("", [0] * 9, (137,)), ("JoinTimeout", [0] * 9, (75,))],
    ids=["further each time", "killed", "cannot reach another"],
)
def test_other_failures_use_the_budget(message: str, trained: Sequence[int], codes: Sequence[int]) -> None:
    made = failing(message, trained, codes=codes)
    assert (made.phase, made.recent_failures) == ("Running", len(trained))


def test_a_kill_in_between_proves_nothing() -> None:
    assert failing("KeyError: 'x'", [500] * 3, codes=(1, 137, 1)).phase == "Running"
    assert failing("KeyError: 'x'", [500] * 4, codes=(1, 137, 1, 1)).phase == "Failed"


STATES = (None, ended(0), ended(0, "done"), ended(1, "boom"), ended(2, "wrong"), waiting("CrashLoopBackOff"))
PODS = st.lists(
    st.builds(
        pod,
        st.sampled_from(["trainer", "trainer", "actor", "coordinator"]),
        st.integers(0, 2),
        attempt=st.integers(1, 3),
        generation=st.integers(1, 2),
        state=st.sampled_from(STATES),
        last_state=st.sampled_from(STATES[:5]),
        created=st.sampled_from([stamp(EARLIER), stamp(NOW)]),
        deleted=st.sampled_from([None, stamp(NOW)]),
        restarts=st.integers(0, 1),
        conditions=st.sampled_from([(), ({"type": "DisruptionTarget", "status": "True"},)]),
    ),
    max_size=4,
)
STATUSES = st.builds(running, attempt=st.just(3), failed=st.integers(0, 3)) | st.just(ExperimentStatus(attempt=3))


@settings(max_examples=300, deadline=None)
@given(STATUSES, PODS, st.sampled_from([1, 2]), st.floats(0, 100))
def test_deciding_again_from_the_same_pods_changes_nothing(
    before: ExperimentStatus, pods: list[Manifest], generation: int, seconds: float
) -> None:
    about = context(generation=generation)
    once = decided(before, about, pods, NOW)
    assert decided(once, about, pods, NOW + timedelta(seconds=seconds)) == once
    assert once.attempt in (3, 4)
    other = decided(before, about, pods[::-1], NOW)
    facts = ("phase", "attempt", "recent_failures", "last_failure_at", "finished_at")
    assert [getattr(once, name) for name in facts] == [getattr(other, name) for name in facts], "in any order"


@pytest.mark.parametrize(
    ("evaluators", "phase"),
    [({}, "Failed"), ({"parameters": {"tag": "reference"}}, "Running")],
    ids=["newest", "fixed"],
)
def test_an_evaluator_that_cannot_run_ends_the_experiment_unless_it_plays_a_fixed_version(
    evaluators: dict[str, Any], phase: Phase
) -> None:
    document = minimal()
    document["spec"] |= {"trainers": {"replicas": 2}, "evaluators": evaluators}
    pods = [*gang(), pod("evaluator", last_state=ended(2, "rlsrl: it cannot run"), restarts=1)]
    assert decided(running(), context_of(document), pods, NOW).phase == phase


def test_a_new_gang_has_a_new_time_of_completion() -> None:
    later = NOW + timedelta(seconds=30)
    restarting = decided(running(), context(), gang(state=ended(1)), NOW)
    being_made = decided(restarting, context(), gang(attempt=2, ready=False), later)
    said = condition(being_made, GANG_COMPLETE)
    assert said is not None
    assert (said.status, said.last_transition_time) == ("False", stamp(NOW))
    said = condition(decided(being_made, context(), gang(attempt=2), later), GANG_COMPLETE)
    assert said is not None
    assert (said.status, said.last_transition_time) == ("True", stamp(later))


def test_an_edit_before_the_trainers_exist_needs_no_restart() -> None:
    before = ExperimentStatus(phase="Starting", attempt=1, restarts=0)
    assert decided(before, context(generation=2), [], NOW).attempt == 1


@given(
    count=st.integers(0, 20),
    ago=st.floats(-100, 3000),
    then=st.floats(0, 3000),
)
def test_failures_expire_one_by_one_whenever_passes_happen(count: int, ago: float, then: float) -> None:
    """Passes in between change nothing, and a clock that is behind changes no count."""
    status = ExperimentStatus(recent_failures=count, last_failure_at=stamp(NOW - timedelta(seconds=ago)))
    left, since = failures(status, decay_seconds=DECAY_SECONDS, now=NOW)
    assert 0 <= left <= count
    if ago < 0:
        assert left == count
    later = NOW + timedelta(seconds=then)
    between = ExperimentStatus(recent_failures=left, last_failure_at=stamp(since))
    directly, _ = failures(status, decay_seconds=DECAY_SECONDS, now=later)
    by_the_way, _ = failures(between, decay_seconds=DECAY_SECONDS, now=later)
    assert by_the_way == directly


ROLES = ("coordinator", "trainer", "buffer", "policy", "actor", "evaluator")
ALL = {"coordinator": 1, "trainer": 2, "buffer": 1, "policy": 1, "actor": 1, "evaluator": 1}
NOBODY = dict.fromkeys(ROLES, 0) | {"coordinator": 1}


@pytest.mark.parametrize(
    ("phase", "pods", "expected"),
    [
        ("Pending", [], ALL),
        ("Running", gang(), ALL),
        ("Starting", [pod(attempt=2), pod(index=1, attempt=2, deleted=stamp(NOW))], ALL | {"trainer": 0}),
        ("Succeeded", [*gang(), pod("actor")], ALL | {"trainer": 0}),
        ("Failed", [pod(deleted=stamp(NOW)), pod("actor")], ALL | {"trainer": 0}),
        ("Succeeded", [pod("coordinator"), pod("actor")], NOBODY),
        ("Failed", [], NOBODY),
        ("Succeeded", [pod("evaluator", created=stamp(EARLIER))], NOBODY | {"evaluator": ALL["evaluator"]}),
        ("Succeeded", [pod("evaluator", state=ended(1, "boom"))], NOBODY | {"evaluator": ALL["evaluator"]}),
        ("Succeeded", [pod("evaluator", restarts=1, last_state=ended(0))], NOBODY),
        ("Failed", [pod("evaluator")], NOBODY),
    ],
)
def test_trainers_end_first_then_the_others_and_the_coordinator_stays(
    phase: Phase, pods: Sequence[Manifest], expected: dict[str, int]
) -> None:
    status = ExperimentStatus(phase=phase, attempt=1, finished_at=stamp(EARLIER) if phase in TERMINAL else None)
    made = [for_phase(manifest, status, pods, NOW) for manifest in render(context())]
    replicas = {
        each["metadata"]["labels"]["rlsrl.dev/role"]: each["spec"]["replicas"]
        for each in made
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    assert replicas == expected


@pytest.mark.parametrize(
    ("reason", "message", "replicas"),
    [
        ("RunDamaged", "a-coordinator-0: roster.json is not a roster", 0),
        ("RunDamaged", "a-trainer-0: no stored version is intact", 1),
        ("ConfigurationError", "a-coordinator-0: no credentials", 0),
        ("BudgetExhausted", "11 failures; the last: a-coordinator-0", 1),
    ],
)
def test_a_coordinator_that_fails_for_good_is_not_restarted_for_ever(
    reason: EndReason, message: str, replicas: int
) -> None:
    failed = ExperimentStatus(phase="Failed", attempt=1)
    failed = with_condition(failed, FINISHED, "True", reason, message, generation=1, now=NOW)
    (coordinator,) = [
        each
        for each in render(context())
        if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", "a-coordinator")
    ]
    assert for_phase(coordinator, failed, [pod("coordinator")], NOW)["spec"]["replicas"] == replicas
    trainers = for_phase(coordinator, failed, [pod("coordinator"), pod()], NOW)
    assert trainers["spec"]["replicas"] == 1, "the others store their last state first"
    retried = with_condition(failed, FINISHED, "False", "Retried", message, generation=1, now=NOW)
    retried = retried.model_copy(update={"phase": "Starting"})
    assert for_phase(coordinator, retried, [], NOW)["spec"]["replicas"] == 1


def test_evaluators_have_a_time_limit() -> None:
    status = ExperimentStatus(phase="Succeeded", attempt=1, finished_at=stamp(NOW))
    rendered = {(each["kind"], each["metadata"]["name"]): each for each in render(context())}
    (evaluators,) = [
        each for (kind, name), each in rendered.items() if (kind, name[-9:]) == ("Deployment", "evaluator")
    ]
    for seconds, replicas in ((0, 1), (EVALUATION_SECONDS, 1), (EVALUATION_SECONDS + 1, 0)):
        made = for_phase(evaluators, status, [pod("evaluator")], NOW + timedelta(seconds=seconds))
        assert made["spec"]["replicas"] == replicas


def test_only_the_trainers_know_the_attempt_and_nothing_rendered_is_changed() -> None:
    rendered = render(context())
    made = [for_phase(manifest, ExperimentStatus(phase="Running", attempt=7), [], NOW) for manifest in rendered]
    assert rendered == render(context())
    changed = [each for each, before in zip(made, rendered, strict=True) if each != before]
    (trainers,) = changed
    assert trainers["metadata"]["labels"]["rlsrl.dev/role"] == "trainer"
    assert trainers["spec"]["template"]["metadata"]["annotations"]["rlsrl.dev/attempt"] == "7"


@pytest.mark.parametrize(
    ("phase", "ready", "pods", "expected"),
    [
        ("Running", "True", gang(), True),
        ("Running", "False", gang(), False),
        ("Running", "True", gang(template="0"), False),
        ("Starting", None, [], False),
        # A role removed by an edit is deleted, even if the edit also suspends or comes just before the end.
        ("Running", "True", [*gang(), pod("policy")], True),
        ("Suspended", "False", gang(), False),
        ("Suspended", "False", [pod("policy")], True),
        ("Succeeded", "False", gang(), False),
        ("Succeeded", "False", [pod("policy")], True),
        ("Failed", "False", [], True),
    ],
)
def test_a_generation_is_rolled_out_once_no_pod_needs_an_earlier_one(
    phase: Phase, ready: Literal["True", "False"] | None, pods: Sequence[Manifest], expected: bool
) -> None:
    status = ExperimentStatus(phase=phase, attempt=1)
    if ready is not None:
        status = with_condition(status, READY, ready, "Ready", "", generation=1, now=NOW)
    assert is_rolled_out(status, {TRAINER: "1"}, pods) is expected
