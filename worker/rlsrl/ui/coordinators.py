"""Reads what coordinators show over HTTP, with a token that opens nothing else.

A coordinator's pod may run a user's code, so its answers are not trusted: redirects, and answers that are too long,
compressed or invalid JSON, are not used.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rlsrl.api.placement import HTTP_PORT
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.tokens import viewing_token
from rlsrl.ui.runs import NotThere, Row

ANSWER_SECONDS = 5.0
"""How long to wait for a whole answer."""
MAX_STATUS_BYTES = 8 * 1024 * 1024
"""More than the status document of 4096 actors has."""
MAX_BYTES = 2 * 1024 * 1024
"""More than any other answer has."""
_MAX_DIGITS = 18


class CoordinatorAway(OSError):
    """A coordinator does not answer, or its answer cannot be used. The text says why."""


class Coordinators:
    """Asks the coordinators of experiments. Only for the event loop's thread."""

    def __init__(self, session: aiohttp.ClientSession, *, viewing_key: str, port: int = HTTP_PORT) -> None:
        """Use an open session without cookies, which the caller closes. Tokens derive from the key."""
        self._session = session
        self._key = viewing_key
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        self._parsing = asyncio.Semaphore(1)
        """A long answer takes much memory while it is parsed."""

    async def ask(self, experiment: Row, path: str, *, max_bytes: int = MAX_BYTES, **query: str) -> Any:
        """Return the JSON value of a page of the experiment's coordinator. Numbers in it are finite, others are None.

        Raises:
            NotThere: the coordinator says that there is no such thing.
            CoordinatorAway: there is no answer within ``ANSWER_SECONDS``, or it cannot be used.
        """
        metadata = experiment["metadata"]
        host = f"{metadata['name']}-{COORDINATOR}.{metadata['namespace']}.svc"
        headers = {
            "Authorization": f"Bearer {viewing_token(self._key, metadata['uid'])}",
            "Accept-Encoding": "identity",
        }
        try:
            async with self._session.get(
                f"http://{host}:{self._port}{path}",
                params=query,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                body = await _body(answer, max_bytes)
        except TimeoutError as error:
            raise CoordinatorAway(
                "the coordinator does not answer. If an operator without this page began the experiment, a "
                "NetworkPolicy may keep the page out: `kubectl rlsrl top` shows it"
            ) from error
        except aiohttp.ClientError as error:
            raise CoordinatorAway(f"the coordinator does not answer: {error}") from error
        async with self._parsing:
            return await asyncio.to_thread(_parsed, body)


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session for coordinators. It keeps no cookies: one coordinator's would go to all."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield session


async def _body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    if answer.status == 401:
        raise CoordinatorAway(
            "the coordinator refuses: an operator without this page began the experiment; `kubectl rlsrl top` shows it"
        )
    if answer.status == 404:
        raise NotThere("the coordinator has no such log or page")
    if answer.status != 200 or answer.content_type != "application/json" or "Content-Encoding" in answer.headers:
        raise CoordinatorAway(f"the coordinator's answer cannot be used: {answer.status} {answer.content_type}")
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise CoordinatorAway(f"the coordinator's answer is longer than {max_bytes:,} bytes")
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_int=_integer, parse_float=_finite, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise CoordinatorAway("the coordinator's answer is invalid JSON") from error


def _integer(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
