import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rlsrl.rpc.settings import AddressTaken
from rlsrl.runtime.exposition import MAX_CONNECTIONS, MetricsServer
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.leaks import open_descriptors
from rlsrl.testing.waiting import until

TIMEOUT = 10
TOKEN = "the-token"


def get(
    address: tuple[str, int], path: str = "/metrics", accept: str = "*/*", authorization: str = ""
) -> tuple[str, str]:
    host, port = address
    headers = {"Accept": accept, "Authorization": authorization}
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def status_of(address: tuple[str, int], path: str, authorization: str = "") -> int:
    """Return the status of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(address, path, authorization=authorization)
    with raised.value as answer:
        return answer.code


def test_metrics_as_prometheus_text() -> None:
    metrics = Metrics(CollectorRegistry())
    with MetricsServer(metrics.registry, host="127.0.0.1", port=0, token=TOKEN) as server:
        assert server.address[0] == "127.0.0.1"
        assert server.address[1] > 0
        for expected in (1.0, 2.0):
            metrics.rollouts.inc()
            content_type, text = get(server.address)
            assert content_type.startswith("text/plain")
            assert f"rlsrl_rollouts_total {expected}\n" in text
        content_type, text = get(server.address, "/metrics?name=all", accept="application/openmetrics-text")
        assert content_type.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")


def test_nothing_else_is_served() -> None:
    with MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN) as server:
        for path in ("/", "/metrics/../etc", "/status"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                get(server.address, path)
            with raised.value as answer:
                assert answer.code == 404


def test_guarded_pages_require_the_token() -> None:
    guarded = {"/secret": lambda query: ("text/plain", b"gold")}
    with MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN, guarded=guarded) as server:
        assert get(server.address, "/secret", authorization=f"Bearer {TOKEN}") == ("text/plain", "gold")
        for wrong in ("", TOKEN, "Bearer", "Bearer the-toke", f"Bearer {TOKEN}s", "Bearer \xe4"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                get(server.address, "/secret", authorization=wrong)
            with raised.value as answer:
                assert answer.code == 401
                assert b"gold" not in answer.read()


def test_the_viewing_token_opens_guarded_pages_for_a_query() -> None:
    asked: list[Mapping[str, str]] = []

    def page(query: Mapping[str, str]) -> tuple[str, bytes]:
        asked.append(query)
        return "text/plain", b"gold"

    guarded, own = {"/secret": page}, {"host": "127.0.0.1", "port": 0, "token": TOKEN}
    with MetricsServer(CollectorRegistry(), **own, viewing_token="look", guarded=guarded) as server:
        address = server.address
        assert get(address, "/secret?after=7&file=a%20b&after=8", authorization="Bearer look")[1] == "gold"
        assert get(address, "/secret", authorization=f"Bearer {TOKEN}")[1] == "gold"
        assert asked == [{"after": "8", "file": "a b"}, {}]
        assert status_of(address, "/secret?token=look") == 401
    with MetricsServer(CollectorRegistry(), **own, guarded=guarded) as server:
        assert status_of(server.address, "/secret", authorization="Bearer ") == 401, "no viewing token is no open door"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("after: 'x'; allowed: a number"), 400, "after: 'x'; allowed: a number"),
        (LookupError("name: 'x'; allowed: actor-0"), 404, "name: 'x'; allowed: actor-0"),
        (OSError("the disk is gone"), 503, "the page cannot be read: the disk is gone"),
        (TimeoutError(), 503, "the process is not ready to answer"),
    ],
)
def test_a_guarded_page_says_why_it_does_not_answer(error: Exception, status: int, text: str) -> None:
    def fail(_: Mapping[str, str]) -> tuple[str, bytes]:
        raise error

    guarded = {"/secret": fail}
    with (
        MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN, guarded=guarded) as server,
        pytest.raises(urllib.error.HTTPError) as raised,
    ):
        get(server.address, "/secret", authorization=f"Bearer {TOKEN}")
    with raised.value as answer:
        assert answer.code == status
        assert text in answer.read().decode()


def test_a_client_that_disconnects_does_no_harm() -> None:
    with MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN) as server:
        for request in (b"", b"GET /met", b"nonsense\r\n\r\n"):
            with socket.create_connection(server.address, TIMEOUT) as client:
                client.sendall(request)
        assert get(server.address)[1] is not None


def test_close_frees_the_address_and_ends_the_named_thread() -> None:
    server = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN)
    address = server.address
    assert "metrics-server" in [thread.name for thread in threading.enumerate()]
    server.close()
    server.close()
    assert "metrics-server" not in [thread.name for thread in threading.enumerate()]
    with MetricsServer(CollectorRegistry(), host=address[0], port=address[1], token=TOKEN) as again:
        assert again.address == address
        with pytest.raises(AddressTaken, match=rf"cannot listen on 127\.0\.0\.1:{address[1]}: another process does"):
            MetricsServer(CollectorRegistry(), host=address[0], port=address[1], token=TOKEN)


@pytest.fixture
def refused() -> Counter[str]:
    return Counter()


def serving(refused: Counter[str], **options: Any) -> MetricsServer:
    """Return a server that counts refusals in ``refused``."""
    return MetricsServer(
        CollectorRegistry(),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        on_refused=lambda kind: refused.update([kind]),
        **options,
    )


@pytest.fixture
def server(refused: Counter[str]) -> Iterator[MetricsServer]:
    with serving(refused, guarded={"/secret": lambda query: ("text/plain", b"gold")}) as server:
        yield server


def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """Send a request; return the whole response."""
    with socket.create_connection(address, TIMEOUT) as client, suppress(ConnectionError):
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))
    return b""


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics SMTP/1.1\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n",
    ],
    ids=["words", "no protocol", "another protocol", "post", "headers", "bytes", "endless", "http/2", "tls"],
)
def test_an_invalid_request_is_refused_and_counted(
    server: MetricsServer, refused: Counter[str], request_: bytes
) -> None:
    assert exchange(server.address, request_)[:12] in (b"HTTP/1.1 400", b"")
    assert refused == {"malformed": 1}
    assert get(server.address)[1] is not None


def test_a_wrong_token_is_counted(server: MetricsServer, refused: Counter[str]) -> None:
    assert exchange(server.address, b"GET /secret HTTP/1.1\r\nAuthorization: Bearer x\r\n\r\n")[9:12] == b"401"
    assert refused == {"token": 1}


def test_a_slow_client_is_disconnected_and_delays_no_other(refused: Counter[str]) -> None:
    with (
        serving(refused, request_seconds=0.5) as server,
        socket.create_connection(server.address, TIMEOUT) as slow,
        suppress(ConnectionError),
    ):
        while True:  # single bytes must not extend the deadline of the request
            slow.sendall(b"G")
            assert get(server.address)[1] is not None
            slow.setblocking(False)
            with suppress(BlockingIOError):
                if not slow.recv(1):
                    break
            slow.setblocking(True)
    until(lambda: refused["slow"] == 1, "the refusal is counted")


def test_a_slow_page_delays_no_other_request() -> None:
    asked, released = threading.Event(), threading.Event()

    def page() -> tuple[str, bytes]:
        asked.set()
        assert released.wait(TIMEOUT)
        return "text/plain", b"late"

    with (
        MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN, pages={"/late": page}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        late = pool.submit(get, server.address, "/late")
        assert asked.wait(TIMEOUT)
        assert get(server.address)[1] is not None
        released.set()
        assert late.result(TIMEOUT) == ("text/plain", "late")


def test_silent_connections_are_closed_to_serve_requests(server: MetricsServer, refused: Counter[str]) -> None:
    num_silent = MAX_CONNECTIONS + 100
    before = open_descriptors()
    with ExitStack() as stack:
        for _ in range(num_silent):
            stack.enter_context(closing(socket.create_connection(server.address, TIMEOUT)))
        assert get(server.address)[1] is not None
        assert refused["crowded"] >= 100
        # This process holds both ends of the connections.
        until(lambda: open_descriptors() - before - num_silent <= MAX_CONNECTIONS, "the server's ends are closed")


def test_an_unread_response_is_abandoned(refused: Counter[str]) -> None:
    pages = {"/large": lambda: ("text/plain", bytes(64 * 1024 * 1024))}
    with (
        serving(refused, pages=pages, request_seconds=0.5) as server,
        socket.create_connection(server.address, TIMEOUT) as client,
    ):
        client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        until(lambda: refused["slow"] == 1, "the server abandons the response")
        assert get(server.address)[1] is not None
