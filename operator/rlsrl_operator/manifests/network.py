"""NetworkPolicies of exactly the role graph: what is not named here is refused where a cluster enforces them."""

from __future__ import annotations

import re

from rlsrl.api.placement import HTTP_PORT
from rlsrl_operator.manifests.subject import Subject
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import COORDINATOR, EVALUATOR, TRAINER, connections, roles_of

STORE_ROLES = (COORDINATOR, TRAINER, EVALUATOR)
"""Who reads and writes an object store."""
_DNS_PORTS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
_HTTPS_PORT = 443


def network_policies(subject: Subject) -> list[Manifest]:
    """One a role."""
    return [_policy(subject, role.name) for role in roles_of(subject.told)]


def _policy(subject: Subject, role: str) -> Manifest:
    settings = subject.settings.network_policies
    graph = connections(subject.experiment, subject.told)
    ingress = [{"from": [_pods(subject, each.source)], **_ports(each.ports)} for each in graph if each.target == role]
    http_ports = tuple(HTTP_PORT + rank for rank in range(subject.experiment.spec.trainers.ranks_per_pod))
    if role == COORDINATOR and settings.operator:
        ingress.append({"from": [settings.operator], **_ports((HTTP_PORT,))})
    if settings.scrapers:
        ports = http_ports if role == TRAINER else (HTTP_PORT,)
        ingress.append({"from": list(settings.scrapers), **_ports(ports)})
    egress = [{"to": [_pods(subject, each.target)], **_ports(each.ports)} for each in graph if each.source == role]
    egress.append({"to": [settings.dns], "ports": _DNS_PORTS})
    store = subject.experiment.spec.parameters.store.object_store
    if store is not None and role in STORE_ROLES:
        egress.append(_ports((_port_of(store.endpoint or ""),)))
    wandb = subject.experiment.spec.tracking.wandb
    if wandb is not None and wandb.mode == "online" and role == COORDINATOR:
        egress.append(_ports((_HTTPS_PORT,)))
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": subject.metadata(subject.name_of(role), role),
        "spec": {
            "podSelector": {"matchLabels": subject.selector(role)},
            "policyTypes": ["Ingress", "Egress"],
            # To the API server an empty list is another one than none, each time that it is applied.
            **({"ingress": ingress} if ingress else {}),
            "egress": egress,
        },
    }


def _port_of(url: str) -> int:
    scheme, _, rest = url.partition("://")
    if (port := re.search(r":([0-9]+)(/|$)", rest)) is not None:
        return int(port[1])
    return 80 if scheme == "http" else _HTTPS_PORT


def _pods(subject: Subject, role: str) -> Manifest:
    return {"podSelector": {"matchLabels": subject.selector(role)}}


def _ports(ports: tuple[int, ...]) -> Manifest:
    return {"ports": [{"port": port, "protocol": "TCP"} for port in ports]} if ports else {}
