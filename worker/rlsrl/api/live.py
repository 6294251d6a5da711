"""What of a role's config its workers take while they run, and what only their successors would.

A field's ``Edit`` says which: ``live`` ones are the *settings* of a role, sent down the Join streams. The rest, the
config less its settings, names the config: two that differ in settings alone have one name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from rlsrl.api.model import ON_EDIT
from rlsrl.api.resolved import Config
from rlsrl.api.schema import JsonSchema, inlined

Settings = Mapping[str, Any]
"""JSON values of a config's live fields, nested as they are in the config."""

ConfigT = TypeVar("ConfigT", bound=Config)


def settings_of(config: Config) -> dict[str, Any]:
    """The values of the live fields."""
    settings, _ = _parted(json.loads(config.to_json()), _schema(type(config)), live=False)
    return settings


def name_of(config: Config) -> str:
    """A short digest of all but the settings."""
    _, fixed = _parted(json.loads(config.to_json()), _schema(type(config)), live=False)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:10]


def with_settings(config: ConfigT, settings: Settings) -> ConfigT:
    """The config with other values of live fields.

    Raises:
        pydantic.ValidationError: they are none of this config's; a ValueError that names every wrong field.
        KeyError: one of them is not live.
    """
    whole = json.loads(config.to_json())
    _overlay(whole, settings, _schema(type(config)), live=False)
    return type(config).from_json(json.dumps(whole))


@cache
def _schema(config: type[Config]) -> JsonSchema:
    return inlined(config.model_json_schema(by_alias=False))


def _parted(values: Mapping[str, Any], schema: JsonSchema, *, live: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The live part and the rest; of a field that has fields, both may hold some."""
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
    for name, value in settings.items():
        member = schema["properties"][name]
        is_live = _is_live(member, live=live)
        if isinstance(value, dict) and isinstance(values.get(name), dict) and "properties" in member:
            _overlay(values[name], value, member, live=is_live)
        elif is_live:
            values[name] = value
        else:
            raise KeyError(f"{name} is no live setting")


def _is_live(schema: JsonSchema, *, live: bool) -> bool:
    on_edit = schema.get(ON_EDIT)
    return live if on_edit is None else on_edit == "live"
