"""Fetch a coordinator's status document. No answer is no error: the experiment's status keeps its last numbers.

A coordinator's pod may run a user's code, so its answer is not trusted: one that is too long, compressed or a redirect
counts as no answer.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import aiohttp
from typing_extensions import override

from rlsrl.api.placement import HTTP_PORT, STATUS_PAGE

ANSWER_SECONDS = 3.0
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""More than the status document of 4096 actors has."""


class CoordinatorStatus(Protocol):
    """A source of coordinators' status documents."""

    async def fetch(self, host: str, token: str) -> dict[str, Any] | None:
        """Return the coordinator's ``/status``, or None without a valid answer within ``ANSWER_SECONDS``."""


class HttpCoordinatorStatus(CoordinatorStatus):
    """Fetches status documents over HTTP."""

    def __init__(
        self, session: aiohttp.ClientSession, *, port: int = HTTP_PORT, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        """Use an open session, which the caller closes. ``answer_seconds``: how long to wait for the whole answer."""
        self._session = session
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=answer_seconds)

    @override
    async def fetch(self, host: str, token: str) -> dict[str, Any] | None:
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        try:
            async with self._session.get(
                f"http://{host}:{self._port}{STATUS_PAGE}",
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                if answer.status != 200 or answer.content_type != "application/json":
                    return None
                if "Content-Encoding" in answer.headers:
                    return None
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        return None
            document = json.loads(body)
        except (TimeoutError, aiohttp.ClientError, ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None
