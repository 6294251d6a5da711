"""NetworkPolicies that allow the role graph's connections, the environments' and those to the coordinator of the
experiment from whose weights trainers start, and no others.

The cluster's network plugin must enforce them.
"""

from __future__ import annotations

import re

from rlsrl.api.placement import HTTP_PORT
from rlsrl.api.pods import ROLE_LABEL
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.api.roles import Role
from rlsrl_operator.manifests.context import ExperimentContext
from rlsrl_operator.manifests.egress import egress_rules
from rlsrl_operator.manifests.source import reading_egress, reading_ingress
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import connections, roles_of

_DNS_PORTS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
_HTTPS_PORT = 443


def network_policies(context: ExperimentContext) -> list[Manifest]:
    """Return one NetworkPolicy for each role."""
    return [_policy(context, role) for role in roles_of(context.configs)]


def with_server_rule(policy: Manifest, context: ExperimentContext, rule: Manifest | None) -> Manifest:
    """Return a NetworkPolicy of the experiment with the rule for the environments' server, if its role makes any."""
    role = next(each for each in roles_of(context.configs) if each.name == policy["metadata"]["labels"][ROLE_LABEL])
    if rule is None or not role.makes_environment:
        return policy
    return {**policy, "spec": {**policy["spec"], "egress": [*policy["spec"]["egress"], rule]}}


def _policy(context: ExperimentContext, role: Role) -> Manifest:
    settings = context.settings.network_policies
    graph = connections(context.experiment, context.configs)
    ingress = [
        {"from": [_pods(context, each.source)], **_ports(each.ports)} for each in graph if each.target == role.name
    ]
    http_ports = tuple(HTTP_PORT + rank for rank in range(context.experiment.spec.trainers.ranks_per_pod))
    if role.name == COORDINATOR:
        readers = [each for each in (settings.operator, settings.viewer) if each]
        ingress += [{"from": [each], **_ports((HTTP_PORT,))} for each in readers]
        ingress.append(reading_ingress(context.name))
    if settings.scrapers:
        ports = http_ports if role.name == TRAINER else (HTTP_PORT,)
        ingress.append({"from": list(settings.scrapers), **_ports(ports)})
    egress = [{"to": [_pods(context, each.target)], **_ports(each.ports)} for each in graph if each.source == role.name]
    if role.name == TRAINER and context.source is not None:
        egress.append(reading_egress(context.source))
    egress.append({"to": [settings.dns], "ports": _DNS_PORTS})
    store = context.experiment.spec.parameters.store.object_store
    if store is not None and role.reaches_object_store:
        egress.append(_ports((_port_of(store.endpoint or ""),)))
    wandb = context.experiment.spec.tracking.wandb
    if wandb is not None and wandb.mode == "online" and role.name == COORDINATOR:
        egress.append(_ports((_HTTPS_PORT,)))
    if role.makes_environment:
        egress += egress_rules(context.experiment, context.settings.environments)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": context.metadata(context.name_of(role.name), role.name),
        "spec": {
            "podSelector": {"matchLabels": context.selector(role.name)},
            "policyTypes": ["Ingress", "Egress"],
            # The API server drops an empty list, and each apply would then add it again.
            **({"ingress": ingress} if ingress else {}),
            "egress": egress,
        },
    }


def _port_of(url: str) -> int:
    scheme, _, rest = url.partition("://")
    if (port := re.search(r":([0-9]+)(/|$)", rest)) is not None:
        return int(port[1])
    return 80 if scheme == "http" else _HTTPS_PORT


def _pods(context: ExperimentContext, role: str) -> Manifest:
    return {"podSelector": {"matchLabels": context.selector(role)}}


def _ports(ports: tuple[int, ...]) -> Manifest:
    return {"ports": [{"port": port, "protocol": "TCP"} for port in ports]} if ports else {}
