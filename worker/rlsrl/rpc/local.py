"""Unix sockets between processes of one machine, for handshakes, wake-ups and shared memory.

Linux only: names live in the abstract namespace and memory in memfds, so neither outlives its processes, however they
die. A SEQPACKET socket keeps message borders and reports a dead peer as an empty message, which no futex or semaphore
does. Any local user can reach or take an abstract name: both ends part at once from a peer of another user, before the
token is shown, and the first message carries the experiment's token.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

MAX_MESSAGE = 64 * 1024
"""Bytes of one handshake message; a longer one is an error of the peer."""
LAST_BACK_OFF_SECONDS = 0.1
"""The most that passes between two tries to reach a name. A try costs microseconds, and a run begins with one."""


def listen(name: str, backlog: int = 128) -> socket.socket:
    """A non-blocking listener on the abstract name.

    Raises:
        OSError: the name is taken (EADDRINUSE): another process of the same run is alive.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(name: str, timeout: float) -> socket.socket:
    """A connection to whoever listens on the abstract name; blocking, with ``timeout`` seconds for each call.

    Raises:
        ConnectionRefusedError: nobody listens.
        BlockingIOError: somebody listens and its backlog is full.
        PermissionError: another user's process has taken the name.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout)
        connection.connect(f"\0{name}")
        if (uid := _peer_uid(connection)) != os.geteuid():
            raise PermissionError(
                f"abstract socket {name!r} belongs to a process of uid {uid}; only one of uid {os.geteuid()} is trusted"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def accept(listener: socket.socket) -> socket.socket:
    """The next connection to a ``listen`` socket; non-blocking.

    Raises:
        BlockingIOError: nobody is waiting.
        ConnectionAbortedError: the peer is gone again, or is another user's and was turned away.
    """
    connection, _ = listener.accept()
    try:
        if (uid := _peer_uid(connection)) != os.geteuid():
            raise ConnectionAbortedError(f"a process of uid {uid} was turned away")
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection


def _peer_uid(connection: socket.socket) -> int:
    """The effective user of the peer when it listened or connected, as the kernel noted it."""
    credentials = struct.Struct("iII")  # struct ucred: pid, uid, gid
    _, uid, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(uid)


def send_json(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one JSON object, with file descriptors if any."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_MESSAGE:
        raise ValueError(f"a handshake message of {len(payload)} bytes is over the limit of {MAX_MESSAGE}")
    socket.send_fds(connection, [payload], list(fds))


def recv_json(connection: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one JSON object and its file descriptors, which the caller owns.

    Raises:
        ConnectionResetError: the peer is gone.
        ValueError: the message is too long, truncated or not a JSON object.
    """
    payload, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE, max_fds)
    try:
        if not payload:
            raise ConnectionResetError("the peer closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError(f"a handshake message of over {MAX_MESSAGE} bytes or {max_fds} descriptors")
        try:
            message = json.loads(payload)
        except RecursionError as error:
            raise ValueError("a handshake message is nested too deeply") from error
        if not isinstance(message, dict):
            raise ValueError("a handshake message is a JSON object")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def create_memory(name: str, nbytes: int) -> int:
    """A descriptor of ``nbytes`` of zeroed anonymous memory; gone with the last process that holds it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal_size(fd: int) -> None:
    """Fix the size of a ``create_memory`` descriptor for good, before it is sent to a peer that can write to it.

    A peer that could shrink the memory would kill with SIGBUS whoever reads what is no longer there.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
