"""Reads what coordinators show over HTTP, with a token that opens nothing else.

A coordinator's pod may run a user's code, so an answer is not trusted: one that is too long, compressed, a redirect or
no JSON counts as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlsrl.api.placement import HTTP_PORT
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.tokens import viewing_token
from rlsrl.ui.runs import NotThere, Row

ANSWER_SECONDS = 5.0
"""How long to wait for a whole answer."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""More than the status document of 4096 actors has, and more than any part of a learning curve."""


class CoordinatorAway(OSError):
    """A coordinator does not answer, or not as it should. The text says who and why."""


class Coordinators:
    """Asks the coordinators of experiments."""

    def __init__(self, session: aiohttp.ClientSession, *, viewing_key: str, port: int = HTTP_PORT) -> None:
        """Use an open session, which the caller closes. Tokens derive from the key."""
        self._session = session
        self._key = viewing_key
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)

    async def ask(self, experiment: Row, path: str, **query: str) -> Any:
        """Return the JSON value of a page of the experiment's coordinator.

        Raises:
            NotThere: the page says that there is no such thing.
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
                return await _content(answer)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise CoordinatorAway(f"the coordinator does not answer: {error or type(error).__name__}") from error


async def _content(answer: aiohttp.ClientResponse) -> Any:
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
        if len(body) > MAX_ANSWER_BYTES:
            raise CoordinatorAway(f"the coordinator's answer is longer than {MAX_ANSWER_BYTES:,} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CoordinatorAway("the coordinator's answer is no JSON") from error


def mapping_in(answer: Any) -> Mapping[str, Any]:
    """Return an answer that is an object.

    Raises:
        CoordinatorAway: it is none.
    """
    if not isinstance(answer, Mapping):
        raise CoordinatorAway("the coordinator's answer has another form")
    return answer
