"""What the administrator says: one YAML file, written by the chart. Bad values end the operator with one error."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from rlsrl.api.model import INTEGRAL, Model
from rlsrl_operator.roles import BY_NAME

Text = Annotated[str, Field(min_length=1, max_length=512)]
RoleName = Annotated[str, Field(pattern=f"^({'|'.join(['default', *BY_NAME])})$")]
Free = dict[str, JsonValue]
"""A part of a Kubernetes object, handed on as it is."""
Identity = Literal["runAsUser", "runAsGroup", "fsGroup"]
"""Of a pod's ``securityContext``: all of it that can be chosen within the restricted profile and is of use."""
Id = Annotated[int, Field(ge=1, le=2**31 - 1), INTEGRAL]
"""A user's or a group's number; nobody is root."""


class SettingsError(ValueError):
    """The settings cannot be used; the text says why."""


class SecretName(Model):
    """Where a Secret is."""

    namespace: Text
    """Its namespace."""
    name: Text
    """Its name."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


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
    priority_class_name: Annotated[str, Field(max_length=512)] = ""
    """Whom they may displace; empty: nobody in particular."""
    extra_env: tuple[Free, ...] = Field(default=(), strict=False)
    """Further environment variables."""
    security_context: dict[Identity, Id | None] = Field(default_factory=dict)
    """Whom they run as, instead of 10001; null leaves it to the cluster, as where each namespace has ids of its own."""


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
    key_secret: SecretName = SecretName(namespace="rlsrl-system", name="rlsrl-operator-key")
    """The Secret of the operator's own key. It is made when it is not there."""
    status_seconds: Annotated[float, Field(ge=1, le=3600)] = 10.0
    """Seconds between two looks at a run for its numbers."""
    images: Images
    """What the pods run."""
    roles: dict[RoleName, PodDefaults] = Field(default_factory=dict)
    """By role; ``default`` for those that are not named."""
    pod_templates: Literal["restricted", "any"] = "restricted"
    """What experiments may say of their pods: what cannot lift the security context, or anything."""
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
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is no UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise SettingsError(f"{path}: {'; '.join(map(_fault, error.errors()))}") from error


def _fault(details: ErrorDetails) -> str:
    path = [str(step) for step in details["loc"] if step != "[key]"]
    place, value = ".".join(path) or "the document", repr(details["input"])
    match details["type"]:
        case "missing":
            return f"{place} is missing"
        case "extra_forbidden":
            near = difflib.get_close_matches(path[-1], _NAMES, n=1)
            return f"{place} is no field{f': did you mean {near[0]}?' if near else ''}"
        case _:
            return f"{place}: {details['msg']}, not {value if len(value) <= 100 else f'{value[:100]}...'}"


_NAMES = [
    field.alias or name
    for model in (OperatorSettings, Images, PodDefaults, NetworkPolicies)
    for name, field in model.model_fields.items()
]
