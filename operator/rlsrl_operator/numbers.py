"""Asks coordinators for the numbers of their runs. Whoever does not answer has none to show, and that is all."""

from __future__ import annotations

from typing import Any, Protocol

import aiohttp

from rlsrl.api.placement import HTTP_PORT

ANSWER_SECONDS = 3.0


class Numbers(Protocol):
    """Where the numbers of a run come from."""

    async def ask(self, host: str, token: str) -> dict[str, Any] | None:
        """The coordinator's ``/status``; None if it does not answer."""


class HttpNumbers:
    """Asks over HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        """Use a session."""
        self._session = session

    async def ask(self, host: str, token: str) -> dict[str, Any] | None:
        """See ``Numbers``."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with self._session.get(
                f"http://{host}:{HTTP_PORT}/status", headers=headers, timeout=timeout
            ) as answer:
                if answer.status != 200:
                    return None
                page = await answer.json()
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return None
        return page if isinstance(page, dict) else None
