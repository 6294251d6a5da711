"""The operator's key, and the page's that follows from it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, cast

import structlog
from operator_world import ApiServer

from rlsrl.api.tokens import viewing_token
from rlsrl.testing.documents import minimal
from rlsrl_operator.cluster import Cluster, ResourceConflict
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.operator_key import own_token_secret, publish_viewing_key, read_key, token_of, viewing_key
from rlsrl_operator.settings import SecretName
from rlsrl_operator.testing import UID, context_of

KEY_SECRET = SecretName(namespace="system", name="operator-key")
PAGE_SECRET = SecretName(namespace="system", name="ui-key")


def cluster_of(server: ApiServer) -> Cluster:
    return Cluster(cast("Any", server), on_write=lambda kind, verb: None)


def value_of(server: ApiServer, place: SecretName, key: str = "key") -> str:
    found = server.objects[server.place("Secret", place.name, place.namespace)]
    assert found["immutable"] is True
    return base64.b64decode(found["data"][key]).decode("latin-1")


def test_the_viewing_key_is_stored_once() -> None:
    server = ApiServer()
    key = asyncio.run(read_key(cluster_of(server), KEY_SECRET))
    assert key == value_of(server, KEY_SECRET).encode("latin-1")
    for _ in range(2):  # a restart
        assert asyncio.run(read_key(cluster_of(server), KEY_SECRET)) == key
        asyncio.run(publish_viewing_key(cluster_of(server), PAGE_SECRET, key))
    assert value_of(server, PAGE_SECRET) == viewing_key(key)
    assert server.writes == ["create Secret operator-key", "create Secret ui-key"]


def test_a_viewing_key_of_another_operator_is_reported() -> None:
    server = ApiServer()
    asyncio.run(publish_viewing_key(cluster_of(server), PAGE_SECRET, b"former"))
    with structlog.testing.capture_logs() as logs:
        asyncio.run(publish_viewing_key(cluster_of(server), PAGE_SECRET, b"present"))
    (event,) = logs
    assert (event["event"], event["secret"]) == ("viewing_key_outdated", "system/ui-key")
    assert value_of(server, PAGE_SECRET) == viewing_key(b"former")


def test_an_operator_that_is_faster_has_stored_the_same_key() -> None:
    class Raced(Cluster):
        async def create(self, manifest: Manifest) -> Manifest:
            await super().create(manifest)  # the other one's
            raise ResourceConflict(f"Secret {manifest['metadata']['name']} exists")

    server = ApiServer()
    with structlog.testing.capture_logs() as logs:
        cluster = Raced(cast("Any", server), on_write=lambda kind, verb: None)
        asyncio.run(publish_viewing_key(cluster, PAGE_SECRET, b"key"))
    assert logs == []
    assert value_of(server, PAGE_SECRET) == viewing_key(b"key")


def test_an_experiments_secret_has_its_tokens() -> None:
    data = own_token_secret(context_of(minimal()), b"key")["data"]
    found = {name: base64.b64decode(value).decode() for name, value in data.items()}
    assert found == {"token": token_of(b"key", UID), "viewing-token": viewing_token(viewing_key(b"key"), UID)}
    assert len({*found.values(), viewing_key(b"key")}) == 3
