"""The network rule of ``environment.http``: it follows from the URL, the Service that the URL names, and what the
administrator allows. Pure.

No revision holds the rule. Each pass derives it anew, so that it follows the Service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple, Self

from typing_extensions import override

from rlsrl.api.reasons import AcceptedReason
from rlsrl.api.spec import EgressPeer, EgressRule, HttpEnvironment, LabelSelector, RLExperiment
from rlsrl_operator.manifests.egress import (
    is_narrower,
    is_within,
    peer_manifest,
    range_faults,
    selections,
    selector_faults,
)
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.settings import Environments

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label of each namespace with its name, which the API server writes."""
_URL = "spec.environment.http.url"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class ServiceName(NamedTuple):
    """The name of a Service."""

    namespace: str
    name: str

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class EnvironmentService:
    """What network rules need to know of a Service."""

    selector: Mapping[str, str] = field(default_factory=dict)
    """The labels of its pods; empty: it has no selector."""
    ports: Mapping[int, int | str] = field(default_factory=dict)
    """Its TCP ports, each with the port of the pods: a number, or the name that a pod gives to it."""
    is_headless: bool = False
    """Whether it has no address: clients connect to pods."""
    external_name: str = ""
    """The host of which it is an alias, or empty."""
    unknown: str = ""
    """Why nothing is known of it: it does not exist, or the operator may not read it. Empty otherwise."""

    @classmethod
    def of(cls, service: Manifest) -> Self:
        """Return what network rules need of a Service as the API server has it."""
        spec = service["spec"]
        return cls(
            selector=dict(spec.get("selector") or {}),
            ports={
                each["port"]: each.get("targetPort") or each["port"]
                for each in spec.get("ports") or ()
                if each.get("protocol", "TCP") == "TCP"
            },
            is_headless=spec.get("clusterIP") == "None",
            external_name=spec.get("externalName", "") if spec.get("type") == "ExternalName" else "",
        )


@dataclass(frozen=True, kw_only=True)
class ServerRule:
    """The rule for the server of an experiment's environments."""

    rule: Manifest | None = None
    """The rule in the words of a NetworkPolicy; None: none is needed, or none can be derived."""
    fault: str = ""
    """Why pods do not reach the server: field, value, what is allowed. Empty: they do."""
    reason: AcceptedReason = "InvalidSpec"
    """The reason of the condition that reports the fault."""


NO_RULE = ServerRule()
"""The pods reach the server without a further rule, or there is no server."""


def service_of(experiment: RLExperiment, namespace: str, allowed: Environments) -> ServiceName | None:
    """Return the Service that an experiment of the namespace needs to know; None: none.

    The administrator must allow some pods of the Service's namespace. Otherwise users could learn from the operator
    what they may not read themselves.
    """
    http = experiment.spec.environment.http
    found = None if http is None or _is_loopback(http.host) else _named(http.host, namespace)
    return found.name if found is not None and _is_listed(found.name, namespace, allowed) else None


def server_rule(
    experiment: RLExperiment,
    namespace: str,
    allowed: Environments,
    services: Mapping[ServiceName, EnvironmentService],
) -> ServerRule:
    """Return the rule for the experiment's server, given the Service of ``service_of``.

    None is derived for what ``environment.egress`` opens already.
    """
    environment = experiment.spec.environment
    if (http := environment.http) is None or _is_loopback(http.host):
        return NO_RULE
    if (address := _address(http.host)) is not None:
        return _for_address(address, http, environment.egress, allowed)
    if (named := _named(http.host, namespace)) is None:
        has_range = any(each.to.cidr is not None and _has_port(each, http.port) for each in environment.egress)
        return NO_RULE if has_range else ServerRule(fault=f"{_at(http)}: {_needs_range(http)}")
    found = _for_service(named, http, namespace, environment.egress, allowed, services)
    # Behind such a name is what is written: only its author knows the pods or the addresses.
    return NO_RULE if found.fault and environment.egress else found


@dataclass(frozen=True, kw_only=True)
class _Named:
    """What a host name means in the cluster's DNS."""

    name: ServiceName
    is_pod: bool
    """Whether it is the name of one pod of the Service."""


