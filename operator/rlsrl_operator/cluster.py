"""The Kubernetes API, as little of it as the operator needs: every call has a deadline, every answer is plain JSON."""

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
"""How long one call may take."""
_CONFLICT, _INVALID, _NOT_FOUND, _BAD_REQUEST, _FORBIDDEN = 409, 422, 404, 400, 403


_READING = frozenset({"get", "list"})
_VERBS = {"server_side_apply": "apply"}
"""What others call what the client calls otherwise."""


class ResourceConflict(Exception):
    """Somebody else was faster, or the object is another one: look again."""


class Refused(Exception):
    """The API server does not take the object as it is; the text is its own."""


class Cluster:
    """One API server. Not found is None; other failures than those named are the client's own exceptions."""

    def __init__(self, dynamic: DynamicClient, *, on_write: Callable[[str, str], None]) -> None:
        """Use a client that is connected. ``on_write`` is called with kind and verb before each write."""
        self._dynamic = dynamic
        self._on_write = on_write

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object of that name."""
        return await self._call("get", api_version, kind, name=name, namespace=namespace)

    async def list(self, api_version: str, kind: str, namespace: str, labels: dict[str, str]) -> list[Manifest]:
        """The objects with those labels."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        found = await self._call("get", api_version, kind, namespace=namespace, label_selector=selector)
        items: list[Manifest] = found["items"] if found is not None else []
        return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    async def last_event(self, about: Manifest, reason: str) -> str | None:
        """What was said last of an object for that reason; None if nothing was, or not lately."""
        selector = f"involvedObject.uid={about['metadata']['uid']},reason={reason}"
        found = await self._call(
            "get", "v1", "Event", namespace=about["metadata"]["namespace"], field_selector=selector
        )
        events = sorted(found["items"] if found is not None else [], key=lambda each: str(each.get("lastTimestamp")))
        return str(events[-1].get("message", "")) if events else None

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply, by force; returns the object as it is then.

        Raises:
            Refused: it is not taken.
            ResourceConflict: it has another uid than the manifest says.
        """
        options = {"field_manager": MANAGER, "force_conflicts": True}
        return await self._write("server_side_apply", manifest, **options)

    async def create(self, manifest: Manifest) -> Manifest:
        """Make it; raises ``ResourceConflict`` if there is one, ``Refused`` if it is not taken."""
        return await self._write("create", manifest, field_manager=MANAGER)

    async def replace(self, manifest: Manifest) -> Manifest:
        """PUT the whole object, with the resourceVersion it has; raises as ``apply``."""
        return await self._write("replace", manifest, field_manager=MANAGER)

    async def annotate(self, manifest: Manifest, annotations: dict[str, str]) -> None:
        """Write these annotations of that very object, and nothing else of it; raises as ``apply``."""
        metadata = {name: manifest["metadata"][name] for name in ("name", "namespace", "uid")}
        body = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}
        await self._write(
            "patch",
            {**body, "metadata": {**metadata, "annotations": annotations}},
            content_type="application/merge-patch+json",
        )

    async def replace_status(self, manifest: Manifest) -> Manifest:
        """PUT the status alone, with the resourceVersion that was read; raises as ``apply``."""
        return await self._write("replace", manifest, subresource="status", field_manager=MANAGER)

    async def delete(self, manifest: Manifest, *, grace_seconds: int | None = None) -> None:
        """Delete that very object: one of the same name and another uid stays. Gone already is fine."""
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
            if error.status in (_INVALID, _BAD_REQUEST, _FORBIDDEN):
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
    """The client's own attribute access costs more than the call."""
    return answer


def message_of(error: ApiException) -> str:
    """What the API server says."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (KeyError, TypeError, ValueError):
        return f"{error.status} {error.reason}"


def fields_of(error: ApiException) -> list[str]:
    """The fields that the API server blames."""
    try:
        return [str(cause.get("field")) for cause in json.loads(error.body or "")["details"]["causes"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


@asynccontextmanager
async def connect(*, on_write: Callable[[str, str], None]) -> AsyncIterator[Cluster]:
    """The cluster that this process is in, or that KUBECONFIG names; see ``Cluster``."""
    await config.load_config()  # type: ignore[no-untyped-call]
    settings = client.Configuration.get_default_copy()
    # Two threads' work for each call, which look for proxies and for passwords; kopf does not ask for them either.
    settings.client_session_kwargs = {"trust_env": False}
    async with client.ApiClient(settings) as api:
        yield Cluster(await DynamicClient(api), on_write=on_write)  # type: ignore[no-untyped-call]
