"""The health page fails for a rank that accepts a connection and does not answer."""

from __future__ import annotations

import secrets
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from rlsrl.api.placement import HEALTH_PORT, HTTP_PORT
from rlsrl.runtime.addresses import HOST_VARIABLE
from rlsrl.runtime.exposition import HEALTH_PAGE, MetricsServer, healthy
from rlsrl.workers.gang_health import serve_health


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> str:
    host = f"127.{secrets.randbelow(250) + 2}.{secrets.randbelow(250) + 1}.9"
    monkeypatch.setenv(HOST_VARIABLE, host)
    return host


def well(host: str, rank: int, resources: ExitStack) -> None:
    pages = {HEALTH_PAGE: healthy}
    port = HTTP_PORT + rank
    resources.enter_context(MetricsServer(CollectorRegistry(), host=host, port=port, token="", pages=pages))


def silent(host: str, rank: int, resources: ExitStack) -> None:
    """Act as a stopped process: its kernel accepts connections."""
    resources.enter_context(socket.create_server((host, HTTP_PORT + rank)))


def absent(host: str, rank: int, resources: ExitStack) -> None:
    """Act as a rank that has not started or has ended."""


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([well, well], 200),
        ([absent, absent], 200),
        ([well, absent], 200),
        ([well, silent], 503),
        ([silent, well], 503),
        ([absent, silent], 503),
    ],
)
def test_the_health_page_finds_silent_ranks(host: str, resources: ExitStack, ranks: list, code: int) -> None:
    for rank, begin in enumerate(ranks):
        begin(host, rank, resources)
    resources.enter_context(serve_health(HEALTH_PORT, ranks=len(ranks)))
    assert asked(host) == code


def asked(host: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{host}:{HEALTH_PORT}{HEALTH_PAGE}", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
