"""Fetching a coordinator's status document over real HTTP: an invalid answer is None, and never an error."""

from __future__ import annotations

import asyncio
import gzip
import socket

import aiohttp
import pytest

from rlsrl_operator.coordinator_status import MAX_ANSWER_BYTES, HttpCoordinatorStatus

DEADLINE_SECONDS = 20
DOCUMENT = b'{"totals": {"env_steps": 7}}'


def ask(answer: bytes | None) -> tuple[dict[str, object] | None, list[bytes]]:
    """Return the parsed document and the requests. ``answer`` None closes the connection without an answer."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer or b"")
        await writer.drain()
        writer.close()

    async def main() -> dict[str, object] | None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with asyncio.timeout(DEADLINE_SECONDS), server, aiohttp.ClientSession() as session:
            port = server.sockets[0].getsockname()[1]
            return await HttpCoordinatorStatus(session, port=port).fetch("127.0.0.1", "the-token")

    return asyncio.run(main()), requests


def response(body: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_the_request_carries_the_token() -> None:
    document, (request,) = ask(response(DOCUMENT))
    assert document == {"totals": {"env_steps": 7}}
    assert request.startswith(b"GET /status HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer the-token\r\n" in request


NO_ANSWERS = {
    "nothing": None,
    "no HTTP": b"no HTTP\r\n\r\n",
    "a refusal": response(DOCUMENT, status="401 Unauthorized"),
    "not now": response(DOCUMENT, status="503 Service Unavailable"),
    "another type": response(DOCUMENT, content_type="text/html"),
    "half a document": response(b"{"),
    "bytes that are no text": response(b'{"\xff": 1}'),
    "a list": response(b"[1]"),
    "null": response(b"null"),
    "a document cut short": response(DOCUMENT)[:-5],
    "a document that is too long": response(b" " * (MAX_ANSWER_BYTES + 1) + DOCUMENT),
    "a deep document": response(b"[" * 100_000),
    "an encoding": response(DOCUMENT).replace(b"Content-Length", b"Content-Encoding: identity\r\nContent-Length"),
    "a bomb": response(gzip.compress(bytes(100_000_000))).replace(
        b"Content-Length", b"Content-Encoding: gzip\r\nContent-Length"
    ),
}


@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_an_invalid_answer_is_none(answer: bytes | None) -> None:
    document, _ = ask(answer)
    assert document is None


def test_a_redirect_is_not_followed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/"
        answer = response(b"", status="302 Found").replace(b"Content-Type", f"Location: {url}\r\nContent-Type".encode())
        document, requests = ask(answer)
        assert document is None
        assert len(requests) == 1
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def fetched(port: int, answer_seconds: float) -> dict[str, object] | None:
    async def main() -> dict[str, object] | None:
        async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
            source = HttpCoordinatorStatus(session, port=port, answer_seconds=answer_seconds)
            return await source.fetch("127.0.0.1", "token")

    return asyncio.run(main())


def test_a_refused_connection_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert fetched(port, answer_seconds=DEADLINE_SECONDS) is None


def test_a_late_answer_is_none() -> None:
    # The kernel accepts the connection, and no process answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert fetched(silent.getsockname()[1], answer_seconds=0.05) is None
