"""``spec.environment.egress``: destinations outside of the experiment, in the words of Kubernetes' NetworkPolicies."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rlsrl.api.model import INTEGRAL, Model, refusal
from rlsrl.api.rules import CrossFieldRule, Fault

MAX_RULES = 16
"""Rules of ``egress``."""
MAX_PORTS = 16
"""Entries of ``ports`` in one rule."""
MAX_LABELS = 16
"""Labels of one selector."""
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_NAME = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}")


def _canonical(text: str) -> str:
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise refusal(f"{text} is not a range of addresses", allowed="for example 203.0.113.0/24") from error
    address = ip_address(text.partition("/")[0])
    if isinstance(address, IPv6Address) and (mapped := address.ipv4_mapped) is not None:
        # Network plugins disagree on whether such a range means the IPv4 addresses.
        raise refusal(f"{text} is a range of mapped IPv4 addresses", allowed=f"an IPv4 range, such as {mapped}/32")
    if address != network.network_address:
        raise refusal(f"{text} is no range: its address has bits beyond the prefix", allowed=f"{network}")
    return str(network)


Cidr = Annotated[
    str,
    Field(
        pattern=r"^[0-9A-Fa-f:.]+/[0-9]{1,3}$",
        max_length=49,
        examples=["203.0.113.0/24"],
        json_schema_extra={"format": "cidr"},
    ),
    AfterValidator(_canonical),
]
"""A range of IPv4 or IPv6 addresses."""


def _with_label_names(labels: dict[str, str]) -> dict[str, str]:
    for name in labels:
        if not _LABEL_NAME.fullmatch(name):
            raise refusal(f"{name!r} is not the name of a label", allowed="for example app or example.com/app")
    return labels


Labels = Annotated[
    dict[str, Annotated[str, Field(pattern=rf"^({_LABEL})?$", max_length=63, examples=["simulator"])]],
    Field(max_length=MAX_LABELS),
    AfterValidator(_with_label_names),
]
"""Labels of an object, by name. A CRD cannot restrict the names: the operator refuses wrong ones."""


class LabelSelector(Model):
    """Selects objects by their labels. ``{}`` selects all."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels that an object must have, all of them."""


def _addresses_have_no_labels(peer: EgressPeer) -> Fault | None:
    selectors = {"namespaceSelector": peer.namespace_selector, "podSelector": peer.pod_selector}
    given = [name for name, selector in selectors.items() if selector is not None]
    if peer.cidr is None or not given:
        return None
    return Fault(f"is given beside {' and '.join(given)}", "addresses or selectors; another rule for the other")


class EgressPeer(Model):
    """Addresses, or pods of the cluster."""

    at_least_one: ClassVar[tuple[str, ...]] = ("cidr", "namespace_selector", "pod_selector")
    rules: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            at="cidr",
            check=_addresses_have_no_labels,
            cel="!has(self.cidr) || !(has(self.namespaceSelector) || has(self.podSelector))",
            message="addresses or selectors, not both",
        ),
    )

    cidr: Cidr | None = None
    """A range of addresses outside of the cluster. Metadata addresses of clouds and the addresses of the API server are
    left out of the range. Pods behind a Service have addresses of their own: use selectors."""
    namespace_selector: LabelSelector | None = None
    """The namespaces of the pods, by the namespaces' labels. By default the experiment's own namespace. A namespace has
    the label ``kubernetes.io/metadata.name`` with its name."""
    pod_selector: LabelSelector | None = None
    """The pods. By default all pods of the namespaces."""


def _range_is_ascending(port: EgressPort) -> Fault | None:
    if port.end_port is None or port.end_port >= port.port:
        return None
    return Fault(f"{port.end_port} is below port {port.port}", f"integer from {port.port} to 65535")


class EgressPort(Model):
    """One port at the destination, or a range of ports."""

    rules: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            at="endPort",
            check=_range_is_ascending,
            cel="!has(self.endPort) || self.endPort >= self.port",
            message="must not be below port",
        ),
    )

    port: Annotated[int, Field(ge=1, le=65_535), INTEGRAL]
    """The port, or the first one of a range. Of pods behind a Service: the pods' own port."""
    end_port: Annotated[int, Field(ge=1, le=65_535), INTEGRAL] | None = None
    """The last port of a range. By default there is one port."""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    """The protocol."""


class EgressRule(Model):
    """One destination and its ports."""

    to: EgressPeer
    """The destination."""
    ports: Annotated[tuple[EgressPort, ...], Field(strict=False, min_length=1, max_length=MAX_PORTS)]
    """Its ports."""
