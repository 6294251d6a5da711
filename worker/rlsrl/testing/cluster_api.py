"""A cluster's API over plain HTTP, for requests that tests repeat: as calls of kubectl they would keep a core busy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote

Object = dict[str, Any]
_ANSWER_SECONDS = 30.0
_NOT_FOUND, _CONFLICT = 404, 409


class ApiFailed(Exception):
    """The API server refused. The text is its answer."""


class Api:
    """An API server without credentials, as ``kubectl proxy`` serves it. For one thread."""

    def __init__(self, address: str) -> None:
        """``address`` is host and port."""
        self._connection = HTTPConnection(address, timeout=_ANSWER_SECONDS)

    def get(self, path: str) -> Object | None:
        """Return an object or a list, or None."""
        return self.send("GET", path)

    def items(self, path: str) -> list[Object]:
        """Return the items of a list."""
        found = self.get(path)
        items: list[Object] = (found or {}).get("items") or []
        return items

    def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, kind: str = "application/json"
    ) -> Object | None:
        """Send a request; return the answer, or None if the object is missing, conflicts, or its namespace is ending.

        Raises:
            ApiFailed: the API server refused for another reason.
        """
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"Content-Type": kind})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status >= 400:
            if response.status in (_NOT_FOUND, _CONFLICT) or b"NamespaceTerminating" in answer:
                return None
            raise ApiFailed(f"{method} {path}: {response.status} {answer.decode(errors='replace')}")
        found: Object = json.loads(answer)
        return found

    def merge(self, path: str, body: Mapping[str, Any]) -> Object | None:
        """Send a merge PATCH."""
        return self.send("PATCH", path, body, kind="application/merge-patch+json")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Resource(NamedTuple):
    """A kind of object on the API server."""

    group_version: str
    kind: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of an object in a namespace, or of all its objects."""
        root = "/api" if "/" not in self.group_version else "/apis"
        return f"{root}/{self.group_version}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


class ApiReader:
    """Reads objects by kind, as ``kubectl get --output json`` shows them. Any thread may call it."""

    def __init__(self, address: str) -> None:
        """``address`` is an API server without credentials."""
        self._address = address
        self._local = threading.local()
        self._resources: dict[str, Resource] = {}

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, or None.

        Raises:
            ApiFailed: the kind is unknown, or there is no answer.
        """
        found = self._ask(self._resource(kind).path(namespace, name))
        return None if found is None else _shown(found)

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """Return the objects with those labels. Raises like ``get``."""
        resource = self._resource(kind)
        path = resource.path(namespace) + (f"?labelSelector={quote(selector)}" if selector else "")
        if (found := self._ask(path)) is None:
            raise ApiFailed(f"the API server serves no {kind} any more")
        head = {"apiVersion": resource.group_version, "kind": resource.kind}
        return [_shown({**head, **each}) for each in found["items"]]

    def _resource(self, kind: str) -> Resource:
        name = kind.lower()
        if name not in self._resources:
            # Of several groups with a name the first wins, as with kubectl.
            for known, resource in self._discover():
                self._resources.setdefault(known, resource)
        if name not in self._resources:
            raise ApiFailed(f"the API server knows no {kind}")
        return self._resources[name]

    def _discover(self) -> Iterator[tuple[str, Resource]]:
        groups = (self._ask("/apis") or {}).get("groups", [])
        for path in ("/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)):
            try:
                found = self._ask(path) or {}
            except ApiFailed:
                continue  # the server of one group is away; the other groups still count
            for each in found.get("resources", []):
                if each["namespaced"] and "/" not in each["name"]:
                    resource = Resource(found["groupVersion"], each["kind"], each["name"])
                    group = found["groupVersion"].rpartition("/")[0]
                    names = (each["name"], each["kind"].lower(), f"{each['name']}.{group}")
                    yield from ((name, resource) for name in names)

    def _ask(self, path: str) -> Object | None:
        """Return the answer over this thread's connection; retry once over a new one, in case the first was closed."""
        for is_last in (False, True):
            if (api := getattr(self._local, "api", None)) is None:
                api = self._local.api = Api(self._address)
            try:
                found: Object | None = api.get(path)
            except (OSError, HTTPException) as error:
                api.close()
                self._local.api = None
                if is_last:
                    raise ApiFailed(f"GET {path}: {error!r}") from error
            else:
                return found
        raise AssertionError("not reached: the last try returns or raises")


def _shown(found: Object) -> Object:
    found["metadata"].pop("managedFields", None)
    return found
