"""The part of the Kubernetes API that the operator needs. Every call has a deadline, every answer is plain JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from rlsrl_operator.manifests.context import MANAGER
from rlsrl_operator.manifests.types import Manifest

CALL_SECONDS = 10
"""Deadline of one call."""
_CONFLICT, _INVALID, _NOT_FOUND, _UNAUTHORIZED, _TOO_MANY = 409, 422, 404, 401, 429
_FAILING_WEBHOOK = "failed calling webhook"
"""In the API server's message, with status 500, if an admission webhook does not answer."""


_READING = frozenset({"get", "list"})
_VERBS = {"server_side_apply": "apply"}
"""Names in metrics of verbs that the client names differently."""


class ResourceConflict(Exception):
    """The object has changed since it was read, exists already, or is gone: read it again."""


class Refused(Exception):
    """The API server refuses the object: invalid, forbidden, over a quota, denied by a webhook. The text is the
    server's.
    """


class Cluster:
    """One API server. A missing object is None; errors that a method does not name are the client's exceptions."""

    def __init__(self, dynamic: DynamicClient, *, on_write: Callable[[str, str], None]) -> None:
        """Use a connected client. ``on_write`` is called with kind and verb before each write."""
        self._dynamic = dynamic
        self._on_write = on_write

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return the object of that name, or None."""
        return await self._call("get", api_version, kind, name=name, namespace=namespace)

    async def list(self, api_version: str, kind: str, namespace: str, labels: dict[str, str]) -> list[Manifest]:
        """Return the objects with those labels."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        found = await self._call("get", api_version, kind, namespace=namespace, label_selector=selector)
        items: list[Manifest] = found["items"] if found is not None else []
        return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    async def last_event(self, about: Manifest, reason: str, *, since: str) -> str | None:
        """Return the message of the object's newest event with that reason; None if none came since ``since``.

        ``since`` is a time as Kubernetes writes it.
        """
        selector = f"involvedObject.uid={about['metadata']['uid']},reason={reason}"
        found = await self._call(
            "get", "v1", "Event", namespace=about["metadata"]["namespace"], field_selector=selector
        )
        items = [each for each in found["items"] if str(each.get("lastTimestamp")) >= since] if found else []
        events = sorted(items, key=lambda each: str(each.get("lastTimestamp")))
        return str(events[-1].get("message", "")) if events else None

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply the manifest by server-side apply, overriding other managers; return the object afterwards.

        Raises:
            Refused: the API server refuses the manifest.
            ResourceConflict: the object has another uid than the manifest.
        """
        options = {"field_manager": MANAGER, "force_conflicts": True}
        return await self._write("server_side_apply", manifest, **options)

    async def create(self, manifest: Manifest) -> Manifest:
        """Create the object; raises ``ResourceConflict`` if it exists, ``Refused`` if the API server refuses it."""
        return await self._write("create", manifest, field_manager=MANAGER)

    async def replace(self, manifest: Manifest) -> Manifest:
        """PUT the whole object if it still has its resourceVersion; raises as ``apply``."""
        return await self._write("replace", manifest, field_manager=MANAGER)

    async def annotate(self, manifest: Manifest, annotations: dict[str, str]) -> None:
        """Write these annotations of the object with that uid, and nothing else; raises as ``apply``."""
        metadata = {name: manifest["metadata"][name] for name in ("name", "namespace", "uid")}
        body = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}
        await self._write(
            "patch",
            {**body, "metadata": {**metadata, "annotations": annotations}},
            content_type="application/merge-patch+json",
        )

    async def replace_status(self, manifest: Manifest) -> Manifest:
        """PUT the status if the object still has its resourceVersion; raises as ``apply``."""
        return await self._write("replace", manifest, subresource="status", field_manager=MANAGER)

    async def delete(self, manifest: Manifest, *, grace_seconds: int | None = None) -> None:
        """Delete the object with that uid; another object of the same name stays. A missing object is no error."""
        metadata = manifest["metadata"]
        body: Manifest = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        place = {"name": metadata["name"], "namespace": metadata["namespace"]}
        try:
            await self._call("delete", manifest["apiVersion"], manifest["kind"], body=body, **place)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise

    async def _write(self, verb: str, manifest: Manifest, **options: Any) -> Manifest:
        namespace = manifest["metadata"]["namespace"]
        try:
            written = await self._call(
                verb, manifest["apiVersion"], manifest["kind"], body=manifest, namespace=namespace, **options
            )
        except ApiException as error:
            if error.status == _CONFLICT or (error.status == _INVALID and "metadata.uid" in fields_of(error)):
                raise ResourceConflict(message_of(error)) from error
            if _is_refusal(error):
                raise Refused(message_of(error)) from error
            raise
        if written is None:
            raise ResourceConflict(f"{manifest['kind']} {manifest['metadata']['name']} is gone")
        return written

    async def _call(
        self, verb: str, api_version: str, kind: str, subresource: str | None = None, **options: Any
    ) -> Manifest | None:
        if verb not in _READING:
            self._on_write(kind if subresource is None else f"{kind}/{subresource}", _VERBS.get(verb, verb))
        resource = await self._dynamic.resources.get(api_version=api_version, kind=kind)
        if subresource is not None:
            resource = resource.subresources[subresource]
        try:
            answer: Manifest = await getattr(self._dynamic, verb)(
                resource, _request_timeout=CALL_SECONDS, serializer=_plain, **options
            )
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return answer


def _plain(_: DynamicClient, answer: Manifest) -> Manifest:
    """Keep the JSON: the client's attribute access costs more than the call."""
    return answer


def _is_refusal(error: ApiException) -> bool:
    """Return whether the write fails again until somebody changes something. A webhook may deny with any 4xx status."""
    status = error.status or 0
    if status in (_UNAUTHORIZED, _NOT_FOUND, _TOO_MANY):
        return False
    return 400 <= status < 500 or _FAILING_WEBHOOK in message_of(error)


def message_of(error: ApiException) -> str:
    """Return the API server's message."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (KeyError, TypeError, ValueError):
        return f"{error.status} {error.reason}"


def fields_of(error: ApiException) -> list[str]:
    """Return the fields that the API server names as invalid."""
    try:
        return [str(cause.get("field")) for cause in json.loads(error.body or "")["details"]["causes"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


@asynccontextmanager
async def connect(*, on_write: Callable[[str, str], None]) -> AsyncIterator[Cluster]:
    """Connect to the cluster that this process runs in, or that KUBECONFIG names."""
    await config.load_config()  # type: ignore[no-untyped-call]
    settings = client.Configuration.get_default_copy()
    # Looking for proxies and passwords takes two threads for each call. kopf ignores both, too.
    settings.client_session_kwargs = {"trust_env": False}
    async with client.ApiClient(settings) as api:
        yield Cluster(await DynamicClient(api), on_write=on_write)  # type: ignore[no-untyped-call]
