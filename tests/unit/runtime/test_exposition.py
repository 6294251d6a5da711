import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from rlsrl.runtime.exposition import MetricsServer
from rlsrl.runtime.metrics import Metrics

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


def test_guarded_pages_want_the_token() -> None:
    guarded = {"/secret": lambda: ("text/plain", b"gold")}
    with MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, token=TOKEN, guarded=guarded) as server:
        assert get(server.address, "/secret", authorization=f"Bearer {TOKEN}") == ("text/plain", "gold")
        for wrong in ("", TOKEN, "Bearer", "Bearer the-toke", f"Bearer {TOKEN}s", "Bearer \xe4"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                get(server.address, "/secret", authorization=wrong)
            with raised.value as answer:
                assert answer.code == 401
                assert b"gold" not in answer.read()


def test_a_client_that_hangs_up_harms_nobody() -> None:
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
        with pytest.raises(OSError, match="in use"):
            MetricsServer(CollectorRegistry(), host=address[0], port=address[1], token=TOKEN)
