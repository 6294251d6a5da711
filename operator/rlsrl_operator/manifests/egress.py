"""``environment.egress``: what the administrator allows of it, and its rules in NetworkPolicies. Pure.

A NetworkPolicy is not able to deny. So an address that no environment may reach is left out of each range that
contains it, and a range that lies within such addresses is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network

from rlsrl.api.spec import EgressPeer, EgressRule, LabelSelector, RLExperiment
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.settings import AllowedEgress, Environments

IpNetwork = IPv4Network | IPv6Network
"""A range of addresses."""
METADATA: tuple[IpNetwork, ...] = tuple(
    map(
        ip_network,
        (
            "169.254.0.0/16",  # link-local: metadata of most clouds, credentials of containers, node-local DNS
            "fe80::/10",
            "fd00:ec2::/32",  # AWS
            "fd20:ce::254/128",  # Google Cloud
            "168.63.129.16/32",  # Azure's host
            "100.100.100.200/32",  # Alibaba Cloud
            "192.0.0.192/32",  # Oracle Cloud
            "fd00:c1::a9fe:a9fe/128",
            "fd00:42::42/128",  # Scaleway
        ),
    )
)
"""Addresses of clouds' metadata servers, which give credentials to every process of a node."""


def egress_faults(experiment: RLExperiment, allowed: Environments) -> list[str]:
    """Return the destinations that the administrator does not allow: field, value, what is allowed."""
    rules = experiment.spec.environment.egress
    return [
        fault
        for index, rule in enumerate(rules)
        for fault in _faults(rule.to, allowed, f"spec.environment.egress[{index}].to")
    ]


def egress_rules(experiment: RLExperiment, allowed: Environments) -> list[Manifest]:
    """Return the rules of a NetworkPolicy for ``environment.egress``.

    Rules that the administrator does not allow are left out: an experiment that is tried again may have such ones.
    """
    rules = experiment.spec.environment.egress
    return [_rule(each, allowed) for each in rules if not any(_faults(each.to, allowed, ""))]


def _faults(peer: EgressPeer, allowed: Environments, at: str) -> Iterator[str]:
    return selector_faults(peer, allowed, at) if peer.cidr is None else range_faults(peer.cidr, allowed, f"{at}.cidr")


def range_faults(cidr: str, allowed: Environments, at: str) -> Iterator[str]:
    """Yield why the administrator does not allow the range. ``at``: what each text begins with."""
    wanted = ip_network(cidr)
    if (closed := next((each for each in METADATA if is_within(wanted, each)), None)) is not None:
        yield f"{at}: {cidr} is within {closed}, where clouds have metadata addresses: no environment reaches them"
    elif (entry := _entry_for(wanted, allowed)) is None:
        yield f"{at}: {cidr} is not within an allowed range; allowed: {_ranges(allowed)}"
    elif allowed.api_server is None:
        yield (
            f"{at}: {cidr} is refused while the API server's addresses are unknown: let the operator get the "
            "EndpointSlice kubernetes of the namespace default, as the chart does, and start it again"
        )
    elif any(is_within(wanted, each) for each in _closed(allowed, entry)):
        yield f"{at}: {cidr} is the API server's, which no environment reaches"


def _entry_for(wanted: IpNetwork, allowed: Environments) -> AllowedEgress | None:
    """Return the administrator's first entry that contains the range, outside of the entry's exceptions; or None."""
    return next((each for each in allowed.egress if _contains(each, wanted)), None)


def _contains(entry: AllowedEgress, wanted: IpNetwork) -> bool:
    if entry.cidr is None or not is_within(wanted, ip_network(entry.cidr)):
        return False
    return not any(is_within(wanted, ip_network(each)) for each in entry.except_)


def _closed(allowed: Environments, entry: AllowedEgress | None) -> Iterator[IpNetwork]:
    """Yield the ranges that rules under an entry of the administrator's leave out."""
    yield from METADATA
    yield from map(ip_network, allowed.api_server or ())
    yield from map(ip_network, entry.except_ if entry is not None else ())


