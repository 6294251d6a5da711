"""Read objects that are not the experiment's, and that no watch of it reports: the Service of its environments' server,
and the experiment from whose weights it starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from kubernetes.aio.client.exceptions import ApiException

from rlsrl.api.spec import API_VERSION, KIND
from rlsrl_operator.cluster import Cluster, message_of
from rlsrl_operator.manifests.servers import EnvironmentService, ServiceName
from rlsrl_operator.manifests.source import SourceExperiment, SourceName

OUTSIDE_SECONDS = 30.0
"""How long what was read of such objects is used."""
_FORBIDDEN = 403

N = TypeVar("N")
"""The name of an object."""
T = TypeVar("T")
"""What is known of it."""


class OutsideReader(Generic[N, T]):
    """Reads objects of one kind at most every ``OUTSIDE_SECONDS``. Only for the event loop's thread."""

    def __init__(self, read_one: Callable[[N], Awaitable[T]]) -> None:
        self._read_one = read_one
        self._known: Mapping[N, T] = {}
        self._due: datetime | None = None

    async def read(self, names: Collection[N], now: datetime) -> Mapping[N, T]:
        """Return what is known of the objects with these names."""
        if set(names) != self._known.keys() or (self._due is not None and now >= self._due):
            self._known = {name: await self._read_one(name) for name in names}
            self._due = now + timedelta(seconds=OUTSIDE_SECONDS)
        return self._known

    async def has_changed(self, now: datetime) -> bool:
        """Return whether an object is not as ``read`` returned it last."""
        before = self._known
        return await self.read(before.keys(), now) != before


ServiceReader = OutsideReader[ServiceName, EnvironmentService]
SourceReader = OutsideReader[SourceName, SourceExperiment]


def service_reader(cluster: Cluster) -> ServiceReader:
    """Return a reader of Services."""

    async def read_one(name: ServiceName) -> EnvironmentService:
        try:
            found = await cluster.get("v1", "Service", name.namespace, name.name)
        except ApiException as error:
            if error.status != _FORBIDDEN:
                raise
            return EnvironmentService(unknown=f"the operator may not read Service {name}: {message_of(error)}")
        if found is None:
            return EnvironmentService(unknown=f"Service {name} does not exist")
        return EnvironmentService.of(found)

    return OutsideReader(read_one)


def source_reader(cluster: Cluster) -> SourceReader:
    """Return a reader of the experiments from which others start."""

    async def read_one(source: SourceName) -> SourceExperiment:
        if (found := await cluster.get(API_VERSION, KIND, source.namespace, source.name)) is not None:
            return SourceExperiment.of(found)
        others = await cluster.list(API_VERSION, KIND, source.namespace, {})
        return SourceExperiment(others=tuple(each["metadata"]["name"] for each in others))

    return OutsideReader(read_one)
