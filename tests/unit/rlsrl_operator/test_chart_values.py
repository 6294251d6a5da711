"""The chart's values match their schema, and the schema matches the operator's settings."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic.alias_generators import to_camel

from rlsrl.api.roles import ROLES
from rlsrl_operator.settings import Identity, PodDefaults

CHART = Path(__file__).parents[3] / "charts"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
NOT_IN_VALUES = {"global", *(f"roles.{role.name}" for role in ROLES)}
"""Helm's own values, and the roles, which have the default without an entry."""

Schema = dict[str, Any]


def resolved(found: Schema) -> Schema:
    reference = found.get("$ref", "").rpartition("/")[2]
    return {**SCHEMA["definitions"][reference], **found} if reference else found


def described(found: Schema, value: Any, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Return schemas by path, as deep as the values of values.yaml."""
    for name, member in found.get("properties", {}).items():
        inner, inner_path = resolved(member), f"{path}.{name}" if path else name
        yield inner_path, inner
        if isinstance(value, dict) and value.get(name):
            yield from described(inner, value[name], inner_path)


def given(value: Any, found: Schema | None, path: str = "") -> Iterator[str]:
    """Return paths of values.yaml, as deep as the fields of the schema."""
    if isinstance(value, dict) and found is not None and "properties" in found:
        for name, member in value.items():
            inner = found["properties"].get(name)
            yield f"{path}.{name}" if path else name
            yield from given(member, inner and resolved(inner), f"{path}.{name}" if path else name)


def test_values_and_schema_have_the_same_fields() -> None:
    in_schema = {path for path, _ in described(SCHEMA, VALUES)}
    assert in_schema - NOT_IN_VALUES == set(given(VALUES, SCHEMA))
    assert in_schema >= NOT_IN_VALUES


@pytest.mark.parametrize("definition", [None, *SCHEMA["definitions"]])
def test_every_field_of_the_schema_has_a_description_and_a_type(definition: str | None) -> None:
    start = SCHEMA if definition is None else SCHEMA["definitions"][definition]
    for path, found in described(start, VALUES if definition is None else None):
        assert found.get("description", "").endswith("."), path
        assert "type" in found or "enum" in found, path
        assert found.get("type") != "array" or "items" in found, path
        assert "properties" not in found or found.get("additionalProperties") is False, path


def test_the_schema_has_the_operators_roles_and_pod_defaults() -> None:
    assert set(SCHEMA["properties"]["roles"]["properties"]) == {"default", *(role.name for role in ROLES)}
    assert set(SCHEMA["definitions"]["pod"]["properties"]) == set(map(to_camel, PodDefaults.model_fields))
    assert set(SCHEMA["definitions"]["securityContext"]["properties"]) == set(get_args(Identity))


def test_the_charts_own_pods_have_the_same_options_as_the_roles_pods() -> None:
    options = {*SCHEMA["definitions"]["pod"]["properties"], "podLabels"}
    operator, ui = (SCHEMA["properties"][name]["properties"] for name in ("operator", "ui"))
    assert set(operator) == {*options, "statusSeconds"}
    assert set(ui) == {*options, "enabled", "hosts", "clients"}


def test_the_chart_has_the_projects_version_and_images() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((CHART.parent / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
