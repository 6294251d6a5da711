"""Connect kopf to the reconciler: kopf watches, and each event wakes the experiment that it is about."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import aiohttp
import kopf
from prometheus_client import CollectorRegistry
from typing_extensions import override

from rlsrl.api.pods import EXPERIMENT_LABEL
from rlsrl.api.spec import KIND
from rlsrl_operator.api_server import with_api_server
from rlsrl_operator.cluster import connect
from rlsrl_operator.coordinator_status import HttpCoordinatorStatus
from rlsrl_operator.keyed_queue import KeyedQueue
from rlsrl_operator.manifests.context import MANAGER
from rlsrl_operator.metrics import OperatorMetrics, serving
from rlsrl_operator.operator_key import publish_viewing_key, read_key
from rlsrl_operator.reconcile import ExperimentKey, Reconciler
from rlsrl_operator.settings import OperatorSettings

NUM_WORKERS = 16
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - a pod has an address of its own, and a NetworkPolicy restricts access
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


class _Operator:
    """One operator process: the handlers that kopf calls, and what they share from startup to cleanup."""

    def __init__(self, settings: OperatorSettings, metrics_port: int) -> None:
        self._settings = settings
        self._metrics_port = metrics_port
        self._metrics = OperatorMetrics(CollectorRegistry())
        self._resources = contextlib.AsyncExitStack()
        self._keys: KeyedQueue[ExperimentKey] | None = None
        self._reconciler: Reconciler | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        """Serve metrics, connect to the API server and start the queue."""
        _tune(settings)
        enter, metrics = self._resources.enter_async_context, self._metrics
        await enter(serving(metrics.registry, host=_EVERYWHERE, port=self._metrics_port))
        cluster = await enter(connect(on_write=metrics.count_write))
        # One coordinator's cookies would go to all.
        session = await enter(aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()))
        key = await read_key(cluster, self._settings.key_secret)
        if (place := self._settings.viewing_key_secret) is not None:
            await publish_viewing_key(cluster, place, key)
        self._reconciler = Reconciler(
            cluster,
            await with_api_server(self._settings, cluster),
            HttpCoordinatorStatus(session),
            key=key,
            on_status=lambda key, status: metrics.experiments.set_status(key.namespace, key.name, status),
        )
        self._keys = KeyedQueue(metrics.measured(self._reconciler.reconcile), num_workers=NUM_WORKERS)
        metrics.watch(self._keys)
        self._task = asyncio.create_task(self._keys.run())

    async def stop(self, **_: Any) -> None:
        """Cancel the passes that are under way and close every connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._resources.aclose()

    async def changed(self, event: kopf.RawEvent, **_: Any) -> None:
        """Handle a watch event of an experiment, or of an object with the experiment label."""
        if self._keys is None or self._reconciler is None:
            return
        kind, metadata = event["object"]["kind"], event["object"]["metadata"]
        version = "" if event["type"] == "DELETED" else metadata["resourceVersion"]
        for name in {metadata["name"]} if kind == KIND else _experiments_of(metadata):
            key = ExperimentKey(metadata["namespace"], name)
            if self._reconciler.wake(key, kind=kind, name=metadata["name"], version=version):
                self._keys.add(key)

    async def working(self, **_: Any) -> str:
        """Fail the liveness probe once the queue has ended."""
        if self._task is not None and self._task.done():
            raise kopf.PermanentError("the queue has ended")
        return "ok"


def registry(settings: OperatorSettings, *, metrics_port: int) -> kopf.OperatorRegistry:
    """Return the handlers of one operator, which serves its metrics at that port."""
    handlers = kopf.OperatorRegistry()
    operator = _Operator(settings, metrics_port)
    kopf.on.login(registry=handlers)(_login)
    kopf.on.startup(registry=handlers)(operator.start)
    kopf.on.cleanup(registry=handlers)(operator.stop)
    for group, version, plural in ((_GROUP, _VERSION, _PLURAL), *_CHILDREN):
        kopf.on.event(group, version, plural, registry=handlers)(operator.changed)
    kopf.on.probe(id="working", registry=handlers)(operator.working)
    return handlers


def _experiments_of(metadata: Mapping[str, Any]) -> set[str]:
    """Return the experiments of an object: by its label, and by its owners, since somebody may change the label."""
    owners = {owner["name"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == KIND}
    label = metadata.get("labels", {}).get(EXPERIMENT_LABEL)
    return owners | ({label} if label else set())


def _login(**facts: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**facts) or kopf.login_with_kubeconfig(**facts)


class _NoEssence(kopf.DiffBaseStorage):
    """Keep kopf from copying the object of each event to compute a difference, which the operator never uses."""

    @override
    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    @override
    def fetch(self, **_: Any) -> None:
        return None

    @override
    def store(self, **_: Any) -> None:
        return None


def _tune(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    # The API server then sends only labelled objects, and reports the removal of the label as a deletion.
    settings.watching.label_selectors[lambda resource: resource.group != _GROUP] = EXPERIMENT_LABEL
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = [0.5, 1, 2, 2, 3, 3, 5, 5, 5, 5]
    settings.persistence.finalizer = f"{MANAGER}.rlsrl.dev/unused"
    settings.persistence.diffbase_storage = _NoEssence()
    settings.scanning.disabled = True
