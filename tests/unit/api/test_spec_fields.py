"""Every field with a wrong type, out of range, misspelt, missing or extra. The cases come from the models."""

import json
import random
from typing import Any, Literal, get_args, get_origin

import pytest

from rlsrl.api.load import Problem, SpecError, dump, load_text
from rlsrl.api.model import MAX_ARGUMENTS, yaml_name
from rlsrl.api.spec import Metadata
from rlsrl.testing.documents import (
    CASES,
    LEAVES,
    MODELS,
    STORES,
    Case,
    JsonDocument,
    camel,
    inside,
    is_ignored,
    is_list_of_models,
    legal,
    minimal,
    out_of_range,
    variation,
    with_value,
    wrong_types,
)


def problems_of(document: JsonDocument) -> tuple[str, tuple[Problem, ...]]:
    text = json.dumps(document, indent=1)
    with pytest.raises(SpecError) as caught:
        load_text(text)
    return text, caught.value.problems


def the_problem(document: JsonDocument, path: str) -> Problem:
    text, problems = problems_of(document)
    found = [problem for problem in problems if problem.path == path]
    assert len(found) == 1, f"{path} not among {[problem.path for problem in problems]}"
    assert 1 <= found[0].place.line <= len(text.splitlines())
    assert path in str(found[0])
    return found[0]


def ids(case: Case) -> str:
    return case.text


def test_the_walk_finds_the_fields() -> None:
    assert len(CASES) > 50
    assert {"spec.algorithm.ppo.minibatchSize", "spec.policy.network.custom.factory", "metadata.name"} <= {
        case.text for case in CASES
    }


def free(case: Case) -> bool:
    """Return whether the field holds arguments of user code."""
    return get_origin(case.kind.type) is dict and case.kind.items[1].type is not str


CONTAINERS = [
    case
    for case in LEAVES
    if get_origin(case.kind.type) in (tuple, dict) and not free(case) and not is_list_of_models(case.kind)
]


@pytest.mark.parametrize("case", LEAVES, ids=ids)
def test_the_smallest_legal_value_breaks_at_most_a_rule_across_fields(case: Case) -> None:
    try:
        load_text(json.dumps(with_value(case, legal(case))))
    except SpecError as error:
        assert {problem.path for problem in error.problems} <= {  # noqa: PT017 - most values are accepted
            *(".".join((*path, "capacity")) for path in STORES.values()),
            "spec.algorithm.ppo.minibatchSize",
            "spec.pacing.maxPolicyLag",
            "spec.pacing.maxTrainStepsBehind",
            "spec.evaluators.maxSteps",
        }


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_wrong_type_is_refused(case: Case) -> None:
    for value in wrong_types(case.kind):
        problem = the_problem(with_value(case, value), case.text)
        assert problem.value == value
        assert_names_allowed(problem, case)


@pytest.mark.parametrize("case", LEAVES, ids=ids)
def test_a_value_out_of_range_is_refused(case: Case) -> None:
    for value in out_of_range(case.kind):
        problem = the_problem(with_value(case, value), case.text)
        assert_names_allowed(problem, case)


@pytest.mark.parametrize("case", CONTAINERS, ids=ids)
def test_the_error_of_a_wrong_item_has_its_path(case: Case) -> None:
    if get_origin(case.kind.type) is tuple:
        item = case.kind.items[0]
        if item.type is str:
            for wrong in (*out_of_range(item), 1, True):
                problem = the_problem(with_value(case, [*legal(case), wrong]), f"{case.text}[1]")
                assert str(item.bound("max_length")) in problem.allowed
            return
        for wrong in (item.bound("ge") - 1, item.bound("le") + 1, "x", 1.5, True):
            problem = the_problem(with_value(case, [item.bound("ge"), wrong]), f"{case.text}[1]")
            assert str(item.bound("ge")) in problem.allowed
            assert str(item.bound("le")) in problem.allowed
        return
    key, value = case.kind.items
    if value.type is int:
        for wrong in (value.bound("ge") - 1, value.bound("le") + 1, "x", 1.5, True):
            problem = the_problem(with_value(case, {"key": wrong}), f"{case.text}.key")
            assert str(value.bound("le")) in problem.allowed
        return
    long_key = "k" * (key.bound("max_length") + 1)
    for name, wrong, allowed in (
        (long_key, "x", key.bound("max_length")),
        ("key", 1, "string"),
        ("key", "x" * (value.bound("max_length") + 1), value.bound("max_length")),
    ):
        assert str(allowed) in the_problem(with_value(case, {name: wrong}), f"{case.text}.{name}").allowed


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_error_of_a_misspelt_field_names_the_right_one(case: Case) -> None:
    name = case.path[-1]
    misspellings = {f"{name}{name[-1]}", f"{name[0]}{name}", name[0].upper() + name[1:]}
    if len(name) > 4:
        misspellings |= {name[:-1], f"{name[:2]}{name[3]}{name[2]}{name[4:]}"}
    snake = next(each for each in case.models[-1].model_fields if yaml_name(each) == name)
    siblings = {yaml_name(each) for each in case.models[-1].model_fields}
    for wrong in sorted((misspellings | {snake}) - siblings):
        document = with_value(case, legal(case))
        mapping = inside(document, case.path[:-1])
        mapping[wrong] = mapping.pop(name)
        problem = the_problem(document, ".".join((*case.path[:-1], wrong)))
        assert problem.nearest == case.text
        assert name in problem.allowed


