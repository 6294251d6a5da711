"""Asks coordinators for the numbers of their runs. Whoever does not answer has none to show, and that is all.

A coordinator's pod runs what its user brought, and its answer is not to be trusted: one that is too long, packed or
leads elsewhere is none.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import aiohttp

from rlsrl.api.placement import HTTP_PORT

ANSWER_SECONDS = 3.0
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""More than the status of 4096 actors has."""


class CoordinatorStatus(Protocol):
    """Where the numbers of a run come from."""

    async def ask(self, host: str, token: str) -> dict[str, Any] | None:
        """The coordinator's ``/status``; None if it does not answer."""


class HttpCoordinatorStatus:
    """Asks over HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        """Use a session."""
        self._session = session

    async def ask(self, host: str, token: str) -> dict[str, Any] | None:
        """See ``CoordinatorStatus``."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        try:
            async with self._session.get(
                f"http://{host}:{HTTP_PORT}/status", headers=headers, timeout=timeout, allow_redirects=False
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
            page = json.loads(body)
        except (TimeoutError, aiohttp.ClientError, ValueError, RecursionError):
            return None
        return page if isinstance(page, dict) else None
