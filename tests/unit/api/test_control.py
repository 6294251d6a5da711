"""What `rlsrl control` changes in a spec."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from rlsrl.api.control import (
    CONTROLLED_ROLES,
    ControlAction,
    ControlRefused,
    control_changes,
    merge_patch,
    overrides_of,
)
from rlsrl.api.load import load_text
from rlsrl.api.spec import ExperimentSpec, PausedWorkers


def spec(**changes: Any) -> ExperimentSpec:
    least = {
        "environment": {"id": "CartPole-v1"},
        "actors": {"environments": 8, "replicas": 4},
        "bufferWorkers": {"replicas": 1},
        "stop": {"trainSteps": 10},
    }
    document = {"apiVersion": "rlsrl.dev/v1alpha1", "kind": "RLExperiment", "metadata": {"name": "e"}}
    return load_text(json.dumps({**document, "spec": least | changes})).spec


def paused(before: list[Any], action: ControlAction, role: str | None = None, index: int | None = None) -> Any:
    return control_changes(spec(paused=before), action, role=role, index=index, now="t")["paused"]


ACTORS, TRAINERS = {"role": "actor"}, {"role": "trainer"}


def test_every_role_of_the_table_but_the_coordinator_can_be_paused() -> None:
    assert set(get_args(PausedWorkers.model_fields["role"].annotation)) == set(CONTROLLED_ROLES)


def test_all_roles_of_the_experiment_pause_and_resume_together() -> None:
    assert paused([], "pause") == [ACTORS, {"role": "buffer"}, TRAINERS]
    assert paused([ACTORS, TRAINERS], "resume") == []


def test_a_role_or_a_worker_pauses_beside_others() -> None:
    assert paused([TRAINERS], "pause", "actor") == [ACTORS, TRAINERS]
    assert paused([TRAINERS], "pause", "actor", 2) == [{"role": "actor", "indices": [2]}, TRAINERS]
    assert paused([{"role": "actor", "indices": [0]}], "pause", "actor", 2) == [{"role": "actor", "indices": [0, 2]}]
    assert paused([ACTORS], "pause", "actor", 2) == [ACTORS]
    assert paused([{"role": "actor", "indices": [0, 1, 3]}], "pause", "actor", 2) == [ACTORS]


def test_a_role_or_a_worker_resumes_and_others_stay_paused() -> None:
    assert paused([ACTORS, TRAINERS], "resume", "actor") == [TRAINERS]
    assert paused([ACTORS], "resume", "actor", 2) == [{"role": "actor", "indices": [0, 1, 3]}]
    assert paused([{"role": "actor", "indices": [2]}], "resume", "actor", 2) == []
    assert paused([], "resume", "actor", 2) == []
    assert paused([{"role": "actor", "indices": [9]}], "resume", "actor", 2) == [], "an index without a worker"


def test_the_end_lets_paused_workers_go_on() -> None:
    assert control_changes(spec(), "stop", role=None, index=None, now="t") == {"stop.now": True}
    stopped = control_changes(spec(paused=[ACTORS]), "stop", role=None, index=None, now="t")
    assert stopped == {"stop.now": True, "paused": []}


def test_changes_are_an_override_and_a_merge_patch() -> None:
    changes = control_changes(spec(), "checkpoint", role=None, index=None, now="2026")
    assert overrides_of(changes) == ['parameters.storeRequest="2026"']
    assert merge_patch(changes) == {"parameters": {"storeRequest": "2026"}}
    assert merge_patch({"stop.now": True, "paused": []}) == {"stop": {"now": True}, "paused": []}


@pytest.mark.parametrize(
    ("action", "role", "index", "message"),
    [
        ("pause", "policy", None, "no policy workers; it has actor, buffer, trainer"),
        ("pause", "actor", 4, "actor-4 does not exist: --index goes from 0 to 3"),
        ("pause", "actor", -1, "--index goes from 0 to 3"),
        ("pause", "trainer", 0, "trainers train together"),
        ("resume", None, 0, "add --role"),
        ("stop", "actor", None, "leave --role out"),
        ("checkpoint", "trainer", None, "leave --role out"),
    ],
)
def test_what_is_not_possible_is_refused(
    action: ControlAction, role: str | None, index: int | None, message: str
) -> None:
    with pytest.raises(ControlRefused, match=message):
        control_changes(spec(), action, role=role, index=index, now="t")
