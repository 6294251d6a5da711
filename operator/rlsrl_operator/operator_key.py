"""The operator's key. Each experiment's tokens derive from it, so that a deleted token comes back unchanged."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

import structlog

from rlsrl.api.tokens import viewing_token
from rlsrl_operator.cluster import Cluster, ResourceConflict
from rlsrl_operator.manifests import ExperimentContext, Manifest, token_secret
from rlsrl_operator.manifests.source import source_secret
from rlsrl_operator.settings import SecretName

_KEY = "key"
_KEY_BYTES = 32
_VIEWING = b"rlsrl: look at experiments"
_log = structlog.stdlib.get_logger("operator_key")


async def read_key(cluster: Cluster, place: SecretName) -> bytes:
    """Return the key. The first operator to ask draws it and stores it in the Secret."""
    wanted = _secret(place, secrets.token_bytes(_KEY_BYTES))
    found = await cluster.get("v1", "Secret", place.namespace, place.name)
    if found is None:
        try:
            found = await cluster.create(wanted)
        except ResourceConflict:
            return await read_key(cluster, place)
    return base64.b64decode(found["data"][_KEY])


async def publish_viewing_key(cluster: Cluster, place: SecretName, key: bytes) -> None:
    """Store the viewing key in the Secret from which the page reads it, unless it is there."""
    value = viewing_key(key).encode()
    wanted = _secret(place, value)
    try:
        found = await cluster.get("v1", "Secret", place.namespace, place.name) or await cluster.create(wanted)
    except ResourceConflict:
        found = await cluster.get("v1", "Secret", place.namespace, place.name) or wanted
    if base64.b64decode(found.get("data", {}).get(_KEY, "")) != value:
        _log.error("viewing_key_outdated", secret=str(place), cure="delete it and restart the operator and the page")


def own_token_secret(context: ExperimentContext, key: bytes) -> Manifest:
    """Return the Secret of the experiment's tokens."""
    return token_secret(context, token_of(key, context.uid), viewing_token(viewing_key(key), context.uid))


def way_to_source(context: ExperimentContext, key: bytes) -> Manifest | None:
    """Return the Secret with the way to the experiment from whose weights this one starts.

    None: it starts from no experiment's, or that one does not exist any more.
    """
    if context.source is None or not (source := context.sources[context.source]).uid:
        return None
    metadata = context.metadata(context.source_secret_name)
    return source_secret(metadata, context.source, source, token_of(key, source.uid))


def viewing_key(key: bytes) -> str:
    """Return the key from which viewing tokens follow: an HMAC-SHA-256 of ``key``, in hexadecimal."""
    return hmac.new(key, _VIEWING, hashlib.sha256).hexdigest()


def token_of(key: bytes, uid: str) -> str:
    """Return the token of the experiment with that uid: HMAC-SHA-256 in hexadecimal."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()


def _secret(place: SecretName, key: bytes) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": place.name, "namespace": place.namespace},
        "immutable": True,
        "type": "Opaque",
        "data": {_KEY: base64.b64encode(key).decode()},
    }
