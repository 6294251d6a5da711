"""Live weights from a trainer to the actors on its machine, through shared memory.

The publisher writes each version into memory that its readers map, then sends one byte to each reader's socket. The
weights are only in the memory. The socket hands over the memory, wakes waiting readers, and reports the publisher's
death, so a byte that a full socket loses does no harm. Sockets have abstract names and the memory is anonymous: nothing
outlives the processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.protocols import (
    NonFinite,
    ParameterError,
    ParameterPublisher,
    Parameters,
    ParameterSource,
    SourceClosed,
    SourceRefused,
    SourceTimeout,
)
from rlsrl.parameters.segment import SegmentReader, SegmentWriter
from rlsrl.rpc.auth import token_matches
from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.local import MAX_BACK_OFF_SECONDS, accept, connect, listen, recv_json, send_json

_PROTOCOL = 1
GREETING_SECONDS = 5.0
"""A peer that connects and sends no token is disconnected after this time."""
_MIN_BACK_OFF_SECONDS = 0.02
_WAKE = b"v"


class BroadcastPublisher(ParameterPublisher):
    """The trainer's end. One thread publishes; the publisher's own thread accepts new readers."""

    def __init__(
        self, name: str, token: str, description: Mapping[str, Any], *, greeting_seconds: float = GREETING_SECONDS
    ) -> None:
        """Accept readers at the abstract socket ``name``.

        Args:
            name: of the socket.
            token: that readers must send.
            description: JSON of any length; readers get it from ``ParameterSource.description``.
            greeting_seconds: how long a peer may be connected without sending the token.

        Raises:
            OSError: the name is taken (EADDRINUSE): another publisher of the same run is alive.
        """
        self._token = token
        self._greeting_seconds = greeting_seconds
        self._latest: Version | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._greeting: dict[socket.socket, float] = {}
        self._readers: set[socket.socket] = set()
        self._readers_lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(listen(name))
            self._segment = SegmentWriter(name, description)
            stack.callback(self._segment.close)
            self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._closing)
            self._thread = threading.Thread(target=self._serve, name="broadcast-accept", daemon=True)
            self._thread.start()
            self._resources = stack.pop_all()

    @override
    def publish(self, parameters: Parameters) -> None:
        """Make these the newest parameters. Never waits for a reader; allocates only at the first publication.

        Raises:
            NonFinite: a weight or statistic is NaN or infinite. The previous version stays the newest.
            ValueError: the version is not newer than the previous one, or layout, vector size or statistics differ.
            SourceClosed: ``close`` was called.
            ParameterError: the thread that accepts readers has died; its error is the cause.
        """
        if self._closed:
            raise SourceClosed("the publisher is closed")
        if self._failure is not None:
            raise ParameterError("the broadcast's accept thread died") from self._failure
        if self._latest is not None and parameters.version <= self._latest:
            raise ValueError(
                f"version {parameters.version} is not newer than {self._latest}, which was published before"
            )
        _check_finite(parameters)
        self._segment.write(parameters)
        self._latest = parameters.version
        with self._readers_lock:
            for reader in self._readers:
                # A full socket holds a wake-up already; the accept thread closes dead ones.
                with contextlib.suppress(OSError):
                    reader.send(_WAKE)

    @override
    def close(self) -> None:
        """Stop publishing. Readers keep the last version and look for another publisher. Idempotent."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._closing, 1)
            self._thread.join()
            self._resources.close()

    def _serve(self) -> None:
        """Accept new readers and disconnect dead ones. Waits for sockets only; ``close`` ends it."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._closing, selectors.EVENT_READ, lambda _: None)
                selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept(selector))
                while not self._closed:
                    for key, _ in selector.select(self._seconds_until_overdue()):
                        key.data(key.fileobj)
                    for connection in self._remove_overdue():
                        self._drop(selector, connection)
        except BaseException as error:  # noqa: BLE001 - raised again by publish
            self._failure = error
        finally:
            with self._readers_lock:
                for connection in [*self._greeting, *self._readers]:
                    connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection = accept(self._listener)
            self._greeting[connection] = time.monotonic() + self._greeting_seconds
            selector.register(connection, selectors.EVENT_READ, lambda peer: self._receive(selector, peer))

    def _receive(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Handle a peer that has sent its greeting, or has disconnected. A reader sends nothing after its greeting."""
        greeted = self._greeting.pop(connection, None) is None
        if greeted or not self._greet(connection):
            self._drop(selector, connection)

    def _greet(self, connection: socket.socket) -> bool:
        """Check a new reader's greeting and send the memory; return False if the connection must be closed."""
        try:
            greeting, _ = recv_json(connection)
            refusal = self._refusal(greeting)
            if refusal is not None:
                send_json(connection, {"refused": refusal})
                return False
            self._send_memory(connection)
        except (OSError, ValueError, RecursionError):  # disconnected, or not a reader
            return False
        return True

    def _refusal(self, greeting: Mapping[str, Any]) -> str | None:
        token = greeting.get("token")
        if not isinstance(token, str) or not token_matches(token, self._token):
            return "the token is not that of this experiment"
        if greeting.get("protocol") != _PROTOCOL:
            return f"the publisher speaks protocol {_PROTOCOL}, the reader {greeting.get('protocol')!r}"
        return None

    def _send_memory(self, connection: socket.socket) -> None:
        """Send the memory and register the reader, under one lock: wake-ups come after the memory; none is lost."""
        descriptor = self._segment.open_read_only()
        try:
            with self._readers_lock:
                send_json(connection, {"protocol": _PROTOCOL}, [descriptor])
                self._readers.add(connection)
        finally:
            os.close(descriptor)

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        with self._readers_lock:
            self._readers.discard(connection)
            connection.close()

    def _seconds_until_overdue(self) -> float | None:
        """Return the seconds until the first silent peer is overdue; None if no peer is silent."""
        return max(min(self._greeting.values()) - time.monotonic(), 0.0) if self._greeting else None

    def _remove_overdue(self) -> list[socket.socket]:
        """Remove and return the peers whose greeting is overdue."""
        now = time.monotonic()
        overdue = [connection for connection, deadline in self._greeting.items() if deadline <= now]
        for connection in overdue:
            del self._greeting[connection]
        return overdue


