"""The fields that an edit changes, and the effect that every field declares."""

import json
import random
from typing import Any

import pytest

from rlsrl.api.crd import schema
from rlsrl.api.edits import edits, refused
from rlsrl.api.fields import all_fields
from rlsrl.api.load import load_text
from rlsrl.api.spec import Mlp, RLExperiment
from rlsrl.testing.api_server import faults
from rlsrl.testing.documents import as_sent, minimal, variation

SCHEMA = schema()
FREE = frozenset(
    {"spec.environment.kwargs", "spec.policy.network.custom.kwargs"}
    | {f"spec.environment.kwargsByRank.{member}" for member in ("each", "cycle")}
)
"""Fields that an API server cannot compare."""
MLP = Mlp().model_dump(by_alias=True, mode="json")


def load(document: Any) -> RLExperiment:
    return load_text(json.dumps(document))


def test_every_field_of_the_spec_declares_the_effect_of_an_edit() -> None:
    silent = [
        field.path for field in all_fields() if field.path[0] == "spec" and len(field.path) > 1 and not field.on_edit
    ]
    assert not silent


def test_an_absent_field_equals_its_default() -> None:
    plain, explicit = minimal(), minimal()
    explicit["spec"]["algorithm"] = {"ppo": {"epochs": 4}}
    explicit["spec"]["seed"] = 0
    assert edits(load(plain), load(explicit)) == ()


@pytest.mark.parametrize(
    ("path", "value", "does"),
    [
        ("seed", 5, "refuse"),
        ("suspend", True, "live"),
        ("restarts.budget", 1, "live"),
        ("pacing.maxPolicyLag", 4, "gang"),
        ("environment.kwargs", {"a": 1}, "refuse"),
        ("environment.maxEpisodeSteps", 10, "refuse"),
        ("environment.kwargsByRank", {"each": {}, "cycle": {}, "addRank": {"port": 1}}, "refuse"),
        ("environment.passPlace", True, "refuse"),
        ("environment.egress", [{"to": {"cidr": "10.0.0.0/8"}, "ports": [{"port": 1}]}], "live"),
        ("parameters.store.filesystem.size", "1Gi", "refuse"),
        ("parameters.store.filesystem.whenDeleted", "Delete", "live"),
    ],
)
def test_a_changed_field_is_named(path: str, value: Any, does: str) -> None:
    before, after = minimal(), minimal()
    *steps, last = path.split(".")
    inner = after["spec"]
    for step in steps:
        inner = inner.setdefault(step, {})
    inner[last] = value
    (edit,) = edits(load(before), load(after))
    assert (edit.path, edit.effect) == (f"spec.{path}", does)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["algorithm.ppo.epochs=4", "seed=0"], []),
        (["metadata.name=other"], []),
        (["algorithm.ppo.epochs=5"], [("spec.algorithm.ppo.epochs", 4, 5)]),
        (["stop.trainSteps=9", "seed=1"], [("spec.seed", 0, 1), ("spec.stop.trainSteps", None, 9)]),
        (
            ["policy.network.custom.factory=a:b"],
            [
                ("spec.policy.network.mlp", MLP, None),
                ("spec.policy.network.custom", None, {"factory": "a:b", "kwargs": {}, "state": {}}),
            ],
        ),
        (["environment.kwargs.x=1"], [("spec.environment.kwargs", {}, {"x": 1})]),
        (["policy.network.mlp.hiddenSizes=[64]"], [("spec.policy.network.mlp.hiddenSizes", [64, 64], [64])]),
    ],
)
def test_edits_have_the_values_before_and_after(overrides: list[str], expected: list[tuple[str, Any, Any]]) -> None:
    text = json.dumps(minimal())
    found = edits(load_text(text), load_text(text, overrides=overrides))

    assert [(edit.path, edit.before, edit.after) for edit in found] == expected


CUSTOM = {"factory": "a:b", "needs": {"minibatchSize": 64}}


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ({"ppo": {}}, {"vtrace": {}}, "vtrace"),
        ({"vtrace": {}}, {"ppo": {"epochs": 2}}, "ppo"),
        ({"ppo": {}}, {"custom": CUSTOM}, "custom"),
        ({"custom": CUSTOM}, {"custom": {**CUSTOM, "needs": {**CUSTOM["needs"], "replay": {}}}}, "custom.needs.replay"),
        (
            {"custom": CUSTOM},
            {"custom": {**CUSTOM, "needs": {**CUSTOM["needs"], "outputs": "policy"}}},
            "custom.needs.outputs",
        ),
    ],
)
def test_another_algorithm_is_another_experiment(before: Any, after: Any, path: str) -> None:
    """What a trainer resumes from fits its algorithm alone."""
    documents = [minimal(), minimal()]
    for document, algorithm in zip(documents, (before, after), strict=True):
        document["spec"]["algorithm"] = algorithm
        if "replay" in algorithm.get("custom", {}).get("needs", {}):
            document["spec"]["pacing"] = {"trainStepsPerEnvStep": 1}
    found = {edit.path: edit.effect for edit in edits(*map(load, documents))}
    assert found[f"spec.algorithm.{path}"] == "refuse"
    assert faults(SCHEMA, as_sent(documents[1]), as_sent(documents[0]))


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [
        ({"ppo": {}}, {"ppo": {"epochs": 2}}, "gang"),
        ({"ppo": {}}, {"ppo": {"learningRate": 0.5}}, "live"),
        ({"custom": CUSTOM}, {"custom": {**CUSTOM, "factory": "a:c"}}, "gang"),
        ({"custom": CUSTOM}, {"custom": {**CUSTOM, "discount": 0.5}}, "gang"),
    ],
)
def test_settings_of_the_same_algorithm_may_be_edited(before: Any, after: Any, effect: str) -> None:
    documents = [minimal(), minimal()]
    for document, algorithm in zip(documents, (before, after), strict=True):
        document["spec"]["algorithm"] = algorithm
    (edit,) = edits(*map(load, documents))
    assert edit.effect == effect
    assert not faults(SCHEMA, as_sent(documents[1]), as_sent(documents[0]))


def test_the_api_server_refuses_the_same_edits_except_in_fields_it_cannot_compare() -> None:
    """Replace generated documents by each other."""
    documents = [variation(random.Random(seed)) for seed in range(40)]
    num_refused = 0
    for before, after in zip(documents, documents[1:] + documents[:1], strict=True):
        ours = {path for path in refused(load(before), load(after)) if path not in FREE}
        theirs = faults(SCHEMA, as_sent(after), as_sent(before))
        assert bool(ours) == bool(theirs), (ours, theirs)
        num_refused += bool(ours)
        assert faults(SCHEMA, as_sent(before), as_sent(before)) == []
    assert num_refused > 10
