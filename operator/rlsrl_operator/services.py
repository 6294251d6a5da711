"""Read the Services of environments' servers, which no watch reports: they have no label of an experiment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from kubernetes.aio.client.exceptions import ApiException

from rlsrl_operator.cluster import Cluster, message_of
from rlsrl_operator.manifests.servers import EnvironmentService, ServiceName

SERVICE_SECONDS = 30.0
"""How long what was read of Services is used."""
_FORBIDDEN = 403


class ServiceReader:
    """Reads the Services of one experiment, at most every ``SERVICE_SECONDS``. Only for the event loop's thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: Mapping[ServiceName, EnvironmentService] = {}
        self._due: datetime | None = None

    async def read(self, names: Collection[ServiceName], now: datetime) -> Mapping[ServiceName, EnvironmentService]:
        """Return what is known of the Services with these names."""
        if set(names) != self._known.keys() or (self._due is not None and now >= self._due):
            self._known = {name: await self._get(name) for name in names}
            self._due = now + timedelta(seconds=SERVICE_SECONDS)
        return self._known

    async def has_changed(self, now: datetime) -> bool:
        """Return whether a Service is not as ``read`` returned it last."""
        before = self._known
        return await self.read(before.keys(), now) != before

    async def _get(self, name: ServiceName) -> EnvironmentService:
        try:
            found = await self._cluster.get("v1", "Service", name.namespace, name.name)
        except ApiException as error:
            if error.status != _FORBIDDEN:
                raise
            return EnvironmentService(unknown=f"the operator may not read Service {name}: {message_of(error)}")
        if found is None:
            return EnvironmentService(unknown=f"Service {name} does not exist")
        return EnvironmentService.of(found)
