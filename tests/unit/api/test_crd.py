"""The CRD has the structure of the models and the loader's verdict on generated documents."""

from __future__ import annotations

import copy
import functools
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import Field

from rlsrl.api.cel import CelRule
from rlsrl.api.crd import NotStructural, custom_resource_definition, of_model, schema
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.model import Model
from rlsrl.testing.api_server import faults, faults_of_defaults
from rlsrl.testing.documents import (
    ALL_MODELS,
    CASES,
    JsonDocument,
    as_sent,
    minimal,
    perhaps_broken,
    refused_documents,
    variation,
)

MAX_BYTES = 200 * 1024
"""As compact JSON: ``kubectl apply`` keeps it in an annotation, and all annotations may have 256 KiB."""
NUM_DOCUMENTS = 600
SCHEMA = schema()


def parts(found: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, found
    for name, each in found.get("properties", {}).items():
        yield from parts(each, f"{path}.{name}" if path else name)
    for key in ("items", "additionalProperties"):
        if key in found:
            yield from parts(found[key], f"{path}[]")


def models_verdict(document: JsonDocument) -> list[str]:
    try:
        load_text(json.dumps(document))
    except SpecError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_every_field_is_in_the_crd_with_a_description() -> None:
    found = dict(parts(SCHEMA))
    for case in CASES:
        if case.path[0] == "spec":
            assert found[case.text].get("description"), case.text
    for path, part in found.items():
        if path.startswith("status."):
            assert part.get("description") or path.endswith("[]"), path


def test_the_crd_is_structural_and_small() -> None:
    made = custom_resource_definition()
    assert len(json.dumps(made, separators=(",", ":"))) < MAX_BYTES
    for path, part in parts(SCHEMA):
        assert part.get("type") or part.get("x-kubernetes-preserve-unknown-fields"), path
        assert not {"$ref", "title", "anyOf", "oneOf", "const", "examples"} & set(part), path
        assert not ("properties" in part and "additionalProperties" in part), path
        if part.get("type") == "string" and path not in ("apiVersion", "kind", "metadata.name"):
            assert "maxLength" in part or "enum" in part or "format" in part, path
        assert part.get("type") != "array" or "maxItems" in part, path


def test_no_rule_reads_free_json() -> None:
    """CEL has no access to it: an API server refuses a definition with such a rule."""
    num_free = 0
    for path, part in parts(SCHEMA):
        rules = " ".join(rule["rule"] for rule in part.get("x-kubernetes-validations", ()))
        for name, member in part.get("properties", {}).items():
            if "properties" not in member and any("type" not in inner for _, inner in parts(member)):
                num_free += 1
                assert not re.search(rf"elf\.{name}\b", rules), f"{path}.{name}"
    assert num_free > 3


def test_no_rule_compares_an_item_with_what_it_was() -> None:
    """The API server does not know which item of a list it was, and refuses a definition with such a rule."""
    in_lists = [rule["rule"] for path, part in parts(SCHEMA) if "[]" in path for rule in _rules(part)]
    assert in_lists
    assert not [rule for rule in in_lists if "oldSelf" in rule]
    encoders = next(part for path, part in parts(SCHEMA) if path == "spec.policy.network")
    assert any("self.encoders == oldSelf.encoders" in rule["rule"] for rule in _rules(encoders))


def _rules(part: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = part.get("x-kubernetes-validations", [])
    return found


def test_every_default_is_legal_by_itself() -> None:
    assert faults_of_defaults(SCHEMA) == []


def test_the_crd_has_names_a_scale_subresource_and_printed_columns() -> None:
    spec = custom_resource_definition()["spec"]
    names = spec["names"]
    assert (spec["group"], names["plural"], names["shortNames"]) == ("rlsrl.dev", "rlexperiments", ["rlx"])
    (version,) = spec["versions"]
    found = dict(parts(SCHEMA))
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"]["scale"].values()
    for path in paths:
        fields = re.sub(r"\[\?.*\]", "[]", path.removeprefix("."))
        assert path == ".metadata.creationTimestamp" or fields in found, path
    assert version["subresources"]["status"] == {}


def test_the_smallest_document_is_accepted_and_a_wrong_name_is_refused() -> None:
    assert faults(SCHEMA, minimal()) == []
    for name in ("1a", "a.b", "A", "a" * 41, "a-"):
        document = minimal()
        document["metadata"]["name"] = name
        (fault,) = faults(SCHEMA, document)
        assert fault.startswith(".metadata.name: lower-case letters")
        assert models_verdict(document)


def test_crd_and_loader_agree_on_generated_documents() -> None:
    broken: Counter[str] = Counter()
    verdicts: Counter[bool] = Counter()
    for seed in range(NUM_DOCUMENTS):
        rng = random.Random(seed)
        document = perhaps_broken(rng)
        of_crd, of_models = faults(SCHEMA, as_sent(document)), models_verdict(document)
        assert bool(of_crd) == bool(of_models), f"seed {seed}: {of_crd} but {of_models} of {json.dumps(document)}"
        verdicts[bool(of_crd)] += 1
        broken.update(fault.partition(": ")[2] for fault in of_crd)
    assert 0.4 < verdicts[True] / NUM_DOCUMENTS < 0.7, verdicts
    for document in refused_documents():
        of_crd = faults(SCHEMA, document)
        assert of_crd, document
        assert models_verdict(document), document
        broken.update(fault.partition(": ")[2] for fault in of_crd)
    rules = [rule for model in ALL_MODELS for rule in model.cel_rules()]
    never = [rule.message for rule in rules if not any(map(messages_of(rule).fullmatch, broken))]
    assert not never, "rules that no document broke"


def messages_of(rule: CelRule) -> re.Pattern[str]:
    numbers = ", ".join(rf"{name} \d+" for name, _ in rule.numbers)
    return re.compile(re.escape(rule.message) + (rf" \({numbers}\)" if numbers else ""))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"actors": {"rolloutLength": 10, "environments": 3}, "algorithm": {"ppo": {"minibatchSize": 7}}},
            "must divide a batch: actors.rolloutLength x environments of a batch (minibatch 7, batch 30)",
        ),
        (
            {
                "actors": {"rolloutLength": 12, "environments": 13, "replicas": 2, "ringSize": 3},
                "policyWorkers": {},
                "algorithm": {"ppo": {"minibatchSize": 12}},
                "pacing": {"maxPolicyLag": 9},
            },
            "must divide every actor's environments (groups 3, environments of an actor 7)",
        ),
    ],
)
def test_the_api_server_names_the_numbers_of_a_broken_rule(sections: dict[str, Any], expected: str) -> None:
    document = minimal()
    document["spec"] |= sections
    (fault,) = faults(SCHEMA, document)
    assert fault.endswith(expected)