def _is_loopback(host: str) -> bool:
    """Return whether the server is in the pod itself, which NetworkPolicies do not concern."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    # Packets to a mapped address are packets of IPv4.
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _named(host: str, namespace: str) -> _Named | None:
    """Return the Service that a host name may be in the cluster's DNS, or None.

    ``name``, ``name.namespace`` and ``name.namespace.svc.DOMAIN``, the last one also behind the name of a pod.
    """
    labels = host.removesuffix(".").split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        return None
    if "svc" in labels[2:4]:
        end = labels.index("svc", 2)
    elif len(labels) <= 2:
        end = len(labels)
    else:
        return None
    if end == 1:
        return _Named(name=ServiceName(namespace, labels[0]), is_pod=False)
    return _Named(name=ServiceName(labels[end - 1], labels[end - 2]), is_pod=end == 3)


def _is_listed(service: ServiceName, namespace: str, allowed: Environments) -> bool:
    """Return whether the administrator allows pods of the Service's namespace."""
    peers = _peers(service.namespace, LabelSelector(), is_own=service.namespace == namespace)
    entries = [each for each in allowed.egress if each.cidr is None]
    return any(is_narrower(peer, each.model_copy(update={"pod_selector": None})) for peer in peers for each in entries)


def _peers(namespace: str, pods: LabelSelector, *, is_own: bool) -> tuple[EgressPeer, ...]:
    """Return the ways to select pods of a namespace. The second one is only for the experiment's own namespace."""
    selector = LabelSelector(match_labels={NAMESPACE_LABEL: namespace})
    by_name = EgressPeer(namespace_selector=selector, pod_selector=pods)
    return (by_name, EgressPeer(pod_selector=pods)) if is_own else (by_name,)


def _for_address(
    address: IPv4Address | IPv6Address, http: HttpEnvironment, egress: Sequence[EgressRule], allowed: Environments
) -> ServerRule:
    cidr = f"{address}/{address.max_prefixlen}"
    # A written range around the address is judged by itself, and leaves out what no environment may reach.
    if faults := list(range_faults(cidr, allowed, _at(http))):
        return ServerRule(fault="\n".join(faults))
    written = (each.to.cidr for each in egress if each.to.cidr is not None and _has_port(each, http.port))
    if any(is_within(ip_network(cidr), ip_network(each)) for each in written):
        return NO_RULE
    return ServerRule(rule=_rule(EgressPeer(cidr=cidr), http.port, allowed))


def _for_service(
    named: _Named,
    http: HttpEnvironment,
    namespace: str,
    egress: Sequence[EgressRule],
    allowed: Environments,
    services: Mapping[ServiceName, EnvironmentService],
) -> ServerRule:
    name = named.name
    if not _is_listed(name, namespace, allowed):
        text = f"pods of the namespace {name.namespace} are not within an allowed selection"
        return ServerRule(fault=f"{_at(http)}: {text}; allowed: {selections(allowed)}; {_needs_range(http)}")
    service = services[name]
    is_direct = named.is_pod or service.is_headless
    if problem := _problem(name, service, None if is_direct else http.port):
        return ServerRule(fault=f"{_at(http)}: {problem}; {_needs_range(http)}", reason="ServiceUnusable")
    # The API server has accepted these labels.
    pods = LabelSelector.model_construct(match_labels=dict(service.selector))
    peers = _peers(name.namespace, pods, is_own=name.namespace == namespace)
    faults = [list(selector_faults(each, allowed, f"{_at(http)}: Service {name}")) for each in peers]
    if all(faults):
        return ServerRule(fault="\n".join(faults[0]))
    port = http.port if is_direct else service.ports[http.port]
    written = [each.to for each in egress if each.to.cidr is None and _has_port(each, port)]
    if any(is_narrower(peer, each) for peer in peers for each in written):
        return NO_RULE
    return ServerRule(rule=_rule(peers[0], port, allowed))


def _problem(name: ServiceName, service: EnvironmentService, port: int | None) -> str:
    """Return why the pods behind a Service's port are unknown, or an empty text. ``port``: None for pods' own ports."""
    if service.unknown:
        return service.unknown
    if service.external_name:
        return f"Service {name} is an ExternalName, another name of {service.external_name}"
    if not service.selector:
        return f"Service {name} has no selector, so its pods are unknown"
    if port is not None and port not in service.ports:
        ports = ", ".join(map(str, sorted(service.ports))) or "none"
        return f"Service {name} has no TCP port {port}; its TCP ports: {ports}"
    return ""


def _rule(peer: EgressPeer, port: int | str, allowed: Environments) -> Manifest:
    return {"to": [peer_manifest(peer, allowed)], "ports": [{"port": port, "protocol": "TCP"}]}


def _has_port(rule: EgressRule, port: int | str) -> bool:
    return isinstance(port, int) and any(
        each.protocol == "TCP" and each.port <= port <= (each.end_port or each.port) for each in rule.ports
    )


def _at(http: HttpEnvironment) -> str:
    return f"{_URL}: {http.url}"


def _needs_range(http: HttpEnvironment) -> str:
    return (
        f"a host name that is no Service with a selector needs a rule with a cidr and port {http.port} in "
        "spec.environment.egress"
    )
