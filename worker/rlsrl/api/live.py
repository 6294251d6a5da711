"""The live settings of a role's config: the fields that running workers accept new values for.

A field's ``EditEffect`` decides: ``live`` fields are the *settings* of a role and travel down the Join streams. The
other fields name the config: configs that differ in settings alone have the same name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from rlsrl.api.model import ON_EDIT
from rlsrl.api.resolved import Config
from rlsrl.api.schema import JsonSchema, inlined

Settings = Mapping[str, Any]
"""JSON values of a config's live fields, nested as in the config."""

ConfigT = TypeVar("ConfigT", bound=Config)


def settings_of(config: Config) -> dict[str, Any]:
    """Return the values of the live fields."""
    settings, _ = _parted(json.loads(config.to_json()), _schema(type(config)), live=False)
    return settings


def settings_document(configs: Mapping[str, Config]) -> str:
    """Return the JSON document with the live settings of all roles, which the coordinator reads.

    Args:
        configs: By role.
    """
    settings = {role: settings_of(config) for role, config in configs.items()}
    return json.dumps({role: values for role, values in settings.items() if values}, indent=1)


def name_of(config: Config) -> str:
    """Return a short digest of all fields but the settings."""
    _, fixed = _parted(json.loads(config.to_json()), _schema(type(config)), live=False)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:10]


def with_settings(config: ConfigT, settings: Settings) -> ConfigT:
    """Return the config with new values of live fields: all of them, since a field that is missing has its default.

    Without any value the config stays as it is.

    Raises:
        pydantic.ValidationError: a value is invalid; names every wrong field.
        KeyError: a field is not live.
    """
    if not settings:
        return config
    whole = json.loads(config.to_json())
    _overlay(whole, settings, _schema(type(config)), live=False)
    return type(config).from_json(json.dumps(whole))


def changed_settings(before: Config, after: Config) -> dict[str, Any]:
    """Return the new values of the live fields that differ, by path such as ``stop.env_steps``; None for no value."""
    old, new = (dict(_leaves(settings_of(config))) for config in (before, after))
    return {path: new.get(path) for path in old | new if old.get(path) != new.get(path)}


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


@cache
def _schema(config: type[Config]) -> JsonSchema:
    return inlined(config.model_json_schema(by_alias=False))


def _parted(values: Mapping[str, Any], schema: JsonSchema, *, live: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the live part and the rest. A nested field may have members in both."""
    settings: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, value in values.items():
        member = schema["properties"][name]
        is_live = _is_live(member, live=live)
        if isinstance(value, dict) and "properties" in member:
            inner, rest = _parted(value, member, live=is_live)
            if inner:
                settings[name] = inner
            if rest:
                fixed[name] = rest
        else:
            (settings if is_live else fixed)[name] = value
    return settings, fixed


def _overlay(values: dict[str, Any], settings: Settings, schema: JsonSchema, *, live: bool) -> None:
    for name, member in schema["properties"].items():
        if name not in settings and name not in schema.get("required", ()) and _is_live(member, live=live):
            values.pop(name, None)
    for name, value in settings.items():
        member = schema["properties"][name]
        is_live = _is_live(member, live=live)
        if isinstance(value, dict) and isinstance(values.get(name), dict) and "properties" in member:
            _overlay(values[name], value, member, live=is_live)
        elif is_live:
            values[name] = value
        else:
            raise KeyError(f"{name} is not a live setting")


def _is_live(schema: JsonSchema, *, live: bool) -> bool:
    on_edit = schema.get(ON_EDIT)
    return live if on_edit is None else on_edit == "live"
