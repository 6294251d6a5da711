"""What workers are told, and the word by which they know each other."""

from __future__ import annotations

import base64
import json

from rlsrl.api.live import settings_of
from rlsrl.api.pods import TOKEN_KEY
from rlsrl.api.resolved import RoleConfig
from rlsrl_operator.manifests.subject import SETTINGS_KEY, Subject
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import COORDINATOR, roles_of


def role_configs(subject: Subject) -> list[Manifest]:
    """One a role, never changed: what is edited in it has another name. The settings in it are those of its making;
    workers are told the newest when they join.
    """
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": subject.metadata(subject.config_name(role, config), role),
            "immutable": True,
            "data": {f"{role}.json": config.to_json()},
        }
        for role, config in _told(subject).items()
    ]


def live_settings(subject: Subject) -> Manifest:
    """The live settings of every role that has some, which the coordinator passes on."""
    settings = {role: settings_of(config) for role, config in _told(subject).items()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": subject.metadata(subject.settings_name, COORDINATOR),
        "data": {SETTINGS_KEY: json.dumps({role: values for role, values in settings.items() if values}, indent=1)},
    }


def token_secret(subject: Subject, token: str) -> Manifest:
    """The experiment's token, drawn once."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": subject.metadata(subject.token_name),
        "immutable": True,
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def _told(subject: Subject) -> dict[str, RoleConfig]:
    told = {role.name: role.config(subject.told) for role in roles_of(subject.told)}
    return {name: config for name, config in told.items() if config is not None}
