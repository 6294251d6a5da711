"""The objects that carry the workers' configs, their live settings and their token."""

from __future__ import annotations

import base64

from rlsrl.api.live import settings_document
from rlsrl.api.pods import TOKEN_KEY, VIEWING_TOKEN_KEY
from rlsrl.api.role_names import COORDINATOR
from rlsrl_operator.manifests.context import SETTINGS_KEY, ExperimentContext
from rlsrl_operator.manifests.types import Manifest


def role_configs(context: ExperimentContext) -> list[Manifest]:
    """Return one immutable ConfigMap for each role: a changed config has another name.

    Live settings in it are those of its creation. Workers get the newest settings when they join.
    """
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": context.metadata(context.config_name(role), role),
            "immutable": True,
            "data": {f"{role}.json": config.to_json()},
        }
        for role, config in context.configs.configs.items()
    ]


def live_settings(context: ExperimentContext) -> Manifest:
    """Return the ConfigMap of all roles' live settings. The coordinator sends them to the workers."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(context.settings_name, COORDINATOR),
        "data": {SETTINGS_KEY: settings_document(context.configs.configs)},
    }


def token_secret(context: ExperimentContext, token: str, viewing_token: str) -> Manifest:
    """Return the Secret of the experiment's tokens."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": context.metadata(context.token_name),
        "immutable": True,
        "type": "Opaque",
        "data": {
            key: base64.b64encode(value.encode()).decode()
            for key, value in ((TOKEN_KEY, token), (VIEWING_TOKEN_KEY, viewing_token))
        },
    }
