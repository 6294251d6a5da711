"""The operator's key. Each experiment's token derives from it, so that a deleted token comes back unchanged."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from rlsrl_operator.cluster import Cluster, ResourceConflict
from rlsrl_operator.manifests import ExperimentContext, Manifest
from rlsrl_operator.manifests.source import source_secret
from rlsrl_operator.settings import SecretName

_KEY = "key"
_KEY_BYTES = 32


async def read_key(cluster: Cluster, place: SecretName) -> bytes:
    """Return the key. The first operator to ask draws it and stores it in the Secret."""
    drawn = base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
    wanted = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": place.name, "namespace": place.namespace},
        "immutable": True,
        "type": "Opaque",
        "data": {_KEY: drawn},
    }
    found = await cluster.get("v1", "Secret", place.namespace, place.name)
    if found is None:
        try:
            found = await cluster.create(wanted)
        except ResourceConflict:
            return await read_key(cluster, place)
    return base64.b64decode(found["data"][_KEY])


def way_to_source(context: ExperimentContext, key: bytes) -> Manifest | None:
    """Return the Secret with the way to the experiment from whose weights this one starts.

    None: it starts from no experiment's, or that one does not exist any more.
    """
    if context.source is None or not (source := context.sources[context.source]).uid:
        return None
    metadata = context.metadata(context.source_secret_name)
    return source_secret(metadata, context.source, source, token_of(key, source.uid))


def token_of(key: bytes, uid: str) -> str:
    """Return the token of the experiment with that uid: HMAC-SHA-256 in hexadecimal."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()
