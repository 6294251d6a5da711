"""The CustomResourceDefinition, generated from the models: the API server refuses what ``rlsrl validate`` refuses.

A CRD takes a subset of JSON schema, a *structural* schema, and silently ignores or prunes some of the rest. The
generator raises on every keyword that it cannot translate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rlsrl.api.cel import NAME_RULE, CelRule, cel_rules, immutable_rule
from rlsrl.api.model import EDITS, ON_EDIT, Model, OnEdit
from rlsrl.api.schema import without_nulls
from rlsrl.api.spec import API_VERSION, KIND, ExperimentSpec, RLExperiment
from rlsrl.api.status import ExperimentStatus

Schema = dict[str, Any]
"""A structural schema, or a part of one."""

PLURAL = "rlexperiments"
SINGULAR = "rlexperiment"
SHORT_NAME = "rlx"

_KEPT = frozenset(
    {"type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"}
    | {"format"}
)
"""Keywords with the same meaning in both schemas."""
_OTHERWISE = frozenset(
    {"title", "description", "examples", "readOnly", "oneOf", "anyOf", "default", "properties", "required", "items"}
    | {"additionalProperties", "propertyNames", "patternProperties", "const", "exclusiveMinimum"}
    | {"x-kubernetes-list-type", "x-list-key", ON_EDIT}
)
"""Keywords without meaning to the API server, or translated below."""

_STRINGS = {"apiVersion": "api_version", "kind": "kind"}

PRINTER_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("Phase", "string", ".status.phase"),
    ("Actors", "integer", ".status.actors.ready"),
    ("FPS", "integer", ".status.training.envStepsPerSecond"),
    ("Steps", "integer", ".status.training.envSteps"),
    ("Version", "string", ".status.training.version"),
    ("Lag", "integer", ".status.training.policyLag"),
    ("Return", "string", ".status.training.returnMean"),
    ("Restarts", "integer", ".status.restarts"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
"""Name, type and path of each column of ``kubectl get``."""


class NotStructural(ValueError):
    """A model uses a feature that a CRD lacks; the text names the field and the feature."""


def custom_resource_definition() -> dict[str, Any]:
    """Return the whole object, ready to be written as YAML.

    Raises:
        NotStructural: a model uses a feature that a CRD lacks.
    """
    group, version = API_VERSION.split("/")
    columns = [{"name": name, "type": kind, "jsonPath": path} for name, kind, path in PRINTER_COLUMNS]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.actors.replicas",
                            "statusReplicasPath": ".status.actors.replicas",
                            "labelSelectorPath": ".status.actors.selector",
                        },
                    },
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def schema() -> Schema:
    """Return the structural schema of a document. The API server has its own schema of metadata; rules see the name."""
    fields = RLExperiment.model_fields
    strings = {name: {"type": "string", "description": fields[key].description} for name, key in _STRINGS.items()}
    return {
        "type": "object",
        "description": RLExperiment.__doc__,
        "required": ["spec"],
        "properties": {
            **strings,
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": {**of_model(ExperimentSpec, on_edit="gang"), "description": fields["spec"].description},
            "status": of_model(ExperimentStatus),
        },
        "x-kubernetes-validations": [_rule(rule) for rule in (NAME_RULE, *cel_rules(RLExperiment))],
    }


def of_model(model: type[Model], on_edit: OnEdit | None = None) -> Schema:
    """Return the structural schema of a model's object, with its rules.

    Args:
        model: the model.
        on_edit: the effect of an edit of its fields, unless a field has its own; None for what users never edit.

    Raises:
        NotStructural: the model uses a feature that a CRD lacks.
    """
    document = model.model_json_schema(by_alias=True)
    definitions = document.pop("$defs", {})
    models = _models_by_name(model)
    return _Translation(definitions, models).object_of(document, model, path=model.__name__, on_edit=on_edit)


class _Translation:
    """The translation of pydantic's JSON schema to a structural one."""

    def __init__(self, definitions: Mapping[str, Schema], models: Mapping[str, type[Model]]) -> None:
        self._definitions = definitions
        self._models = models

    def object_of(self, found: Schema, model: type[Model], path: str, on_edit: OnEdit | None) -> Schema:
        made = self._of(found, path, on_edit)
        rules = [*cel_rules(model), *self._immutable(found, on_edit)]
        if rules:
            made["x-kubernetes-validations"] = [_rule(rule) for rule in rules]
        return made

    def _immutable(self, found: Schema, on_edit: OnEdit | None) -> list[CelRule]:
        """Return the rules that forbid edits of members: presence and value must stay.

        A member that has members itself has rules of its own for their values, which name the edited field.
        """
        required = found.get("required", ())
        rules = []
        for name, member in found.get("properties", {}).items():
            if member.get(ON_EDIT, on_edit) != "refuse":
                continue
            # The API server checks the enclosing object's default without this member, even if it has a default.
            always = name in required
            target = self._target(member)
            if _is_free(target):
                continue  # CEL cannot compare free JSON: the operator refuses the edit.
            whole = "properties" not in target
            if whole or not always:
                rules.append(immutable_rule(name, always=always, whole=whole))
        return rules

    def _target(self, found: Schema) -> Schema:
        if "anyOf" in found:
            found = _not_null(found, "")
        reference = found.get("$ref", "").rsplit("/", 1)[-1]
        return self._definitions[reference] if reference in self._models else found

    def _any(self, found: Schema, path: str, on_edit: OnEdit | None) -> Schema:
        """Return a property's schema; for a reference, that of the model's object."""
        if "anyOf" in found:
            found = _not_null(found, path)
        on_edit = found.get(ON_EDIT, on_edit)
        if "$ref" not in found:
            return self._of(found, path, on_edit)
        name = found["$ref"].rsplit("/", 1)[-1]
        if name == "JsonValue":
            return {**_description(found), **_ANYTHING}
        made = self.object_of(self._definitions[name], self._models[name], path, on_edit)
        return self._with_default(made | _description(found), found)

    def _of(self, found: Schema, path: str, on_edit: OnEdit | None) -> Schema:
        if unknown := set(found) - _KEPT - _OTHERWISE:
            raise NotStructural(f"{path}: a CRD has no keyword for {sorted(unknown)}")
        made: Schema = {**_description(found, on_edit), **{key: found[key] for key in found if key in _KEPT}}
        if "const" in found:
            made["enum"] = [found["const"]]
        if "exclusiveMinimum" in found:
            made |= {"minimum": found["exclusiveMinimum"], "exclusiveMinimum": True}
        if "type" not in found:
            return {**_description(found, on_edit), **_ANYTHING}
        kind = found["type"]
        if kind == "integer" and found.get("maximum", 0) > 2**31 - 1:
            made["format"] = "int64"
        if kind == "string" and "enum" not in made and "maxLength" not in found and "format" not in found:
            raise NotStructural(f"{path}: a string needs a bound (max_length)")
        if kind == "array":
            made |= self._list(found, path, on_edit)
        if kind == "object":
            made |= self._map(found, path, on_edit)
        return self._with_default(made, found)

    def _list(self, found: Schema, path: str, on_edit: OnEdit | None) -> Schema:
        if "maxItems" not in found or "items" not in found:
            raise NotStructural(f"{path}: a list needs a bound (max_length) and a type")
        made: Schema = {"items": self._any(found["items"], f"{path}[]", on_edit)}
        if "x-kubernetes-list-type" in found:
            made["x-kubernetes-list-type"] = found["x-kubernetes-list-type"]
            made["x-kubernetes-list-map-keys"] = [found["x-list-key"]]
        return made

    def _map(self, found: Schema, path: str, on_edit: OnEdit | None) -> Schema:
        if "properties" in found:
            made: Schema = {
                "properties": {
                    name: self._any(each, f"{path}.{name}", on_edit) for name, each in found["properties"].items()
                }
            }
            if "required" in found:
                made["required"] = list(found["required"])
            return made
        if found.get("additionalProperties") is False or not {"additionalProperties", "patternProperties"} & set(found):
            return {}
        if "maxProperties" not in found:
            raise NotStructural(f"{path}: a map needs a bound (max_length)")
        if found.get("propertyNames", {}).keys() - {"type"} or "patternProperties" in found:
            raise NotStructural(f"{path}: a CRD cannot restrict a map's keys")
        return {"additionalProperties": self._any(found["additionalProperties"], f"{path}.*", on_edit)}

    @staticmethod
    def _with_default(made: Schema, found: Schema) -> Schema:
        """Add the default, without the members that the properties' own defaults give."""
        default = without_nulls(found.get("default"))
        if default is not None:
            made["default"] = _beyond_defaults(default, made)
        return made


