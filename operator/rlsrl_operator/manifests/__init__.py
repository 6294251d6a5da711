"""From one experiment to the objects that run it. Pure; YAML's golden twins are in the tests."""

from __future__ import annotations

from rlsrl_operator.manifests.config import config_map, token_secret
from rlsrl_operator.manifests.network import network_policies
from rlsrl_operator.manifests.subject import Subject
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.manifests.workloads import services, volume_claim, workloads

__all__ = ["Manifest", "Subject", "config_map", "render", "token_secret", "volume_claim"]


def render(subject: Subject) -> list[Manifest]:
    """The objects that are kept as they are here, in the order in which they are made."""
    policies = network_policies(subject) if subject.settings.network_policies.enabled else []
    return [*services(subject), *policies, *workloads(subject)]
