"""Find the addresses of the API server, which no environment may reach."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any

import structlog
from kubernetes.aio.client.exceptions import ApiException

from rlsrl_operator.cluster import Cluster, message_of
from rlsrl_operator.settings import OperatorSettings

_FORBIDDEN = 403
_SLICE = ("discovery.k8s.io/v1", "EndpointSlice", "default", "kubernetes")
"""The API server itself writes this object: its addresses behind the Service ``kubernetes``."""
_SERVICE = "KUBERNETES_SERVICE_HOST"
"""Environment variable of every pod with the address of that Service."""


async def with_api_server(
    settings: OperatorSettings, cluster: Cluster, environ: Mapping[str, str] = os.environ
) -> OperatorSettings:
    """Return the settings with the addresses of the API server; unchanged if no experiment may name any address.

    If the operator may not read them, they stay unknown, and every range of an experiment is refused.
    """
    if not any(each.cidr for each in settings.environments.egress):
        return settings
    try:
        endpoints = tuple(_endpoints(await cluster.get(*_SLICE)))
        error = "" if endpoints else "the EndpointSlice default/kubernetes has no addresses"
    except ApiException as refusal:
        if refusal.status != _FORBIDDEN:
            raise
        endpoints, error = (), message_of(refusal)
    if not endpoints:
        structlog.get_logger().error("api_server_unknown", error=error, effect="egress ranges are refused")
        return settings
    addresses = tuple(_ranges([*endpoints, environ.get(_SERVICE, "")]))
    environments = settings.environments.model_copy(update={"api_server": addresses})
    return settings.model_copy(update={"environments": environments})


def _endpoints(found: Mapping[str, Any] | None) -> Iterator[str]:
    for endpoint in (found or {}).get("endpoints") or ():
        yield from endpoint["addresses"]


def _ranges(addresses: list[str]) -> Iterator[str]:
    """Yield the addresses as ranges, each once; some clusters have a name in the Service's place, which is no range."""
    for each in dict.fromkeys(addresses):
        try:
            address = ip_address(each)
        except ValueError:
            continue
        yield f"{address}/{address.max_prefixlen}"
