"""Connections to one HTTP server: kept, replaced when the server closes them, and errors in words."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rlsrl.envs.http.connections import Connections, RequestFailed, Response
from rlsrl.rpc.tls import CERTIFICATE, KEY
from rlsrl.testing.certificates import Authority, MountedSecret
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
LAST_ANSWER = ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


class Server:
    """Answers each request by a function: bytes to send, or None to send nothing. Then it may close the connection."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        family: socket.AddressFamily = socket.AF_INET,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answer: Callable[[bytes], bytes | None] = lambda _: ANSWER
        self.closes = False
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_closed = 0
        self.num_reads = 0
        """Pieces in which requests arrived."""
        self._tls = tls
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with (
            suppress(ssl.SSLError),
            accepted if self._tls is None else self._tls.wrap_socket(accepted, server_side=True) as connection,
        ):
            while head := self._read(connection):
                self.requests.append(head)
                if (answer := self.answer(head)) is not None:
                    connection.sendall(answer)
                if self.closes:
                    break
        self.num_closed += 1

    def _read(self, connection: socket.socket) -> bytes:
        """Return a request whose body is empty or one byte, or nothing at the end."""
        read = b""
        while b"\r\n\r\n" not in read or (b"Content-Length: 1" in read and read.endswith(b"\r\n\r\n")):
            if not (part := connection.recv(1000)):
                return b""
            read += part
            self.num_reads += 1
        return read


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def ask(connections: Connections, path: str = "/a", content: bytes | None = b"x", seconds: float = 30.0) -> Response:
    return connections.request("POST", path, content, connect_seconds=3600.0, seconds=seconds)


def connections_to(server: Server) -> Connections:
    return Connections(f"http://127.0.0.1:{server.port}/below/", {"Content-Type": "application/json"})


def test_requests_one_after_the_other_share_a_connection(server: Server) -> None:
    connections = connections_to(server)
    for path in ("/a", "/b", "/c"):
        assert ask(connections, path) == Response(200, b"hi")
    assert server.num_connections == 1
    assert [each.split(b" ")[:2] for each in server.requests] == [
        [b"POST", b"/below" + each] for each in (b"/a", b"/b", b"/c")
    ]
    assert all(b"Content-Type: application/json\r\n" in each and each.endswith(b"x") for each in server.requests)


def test_requests_at_the_same_time_have_a_connection_each_and_keep_them(server: Server) -> None:
    connections, number = connections_to(server), 8
    together = threading.Barrier(number, timeout=DEADLINE_SECONDS)

    def answer(_: bytes) -> bytes:
        together.wait()
        return ANSWER

    server.answer = answer
    with ThreadPoolExecutor(number) as pool:
        for _ in range(3):
            assert [*pool.map(lambda _: ask(connections).status, range(number))] == [200] * number
    assert server.num_connections == number


@pytest.mark.parametrize("says_so", [True, False])
def test_a_connection_that_the_server_has_closed_is_replaced(server: Server, says_so: bool) -> None:
    connections = connections_to(server)
    server.closes = True
    server.answer = lambda _: LAST_ANSWER if says_so else ANSWER
    for number in range(1, 4):
        assert ask(connections) == Response(200, b"hi")
        until(lambda number=number: server.num_closed == number, "the server closes the connection")  # type: ignore[misc]
    assert len(server.requests) == 3, "none was sent twice"


@pytest.mark.parametrize(
    ("answer", "closes", "text"),
    [
        (None, False, "timed out"),
        (None, True, "the server closed the connection without an answer"),
        (b"hello\r\n\r\n", True, "Expected HTTP/"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", False, "another protocol"),
        (ANSWER[:-1], True, "the server closed the connection within its answer"),
        (ANSWER[:20], True, "the server closed the connection within its answer"),
    ],
)
def test_a_request_without_a_whole_answer_fails_in_words(
    server: Server, answer: bytes | None, closes: bool, text: str
) -> None:
    connections = connections_to(server)
    server.answer, server.closes = lambda _: answer, closes
    with pytest.raises(RequestFailed, match=text):
        ask(connections, seconds=0.1)
    server.answer, server.closes = lambda _: ANSWER, False
    assert ask(connections) == Response(200, b"hi")
    assert server.num_connections == 2, "the connection of the failed request is not used again"


@pytest.mark.parametrize(
    ("answer", "closes"),
    [
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", False, id="chunks"
        ),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ANSWER, False, id="interim"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nhi", True, id="until the end"),
        pytest.param(ANSWER.replace(b"/1.1", b"/1.0"), True, id="HTTP/1.0"),
        pytest.param(ANSWER + ANSWER.replace(b"200", b"500"), True, id="more than asked for"),
    ],
)
def test_answers_of_each_form_are_understood(server: Server, answer: bytes, closes: bool) -> None:
    connections = connections_to(server)
    server.answer, server.closes = lambda _: answer, closes
    for _ in range(2):
        assert ask(connections) == Response(200, b"hi")
    assert server.num_connections == (2 if closes else 1)


@pytest.mark.parametrize("more", [ANSWER.replace(b"200", b"500"), b"HTTP/1.1 50"])
def test_a_connection_with_more_than_was_asked_for_is_not_used_again(server: Server, more: bytes) -> None:
    connections = connections_to(server)
    server.answer = lambda _: ANSWER + more
    for number in (1, 2):
        assert ask(connections) == Response(200, b"hi")
        assert server.num_connections == number


def test_a_request_arrives_in_one_piece(server: Server) -> None:
    ask(connections_to(server))
    assert server.num_reads == 1


def test_no_server_and_no_such_host_fail_in_words(server: Server) -> None:
    server.close()
    with pytest.raises(RequestFailed, match="Connection refused"):
        ask(connections_to(server))
    with pytest.raises(RequestFailed, match=r"not known|resolution|No address"):
        ask(Connections("http://no-such-host.invalid:80", {}))


def test_an_ipv6_address_is_bare_to_connect_and_in_brackets_in_the_header() -> None:
    with closing(Server("::1", socket.AF_INET6)) as server:
        assert ask(Connections(f"http://[::1]:{server.port}", {})) == Response(200, b"hi")
        assert f"Host: [::1]:{server.port}\r\n".encode() in server.requests[0]


@pytest.mark.parametrize("is_trusted", [True, False])
def test_https_trusts_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    authority, other = Authority.new(tmp_path), Authority.new(tmp_path)
    folder = MountedSecret(tmp_path / "server", authority.issue("localhost")).folder
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    monkeypatch.setenv("SSL_CERT_FILE", str((authority if is_trusted else other).folder / CERTIFICATE))
    with closing(Server(tls=tls)) as server:
        connections = Connections(f"https://localhost:{server.port}", {})
        if is_trusted:
            assert [ask(connections) for _ in range(3)] == [Response(200, b"hi")] * 3
            assert server.num_connections == 1
            server.answer = lambda _: None
            with pytest.raises(RequestFailed, match="timed out"):
                ask(connections, seconds=0.1)
            return
        with pytest.raises(RequestFailed, match="certificate verify failed"):
            ask(connections)
        assert not server.requests
