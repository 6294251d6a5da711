"""What workers are told, and the word by which they know each other."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from rlsrl.api.pods import TOKEN_KEY
from rlsrl_operator.manifests.subject import Subject
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import roles_of

MANIFESTS_KEY = "manifests.json"
"""Of the ConfigMap: the objects as they were rendered for this generation, so that a newer operator restarts nobody."""


def config_map(subject: Subject, manifests: Sequence[Manifest]) -> Manifest:
    """This generation's configs, one a role, and its manifests. Never changed."""
    told = {role.name: role.config(subject.told) for role in roles_of(subject.told)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": subject.metadata(subject.config_name),
        "immutable": True,
        "data": {f"{name}.json": config.to_json() for name, config in told.items() if config is not None}
        | {MANIFESTS_KEY: json.dumps(list(manifests), indent=1, sort_keys=True)},
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
