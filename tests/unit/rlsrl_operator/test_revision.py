"""The changes of an edit; other settings or a newer operator change nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlsrl.api.edits import edits
from rlsrl.api.model import MAX_ARGUMENTS, OnEdit
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.testing.documents import EGRESS, minimal
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    Revision,
    first_revision,
    is_anothers,
    next_revision,
    read_revision,
    revision_object,
)
from rlsrl_operator.settings import Images, OperatorSettings, SecretName
from rlsrl_operator.testing import SETTINGS, context_of

KEY = b"the operator's own"
NEWER = OperatorSettings(images=Images(actor="registry.example/actor:2", learner="registry.example/learner:2"))


def context(
    spec: Mapping[str, Any], *, generation: int = 1, settings: OperatorSettings = SETTINGS
) -> ExperimentContext:
    document = minimal()
    document["spec"] = merged({**document["spec"], **BASE}, spec)
    return context_of(document, generation=generation, settings=settings)


BASE: dict[str, Any] = {
    "actors": {"environmentsPerActor": 8, "replicas": 2},
    "policyWorkers": {"replicas": 1},
    "bufferWorkers": {"replicas": 1},
    "evaluators": {"replicas": 1},
    "trainers": {"replicas": 1, "batchEnvironments": 16},
}


def merged(into: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(dict(into))
    for name, value in spec.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = merged(made[name], value) if both else value
    return made


def templates(revision: Revision) -> dict[str, Manifest]:
    return {
        each["metadata"]["labels"]["rlsrl.dev/role"]: each["spec"]["template"]
        for each in revision.manifests
        if "template" in each.get("spec", {})
    }


def replaced(before: Revision, after: Revision) -> set[str]:
    """Return the roles with changed pod templates."""
    was, now = templates(before), templates(after)
    return {role for role in {*was, *now} if was.get(role) != now.get(role)}


EDITS: dict[str, tuple[dict[str, Any], OnEdit, set[str]]] = {
    "learning rate": ({"algorithm": {"ppo": {"learningRate": 0.1}}}, "live", set()),
    "schedule": (
        {"algorithm": {"ppo": {"clipRangeSchedule": {"linear": {"to": 0.1, "envSteps": 10}}}}},
        "live",
        set(),
    ),
    "stop": ({"stop": {"envSteps": 123_456}}, "live", set()),
    "cadence": ({"parameters": {"everySeconds": 3, "keepLast": 9}}, "live", set()),
    "budget": ({"restarts": {"budget": 3}}, "live", set()),
    "volume": ({"parameters": {"store": {"filesystem": {"whenDeleted": "Delete"}}}}, "live", set()),
    "suspend": ({"suspend": True}, "live", set()),
    "destinations of environments": ({"environment": {"egress": [EGRESS[0]]}}, "live", set()),
    "batches of policy workers": ({"policyWorkers": {"maxBatchSize": 7}}, "roll", {"policy"}),
    "policy workers": ({"policyWorkers": {"replicas": 2}}, "roll", {"policy", "actor"}),
    "evaluators": ({"evaluators": {"environments": 3}}, "roll", {"evaluator"}),
    "fixed version": ({"evaluators": {"parameters": {"tag": "best"}}}, "roll", {"evaluator"}),
    "tracking": ({"tracking": {"wandb": {"project": "p"}}}, "roll", {COORDINATOR}),
    "metrics of workers": ({"tracking": {"workerSeconds": 5.0}}, "roll", {COORDINATOR}),
    "lag": ({"pacing": {"maxPolicyLag": 3}}, "gang", {TRAINER}),
    "epochs": ({"algorithm": {"ppo": {"epochs": 2}}}, "gang", {TRAINER}),
    "rollout": ({"actors": {"rolloutLength": 256}}, "gang", {TRAINER, "actor", "buffer"}),
    "ranks": ({"trainers": {"replicas": 2}}, "gang", {TRAINER, "actor", "buffer"}),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_replaces_the_pods_of_its_effect(name: str) -> None:
    spec, does, roles = EDITS[name]
    before = context({})
    after = context(spec, generation=2)
    assert {edit.effect for edit in edits(before.experiment, after.experiment)} == {does}
    first = first_revision(before)
    # A newer operator with other settings: unchanged objects stay as recorded.
    second = next_revision(first, context(spec, generation=2, settings=NEWER))
    assert replaced(first, second) == roles
    assert "registry.example/actor:2" not in json.dumps(second.manifests)
    assert second.experiment == after.experiment


def test_an_edit_of_live_settings_changes_one_object() -> None:
    first = first_revision(context({}))
    second = next_revision(first, context({"stop": {"envSteps": 123_456}}, generation=2))
    was, now = ({each["metadata"]["name"]: each for each in revision.manifests} for revision in (first, second))
    assert {name for name in {*was, *now} if was.get(name) != now.get(name)} == {f"{CONTEXT.name}-settings"}
    told = json.loads(now[f"{CONTEXT.name}-settings"]["data"]["settings.json"])
    assert told[TRAINER]["stop"]["env_steps"] == 123_456


CONTEXT = context({})


def test_scaling_actors_replaces_no_pod() -> None:
    alone: dict[str, Any] = {"bufferWorkers": None}
    first = first_revision(context(alone))
    second = next_revision(first, context({**alone, "actors": {"replicas": 5}}, generation=2))
    assert replaced(first, second) == set()
    (actors,) = (
        each
        for each in second.manifests
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", CONTEXT.name_of("actor"))
    )
    assert actors["spec"]["replicas"] == 5


@pytest.mark.parametrize(
    ("environment", "actors", "roles"),
    [
        ({"passPlace": True}, {"environmentsPerActor": 8}, {"actor"}),
        ({"passPlace": True}, {"environmentsPerActor": None, "environments": 20}, {"actor"}),
        ({"kwargsByRank": {"addRank": {"port": 9000}}}, {"environmentsPerActor": 8}, set()),
    ],
    ids=["place", "place of a total", "rank alone"],
)
def test_scaling_actors_restarts_those_whose_environments_know_the_number_of_all(
    environment: dict[str, Any], actors: dict[str, Any], roles: set[str]
) -> None:
    spec: dict[str, Any] = {"environment": environment, "bufferWorkers": None, "actors": actors}
    spec["pacing"] = {"maxPolicyLag": 8}
    first = first_revision(context(spec))
    second = next_revision(first, context(merged(spec, {"actors": {"replicas": 5}}), generation=2))
    assert replaced(first, second) == roles


def test_environments_that_depend_on_their_rank_never_exist_beside_their_predecessors() -> None:
    def strategies(environment: dict[str, Any]) -> dict[str, str]:
        return {
            each["metadata"]["labels"]["rlsrl.dev/role"]: each["spec"]["strategy"]["type"]
            for each in first_revision(context({"environment": environment})).manifests
            if each["kind"] == "Deployment"
        }

    rolling = dict.fromkeys(("actor", "buffer", "evaluator", "policy"), "RollingUpdate")
    assert strategies({}) == rolling
    for environment in ({"passPlace": True}, {"kwargsByRank": {"cycle": {"level": [1, 2]}}}):
        assert strategies(environment) == {**rolling, "actor": "Recreate", "evaluator": "Recreate"}


def test_a_newer_operator_replaces_only_edited_pods() -> None:
    manifests = copy.deepcopy(first_revision(context({})).manifests)
    for each in manifests:
        if "template" in each.get("spec", {}):
            each["spec"]["template"]["spec"]["hostname"] = "of-an-older-operator"
    first = replace(first_revision(context({})), manifests=manifests)
    assert replaced(first, next_revision(first, context({}, generation=2))) == set()
    second = next_revision(first, context({"evaluators": {"replicas": 2, "environments": 3}}, generation=2))
    assert replaced(first, second) == {"evaluator"}
    assert "hostname" not in templates(second)["evaluator"]["spec"]


def test_only_a_signed_revision_is_read() -> None:
    revision = first_revision(CONTEXT)
    found = revision_object(CONTEXT, revision, KEY)
    assert read_revision(CONTEXT, found, KEY) == revision
    assert read_revision(CONTEXT, found, b"another operator's") is None
    for name in ("manifests.json", "settings.json", "experiment.json"):
        assert read_revision(CONTEXT, {**found, "data": {**found["data"], name: "[]"}}, KEY) is None
    unsigned = {name: value for name, value in found["data"].items() if name != "signature"}
    assert read_revision(CONTEXT, {**found, "data": unsigned}, KEY) is None
    elsewhere = {**found, "metadata": {**found["metadata"], "name": context({}, generation=2).revision_name}}
    assert read_revision(CONTEXT, elsewhere, KEY) is None, "an earlier revision does not pass for a later one"


@pytest.mark.parametrize(
    "value", ["k" * (MAX_ARGUMENTS - 100), [1] * ((MAX_ARGUMENTS - 8) // 3)], ids=["text", "numbers"]
)
def test_a_revision_with_the_longest_kwargs_fits_a_config_map(value: object) -> None:
    roles: dict[str, Any] = {role: {} for role in ("policyWorkers", "bufferWorkers", "evaluators")}
    about = context({**roles, "environment": {"kwargs": {"x": value}}})
    found = revision_object(about, first_revision(about), KEY)
    assert sum(len(text.encode()) for text in found["data"].values()) < 2**20


def test_a_revision_names_its_operator() -> None:
    other = OperatorSettings(images=SETTINGS.images, key_secret=SecretName(namespace="elsewhere", name="its-key"))
    theirs = revision_object(context({}, settings=other), first_revision(CONTEXT), b"another operator's")
    assert read_revision(CONTEXT, theirs, KEY) is None
    assert is_anothers(CONTEXT, theirs)
    assert read_revision(CONTEXT, theirs, b"another operator's") is not None, "with its key we are that operator"
    # An unreadable revision that names this operator: its key was lost, or somebody changed the object.
    assert not is_anothers(CONTEXT, revision_object(CONTEXT, first_revision(CONTEXT), b"a lost one"))
    assert not is_anothers(CONTEXT, {**theirs, "data": {}})
    assert not is_anothers(CONTEXT, {name: value for name, value in theirs.items() if name != "data"})
