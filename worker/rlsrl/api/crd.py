"""The CustomResourceDefinition, generated from the models: the API server refuses what ``rlsrl validate`` refuses.

A CRD takes a subset of JSON schema, a *structural* schema, and silently ignores or prunes some of the rest. The
generator raises on every keyword that it cannot translate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlsrl.api.cel import CelRule, immutable_rule
from rlsrl.api.model import CEL_RULES, EDITS, ON_EDIT, ON_EDIT_OF_MEMBERS, Model, OnEdit
from rlsrl.api.schema import inlined
from rlsrl.api.spec import API_VERSION, KIND, ExperimentSpec, RLExperiment
from rlsrl.api.spec.metadata import MAX_NAME_LENGTH, NAME_PATTERN
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
    | {"x-kubernetes-list-type", "x-list-key", ON_EDIT, ON_EDIT_OF_MEMBERS, CEL_RULES}
)
"""Keywords without meaning to the API server, or translated below."""

_STRINGS = {"apiVersion": "api_version", "kind": "kind"}

NAME_RULE = CelRule(
    expression=f"self.metadata.name.matches('{NAME_PATTERN}') && size(self.metadata.name) <= {MAX_NAME_LENGTH}",
    message=f"lower-case letters, digits and dashes, beginning with a letter, at most {MAX_NAME_LENGTH} characters",
    at=".metadata.name",
)
"""A CRD cannot restrict metadata by a schema. A rule of the whole object can."""

PRINTER_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("Phase", "string", ".status.phase"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Progress", "string", '.status.conditions[?(@.type=="Progressing")].reason'),
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
        "x-kubernetes-validations": [rule.to_json() for rule in (NAME_RULE, *RLExperiment.cel_rules())],
    }


def of_model(model: type[Model], on_edit: OnEdit | None = None) -> Schema:
    """Return the structural schema of a model's object, with its rules.

    Args:
        model: the model.
        on_edit: the effect of an edit of its fields, unless a field has its own; None for what users never edit.

    Raises:
        NotStructural: the model uses a feature that a CRD lacks.
    """
    return _translated(inlined(model.model_json_schema(by_alias=True)), model.__name__, on_edit)


def _translated(found: Schema, path: str, on_edit: OnEdit | None, *, is_in_list: bool = False) -> Schema:
    """Return the structural schema of one of pydantic's, whose references are inlined.

    ``is_in_list``: the API server does not know what an item was before an edit. The rule of the list forbids edits.
    """
    on_edit = found.get(ON_EDIT, on_edit)
    if unknown := set(found) - _KEPT - _OTHERWISE:
        raise NotStructural(f"{path}: a CRD has no keyword for {sorted(unknown)}")
    if "anyOf" in found and "properties" not in found:
        raise NotStructural(f"{path}: a union of types: use optional members of which one is set")
    if "type" not in found:
        return {**_description(found, on_edit), "x-kubernetes-preserve-unknown-fields": True}
    made: Schema = {**_description(found, on_edit), **{key: found[key] for key in found if key in _KEPT}}
    if "const" in found:
        made["enum"] = [found["const"]]
    if "exclusiveMinimum" in found:
        made |= {"minimum": found["exclusiveMinimum"], "exclusiveMinimum": True}
    kind, of_members = found["type"], found.get(ON_EDIT_OF_MEMBERS, on_edit)
    if kind == "integer" and found.get("maximum", 0) > 2**31 - 1:
        made["format"] = "int64"
    if kind == "string" and "enum" not in made and "maxLength" not in found and "format" not in found:
        raise NotStructural(f"{path}: a string needs a bound (max_length)")
    if kind == "array":
        made |= _list(found, path, of_members)
    if kind == "object":
        made |= _map(found, path, of_members, is_in_list=is_in_list)
    if rules := [*found.get(CEL_RULES, ()), *(() if is_in_list else _immutable(found, of_members))]:
        made["x-kubernetes-validations"] = [rule.to_json() for rule in rules]
    if "default" in found:
        made["default"] = _beyond_defaults(found["default"], made)
    return made


def _list(found: Schema, path: str, on_edit: OnEdit | None) -> Schema:
    if "maxItems" not in found or "items" not in found:
        raise NotStructural(f"{path}: a list needs a bound (max_length) and a type")
    made: Schema = {"items": _translated(found["items"], f"{path}[]", on_edit, is_in_list=True)}
    if "x-kubernetes-list-type" in found:
        made["x-kubernetes-list-type"] = found["x-kubernetes-list-type"]
        made["x-kubernetes-list-map-keys"] = [found["x-list-key"]]
    return made


def _map(found: Schema, path: str, on_edit: OnEdit | None, *, is_in_list: bool) -> Schema:
    if "properties" in found:
        members = {
            name: _translated(each, f"{path}.{name}", on_edit, is_in_list=is_in_list)
            for name, each in found["properties"].items()
        }
        return {"properties": members, **({"required": [*found["required"]]} if "required" in found else {})}
    if not isinstance(found.get("additionalProperties"), dict):
        return {}
    if "maxProperties" not in found:
        raise NotStructural(f"{path}: a map needs a bound (max_length)")
    if found.get("propertyNames", {}).keys() - {"type"}:
        raise NotStructural(f"{path}: a CRD cannot restrict a map's keys")
    values = _translated(found["additionalProperties"], f"{path}.*", on_edit, is_in_list=is_in_list)
    return {"additionalProperties": values}


def _immutable(found: Schema, on_edit: OnEdit | None) -> Iterator[CelRule]:
    """Yield the rules that forbid edits of members: presence and value must stay.

    A member that has members itself has rules of its own for their values, which name the edited field.
    """
    for name, member in found.get("properties", {}).items():
        # CEL cannot compare free JSON: the operator refuses the edit.
        if member.get(ON_EDIT, on_edit) == "refuse" and not _holds_free_json(member):
            # The API server checks the enclosing object's default without this member, even if it has a default.
            always = name in found.get("required", ())
            whole = "properties" not in member
            if whole or not always:
                yield immutable_rule(name, always=always, whole=whole)


def _holds_free_json(found: Schema) -> bool:
    """Return whether the value is free JSON, or a list or map of it."""
    inner = found.get("additionalProperties", found.get("items"))
    return "type" not in found or (isinstance(inner, dict) and _holds_free_json(inner))


def _description(found: Schema, on_edit: OnEdit | None = None) -> dict[str, str]:
    """Return the description as one paragraph, for ``kubectl explain``; a value's with the effect of an edit."""
    if "description" not in found:
        return {}
    edits = f" {EDITS[on_edit]}" if on_edit is not None and "properties" not in found else ""
    return {"description": " ".join(found["description"].split()).replace("``", "`") + edits}


def _beyond_defaults(default: Any, schema: Schema) -> Any:
    """Return an object's default without members whose own default is the same: the API server fills those in."""
    if not isinstance(default, dict) or "properties" not in schema:
        return default
    members = {name: _beyond_defaults(value, schema["properties"][name]) for name, value in default.items()}
    return {name: value for name, value in members.items() if value != schema["properties"][name].get("default")}
