"""The JSON schema and ``explain``, both generated from the models."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rlsrl.api.explain import UnknownField, explain
from rlsrl.api.fields import all_fields, allowed, find, nearest, parse_path, show_path, show_value
from rlsrl.api.schema import json_schema
from rlsrl.api.synonyms import all_synonyms


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key not in ("default", "examples"):
                yield from parts(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from parts(item)


def test_the_schema_stands_alone_and_is_plain_json() -> None:
    schema = json_schema()

    assert json.loads(json.dumps(schema)) == schema
    assert schema["required"] == ["apiVersion", "kind", "metadata", "spec"]
    for part in parts(schema):
        assert not {"$ref", "$defs", "patternProperties", "ge", "le", "gt"} & part.keys()
        assert part.get("type") != "null"
    assert "null" not in json.dumps(schema)


def test_the_schema_is_closed_bounded_and_described() -> None:
    for field in all_fields():
        schema = field.schema
        assert field.description, show_path(field.path)
        if "properties" in schema:
            assert schema["additionalProperties"] is False
    for part in parts(json_schema()):
        match part.get("type"):
            case "integer" | "number":
                assert "maximum" in part
                assert ("minimum" in part) != ("exclusiveMinimum" in part)
            case "string":
                assert {"maxLength", "const", "enum"} & part.keys()
            case "array":
                assert "maxItems" in part
            case "object":
                assert {"maxProperties", "properties"} & part.keys()


def test_the_schema_knows_unions_and_defaults() -> None:
    environment, stop = find(("spec", "environment")), find(("spec", "stop"))
    learning_rate = find(("spec", "algorithm", "ppo", "learningRate"))

    assert environment
    assert environment.schema["oneOf"] == [{"required": [name]} for name in ("id", "factory", "http")]
    assert stop
    assert len(stop.schema["anyOf"]) == 4
    assert learning_rate
    assert learning_rate.schema["default"] == 3e-4
    assert not learning_rate.required


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("spec.actors.replicas", "integer from 1 to 4096"),
        ("spec.algorithm.ppo.learningRate", "number above 0, up to 1"),
        ("spec.algorithm.ppo.clipValueLoss", "true or false"),
        ("spec.policy.network.mlp.activation", "tanh or relu"),
        ("spec.policy.network.mlp.hiddenSizes", "list of 1 to 16 items, each integer from 1 to 65536"),
        ("spec.policy.network", "mapping with exactly one of mlp, cnn, impalaCnn, custom; also encoders, recurrent"),
        ("spec.stop", "mapping with at least one of returnMean, envSteps, trainSteps, wallSeconds; also episodes, now"),
        ("spec.pacing", "mapping with the fields maxPolicyLag, trainStepsPerEnvStep, maxTrainStepsBehind"),
        ("spec.environment.kwargs.anything.at.all", "any JSON value"),
        ("spec.environment.kwargs", "mapping of at most 64 entries; keys: string; values: any JSON value"),
        ("spec.environment.kwargsByRank", "mapping with the fields each, cycle, addRank"),
        ("spec.environment.kwargsByRank.cycle.level", "list of 1 to 16384 items, each any JSON value"),
        ("spec.environment.kwargsByRank.addRank.port", "integer from 0 to 2147483647"),
    ],
)
def test_allowed_values_are_described_in_words(path: str, words: str) -> None:
    field = find(parse_path(path))

    assert field
    assert allowed(field.schema) == words


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("actors.replica", "spec.actors.replicas"),
        ("actrs.replicas", "spec.actors.replicas"),
        ("actors.Replicas", "spec.actors.replicas"),
        ("algorithm.ppo.clip_range", "spec.algorithm.ppo.clipRange"),
        ("clipRange", "spec.algorithm.ppo.clipRange"),
        ("spec.ppo.clipRange", "spec.algorithm.ppo.clipRange"),
        ("meta.name", "metadata.name"),
        ("actors.replicas.quux", None),
        ("zebra", None),
    ],
)
def test_the_nearest_field_is_found(wrong: str, meant: str | None) -> None:
    path = parse_path(wrong)
    assert find(path) is None

    found = nearest(path)

    assert (show_path(found) if found else None) == meant


def test_paths_and_values_are_shown_on_one_printable_line() -> None:
    assert show_path(("a", 0, "b-c", "d e", "\x1b")) == 'a[0].b-c["d e"]["\\u001b"]'
    assert show_path(()) == "the document"
    assert show_value({"a": "é\u2028\x9b"}) == '{"a": "é\\u2028\\x9b"}'
    assert show_value("x" * 100) == '"' + "x" * 56 + "..."


def test_explain_shows_type_default_rules_and_fields() -> None:
    text = explain("spec.actors")

    assert "FIELD:    spec.actors <mapping> required" in text
    assert "The workers that step environments." in text
    assert "exactly one of environments, environmentsPerActor" in text
    assert "  replicas <integer> default 1\n      Number of actors." in text
    assert explain("actors") == text


@pytest.mark.parametrize("field", all_fields(), ids=lambda field: show_path(field.path))
def test_every_field_is_explained(field: Any) -> None:
    text = explain(show_path(field.path))

    assert " ".join(text.split()).count(field.description.replace("``", "`")) >= 1
    assert all(f"  {child.path[-1]} <" in text for child in field.children)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_whole_document_is_explained_without_a_path() -> None:
    assert "  spec <mapping> required" in explain()


@pytest.mark.parametrize("name", all_synonyms())
def test_each_name_of_another_library_leads_to_a_field(name: str) -> None:
    meant = nearest(("spec", name))
    assert meant is not None
    assert find(meant) is not None
    assert all_synonyms().count(name) == 1


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("spec.algorithm.ppo.gamma", "spec.algorithm.ppo.discount"),
        ("spec.actors.n_steps", "spec.actors.rolloutLength"),
        ("spec.actors.nSteps", "spec.actors.rolloutLength"),
        ("spec.ent_coef", "spec.algorithm.ppo.entropyCoefficient"),
        ("spec.ppo.vf_loss_coeff", "spec.algorithm.ppo.valueCoefficient"),
    ],
)
def test_a_name_of_another_library_names_the_field(wrong: str, meant: str) -> None:
    found = nearest(tuple(wrong.split(".")))
    assert found is not None
    assert show_path(found) == meant


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(UnknownField, match=r"no field spec\.actors\.replica; did you mean spec\.actors\.replicas\?"):
        explain("actors.replica")
    with pytest.raises(UnknownField, match=r"no field spec\.zebra; `rlsrl explain spec` lists the fields there$"):
        explain("zebra")
