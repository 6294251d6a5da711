"""Every field x {wrong type, out of range, misspelt, missing, extra}: the cases come from the models themselves."""

import json
import random
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from rlsrl.api.load import Problem, SpecError, dump, load_text
from rlsrl.api.model import Model
from rlsrl.api.spec import Metadata, RLExperiment

Document = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A field's type without None and Annotated, and its constraints."""

    type: Any
    constraints: tuple[Any, ...]

    def bound(self, name: str) -> Any:
        found = [getattr(each, name) for each in self.constraints if getattr(each, name, None) is not None]
        return found[-1] if found else None

    @property
    def items(self) -> tuple["Kind", ...]:
        return tuple(kind_of(argument) for argument in get_args(self.type) if argument is not Ellipsis)


@dataclass(frozen=True)
class Case:
    """One field of the document, with the models on the way to it."""

    path: tuple[str, ...]
    models: tuple[type[Model], ...]
    kind: Kind
    required: bool

    @property
    def text(self) -> str:
        return ".".join(self.path)


def kind_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
    """Strip ``| None`` and ``Annotated``; collect constraints, inner ones first."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        flat = tuple(item for each in extra for item in (each.metadata if isinstance(each, FieldInfo) else (each,)))
        return kind_of(inner, flat + metadata)
    return Kind(annotation, metadata)


def is_ignored(field: FieldInfo) -> bool:
    return field.json_schema_extra == {"readOnly": True}


def walk(model: type[Model] = RLExperiment, path: tuple[str, ...] = (), models: tuple[Any, ...] = ()) -> Iterator[Case]:
    for name, field in model.model_fields.items():
        if is_ignored(field):
            continue
        kind = kind_of(field.annotation, tuple(field.metadata))
        case = Case((*path, to_camel(name)), (*models, model), kind, field.is_required())
        yield case
        if isinstance(kind.type, type) and issubclass(kind.type, Model):
            yield from walk(kind.type, case.path, case.models)


CASES = tuple(walk())
LEAVES = tuple(case for case in CASES if not (isinstance(case.kind.type, type) and issubclass(case.kind.type, Model)))
MODELS = {(): RLExperiment} | {case.path: case.kind.type for case in CASES if case not in LEAVES}
EXAMPLES = {
    "apiVersion": "rlsrl.dev/v1alpha1", "kind": "RLExperiment", "metadata.name": "a", "metadata.namespace": "n",
    "spec.environment.id": "CartPole-v1", "spec.environment.actionMask": "action_mask",
    "spec.parameters.store.objectStore.url": "s3://bucket/prefix",
    "spec.parameters.store.objectStore.endpoint": "https://s3.example.com",
    "spec.parameters.store.objectStore.region": "eu-central-1",
    "spec.tracking.wandb.project": "my-project", "spec.tracking.wandb.entity": "my-team",
}  # fmt: skip
"""Legal strings whose pattern no generator needs to solve; factories share one."""


def legal(case: Case) -> Any:
    """A legal value of the field: the lowest, the first, the smallest."""
    kind = case.kind
    if isinstance(kind.type, type) and issubclass(kind.type, Model):
        return {}
    if get_origin(kind.type) is Literal:
        return get_args(kind.type)[0]
    if kind.type is str:
        return EXAMPLES.get(case.text, "package.module:make")
    if get_origin(kind.type) is tuple:
        return [kind.items[0].bound("ge")]
    if get_origin(kind.type) is dict:
        return {"key": "value"}
    if kind.type is bool:
        return False
    low = kind.bound("ge")
    return low if low is not None else kind.bound("le") / 2


def minimal() -> Document:
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": "a"},
        "spec": {"environment": {"id": "CartPole-v1"}, "actors": {"environments": 8}, "stop": {"envSteps": 1000}},
    }


def with_value(case: Case, value: Any) -> Document:
    """A document that is legal but for the field: what the way to it needs is there, other union members are not."""
    document = minimal()
    mapping = document
    for step, model, depth in zip(case.path, case.models, range(len(case.path)), strict=True):
        if step in (members := [to_camel(name) for name in model.exactly_one]):
            for other in members:
                if other != step:
                    mapping.pop(other, None)
        if depth == len(case.path) - 1:
            mapping[step] = value
            break
        mapping = mapping.setdefault(step, {})
        for sibling in CASES:
            if sibling.path[:-1] == case.path[: depth + 1] and sibling.required:
                mapping.setdefault(sibling.path[-1], legal(sibling))
    return document


def wrong_types(kind: Kind) -> list[Any]:
    if get_origin(kind.type) is Literal:
        return [1, True, ["x"], {"x": 1}]
    if get_origin(kind.type) is tuple:
        return ["x", 1, {"x": 1}]
    if get_origin(kind.type) is dict or (isinstance(kind.type, type) and issubclass(kind.type, Model)):
        return ["x", 1, [1], True]
    return {
        int: ["1", 1.5, True, [1], {"x": 1}],
        float: ["1", True, [1.0], {"x": 1}],
        bool: [1, "true", 0.0, []],
        str: [1, 1.5, True, ["x"], {"x": 1}],
    }[kind.type]


def out_of_range(kind: Kind) -> list[Any]:
    if get_origin(kind.type) is Literal:
        return ["other", get_args(kind.type)[0].upper() + "_"]
    if kind.type is str:
        return ["x" * (kind.bound("max_length") + 1), "", "no spaces, please", "-x", "ä", "x\n"]
    if get_origin(kind.type) is tuple:
        item = kind.items[0]
        return [[], [item.bound("ge")] * (kind.bound("max_length") + 1)]
    if get_origin(kind.type) is dict:
        return [{f"key{number}": "value" for number in range(kind.bound("max_length") + 1)}]
    if kind.type is bool:
        return []
    above, low, high = kind.bound("gt"), kind.bound("ge"), kind.bound("le")
    return [above if above is not None else low - 1, -(10**18), high + 1, high * 2 + 1, 10**18]


def problems_of(document: Document) -> tuple[str, tuple[Problem, ...]]:
    text = json.dumps(document, indent=1)
    with pytest.raises(SpecError) as caught:
        load_text(text)
    return text, caught.value.problems


def the_problem(document: Document, path: str) -> Problem:
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


@pytest.mark.parametrize("case", LEAVES, ids=ids)
def test_the_smallest_legal_value_breaks_at_most_a_rule_across_fields(case: Case) -> None:
    try:
        load_text(json.dumps(with_value(case, legal(case))))
    except SpecError as error:
        assert {problem.path for problem in error.problems} <= {  # noqa: PT017 - most values are accepted
            "spec.algorithm.ppo.minibatchSize",
            "spec.pacing.maxPolicyLag",
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


@pytest.mark.parametrize("case", [case for case in LEAVES if get_origin(case.kind.type) in (tuple, dict)], ids=ids)
def test_a_wrong_item_is_refused_at_its_own_place(case: Case) -> None:
    if get_origin(case.kind.type) is tuple:
        item = case.kind.items[0]
        for wrong in (item.bound("ge") - 1, item.bound("le") + 1, "x", 1.5, True):
            problem = the_problem(with_value(case, [item.bound("ge"), wrong]), f"{case.text}[1]")
            assert str(item.bound("ge")) in problem.allowed
            assert str(item.bound("le")) in problem.allowed
        return
    key, value = case.kind.items
    long_key = "k" * (key.bound("max_length") + 1)
    problem = the_problem(with_value(case, {long_key: "x"}), f"{case.text}.{long_key}")
    assert str(key.bound("max_length")) in problem.allowed
    if value.type is str:
        problem = the_problem(with_value(case, {"key": 1}), f"{case.text}.key")
        assert "string" in problem.allowed
        problem = the_problem(with_value(case, {"key": "x" * (value.bound("max_length") + 1)}), f"{case.text}.key")
        assert str(value.bound("max_length")) in problem.allowed
    else:
        problem = the_problem(with_value(case, {"no-name": 1}), f"{case.text}.no-name")
        assert "A-Za-z" in problem.allowed


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_misspelt_field_is_refused_and_the_right_one_named(case: Case) -> None:
    name = case.path[-1]
    misspellings = {f"{name}{name[-1]}", f"{name[0]}{name}", name[0].upper() + name[1:]}
    if len(name) > 4:
        misspellings |= {name[:-1], f"{name[:2]}{name[3]}{name[2]}{name[4:]}"}
    snake = next(each for each in case.models[-1].model_fields if to_camel(each) == name)
    siblings = {to_camel(each) for each in case.models[-1].model_fields}
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
def test_null_means_a_field_left_out(case: Case) -> None:
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


def test_what_kubernetes_writes_is_accepted_and_ignored() -> None:
    document = minimal()
    ignored = [to_camel(name) for name, field in Metadata.model_fields.items() if is_ignored(field)]
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


def variation(rng: random.Random) -> Document:
    """A legal document: each field present or not, with any legal value; what rules across fields demand comes last."""
    document = minimal()
    for case in LEAVES:
        if case.path[0] in ("apiVersion", "kind") or rng.random() < 0.5 or other_member_given(document, case):
            continue
        mapping = document
        for step in case.path[:-1]:
            mapping = mapping.setdefault(step, {})
        for sibling in CASES:
            if sibling.path[:-1] == case.path[:-1] and sibling.required:
                mapping.setdefault(sibling.path[-1], legal(sibling))
        mapping[case.path[-1]] = random_legal(case, rng)
    spec = document["spec"]
    actors = {"replicas": rng.randint(1, 8), "rolloutLength": rng.choice([1, 5, 16, 128, 2048])}
    actors[rng.choice(["environments", "environmentsPerActor"])] = rng.randint(2, 64)
    spec["actors"] = actors
    total = actors.get("environments") or actors["environmentsPerActor"] * actors["replicas"]
    batch = rng.choice([total, 2 * total, 64])
    spec["trainers"] = {} if batch == total else {"batchEnvironments": batch}
    spec["pacing"] = {"maxPolicyLag": 64 if total % actors["replicas"] or batch == 64 else 1}
    transitions = batch * actors["rolloutLength"]
    divisors = [number for number in range(2, min(transitions, 5000) + 1) if transitions % number == 0]
    spec.setdefault("algorithm", {}).setdefault("ppo", {})["minibatchSize"] = rng.choice(divisors)
    num_actors = min(actors["replicas"], total)
    if total % num_actors:
        spec.pop("bufferWorkers", None)
    elif "bufferWorkers" in spec:
        divisors = [number for number in range(1, num_actors + 1) if num_actors % number == 0]
        spec["bufferWorkers"] = {"replicas": rng.choice(divisors)}
    if "maxSteps" in spec.get("evaluators", {}):
        spec["evaluators"]["maxSteps"] = rng.randint(65_536, 10**9)
    return document


def random_legal(case: Case, rng: random.Random) -> Any:
    kind = case.kind
    if get_origin(kind.type) is Literal:
        return rng.choice(get_args(kind.type))
    if get_origin(kind.type) is tuple:
        item = kind.items[0]
        return [
            rng.randint(item.bound("ge"), item.bound("le")) for _ in range(rng.randint(1, kind.bound("max_length")))
        ]
    if get_origin(kind.type) is dict and kind.items[1].type is not str:
        return {"size": rng.choice([1, 2.5, "three", None, [1, {"deep": True}]]), "e": "1e3", "date": "2001-01-01"}
    if kind.type is bool:
        return rng.random() < 0.5
    if kind.type is int:
        low, high = kind.bound("ge"), kind.bound("le")
        return rng.choice([low, high, rng.randint(low, high), float(rng.randint(low, min(high, 2**50)))])
    if kind.type is float:
        low = kind.bound("ge") if kind.bound("ge") is not None else 1e-12
        return rng.choice([low, kind.bound("le"), rng.uniform(low, kind.bound("le"))])
    return legal(case)


def other_member_given(document: Document, case: Case) -> bool:
    """Whether a union on the field's way already holds another member."""
    for depth, (step, model) in enumerate(zip(case.path, case.models, strict=True)):
        members = camel(model.exactly_one)
        mapping: Any = document
        for above in case.path[:depth]:
            mapping = mapping.get(above, {})
        if step in members and any(member in mapping for member in members if member != step):
            return True
    return False


def outcome(document: Document) -> Any:
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


def inside(document: Document, path: tuple[str, ...]) -> Document:
    for step in path:
        document = document[step]
    return document


def camel(names: tuple[str, ...]) -> list[str]:
    return [to_camel(name) for name in names]


def test_every_value_has_a_bound() -> None:
    for case in LEAVES:
        for kind in (case.kind, *case.kind.items):
            if kind.type is str or get_origin(kind.type) in (tuple, dict):
                assert kind.bound("max_length"), case.text
            elif kind.type in (int, float):
                assert kind.bound("le") is not None, case.text
                assert (kind.bound("ge") is None) != (kind.bound("gt") is None), case.text
