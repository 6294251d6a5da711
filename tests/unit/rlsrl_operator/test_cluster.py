"""Errors of the API server become conflicts, refusals or the client's exceptions."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException

from rlsrl_operator.cluster import Cluster, Refused, ResourceConflict
from rlsrl_operator.testing import pod


class Refusing:
    """A client whose writes all fail with one answer."""

    def __init__(self, status: int, **body: Any) -> None:
        self._error = ApiException(status=status)
        self._error.body = json.dumps({"message": "no", **body})
        self.resources = SimpleNamespace(get=self._resource)

    async def _resource(self, **_: Any) -> None:
        return None

    async def patch(self, *_: Any, **__: Any) -> None:
        raise self._error


def blaming(field: str) -> dict[str, Any]:
    return {"details": {"causes": [{"reason": "FieldValueInvalid", "message": "immutable", "field": field}]}}


@pytest.mark.parametrize(
    ("refusing", "expected"),
    [
        (Refusing(409), ResourceConflict),
        # The answer to a patch with a uid, if another object has that name by now.
        (Refusing(422, **blaming("metadata.uid")), ResourceConflict),
        (Refusing(422, **blaming("spec.replicas")), Refused),
        (Refusing(422), Refused),
        (Refusing(403), Refused),
        (Refusing(500), ApiException),
    ],
)
def test_answers_of_the_api_server_become_these_errors(refusing: Any, expected: type[Exception]) -> None:
    cluster = Cluster(refusing, on_write=lambda _, __: None)
    about = pod()
    about |= {"apiVersion": "v1", "kind": "Pod"}
    about["metadata"] |= {"namespace": "n", "uid": "u"}
    with pytest.raises(expected):
        asyncio.run(cluster.annotate(about, {"a": "b"}))