def _ranges(allowed: Environments) -> str:
    listed = (
        f"{each.cidr} except {' and '.join(each.except_)}" if each.except_ else each.cidr
        for each in allowed.egress
        if each.cidr is not None
    )
    return ", ".join(listed) or "none: the administrator lists ranges in the chart's value environments.egress"


def selector_faults(peer: EgressPeer, allowed: Environments, at: str) -> Iterator[str]:
    """Yield why the administrator does not allow the pods that the peer selects. ``at``: see ``range_faults``."""
    if any(is_narrower(peer, each) for each in allowed.egress if each.cidr is None):
        return
    yield f"{at}: {_shown(peer)} is not within an allowed selection; allowed: {selections(allowed)}"


def selections(allowed: Environments) -> str:
    """Return in words the pods that the administrator allows."""
    listed = "; ".join(_shown(each) for each in allowed.egress if each.cidr is None)
    if not listed:
        return "none: the administrator lists selectors in the chart's value environments.egress"
    return f"{listed}; also with further labels"


def is_narrower(asked: EgressPeer, allowed: EgressPeer) -> bool:
    """Return whether the allowed peer certainly selects every pod that the other peer selects.

    A selector with more labels selects fewer objects.
    """
    has_pods = _labels(asked.pod_selector) >= _labels(allowed.pod_selector)
    if asked.namespace_selector is None:
        # The experiment's own namespace, whose labels are unknown here.
        return has_pods and not _labels(allowed.namespace_selector)
    if allowed.namespace_selector is None:
        return False
    return has_pods and _labels(asked.namespace_selector) >= _labels(allowed.namespace_selector)


def _labels(selector: LabelSelector | None) -> frozenset[tuple[str, str]]:
    return frozenset(() if selector is None else selector.match_labels.items())


def _shown(peer: EgressPeer) -> str:
    """Return a peer of pods in words: ``namespaceSelector {} podSelector {app: simulator}``."""
    selectors = {"namespaceSelector": peer.namespace_selector, "podSelector": peer.pod_selector}
    return " ".join(
        f"{name} {{{', '.join(f'{label}: {value}' for label, value in selector.match_labels.items())}}}"
        for name, selector in selectors.items()
        if selector is not None
    )


def _rule(rule: EgressRule, allowed: Environments) -> Manifest:
    ports = [
        {"port": each.port, **({"endPort": each.end_port} if each.end_port else {}), "protocol": each.protocol}
        for each in rule.ports
    ]
    return {"to": [peer_manifest(rule.to, allowed)], "ports": ports}


def peer_manifest(peer: EgressPeer, allowed: Environments) -> Manifest:
    """Return the peer in the words of a NetworkPolicy, without what no environment may reach."""
    if peer.cidr is None:
        selectors = {"namespaceSelector": peer.namespace_selector, "podSelector": peer.pod_selector}
        return {name: _selector(each) for name, each in selectors.items() if each is not None}
    wanted = ip_network(peer.cidr)
    closed = _inside(wanted, _closed(allowed, _entry_for(wanted, allowed)))
    return {"ipBlock": {"cidr": str(wanted), **({"except": closed} if closed else {})}}


def _selector(selector: LabelSelector) -> Manifest:
    return {"matchLabels": dict(selector.match_labels)} if selector.match_labels else {}


def _inside(wanted: IpNetwork, closed: Iterable[IpNetwork]) -> list[str]:
    """Return the closed ranges inside the wanted one, each address once, in ascending order."""
    inside = {each for each in closed if is_within(each, wanted)}
    widest = (each for each in inside if not any(is_within(each, other) for other in inside - {each}))
    return [str(each) for each in sorted(widest, key=lambda each: int(each.network_address))]


def is_within(inner: IpNetwork, outer: IpNetwork) -> bool:
    """Return whether one range is part of another. Ranges of IPv4 and IPv6 never are."""
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)
