"""The status of an experiment: conditions, the blocking pod, the run's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest

from rlsrl.api.reasons import (
    ACCEPTED,
    DURABLE,
    ENVIRONMENT_ERRORS,
    ENVIRONMENT_SERVER_AWAY,
    FINISHED,
    GANG_COMPLETE,
    NON_FINITE_VALUES,
    PROGRESSING,
    READY,
    RESUMED,
    ROLLED_BACK,
    is_trouble,
)
from rlsrl.api.status import Condition, EpisodeInfo, ExperimentStatus, LastFailure, Phase, RoleStatus, Training
from rlsrl.testing.documents import minimal
from rlsrl_operator.manifests import ExperimentContext, Manifest
from rlsrl_operator.status import (
    blocker,
    condition,
    events,
    outcome,
    read,
    replica_failure,
    stamp,
    summarize,
    training,
    with_condition,
    with_numbers,
    write,
)
from rlsrl_operator.testing import TAINTED, UID, context_of, ended, pod, waiting

NOW = datetime(2026, 1, 1, 12, 0, 0, 700_000, tzinfo=UTC)
CREATED = "2026-01-01T00:00:00Z"
Holds = Literal["True", "False", "Unknown"]


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def with_ready(
    status: ExperimentStatus, holds: Holds, reason: str, *, now: datetime, generation: int = 1
) -> ExperimentStatus:
    return with_condition(status, READY, holds, reason, f"because of {reason}", generation=generation, now=now)


def ready_of(status: ExperimentStatus) -> Condition:
    found = condition(status, READY)
    assert found is not None
    return found


def test_the_transition_time_changes_only_with_the_status() -> None:
    status = with_ready(ExperimentStatus(), "False", "Starting", now=NOW)
    assert ready_of(status).last_transition_time == stamp(NOW) == "2026-01-01T12:00:00Z"
    status = with_ready(status, "False", "Unschedulable", now=later(10), generation=2)
    said = ready_of(status)
    assert (said.reason, said.observed_generation) == ("Unschedulable", 2)
    assert said.last_transition_time == stamp(NOW)
    status = with_ready(status, "True", "Ready", now=later(20))
    assert ready_of(status).last_transition_time == stamp(later(20))
    assert with_ready(status, "True", "Ready", now=later(30)) == status
    status = with_ready(status, "Unknown", "Ready", now=later(40))
    assert ready_of(status).last_transition_time == stamp(later(40))


def test_a_condition_replaces_the_one_of_its_type() -> None:
    status = ExperimentStatus()
    for name in (READY, ACCEPTED, READY, FINISHED, READY):
        status = with_condition(status, name, "True", "Some", "", generation=1, now=NOW)
    assert [each.type for each in status.conditions] == sorted([ACCEPTED, FINISHED, READY])
    long = with_condition(status, READY, "True", "Some", "x" * 5000, generation=1, now=NOW)
    assert len(ready_of(long).message) == 1024, "the API server's limit"
    assert ready_of(status).message == "", "a status is a value"


UNSCHEDULED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
}
IMAGE = waiting("ImagePullBackOff", 'Back-off pulling image "registry.example/learner:1"')
CRASHING = waiting("CrashLoopBackOff", "back-off 5m0s restarting failed container")
BLOCKERS: dict[str, tuple[Sequence[Manifest], tuple[str, str] | None]] = {
    "nobody": ([], None),
    "all are ready": ([pod(), pod("actor")], None),
    "unschedulable": (
        [pod("actor"), pod(index=1, ready=False, conditions=[UNSCHEDULED])],
        ("Unschedulable", f"a-trainer-1, since {CREATED}: {UNSCHEDULED['message']}"),
    ),
    "no image": (
        [pod("actor", state=IMAGE)],
        ("ImagePullBackOff", f'a-actor-0, since {CREATED}: Back-off pulling image "registry.example/learner:1"'),
    ),
    "crashing, with its last words": (
        [pod("evaluator", 2, state=CRASHING, last_state=ended(1, "Traceback\n  ...\nKeyError: 'obs'\n"), restarts=4)],
        ("CrashLoopBackOff", f"a-evaluator-2, since {CREATED}: KeyError: 'obs'"),
    ),
    "crashing without a word": (
        [pod("actor", state=CRASHING, last_state=ended(137))],
        ("CrashLoopBackOff", f"a-actor-0, since {CREATED}: back-off 5m0s restarting failed container"),
    ),
    "starting again, with its last words": (
        [pod("actor", ready=False, last_state=ended(1, "Traceback\n  ...\nValueError: no level 7\n"), restarts=1)],
        ("Restarting", "a-actor-0 ended: Error, exit code 1: ValueError: no level 7"),
    ),
    "starting again after its work was done": (
        [pod("evaluator", ready=False, last_state=ended(0), restarts=1)],
        ("Starting", f"a-evaluator-0 has been starting since {CREATED}"),
    ),
    "on a lost node": (
        [pod("actor", ready=False, deleted=CREATED, conditions=[TAINTED], node="n2")],
        ("Starting", "a-actor-0 was disrupted on node n2: DeletionByTaintManager: Taint manager: deleting"),
    ),
    "on a node that does not answer yet": (
        [pod("actor", ready=False, unready_since="2026-01-01T00:05:00Z", started=True)],
        ("Starting", "a-actor-0 runs, and has not been ready since 2026-01-01T00:05:00Z"),
    ),
    "terminating": ([pod("actor", ready=False, deleted=CREATED)], ("Starting", "a-actor-0 is terminating")),
    "being made": (
        [pod("actor", state=waiting("ContainerCreating"))],
        ("Starting", f"a-actor-0 has been starting since {CREATED}"),
    ),
    "not made by a node yet": (
        [{"metadata": {"name": "a-actor-0", "creationTimestamp": CREATED}, "status": {"phase": "Pending"}}],
        ("Starting", f"a-actor-0 has been starting since {CREATED}"),
    ),
    "running and not ready": ([pod(ready=False)], ("Starting", f"a-trainer-0 has been starting since {CREATED}")),
    "of an attempt before": (
        [pod(ready=False, attempt=0), pod(attempt=2, ready=False, state=CRASHING)],
        ("Starting", f"a-trainer-0 has been starting since {CREATED}"),
    ),
    "trouble goes before what only takes its time": (
        [pod(ready=False), pod("policy", ready=False), pod("actor", 7, state=IMAGE), pod("actor", 8, state=CRASHING)],
        ("ImagePullBackOff", f'a-actor-7, since {CREATED}: Back-off pulling image "registry.example/learner:1"'),
    ),
    "a sidecar that waits is not the worker": (
        [pod(ready=False, containerStatuses=[{"name": "sidecar", "state": CRASHING}])],
        ("Starting", f"a-trainer-0 has been starting since {CREATED}"),
    ),
}


@pytest.mark.parametrize("name", BLOCKERS)
def test_the_blocking_pod(name: str) -> None:
    pods, expected = BLOCKERS[name]
    assert blocker(pods, attempt=1) == expected


def test_a_pod_of_an_earlier_attempt_is_terminating() -> None:
    assert blocker([pod(attempt=1, state=CRASHING)], attempt=2) == (
        "Starting",
        "a-trainer-0 of attempt 1 is terminating",
    )


NUMBERS = {
    "env_steps": 1024.0,
    "train_steps": 4.0,
    "env_steps_per_second": 999.6,
    "version": "1.4",
    "policy_lag": 1.0,
    "return_mean": 21.456,
}


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (
            {"totals": NUMBERS},
            Training(
                env_steps=1024,
                train_steps=4,
                env_steps_per_second=1000,
                version="1.4",
                policy_lag=1,
                return_mean="21.5",
                updated_at=stamp(NOW),
            ),
        ),
        ({"totals": dict.fromkeys(NUMBERS)}, Training(updated_at=stamp(NOW))),
        ({"totals": NUMBERS | {"return_mean": None, "policy_lag": None, "version": None}}, None),
        ({"totals": {"policy_lag": -0.4}}, Training(policy_lag=0, updated_at=stamp(NOW))),
        ({"totals": None}, Training(updated_at=stamp(NOW))),
        ({"totals": [1]}, Training(updated_at=stamp(NOW))),
        ({"totals": dict.fromkeys(NUMBERS, "many")}, Training(version="many", updated_at=stamp(NOW))),
        ({"totals": dict.fromkeys(NUMBERS, float("inf"))}, Training(updated_at=stamp(NOW))),
        ({"totals": dict.fromkeys(NUMBERS, float("nan"))}, Training(updated_at=stamp(NOW))),
        ({"totals": {name: {"a": 10**400} for name in NUMBERS}}, Training(updated_at=stamp(NOW))),
        ({"totals": {"env_steps": 10**400, "version": "x" * 65}}, Training(updated_at=stamp(NOW))),
        ({}, Training(updated_at=stamp(NOW))),
    ],
)
def test_numbers_of_a_run_may_be_missing(reported: dict[str, Any], expected: Training | None) -> None:
    told = with_numbers(ExperimentStatus(), reported, generation=1, now=NOW).training
    assert told is not None
    if expected is not None:
        assert told == expected
    else:
        assert (told.env_steps, told.return_mean, told.policy_lag, told.version) == (1024, None, None, None)
    written = write(ExperimentStatus(training=told))["training"]
    assert None not in written.values(), "a null is a field left out"


@pytest.mark.parametrize(
    ("unstored", "expected"),
    [(0, ("True", "Stored")), (2.0, ("False", "NotStored")), (None, None), ("2", None), (float("nan"), None)],
)
def test_unstored_versions_are_reported(unstored: object, expected: tuple[str, str] | None) -> None:
    status = with_numbers(ExperimentStatus(), {"totals": {"unstored_versions": unstored}}, generation=1, now=NOW)
    said = condition(status, "Durable")
    assert (said and (said.status, said.reason)) == expected


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("1.9: No space left on device: '/data' needs 9 bytes", "1.9: No space left on device: '/data' needs 9 bytes"),
        (None, "the trainer's log has the error"),
        (7, "the trainer's log has the error"),
    ],
)
def test_the_message_says_why_versions_are_not_stored(reason: object, told: str) -> None:
    totals = {"unstored_versions": 2, "unstored_reason": reason}
    said = condition(with_numbers(ExperimentStatus(), {"totals": totals}, generation=1, now=NOW), "Durable")
    assert said is not None
    assert said.message == f"the last 2 scheduled versions could not be stored: {told}"


LATE = "version 1.9 was due 95 s ago and is not stored yet"
FAILED = {"number": 2.0, "last": "evaluator-0: 1.8: [Errno 28] No space left on device"}
FAILED_TEXT = f"the newest 2 evaluations failed, the last of {FAILED['last']}"


@pytest.mark.parametrize(
    ("late", "failed", "unstored", "reason", "message"),
    [
        (LATE, None, 0, "StoredLate", f"the store is slow: {LATE}"),
        ("", None, 0, "Stored", "versions are stored as scheduled"),
        (7, 7, 0, "Stored", "versions are stored as scheduled"),
        (None, FAILED, 0, "EvaluationsFailed", FAILED_TEXT),
        (LATE, FAILED, 0, "StoredLate", f"the store is slow: {LATE}; {FAILED_TEXT}"),
        (
            LATE,
            FAILED,
            1,
            "NotStored",
            f"the last 1 scheduled versions could not be stored: the trainer's log has the error; {FAILED_TEXT}",
        ),
    ],
)
def test_a_slow_store_and_failed_evaluations_are_reported(
    late: object, failed: object, unstored: int, reason: str, message: str
) -> None:
    reported = {"totals": {"unstored_versions": unstored, "late_version": late}, "failed_evaluations": failed}
    said = condition(with_numbers(ExperimentStatus(), reported, generation=1, now=NOW), DURABLE)
    assert said is not None
    assert (said.reason, said.message) == (reason, message)
    assert said.status == ("True" if reason == "Stored" else "False")
    assert is_trouble(reason) is (reason != "Stored")


INFO = {"won": {"mean": 0.93333, "count": 120.0}, "never": {"mean": None, "count": 0.0}}


def test_the_length_of_episodes_and_values_of_info_are_reported() -> None:
    page = {"totals": {**NUMBERS, "length_mean": 21.44, "episode_info": INFO}}
    told = with_numbers(ExperimentStatus(), page, generation=1, now=NOW)
    assert told.training is not None
    assert told.training.length_mean == "21.4"
    assert told.training.episode_info == (
        EpisodeInfo(key="won", mean="0.9333", count=120),
        EpisodeInfo(key="never", count=0),
    )
    assert write(told)["training"]["episodeInfo"][1] == {"key": "never", "count": 0}
    assert read({"status": write(told)}) == told


@pytest.mark.parametrize(
    "found",
    [7, "many", [], {}, {"won": 3}, {"won": None}, {"x" * 65: {"mean": 1.0, "count": 1}}],
)
def test_values_of_info_that_are_none_are_left_out(found: object) -> None:
    told = with_numbers(ExperimentStatus(), {"totals": {"episode_info": found}}, generation=1, now=NOW)
    assert told.training == Training(updated_at=stamp(NOW))


def test_strange_statistics_of_info_fit_the_schema() -> None:
    found = {f"key{number}": {"mean": float("nan"), "count": -1} for number in range(20)}
    training = with_numbers(ExperimentStatus(), {"totals": {"episode_info": found}}, generation=1, now=NOW).training
    assert training is not None
    assert training.episode_info == tuple(EpisodeInfo(key=f"key{number}", count=0) for number in range(16))


def test_the_final_numbers_have_the_values_of_info_of_the_terminal_record() -> None:
    record = {"reason": "envSteps", "version": "1.9", "result": {"env_steps": 9, "episode_info": INFO}}
    final, _ = outcome(Training(env_steps=8, return_mean="1.0", length_mean="2.0"), record, NOW)
    assert final is not None
    assert (final.env_steps, final.return_mean, final.length_mean) == (9, "1.0", "2.0")
    assert final.episode_info is not None
    assert [each.key for each in final.episode_info] == ["won", "never"]
    assert write(ExperimentStatus(training=final))["training"]["episodeInfo"][0]["mean"] == "0.9333"


LOST = "attempt 3 resumed from version 2.100, since version 2.200 cannot be used (it is cut): training steps lost: 100"


def test_a_rollback_is_reported_until_another_run_begins() -> None:
    status = with_numbers(ExperimentStatus(), {"totals": {"rollback": LOST}}, generation=1, now=NOW)
    for silent in ({}, {"rollback": ""}, {"rollback": None}, {"rollback": 7}):
        status = with_numbers(status, {"totals": silent}, generation=1, now=later(60))
        said = condition(status, ROLLED_BACK)
        assert said is not None
        assert (said.status, said.reason, said.message) == ("True", "OlderVersion", LOST)
        unharmed = with_numbers(ExperimentStatus(), {"totals": silent}, generation=1, now=NOW)
        assert condition(unharmed, ROLLED_BACK) is None


RESUMPTION = {"attempt": 2, "version": "1.1200", "text": "attempt 2 resumed from version 1.1200; lost: at least 31"}
CAUSE = "attempt 1 is over: a-trainer-0 was replaced"


def after_a_restart(
    attempt: int = 2, cause: str = CAUSE, *, before: ExperimentStatus | None = None
) -> ExperimentStatus:
    status = (before or ExperimentStatus(phase="Running")).model_copy(update={"attempt": attempt})
    return with_condition(status, RESUMED, "False", "Restarting", cause, generation=1, now=NOW)


def resumption_of(status: ExperimentStatus) -> tuple[str, str, str] | None:
    said = condition(status, RESUMED)
    return None if said is None else (said.status, said.reason, said.message)


def test_a_resumption_is_reported_with_its_cause_until_the_next_one() -> None:
    status = with_numbers(after_a_restart(), {"resumption": RESUMPTION}, generation=1, now=NOW)
    told = ("True", "NextAttempt", f"{RESUMPTION['text']}; {CAUSE}")
    # A coordinator that was restarted since then does not know what was lost, or nothing yet.
    less = {**RESUMPTION, "text": "attempt 2 resumed from version 1.1200"}
    for later_document in ({"resumption": RESUMPTION}, {"resumption": less}, {"resumption": None}, {}):
        assert resumption_of(status) == told
        status = with_numbers(status, later_document, generation=1, now=later(60))
    second = after_a_restart(3, "attempt 2 is over: a-trainer-1 was deleted", before=status)
    assert with_numbers(second, {"resumption": RESUMPTION}, generation=1, now=NOW) == with_numbers(
        second, {}, generation=1, now=NOW
    ), "the numbers are those of the attempt before"
    text = "attempt 3 resumed from version 1.1200"
    told_again = with_numbers(second, {"resumption": {**RESUMPTION, "attempt": 3, "text": text}}, generation=1, now=NOW)
    assert resumption_of(told_again) == (
        "True",
        "NextAttempt",
        f"{text}; attempt 2 is over: a-trainer-1 was deleted",
    )


def test_a_resumption_after_a_suspension_has_no_cause() -> None:
    status = ExperimentStatus(phase="Running", attempt=2)
    assert resumption_of(with_numbers(status, {"resumption": RESUMPTION}, generation=1, now=NOW)) == (
        "True",
        "NextAttempt",
        RESUMPTION["text"],
    )


def test_an_experiment_that_has_just_begun_has_not_resumed() -> None:
    begun = {"attempt": 1, "version": None, "text": "attempt 1 began from step 0: no version was stored"}
    status = ExperimentStatus(phase="Running", attempt=1)
    assert resumption_of(with_numbers(status, {"resumption": begun}, generation=1, now=NOW)) is None
    again = {**begun, "attempt": 2, "text": "attempt 2 began from step 0: no version was stored"}
    assert resumption_of(with_numbers(after_a_restart(), {"resumption": again}, generation=1, now=NOW)) == (
        "True",
        "NextAttempt",
        f"{again['text']}; {CAUSE}",
    )


@pytest.mark.parametrize("strange", [None, 7, "x", [], {}, {"attempt": 2}, {"attempt": 2, "version": "1.1", "text": 3}])
def test_a_strange_resumption_changes_nothing(strange: Any) -> None:
    status = after_a_restart()
    assert resumption_of(with_numbers(status, {"resumption": strange}, generation=1, now=NOW)) == (
        "False",
        "Restarting",
        CAUSE,
    )


def test_each_resumption_is_an_event() -> None:
    document = {"metadata": {"name": "a", "namespace": "n", "uid": "u"}}
    before, after_end = ExperimentStatus(phase="Running", attempt=1), after_a_restart()
    assert list(events(document, before, after_end, NOW)) == [], "GangComplete has said so"
    resumed = with_numbers(after_end, {"resumption": RESUMPTION}, generation=1, now=NOW)
    (event,) = events(document, after_end, resumed, NOW)
    assert (event["type"], event["reason"], event["message"]) == (
        "Normal",
        "NextAttempt",
        f"{RESUMPTION['text']}; {CAUSE}",
    )
    again = with_numbers(
        after_a_restart(3, before=resumed), {"resumption": {**RESUMPTION, "attempt": 3}}, generation=1, now=later(60)
    )
    (second,) = events(document, after_a_restart(3, before=resumed), again, later(60))
    assert second["metadata"]["name"] != event["metadata"]["name"]


LAST_ERROR = "actor-0: environment rank 3 raised ValueError: stuck (error 2 of this environment)"


@pytest.mark.parametrize(
    ("errors", "begins"),
    [
        ({"number": 3.0, "last": LAST_ERROR}, "3 errors of environments since their actors started; "),
        ({"number": 1, "last": LAST_ERROR}, "1 error of environments since their actors started; "),
    ],
)
def test_errors_of_environments_are_reported_from_then_on(errors: dict[str, Any], begins: str) -> None:
    status = with_numbers(ExperimentStatus(), {"environment_errors": errors}, generation=1, now=NOW)
    for silent in (
        {},
        {"environment_errors": None},
        {"environment_errors": 3},
        {"environment_errors": {"number": "x"}},
    ):
        status = with_numbers(status, silent, generation=1, now=later(60))
        said = condition(status, ENVIRONMENT_ERRORS)
        assert said is not None
        assert (said.status, said.reason) == ("True", "MadeAgain")
        assert said.message.startswith(begins)
        assert said.message.endswith(f"; the last of {LAST_ERROR}")
        well = with_numbers(ExperimentStatus(), silent, generation=1, now=NOW)
        assert condition(well, ENVIRONMENT_ERRORS) is None


def test_values_that_are_not_finite_are_reported_from_then_on() -> None:
    last = "actor-0: environment rank 3: reward is nan at step 50 of its episode"
    status = with_numbers(
        ExperimentStatus(), {"non_finite_steps": {"number": 7.0, "last": last}}, generation=1, now=NOW
    )
    status = with_numbers(status, {"non_finite_steps": None}, generation=1, now=later(60))
    said = condition(status, NON_FINITE_VALUES)
    assert said is not None
    assert (said.status, said.reason, said.last_transition_time) == ("True", "Dropped", stamp(NOW))
    assert said.message == (
        "NaN or infinity in 7 steps or resets of environments since their actors started; none of them is trained, and "
        f"training goes on; the last of {last}"
    )
    well = with_numbers(ExperimentStatus(), {"non_finite_steps": None}, generation=1, now=NOW)
    assert condition(well, NON_FINITE_VALUES) is None


def test_numbers_change_nothing_else() -> None:
    before = with_ready(ExperimentStatus(phase="Running"), "True", "Ready", now=NOW)
    told = with_numbers(before, {"totals": {"env_steps": 8, "unstored_versions": 1}}, generation=1, now=NOW)
    assert (told.training and told.training.env_steps) == 8
    durable_condition = condition(told, DURABLE)
    assert durable_condition is not None and durable_condition.reason == "NotStored"
    assert told.model_copy(update={"training": None, "conditions": before.conditions}) == before


CALL = {"text": "environment rank 3 has been in step for 61 s (actor-0)", "seconds": 61.0}
WAIT = "trainer-0 has waited for batch for 61 s"
NO_STEP = "no environment step and no training step for 61 s"


@pytest.mark.parametrize(
    ("reported", "holds", "reason", "message"),
    [
        ({"stall": None}, "True", "Progressing", "steps are taken"),
        (
            {"stall": {"seconds": 61.2, "reasons": [CALL["text"], WAIT]}, "environment_calls": [CALL]},
            "False",
            "Stalled",
            f"{NO_STEP}: {CALL['text']}; {WAIT}",
        ),
        (
            {"stall": {"seconds": 61.2, "reasons": ["trainer-0 has not answered for 61 s"]}},
            "False",
            "Stalled",
            f"{NO_STEP}: trainer-0 has not answered for 61 s",
        ),
        ({"stall": {"seconds": 61.2, "reasons": [3, None]}}, "False", "Stalled", NO_STEP),
        ({"stall": {"seconds": 61.2}}, "False", "Stalled", NO_STEP),
        ({"stall": None, "environment_calls": [CALL]}, "True", "LongCall", f"training goes on; {CALL['text']}"),
        ({"stall": None, "environment_calls": [{**CALL, "seconds": 59.0}]}, "True", "Progressing", "steps are taken"),
        ({"stall": {}, "environment_calls": [7, {}]}, "True", "Progressing", "steps are taken"),
        ({"stall": 5, "environment_calls": {}}, "True", "Progressing", "steps are taken"),
        ({"phase": "paused", "stall": None}, "False", "Paused", "workers are paused"),
        (
            {"phase": "paused", "stall": None, "paused": {"text": "paused since T: actor-0"}},
            "False",
            "Paused",
            "paused since T: actor-0",
        ),
        (
            {"phase": "training", "stall": None, "paused": {"text": "paused since T: actor-0"}},
            "True",
            "Progressing",
            "steps are taken; paused since T: actor-0",
        ),
    ],
)
def test_whether_an_experiment_takes_steps_is_a_condition(
    reported: dict[str, Any], holds: str, reason: str, message: str
) -> None:
    said = condition(with_numbers(ExperimentStatus(), reported, generation=1, now=NOW), PROGRESSING)
    assert said is not None
    assert (said.status, said.reason, said.message) == (holds, reason, message)
    assert is_trouble(reason) is (reason in ("Stalled", "LongCall"))


MAKING = {"text": "environment rank 3 has been in make for 61 s (actor-0)", "seconds": 61.0}
HANGING_START = {"stall": {"seconds": 61.2, "reasons": [MAKING["text"]]}, "environment_calls": [MAKING]}


def test_an_experiment_whose_environment_hangs_while_it_is_made_stalls_before_it_runs() -> None:
    starting = summarize(ExperimentStatus(phase="Starting", attempt=1), context(), [], NOW)
    stalled = with_numbers(starting, HANGING_START, generation=1, now=NOW)
    said = condition(stalled, PROGRESSING)
    assert said is not None
    assert (said.status, said.reason, said.message) == ("False", "Stalled", f"{NO_STEP}: {MAKING['text']}")
    assert stalled.training is None, "it has no numbers"
    assert summarize(stalled, context(), [], later(10)) == stalled, "until the coordinator says otherwise"
    again = with_numbers(stalled, {"stall": None, "environment_calls": []}, generation=1, now=later(20))
    said = condition(again, PROGRESSING)
    assert said is not None
    assert (said.status, said.reason) == ("False", "Starting")


@pytest.mark.parametrize(
    "reported",
    [
        {},
        {"totals": NUMBERS, "stall": None, "environment_calls": [MAKING]},
        {"stall": {"seconds": 99.0, "reasons": ["trainer-0 has not answered for 99 s"]}},
        {**HANGING_START, "environment_calls": [{**MAKING, "seconds": 59.0}]},
    ],
)
def test_an_experiment_that_starts_slowly_does_not_stall(reported: dict[str, Any]) -> None:
    starting = summarize(ExperimentStatus(phase="Starting", attempt=1), context(), [], NOW)
    assert with_numbers(starting, reported, generation=1, now=NOW) == starting


WAITS = {"number": 8, "text": "8 environments have waited since 2026-01-01T00:00:00Z: http://sim is away (actor-0)"}


@pytest.mark.parametrize("phase", ["Starting", "Running"])
def test_a_server_of_environments_that_is_away_is_a_condition_until_no_environment_waits(phase: Phase) -> None:
    status = ExperimentStatus(phase=phase, attempt=1)
    none = with_numbers(status, {"server_waits": None}, generation=1, now=NOW)
    assert condition(none, ENVIRONMENT_SERVER_AWAY) is None
    away = with_numbers(status, {"server_waits": WAITS}, generation=1, now=NOW)
    said = condition(away, ENVIRONMENT_SERVER_AWAY)
    assert said is not None
    assert (said.status, said.reason, said.message) == ("True", "ServerAway", WAITS["text"])
    assert with_numbers(away, {"server_waits": WAITS}, generation=1, now=NOW) == away
    for reported in ({"server_waits": None}, {}, {"server_waits": 7}):
        said = condition(with_numbers(away, reported, generation=1, now=later(10)), ENVIRONMENT_SERVER_AWAY)
        assert said is not None
        assert (said.status, said.reason) == ("False", "NoneWaits")
    assert is_trouble("ServerAway")
    assert not is_trouble("NoneWaits")


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded", "Failed"])
def test_no_environment_waits_for_a_server_once_its_pod_is_gone(phase: Phase) -> None:
    away = with_numbers(ExperimentStatus(phase="Running"), {"server_waits": WAITS}, generation=1, now=NOW)
    resting = summarize(away.model_copy(update={"phase": phase}), context(), [], later(10))
    said = condition(resting, ENVIRONMENT_SERVER_AWAY)
    assert said is not None
    assert (said.status, said.reason) == ("False", "NoneWaits")


def test_a_page_of_an_older_coordinator_says_nothing_about_steps() -> None:
    assert condition(with_numbers(ExperimentStatus(), {"totals": NUMBERS}, generation=1, now=NOW), PROGRESSING) is None


@pytest.mark.parametrize(
    ("phase", "reason", "speed"),
    [("Suspended", "Suspended", 0), ("Queued", "Queued", 0), ("Running", "Starting", 0), ("Failed", "Finished", 1000)],
)
def test_an_experiment_that_need_not_take_steps_does_not_stall(phase: Phase, reason: str, speed: int) -> None:
    """``Running`` with an incomplete gang becomes ``Starting``."""
    before = with_numbers(
        ExperimentStatus(phase=phase, attempt=1),
        {"totals": NUMBERS, "stall": {"seconds": 99}},
        generation=1,
        now=NOW,
    )
    told = summarize(before, context(), [], later(10))
    said = condition(told, PROGRESSING)
    assert said is not None
    assert (said.status, said.reason, said.last_transition_time) == ("False", reason, stamp(NOW))
    assert told.training is not None
    assert told.training.env_steps_per_second == speed
    assert summarize(told, context(), [], later(20)) == told


def test_an_experiment_that_never_ran_has_no_such_condition() -> None:
    told = summarize(ExperimentStatus(phase="Suspended", attempt=1), context(), [], NOW)
    assert condition(told, PROGRESSING) is None


FULL = ExperimentStatus(
    phase="Running",
    observed_generation=3,
    attempt=2,
    restarts=1,
    recent_failures=1,
    last_failure_at=stamp(NOW),
    last_failure=LastFailure(signature="0f", env_steps=7, times=2),
    actors=RoleStatus(replicas=4, ready=3, selector="a=b"),
    trainers=RoleStatus(replicas=1, ready=1),
    training=training(NUMBERS, NOW),
    conditions=(Condition(type=READY, status="False", reason="Starting", message="", last_transition_time=stamp(NOW)),),
)


@pytest.mark.parametrize("status", [FULL, ExperimentStatus()])
def test_a_status_is_read_as_it_was_written(status: ExperimentStatus) -> None:
    written = write(status)
    assert read({"status": written}) == status
    assert write(read({"status": written})) == written


@pytest.mark.parametrize("document", [{}, {"status": None}, {"status": {}}])
def test_a_missing_status_is_empty(document: dict[str, Any]) -> None:
    assert read(document) == ExperimentStatus()


HANG = "rlsrl: environment rank 3 was in step for 30 s (environment.stepSeconds): the actor was ended"


def context() -> ExperimentContext:
    document = minimal()
    document["spec"] |= {"trainers": {"replicas": 2}, "bufferWorkers": {}}
    return context_of(document, generation=4)


ALL_READY = [pod("coordinator"), pod(), pod(index=1), pod("buffer"), pod("actor")]


@pytest.mark.parametrize(
    ("phase", "complete", "pods", "expected_phase", "reason", "message"),
    [
        (
            "Pending",
            "False",
            [],
            "Starting",
            "Starting",
            "coordinator 0/1, trainer 0/2, buffer 0/1, actor 0/1 ready: pods are being created",
        ),
        ("Starting", "True", ALL_READY, "Running", "Ready", "every pod is ready"),
        (
            "Running",
            "True",
            [*ALL_READY[:-1], pod("actor", state=IMAGE)],
            "Running",
            "ImagePullBackOff",
            f'actor 0/1 ready: a-actor-0, since {CREATED}: Back-off pulling image "registry.example/learner:1"',
        ),
        (
            "Running",
            "True",
            [*ALL_READY[:-1], pod("actor", ready=False, last_state=ended(12, f"a log line\n{HANG}"), restarts=1)],
            "Running",
            "Restarting",
            f"actor 0/1 ready: a-actor-0 ended: Error, exit code 12: {HANG}",
        ),
        ("Running", "False", ALL_READY, "Starting", "Ready", "every pod is ready"),
        ("Succeeded", "True", ALL_READY[:1], "Succeeded", "Finished", "the experiment has finished"),
        ("Failed", "False", ALL_READY, "Failed", "Finished", "the experiment has finished"),
    ],
)
def test_the_summary(
    phase: Phase, complete: Holds, pods: Sequence[Manifest], expected_phase: Phase, reason: str, message: str
) -> None:
    before = with_condition(
        ExperimentStatus(phase=phase, attempt=1), GANG_COMPLETE, complete, "Some", "", generation=1, now=NOW
    )
    told = summarize(before, context(), pods, NOW)
    assert (told.phase, told.observed_generation) == (expected_phase, 4)
    said = ready_of(told)
    assert (said.reason, said.message) == (reason, message)
    assert said.status == ("True" if reason == "Ready" else "False")
    accepted = condition(told, ACCEPTED)
    assert accepted is not None
    assert accepted.status == "True"
    assert summarize(told, context(), pods, later(60)) == told, "nothing new is nothing to write"


def test_pods_are_counted_by_role_and_found_by_selector() -> None:
    pods = [*ALL_READY, pod("actor", 1), pod("actor", 2, ready=False)]
    told = summarize(ExperimentStatus(phase="Running", attempt=1), context(), pods, NOW)
    selector = f"rlsrl.dev/experiment=a,rlsrl.dev/role={{}},rlsrl.dev/uid={UID}"
    assert told.trainers == RoleStatus(replicas=2, ready=2, selector=selector.format("trainer"))
    assert told.actors == RoleStatus(replicas=1, ready=1, selector=selector.format("actor")), (
        "never more than there are"
    )
    over = summarize(told.model_copy(update={"phase": "Succeeded"}), context(), [pod("coordinator")], NOW)
    assert over.actors == RoleStatus(replicas=0, ready=0, selector=selector.format("actor"))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Unschedulable", True),
        ("ImagePullBackOff", True),
        ("Starting", False),
        ("Finished", False),
        ("InvalidSpec", True),
        ("Restarting", True),
        ("Complete", False),
        ("Succeeded", False),
        ("BudgetExhausted", True),
        ("UpdatesSkipped", True),
    ],
)
def test_reasons_that_need_attention(reason: str, expected: bool) -> None:
    assert is_trouble(reason) is expected


def test_refused_pods_are_reported_unless_an_existing_pod_blocks() -> None:
    before = ExperimentStatus(phase="Starting", attempt=1)
    told = condition(summarize(before, context(), [], NOW, failed_create="Deployment a-actor: exceeded quota"), "Ready")
    assert told is not None
    assert (told.status, told.reason) == ("False", "FailedCreate")
    assert told.message.endswith("Deployment a-actor: exceeded quota")
    stuck = [pod(state=waiting("ImagePullBackOff"))]
    told = condition(
        summarize(before, context(), stuck, NOW, failed_create="Deployment a-actor: exceeded quota"), "Ready"
    )
    assert told is not None
    assert told.reason == "ImagePullBackOff"


def test_starting_pods_name_the_secret_that_may_be_missing() -> None:
    document = minimal()
    creating = [pod("actor", state=waiting("ContainerCreating"))]
    said = ready_of(summarize(ExperimentStatus(), context_of(document), creating, NOW)).message
    assert "Secret" not in said
    document["spec"]["security"] = {"tlsSecret": "mine"}
    said = ready_of(summarize(ExperimentStatus(), context_of(document), creating, NOW)).message
    assert said.endswith("pods wait for a Secret mine with the keys tls.crt, tls.key, ca.crt")
    running = [pod(role) for role in ("coordinator", "trainer", "actor")]
    assert ready_of(summarize(ExperimentStatus(), context_of(document), running, NOW)).reason == "Ready"


def test_a_deployments_replica_failure() -> None:
    holding = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    assert (
        replica_failure({"status": {"conditions": [{"type": "Available", "status": "False"}, holding]}})
        == "exceeded quota"
    )
    for quiet in ({}, {"status": {}}, {"status": {"conditions": [{**holding, "status": "False"}]}}):
        assert replica_failure(quiet) is None
