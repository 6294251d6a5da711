"""The experiment of ``parameters.from.experiment``, from whose weights another one starts: what pods need to read them.

Trainers read from that experiment's coordinator, with a token that allows nothing else. The way there is in a Secret of
their own, which follows the source: if that is deleted and made again, pods and their templates stay. Pure.
"""

from __future__ import annotations

import base64
import difflib
from dataclasses import dataclass
from typing import NamedTuple, Self

from rlsrl.api.placement import COORDINATOR_PORT
from rlsrl.api.pods import (
    EXPERIMENT_LABEL,
    ROLE_LABEL,
    SOURCE_ADDRESS_KEY,
    SOURCE_TLS_NAME_KEY,
    SOURCE_TOKEN_KEY,
    STARTS_FROM_LABEL,
    certified_name,
)
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.spec import RLExperiment
from rlsrl.api.tokens import reading_token
from rlsrl_operator.manifests.types import Manifest

FIELD = "spec.parameters.from.experiment"


class SourceName(NamedTuple):
    """The name of the experiment."""

    namespace: str
    name: str


@dataclass(frozen=True, kw_only=True)
class SourceExperiment:
    """What must be known of the experiment."""

    uid: str = ""
    """Its ``metadata.uid``; empty: it does not exist."""
    has_version: bool = False
    """Whether it has reported a version: the first one is stored before it trains."""
    uses_tls: bool = False
    """Whether its workers have certificates."""
    others: tuple[str, ...] = ()
    """The experiments of its namespace, if it does not exist."""

    @classmethod
    def of(cls, document: Manifest) -> Self:
        """Return what must be known of an experiment as the API server has it."""
        security = document["spec"].get("security") or {}
        training = document.get("status", {}).get("training") or {}
        return cls(
            uid=document["metadata"]["uid"],
            has_version=bool(training.get("version")),
            uses_tls=bool(security.get("tlsSecret")),
        )


def source_of(experiment: RLExperiment, namespace: str) -> SourceName | None:
    """Return from which experiment's weights an experiment of the namespace starts; None: from no experiment's."""
    initial = experiment.spec.parameters.from_
    return None if initial is None or initial.experiment is None else SourceName(namespace, initial.experiment)


def source_fault(experiment: RLExperiment, name: SourceName, source: SourceExperiment) -> str:
    """Return why the experiment cannot start from the source, or an empty text."""
    if not source.uid:
        nearest = difflib.get_close_matches(name.name, source.others, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return f"{FIELD}: {name.name!r} does not exist in the namespace {name.namespace}{hint}"
    if not source.has_version:
        return f"{FIELD}: {name.name!r} has no version of its weights yet"
    if source.uses_tls and experiment.spec.security.tls_secret is None:
        return (
            f"{FIELD}: the workers of {name.name!r} have certificates (security.tlsSecret); allowed: "
            "security.tlsSecret with one of the same authorities"
        )
    return ""


def source_secret(metadata: Manifest, name: SourceName, source: SourceExperiment, token: str) -> Manifest:
    """Return the Secret with the way to the source's coordinator.

    Args:
        metadata: Of the Secret.
        name: The source.
        source: What is known of it.
        token: The source's token, from which the token for reading follows.
    """
    address = f"{name.name}-{COORDINATOR}:{COORDINATOR_PORT}"
    values = {SOURCE_ADDRESS_KEY: address, SOURCE_TOKEN_KEY: reading_token(token)}
    if source.uses_tls:
        values[SOURCE_TLS_NAME_KEY] = certified_name(name.name, name.namespace)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in values.items()},
    }


def reading_ingress(name: str) -> Manifest:
    """Return the rule of a coordinator that lets trainers in that start from its experiment's weights."""
    return {"from": [{"podSelector": {"matchLabels": {STARTS_FROM_LABEL: name}}}], "ports": _PORTS}


def reading_egress(source: SourceName) -> Manifest:
    """Return the rule of trainers that lets them reach the coordinator of the experiment from which they start."""
    labels = {EXPERIMENT_LABEL: source.name, ROLE_LABEL: COORDINATOR}
    return {"to": [{"podSelector": {"matchLabels": labels}}], "ports": _PORTS}


_PORTS = [{"port": COORDINATOR_PORT, "protocol": "TCP"}]