class BroadcastReader(ParameterSource):
    """An actor's end. One thread uses it; any thread may call ``close``.

    It connects to the next publisher when one dies or closes. Versions never move back: a publisher that restarts with
    older versions is ignored until it publishes newer ones.
    """

    def __init__(self, name: str, token: str) -> None:
        self._name = name
        self._token = token
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._connection: socket.socket | None = None
        self._greeted = False
        self._retry_at = 0.0
        self._back_off = BackOff(first_seconds=_MIN_BACK_OFF_SECONDS, max_seconds=MAX_BACK_OFF_SECONDS)
        self._segment: SegmentReader | None = None
        self._successor: SegmentReader | None = None
        self._newest = INITIAL

    @override
    def description(self, timeout: float) -> dict[str, Any]:
        with self._use():
            deadline = time.monotonic() + timeout
            while (segment := self._segment or self._successor) is None:
                self._wait_for_event(deadline)
            return segment.description

    @override
    def get(self, newer_than: Version | None = None) -> Parameters | None:
        # Returns a copy, which no later publication changes.
        with self._use():
            version = self._latest()
            if version is None or (newer_than is not None and version <= newer_than):
                return None
            return self._copy_latest()

    @override
    def wait(self, min_version: Version, timeout: float) -> Parameters:
        # Without a publisher it tries to connect, with back-off, until the timeout.
        with self._use():
            deadline = time.monotonic() + timeout
            while (version := self._latest()) is None or version < min_version:
                self._wait_for_event(deadline)
            return self._copy_latest()

    @override
    def close(self) -> None:
        with self._ending:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._closing, 1)
            with self._using:
                self._disconnect()
                self._segment = self._successor = None
                os.close(self._closing)

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Handle what has arrived since the last use, and keep ``close`` from releasing resources during this one."""
        with self._using:
            self._advance()
            yield

    def _advance(self) -> None:
        """Advance the connection as far as possible without waiting."""
        if self._closed:
            raise SourceClosed("the reader is closed")
        try:
            if self._connection is None:
                self._connect()
            elif not self._greeted:
                self._receive_memory(self._connection)
            else:
                self._drain(self._connection)
        except BlockingIOError:
            pass  # nothing more has arrived
        except (OSError, ValueError, ParameterError) as error:
            self._disconnect()
            if isinstance(error, ParameterError):
                raise

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + self._back_off.next_delay()
        self._connection = connect(self._name, timeout=_MIN_BACK_OFF_SECONDS)
        self._connection.setblocking(False)
        self._greeted = False
        send_json(self._connection, {"token": self._token, "protocol": _PROTOCOL})

    def _receive_memory(self, connection: socket.socket) -> None:
        answer, descriptors = recv_json(connection, max_fds=1)
        if "refused" in answer:
            raise SourceRefused(f"{self._name}: {answer['refused']}")
        if len(descriptors) != 1:
            raise ValueError("the publisher's answer carries no memory")
        self._successor = SegmentReader(descriptors[0])
        self._greeted = True
        self._back_off.reset()

    def _drain(self, connection: socket.socket) -> None:
        """Discard the wake-ups. The caller reads the newest version from the memory."""
        while connection.recv(len(_WAKE)):
            pass
        raise ConnectionResetError("the publisher is gone")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _latest(self) -> Version | None:
        """Return the latest version. Switch to the next publisher's memory once its version is not older."""
        if self._successor is not None:
            version = self._successor.version
            if version is not None and version >= self._newest:
                self._segment, self._successor = self._successor, None
        return self._segment.version if self._segment is not None else None

    def _copy_latest(self) -> Parameters:
        assert self._segment is not None
        parameters = self._segment.read()
        self._newest = parameters.version
        return parameters

    def _wait_for_event(self, deadline: float) -> None:
        """Wait for the socket, the next attempt to connect, or ``close``; then handle what has arrived."""
        now = time.monotonic()
        if now >= deadline:
            raise SourceTimeout(f"nothing came from publisher {self._name!r} in time{self._problem()}")
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        until = deadline
        if self._connection is not None:
            poll.register(self._connection, select.POLLIN)
        else:
            until = min(deadline, self._retry_at)
        poll.poll(max(until - now, 0.0) * 1000)
        self._advance()

    def _problem(self) -> str:
        if self._connection is None:
            return ": it is not there"
        return "" if self._greeted else ": it is there and does not answer"


def _check_finite(parameters: Parameters) -> None:
    """Check the sums, which needs no memory: a finite sum has finite terms. If a sum overflows, check the terms."""
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in {"vector": parameters.vector, **parameters.statistics}.items():
            is_finite = array.dtype.kind != "f" or np.isfinite(np.add.reduce(array, axis=None))
            if not is_finite and not np.isfinite(array).all():
                raise NonFinite(f"version {parameters.version}: {name} holds NaN or infinity")