@pytest.mark.parametrize(
    "environment",
    [
        {"factory": "a:b"},
        *(
            {"id": "CartPole-v1", name: value}
            for name, value in {
                "kwargsByRank": {"addRank": {"port": 9000}},
                "atari": {},
                "maxEpisodeSteps": 9,
                "frameStack": 2,
                "actionMask": "mask",
            }.items()
        ),
    ],
)
def test_native_vectorization_is_refused_beside(environment: JsonDocument) -> None:
    document = minimal()
    document["spec"]["environment"] = environment
    assert not faults(SCHEMA, document)
    document["spec"]["actors"]["vectorization"] = "native"
    (fault,) = faults(SCHEMA, document)
    assert fault.startswith(".spec.actors.vectorization: native takes")
    (problem,) = models_verdict(document)
    assert "spec.actors.vectorization" in problem


def numbers_out_of_bounds() -> list[tuple[str, int, JsonDocument]]:
    """Return documents with one integer of a rule below its bound: its path, its value, the document."""
    found = []
    spec = {**minimal()["spec"], "bufferWorkers": {}, "policyWorkers": {}, "evaluators": {}}
    spec |= {"trainers": {}, "algorithm": {"ppo": {}}, "pacing": {}}
    for path in (
        *("actors.environments", "actors.environmentsPerActor", "actors.replicas", "actors.ringSize"),
        *("actors.rolloutLength", "trainers.replicas", "trainers.batchEnvironments", "trainers.gpusPerPod"),
        *("algorithm.ppo.minibatchSize", "bufferWorkers.replicas", "evaluators.replicas", "pacing.maxPolicyLag"),
    ):
        for value in (0, -1):
            document = copy.deepcopy({**minimal(), "spec": spec})
            *sections, field = path.split(".")
            about = functools.reduce(operator.getitem, sections, document["spec"])
            if path == "actors.environmentsPerActor":
                del about["environments"]
            about[field] = value
            found.append((path, value, document))
    return found


@pytest.mark.parametrize(("path", "value", "document"), numbers_out_of_bounds())
def test_a_number_below_its_bound_breaks_no_rules_arithmetic(path: str, value: int, document: JsonDocument) -> None:
    of_crd = faults(SCHEMA, document)
    below = f".spec.{path}: {value} is below "
    is_allowed = value == 0 and path in ("trainers.gpusPerPod", "pacing.maxPolicyLag")
    assert any(each.startswith(below) for each in of_crd) is not is_allowed
    assert not [each for each in of_crd if "CELEvalError" in each or "zero" in each or "modulus" in each], of_crd


def test_legal_variations_are_accepted() -> None:
    for seed in range(30):
        assert faults(SCHEMA, as_sent(variation(random.Random(seed)))) == []


class Unbounded(Model):
    """A string without a bound."""

    text: str = ""


class UnboundedList(Model):
    """A list without a bound."""

    numbers: tuple[int, ...] = ()


class TwoTypes(Model):
    """A union of types, which a structural schema refuses."""

    either: int | str = 1


class Inexpressible(Model):
    """A rule that a CRD has no keyword for."""

    number: Annotated[int, Field(multiple_of=2, ge=0, le=8)] = 2


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (Unbounded, "Unbounded.text: a string needs a bound"),
        (UnboundedList, "UnboundedList.numbers: a list needs a bound"),
        (TwoTypes, "TwoTypes.either: a union of types"),
        (Inexpressible, r"Inexpressible.number: a CRD has no keyword for \['multipleOf'\]"),
    ],
)
def test_the_generator_refuses_what_a_crd_cannot_express(model: type[Model], complaint: str) -> None:
    with pytest.raises(NotStructural, match=complaint):
        of_model(model)