_ANYTHING: Mapping[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


def _description(found: Schema, on_edit: OnEdit | None = None) -> dict[str, str]:
    """Return the description as one paragraph, for ``kubectl explain``; a value's with the effect of an edit."""
    if "description" not in found:
        return {}
    edits = f" {EDITS[on_edit]}" if on_edit is not None and "properties" not in found else ""
    return {"description": " ".join(found["description"].split()).replace("``", "`") + edits}


def _is_free(found: Schema) -> bool:
    """Whether the schema is a map of any JSON."""
    values = found.get("additionalProperties")
    return isinstance(values, dict) and values.get("$ref", "").endswith("/JsonValue")


def _not_null(found: Schema, path: str) -> Schema:
    members = [each for each in found["anyOf"] if each != {"type": "null"}]
    if len(members) != 1:
        raise NotStructural(f"{path}: a union of types: use optional members of which one is set")
    siblings = {key: value for key, value in found.items() if key not in ("anyOf", "oneOf")}
    return {**members[0], **siblings}


def _rule(rule: CelRule) -> dict[str, str]:
    return {"rule": rule.expression, "message": rule.message, **({} if rule.at is None else {"fieldPath": rule.at})}


def _beyond_defaults(default: Any, schema: Schema) -> Any:
    """Return an object's default without members whose own default is the same: the API server fills those in."""
    if not isinstance(default, dict) or "properties" not in schema:
        return default
    members = {name: _beyond_defaults(value, schema["properties"][name]) for name, value in default.items()}
    return {name: value for name, value in members.items() if value != schema["properties"][name].get("default")}


def _models_by_name(model: type[Model]) -> dict[str, type[Model]]:
    """Return the model and every model of its fields, by class name."""
    found: dict[str, type[Model]] = {}

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, Model) and annotation.__name__ not in found:
            found[annotation.__name__] = annotation
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for part in get_args(annotation):
            visit(part)

    visit(model)
    return found
