"""What kopf does for the operator: it watches, and each event wakes the experiment that it is about. Nothing more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import kopf
from prometheus_client import CollectorRegistry

from rlsrl.api.pods import EXPERIMENT_LABEL
from rlsrl.api.spec import KIND
from rlsrl_operator.cluster import connect
from rlsrl_operator.coordinator_status import HttpCoordinatorStatus
from rlsrl_operator.keyed_queue import KeyedQueue
from rlsrl_operator.manifests.context import MANAGER
from rlsrl_operator.metrics import OperatorMetrics, serving
from rlsrl_operator.operator_key import read_key
from rlsrl_operator.reconcile import ExperimentKey, Reconciler
from rlsrl_operator.settings import OperatorSettings

NUM_WORKERS = 16
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - a pod of its own; a NetworkPolicy says who may come
_CHILDREN = (
    ("", "v1", "pods"),
    ("", "v1", "configmaps"),
    ("", "v1", "secrets"),
    ("", "v1", "services"),
    ("", "v1", "persistentvolumeclaims"),
    ("apps", "v1", "deployments"),
    ("apps", "v1", "statefulsets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
)
_GROUP, _VERSION, _PLURAL = "rlsrl.dev", "v1alpha1", "rlexperiments"


def registry(settings: OperatorSettings, *, metrics_port: int) -> kopf.OperatorRegistry:
    """The handlers of one operator; its metrics are served at that port."""
    metrics = OperatorMetrics(CollectorRegistry())
    handlers = kopf.OperatorRegistry()
    keys: KeyedQueue[ExperimentKey] | None = None
    reconciler: Reconciler | None = None
    tasks: list[asyncio.Task[None]] = []
    resources = contextlib.AsyncExitStack()

    def wake(namespace: str | None, names: Iterable[str | None], event: kopf.RawEvent) -> None:
        if keys is None or reconciler is None or not namespace:
            return
        about, is_gone = event["object"], event["type"] == "DELETED"
        kind, metadata = about["kind"], about["metadata"]
        for key in {ExperimentKey(namespace, name) for name in names if name}:
            version = "" if is_gone else metadata["resourceVersion"]
            if reconciler.wake(key, kind=kind, name=metadata["name"], version=version):
                keys.add(key)

    @kopf.on.login(registry=handlers)
    def login(**facts: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**facts) or kopf.login_with_kubeconfig(**facts)

    @kopf.on.startup(registry=handlers)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        nonlocal keys, reconciler
        _tune(settings)
        await resources.enter_async_context(serving(metrics.registry, host=_EVERYWHERE, port=metrics_port))
        cluster = await resources.enter_async_context(connect(on_write=metrics.wrote))
        session = await resources.enter_async_context(aiohttp.ClientSession())
        key = await read_key(cluster, operator_settings.key_secret)
        reconciler = Reconciler(
            cluster,
            operator_settings,
            HttpCoordinatorStatus(session),
            key=key,
            seen=lambda key, status: metrics.experiments.saw(key.namespace, key.name, status),
        )
        keys = KeyedQueue(metrics.measured(reconciler.reconcile), num_workers=NUM_WORKERS)
        metrics.watch(keys)
        tasks.append(asyncio.create_task(keys.run()))

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await resources.aclose()

    @kopf.on.event(_GROUP, _VERSION, _PLURAL, registry=handlers)
    async def experiment(namespace: str | None, name: str | None, event: kopf.RawEvent, **_: Any) -> None:
        wake(namespace, [name], event)

    for group, version, plural in _CHILDREN:

        @kopf.on.event(group, version, plural, registry=handlers)
        async def child(namespace: str | None, meta: Mapping[str, Any], event: kopf.RawEvent, **_: Any) -> None:
            # By owner as well as by label: one that was relabelled has to wake whoever it belongs to.
            owners = [owner["name"] for owner in meta.get("ownerReferences", ()) if owner["kind"] == KIND]
            wake(namespace, [meta.get("labels", {}).get(EXPERIMENT_LABEL), *owners], event)

    @kopf.on.probe(id="working", registry=handlers)
    async def working(**_: Any) -> str:
        if any(task.done() for task in tasks):
            raise kopf.PermanentError("the queue has ended")
        return "ok"

    operator_settings = settings
    return handlers


class _NoEssence(kopf.DiffBaseStorage):
    """kopf copies each object of each event to tell what changed in it: we never ask."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def _tune(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    # The API server sends what has our label, and says when it is taken away; not every pod and Secret of the cluster.
    settings.watching.label_selectors[lambda resource: resource.group != _GROUP] = EXPERIMENT_LABEL
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = [0.5, 1, 2, 2, 3, 3, 5, 5, 5, 5]
    settings.persistence.finalizer = f"{MANAGER}.rlsrl.dev/unused"
    settings.persistence.diffbase_storage = _NoEssence()
    settings.scanning.disabled = True
