"""The administrator's settings: one YAML file that the chart writes. Invalid values end the operator with one error."""

from __future__ import annotations

import difflib
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import override

from rlsrl.api.model import INTEGRAL, Model
from rlsrl.api.roles import ROLES
from rlsrl.api.rules import CrossFieldRule, Fault
from rlsrl.api.spec.egress import Cidr, EgressPeer

SettingText = Annotated[str, Field(min_length=1, max_length=512)]
RoleName = Annotated[str, Field(pattern=f"^({'|'.join(role.name for role in ROLES)})$")]
RoleOrDefault = Annotated[str, Field(pattern=f"^({'|'.join(['default', *(role.name for role in ROLES)])})$")]
Free = dict[str, JsonValue]
"""A part of a Kubernetes object, passed on unchanged."""
Identity = Literal["runAsUser", "runAsGroup", "fsGroup"]
"""The fields of a pod's ``securityContext`` that the restricted profile leaves open and that are of use."""
Id = Annotated[int, Field(ge=1, le=2**31 - 1), INTEGRAL]
"""The number of a user or group; root (0) is not allowed."""


def _exceptions_are_inside(allowed: AllowedEgress) -> Fault | None:
    if not allowed.except_:
        return None
    if allowed.cidr is None:
        return Fault("is given without cidr", "ranges inside a cidr")
    outer = ip_network(allowed.cidr)
    for each in allowed.except_:
        inner = ip_network(each)
        if inner.version != outer.version or not outer.supernet_of(inner) or inner == outer:  # type: ignore[arg-type]
            return Fault(f"{each} is not inside {outer}", f"ranges inside {outer}")
    return None


_EXCEPTIONS_ARE_INSIDE = CrossFieldRule(
    at="except", check=_exceptions_are_inside, cel=None, message="ranges inside cidr, and smaller than cidr"
)


class SettingsError(ValueError):
    """The settings are invalid; the text says why."""


class SecretName(Model):
    """The name of a Secret."""

    namespace: SettingText
    """Its namespace."""
    name: SettingText
    """Its name."""

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Images(Model):
    """The images of the pods."""

    actor: SettingText
    """Image of the roles without torch."""
    learner: SettingText
    """Image of the roles with torch."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes pull them."""
    pull_secrets: tuple[SettingText, ...] = Field(default=(), strict=False)
    """Names of Secrets with a registry's credentials, in the experiment's namespace."""


class PodDefaults(Model):
    """What the administrator adds to the pods of a role."""

    resources: Free = Field(default_factory=dict)
    """Requests and limits."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the node must have."""
    tolerations: tuple[Free, ...] = Field(default=(), strict=False)
    """Taints that the pods tolerate."""
    affinity: Free = Field(default_factory=dict)
    """Node and pod affinity."""
    priority_class_name: Annotated[str, Field(max_length=512)] = ""
    """The PriorityClass of the pods; empty for the cluster's default."""
    extra_env: tuple[Free, ...] = Field(default=(), strict=False)
    """Further environment variables."""
    security_context: dict[Identity, Id | None] = Field(default_factory=dict)
    """User and groups instead of 10001; null lets the cluster choose, for example from a namespace's range of ids."""


class NetworkPolicies(Model):
    """The connections that experiments' pods accept and open."""

    enabled: bool = True
    """Whether each experiment gets NetworkPolicies that allow its role graph's connections and no others."""
    operator: Free = Field(default_factory=dict)
    """The peer (``namespaceSelector``, ``podSelector``) that matches the operator."""
    viewer: Free = Field(default_factory=dict)
    """The peer that matches the page's pod."""
    scrapers: tuple[Free, ...] = Field(default=(), strict=False)
    """Peers that may fetch ``/metrics``."""
    dns: Free = Field(default_factory=lambda: Free(namespaceSelector={}, podSelector={}))
    """The peer that answers DNS."""


class AllowedEgress(EgressPeer):
    """A destination of ``environment.egress``, or a wider one: a range around it, or selectors with fewer labels."""

    rules: ClassVar[tuple[CrossFieldRule, ...]] = (*EgressPeer.rules, _EXCEPTIONS_ARE_INSIDE)

    except_: tuple[Cidr, ...] = Field(default=(), strict=False, alias="except")
    """Ranges inside ``cidr`` that experiments must not reach."""


class Environments(Model):
    """What experiments' environments may do."""

    egress: tuple[AllowedEgress, ...] = Field(default=(), strict=False)
    """Destinations that experiments may name in ``environment.egress``; empty for none."""
    api_server: tuple[Cidr, ...] | None = Field(default=None, strict=False)
    """Addresses of the API server, which the operator finds when it starts (``rlsrl_operator.api_server``); None:
    unknown."""


class OperatorSettings(Model):
    """All settings of the operator."""

    namespaces: tuple[SettingText, ...] = Field(default=(), strict=False)
    """The namespaces whose experiments this operator manages; empty for all."""
    key_secret: SecretName = SecretName(namespace="rlsrl-system", name="rlsrl-operator-key")
    """The Secret of the operator's key. The operator creates it if it does not exist."""
    viewing_key_secret: SecretName | None = None
    """The Secret of the key with which the page reads from coordinators. The operator creates it; None: no page."""
    status_seconds: Annotated[float, Field(ge=1, le=3600)] = 10.0
    """Seconds between two updates of a run's numbers."""
    images: Images
    """The images of the pods."""
    resources: dict[RoleName, Free] = Field(default_factory=dict)
    """By role: requests and limits of its pods, of a trainer's pod for each rank. ``roles`` takes precedence."""
    roles: dict[RoleOrDefault, PodDefaults] = Field(default_factory=dict)
    """By role; ``default`` applies to roles without an entry."""
    pod_templates: Literal["restricted", "any"] = "restricted"
    """The fields allowed in an experiment's ``podTemplate``: those without access to the node, the API server or other
    namespaces, or all."""
    network_policies: NetworkPolicies = NetworkPolicies()
    """The connections that experiments' pods accept and open."""
    environments: Environments = Environments()
    """What experiments' environments may do."""

    def defaults_of(self, role: str) -> PodDefaults:
        """Return the pod defaults of a role."""
        return self.roles.get(role) or self.roles.get("default") or PodDefaults()


def read_settings(path: Path) -> OperatorSettings:
    """Return the settings in a file.

    Raises:
        SettingsError: the file cannot be read or is invalid; names every fault.
    """
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return OperatorSettings.model_validate(value, by_alias=True, by_name=False)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
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
            return f"{place} is not a field{f': did you mean {near[0]}?' if near else ''}"
        case _:
            return f"{place}: {details['msg']}, not {value if len(value) <= 100 else f'{value[:100]}...'}"


_NAMES = [
    field.alias or name
    for model in (OperatorSettings, Images, PodDefaults, NetworkPolicies, Environments, AllowedEgress)
    for name, field in model.model_fields.items()
]
