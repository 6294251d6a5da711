"""A DNS query that is lost is soon asked over another path, not for 13 s over the same one, as gRPC does by default.

While a DNS pod moves away from a drained node, a node's connection tracking may still lead some ports to the old pod.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from rlsrl.rpc.reconnect import ReconnectingCall

DEADLINE_SECONDS = 60.0
_HEADER_BYTES = 12


class LossyDns:
    """A DNS server that has 127.0.0.1 for every name. It answers nothing that comes from the first port that asks."""

    def __init__(self) -> None:
        self.num_lost = 0
        self._lost_port: int | None = None
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="dns")

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._socket.getsockname())

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._socket.sendto(b"", self._socket.getsockname())  # ends the thread
            self._thread.join()
            self._socket.close()

    def _serve(self) -> None:
        while (received := self._socket.recvfrom(4096))[0]:
            query, asker = received
            self._lost_port = self._lost_port or asker[1]
            if asker[1] == self._lost_port:
                self.num_lost += 1
            else:
                self._socket.sendto(answer(query), asker)


def answer(query: bytes) -> bytes:
    """Return the answer to a query of one name (RFC 1035): 127.0.0.1 for an A record, nothing for another."""
    end = query.index(b"\0", _HEADER_BYTES) + 5  # the name, its type and its class
    question = query[_HEADER_BYTES:end]
    is_address = question[-4:-2] == b"\0\x01"
    header = query[:2] + b"\x81\x80" + struct.pack("!4H", 1, is_address, 0, 0)
    record = b"\xc0\x0c" + struct.pack("!2HIH", 1, 1, 5, 4) + socket.inet_aton("127.0.0.1")
    return header + question + (record if is_address else b"")


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Yield the port of a gRPC server that returns each message."""
    handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
    handlers = (grpc.method_handlers_generic_handler("test", {"echo": handler}),)
    server = grpc.server(ThreadPoolExecutor(2), handlers=handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def test_a_lost_dns_query_is_repeated_over_another_path() -> None:
    dns = LossyDns()
    changed = threading.Condition(threading.Lock())
    connected = threading.Event()

    def converse(channel: grpc.Channel) -> bool:
        call = channel.stream_stream("/test/echo")(iter([b"hello"]))
        with calls.reading(call), contextlib.suppress(grpc.RpcError):
            for _ in call:
                connected.set()
        return connected.is_set()

    with dns.serving(), echo_server() as port:
        address = f"dns://{dns.address}/coordinator.test:{port}"
        calls = ReconnectingCall(address, tls=None, name="test", changed=changed, converse=converse)
        calls.start()
        try:
            assert connected.wait(DEADLINE_SECONDS)
        finally:
            calls.close()
    assert dns.num_lost == 4, "A and AAAA, asked twice; a third time would come after 5 s"
