"""What the administrator says: one YAML file, written by the chart. Bad values end the operator with one error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, JsonValue, ValidationError

from rlsrl.api.model import Model

Text = Annotated[str, Field(max_length=512)]
Free = dict[str, JsonValue]
"""A part of a Kubernetes object, handed on as it is."""


class SettingsError(ValueError):
    """The settings cannot be used; the text says why."""


class Images(Model):
    """What the pods run."""

    actor: Text
    """Image of the roles without torch."""
    learner: Text
    """Image of the roles with torch."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes pull them."""
    pull_secrets: tuple[Text, ...] = Field(default=(), strict=False)
    """Names of Secrets with a registry's credentials, in the experiment's namespace."""


class PodDefaults(Model):
    """What pods get beside what their role needs."""

    resources: Free = Field(default_factory=dict)
    """Requests and limits."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that their node must have."""
    tolerations: tuple[Free, ...] = Field(default=(), strict=False)
    """Taints that they bear."""
    affinity: Free = Field(default_factory=dict)
    """Where they would rather be."""
    priority_class_name: Text | None = None
    """Whom they may displace."""
    extra_env: tuple[Free, ...] = Field(default=(), strict=False)
    """Further environment variables."""


class NetworkPolicies(Model):
    """Who may connect to the experiments' pods."""

    enabled: bool = True
    """Whether each experiment gets NetworkPolicies of exactly its role graph."""
    operator: Free = Field(default_factory=dict)
    """Peer (``namespaceSelector``, ``podSelector``) that the operator is."""
    scrapers: tuple[Free, ...] = Field(default=(), strict=False)
    """Peers that may fetch ``/metrics``."""
    dns: Free = Field(default_factory=lambda: Free(namespaceSelector={}, podSelector={}))
    """Peer that answers DNS."""


class OperatorSettings(Model):
    """All of it."""

    namespaces: tuple[Text, ...] = Field(default=(), strict=False)
    """Where experiments are looked after; empty: everywhere."""
    images: Images
    """What the pods run."""
    roles: dict[str, PodDefaults] = Field(default_factory=dict)
    """By role; ``default`` for those that are not named."""
    network_policies: NetworkPolicies = NetworkPolicies()
    """Who may connect to the experiments' pods."""

    def defaults_of(self, role: str) -> PodDefaults:
        """What pods of a role get."""
        return self.roles.get(role) or self.roles.get("default") or PodDefaults()


def read_settings(path: Path) -> OperatorSettings:
    """The settings in a file.

    Raises:
        SettingsError: it cannot be read, or holds something else; names every fault.
    """
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return OperatorSettings.model_validate(value, by_alias=True, by_name=False)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is no YAML: {error}") from error
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, each['loc'])) or 'the document'}: {each['msg']}, not {each['input']!r}"
            for each in error.errors()
        )
        raise SettingsError(f"{path}: {'; '.join(faults)}") from error
