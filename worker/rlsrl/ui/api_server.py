"""Reads experiments from a cluster's API server. An answer serves all who ask within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from typing_extensions import override

from rlsrl.api.crd import PLURAL
from rlsrl.api.spec import API_VERSION
from rlsrl.ui.runs import Row

T = TypeVar("T")

CALL_SECONDS = 10.0
"""Deadline of one call."""
RECENT_SECONDS = 1.0
"""How long an answer serves."""
_GROUP, _, _VERSION = API_VERSION.partition("/")
_NOT_FOUND = 404


class ExperimentSource(Protocol):
    """The experiments of a cluster, as its API server has them."""

    async def all(self) -> Sequence[Row]:
        """Return all experiments.

        Raises:
            OSError: the API server does not answer, or refuses.
        """

    async def one(self, namespace: str, name: str) -> Row | None:
        """Return the experiment of that name, or None; raises as ``all``."""


class ApiServerExperiments(ExperimentSource):
    """Asks the API server of the cluster that this process runs in, or that KUBECONFIG names."""

    def __init__(self, api: client.CustomObjectsApi, *, namespaces: Sequence[str]) -> None:
        """Read these namespaces; without any, the whole cluster."""
        self._api = api
        self._namespaces = tuple(namespaces)
        self._answers: dict[tuple[str, ...], tuple[float, asyncio.Task[Any]]] = {}
        """By what was asked: when the answer is too old, and the answer."""

    @override
    async def all(self) -> Sequence[Row]:
        if not self._namespaces:
            return await self._recent((), lambda: self._list(self._api.list_cluster_custom_object))
        lists = await asyncio.gather(*map(self._in_namespace, self._namespaces))
        return [each for found in lists for each in found]

    @override
    async def one(self, namespace: str, name: str) -> Row | None:
        if self._namespaces and namespace not in self._namespaces:
            return None

        async def get() -> Row | None:
            call = self._api.get_namespaced_custom_object
            try:
                found: Row = await self._call(call, namespace=namespace, name=name)
            except ApiException as error:
                if error.status == _NOT_FOUND:
                    return None
                raise
            return found

        return await self._recent((namespace, name), get)

    async def _in_namespace(self, namespace: str) -> list[Row]:
        listing = self._api.list_namespaced_custom_object
        try:
            return await self._recent((namespace,), lambda: self._list(listing, namespace=namespace))
        except OSError as error:
            raise OSError(f"namespace {namespace}: {error}") from error

    async def _list(self, listing: Callable[..., Awaitable[Any]], **place: str) -> list[Row]:
        # Version 0: from the API server's memory, which may be some milliseconds old.
        answer = await self._call(listing, resource_version="0", **place)
        return list(answer["items"])

    async def _call(self, call: Callable[..., Awaitable[Any]], **arguments: str) -> Any:
        return await call(_GROUP, _VERSION, plural=PLURAL, _request_timeout=CALL_SECONDS, **arguments)

    async def _recent(self, key: tuple[str, ...], ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the last answer if it is recent, else ask.

        Raises:
            OSError: the API server does not answer, or refuses.
        """
        now = time.monotonic()
        self._answers = {each: kept for each, kept in self._answers.items() if now < kept[0]}
        if key not in self._answers:
            self._answers[key] = now + RECENT_SECONDS, asyncio.create_task(ask())
        try:
            # Others may wait for the same answer when one of them goes away.
            answer: T = await asyncio.shield(self._answers[key][1])
        except ApiException as error:
            raise OSError(f"the API server refuses: {error.status} {error.reason}") from error
        except (TimeoutError, aiohttp.ClientError) as error:
            raise OSError(f"the API server does not answer: {error or type(error).__name__}") from error
        return answer


@asynccontextmanager
async def connect(namespaces: Sequence[str]) -> AsyncIterator[ExperimentSource]:
    """Connect to the API server; see ``ApiServerExperiments``."""
    await config.load_config()  # type: ignore[no-untyped-call]
    settings = client.Configuration.get_default_copy()
    settings.client_session_kwargs = {"trust_env": False}
    async with client.ApiClient(settings) as api:
        yield ApiServerExperiments(client.CustomObjectsApi(api), namespaces=namespaces)