@pytest.mark.parametrize("case", [case for case in CASES if case.required], ids=ids)
def test_a_missing_field_is_refused(case: Case) -> None:
    for absent in ("removed", None):
        document = with_value(case, legal(case))
        mapping = inside(document, case.path[:-1])
        mapping.pop(case.path[-1])
        if absent is None:
            mapping[case.path[-1]] = None
        problem = the_problem(document, case.text)
        assert "missing" in problem.message
        assert_names_allowed(problem, case)


@pytest.mark.parametrize("case", [case for case in LEAVES if not case.required], ids=ids)
def test_null_equals_an_absent_field(case: Case) -> None:
    document, without = with_value(case, None), with_value(case, None)
    inside(without, case.path[:-1]).pop(case.path[-1])

    assert outcome(document) == outcome(without)


@pytest.mark.parametrize("path", MODELS, ids=".".join)
def test_an_extra_field_is_refused(path: tuple[str, ...]) -> None:
    case = next((case for case in CASES if case.path == path), None)
    document = with_value(case, {}) if case else minimal()
    inside(document, path)["unheardOf"] = 1

    problem = the_problem(document, ".".join((*path, "unheardOf")))

    fields = [each.path[-1] for each in CASES if each.path[:-1] == path]
    assert all(field in problem.allowed for field in fields)
    assert fields or problem.allowed == "mapping with no fields: {}"


@pytest.mark.parametrize("path", [path for path, model in MODELS.items() if model.exactly_one], ids=".".join)
def test_a_union_takes_exactly_one_member(path: tuple[str, ...]) -> None:
    members = [case for case in CASES if case.path[:-1] == path and case.path[-1] in camel(MODELS[path].exactly_one)]
    none_given = with_value(members[0], None)
    problem = the_problem(none_given, ".".join(path))
    assert all(member.path[-1] in problem.allowed for member in members)
    for first in members:
        for second in members:
            if first is not second:
                both = with_value(first, legal(first))
                inside(both, path)[second.path[-1]] = legal(second)
                problem = the_problem(both, ".".join(path))
                assert first.path[-1] in problem.message
                assert second.path[-1] in problem.message
                assert "exactly one" in problem.allowed


@pytest.mark.parametrize("path", [path for path, model in MODELS.items() if model.at_least_one], ids=".".join)
def test_at_least_one_of_some_fields_is_needed(path: tuple[str, ...]) -> None:
    document = minimal()
    inside(document, path[:-1])[path[-1]] = {}

    problem = the_problem(document, ".".join(path))

    assert all(member in problem.allowed for member in camel(MODELS[path].at_least_one))


def test_fields_that_kubernetes_writes_are_accepted_and_ignored() -> None:
    document = minimal()
    ignored = [yaml_name(name) for name, field in Metadata.model_fields.items() if is_ignored(field)]
    assert {"managedFields", "uid", "creationTimestamp"} <= set(ignored)
    document["metadata"] |= {name: [{"any": ["thing", 1, None]}] for name in ignored}
    document["status"] = {"conditions": []}

    assert load_text(json.dumps(document)).spec == load_text(json.dumps(minimal())).spec


def test_two_hundred_legal_variations_are_accepted() -> None:
    seen = set()
    for seed in range(200):
        document = variation(random.Random(seed))
        experiment = load_text(json.dumps(document))
        assert load_text(dump(experiment)) == experiment
        seen.add(experiment.model_dump_json())
    assert len(seen) == 200


def outcome(document: JsonDocument) -> Any:
    try:
        return load_text(json.dumps(document))
    except SpecError as error:
        return [(problem.path, problem.message, problem.allowed) for problem in error.problems]


def assert_names_allowed(problem: Problem, case: Case) -> None:
    kind = case.kind
    if get_origin(kind.type) is Literal:
        assert all(choice in problem.allowed for choice in get_args(kind.type))
    elif kind.type in (int, float):
        low = kind.bound("ge") if kind.bound("ge") is not None else kind.bound("gt")
        for bound in (low, kind.bound("le")):
            assert str(int(bound) if float(bound).is_integer() else bound) in problem.allowed
    elif kind.type is str:
        assert str(kind.bound("max_length")) in problem.allowed
        assert str(kind.bound("pattern")) in problem.allowed
    elif get_origin(kind.type) in (tuple, dict):
        assert str(kind.bound("max_length")) in problem.allowed
    elif kind.type is bool:
        assert problem.allowed == "true or false"
    else:
        children = [each.path[-1] for each in CASES if each.path[:-1] == case.path]
        assert all(child in problem.allowed for child in children)


@pytest.mark.parametrize("section", ["environment", "policy.network.custom"])
def test_long_kwargs_are_refused_with_their_size_and_largest_argument(section: str) -> None:
    document = minimal()
    document["spec"]["policy"] = {"network": {"custom": {"factory": "a.b:c"}}}
    about = document["spec"]
    for name in section.split("."):
        about = about[name]
    rest = len('{"map": "", "a": 1}')
    about["kwargs"] = {"map": "k" * (MAX_ARGUMENTS - rest), "a": 1}
    load_text(json.dumps(document))
    about["kwargs"]["map"] += "k"
    with pytest.raises(SpecError) as raised:
        load_text(json.dumps(document))
    (problem,) = raised.value.problems
    assert problem.path == f"spec.{section}.kwargs"
    assert problem.message == f"has {MAX_ARGUMENTS + 1} characters as JSON, most of them in 'map'"
    assert problem.allowed.startswith(f"at most {MAX_ARGUMENTS};")
    assert len(str(raised.value)) < 300


def test_kwargs_of_environment_and_network_are_bounded_together() -> None:
    """Each role's config has both, and one ConfigMap of 1 MiB has all configs."""
    document = minimal()
    half = {"map": "k" * (MAX_ARGUMENTS // 2 - len('{"map": ""}'))}
    document["spec"]["environment"]["kwargs"] = half
    document["spec"]["policy"] = {"network": {"custom": {"factory": "a.b:c", "kwargs": {**half}}}}
    load_text(json.dumps(document))
    document["spec"]["policy"]["network"]["custom"]["kwargs"]["map"] += "k"
    with pytest.raises(SpecError) as raised:
        load_text(json.dumps(document))
    (problem,) = raised.value.problems
    assert problem.path == "spec.policy.network.custom.kwargs"
    assert problem.message.startswith(
        f"has {MAX_ARGUMENTS // 2 + 1} characters as JSON, beside {MAX_ARGUMENTS // 2} of"
    )
    assert problem.allowed.startswith(f"at most {MAX_ARGUMENTS} together;")


def test_arguments_by_rank_are_bounded_together_with_the_others() -> None:
    document = minimal()
    half = MAX_ARGUMENTS // 2
    document["spec"]["environment"] |= {
        "kwargs": {"map": "k" * (half - len('{"map": ""}'))},
        "kwargsByRank": {"cycle": {"text": ["k" * (half - len('{"cycle": {"text": [""]}}'))]}},
    }
    load_text(json.dumps(document))
    document["spec"]["environment"]["kwargsByRank"]["cycle"]["text"][0] += "k"
    with pytest.raises(SpecError) as raised:
        load_text(json.dumps(document))
    (problem,) = raised.value.problems
    assert problem.path == "spec.environment.kwargsByRank"
    assert problem.message == f"has {half + 1} characters as JSON, beside {half} of environment.kwargs"
    assert problem.allowed.startswith(f"at most {MAX_ARGUMENTS} together;")


def test_every_value_has_a_bound() -> None:
    for case in LEAVES:
        for kind in (case.kind, *(() if free(case) else case.kind.items)):
            if kind.type is str or get_origin(kind.type) in (tuple, dict):
                assert kind.bound("max_length"), case.text
            elif kind.type in (int, float):
                assert kind.bound("le") is not None, case.text
                assert (kind.bound("ge") is None) != (kind.bound("gt") is None), case.text
