"""Unix sockets between processes of one machine, for handshakes, wake-ups and shared memory.

Linux only. Socket names are in the abstract namespace and memory is in memfds, so neither outlives its processes,
however they die. A SEQPACKET socket keeps message boundaries, and reports a dead peer as an empty message; a futex or
semaphore cannot. Any local user can connect to an abstract name or take it. So both ends disconnect from a peer of
another user before they send the token, and the first message carries the experiment's token.
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
"""Longest handshake message in bytes. A longer one is an error of the peer."""
MAX_BACK_OFF_SECONDS = 0.1
"""Longest delay between two attempts to connect. An attempt costs microseconds, and every run starts with some."""


def listen(name: str, backlog: int = 128) -> socket.socket:
    """Return a non-blocking socket that listens at the abstract name.

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
    """Return a blocking connection to the listener at the abstract name. Each call on it has ``timeout`` seconds.

    Raises:
        ConnectionRefusedError: no process listens there.
        BlockingIOError: the listener's backlog is full.
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
    """Return the next connection of a ``listen`` socket, non-blocking.

    Raises:
        BlockingIOError: no peer is waiting.
        ConnectionAbortedError: the peer has disconnected, or belongs to another user and was refused.
    """
    connection, _ = listener.accept()
    try:
        if (uid := _peer_uid(connection)) != os.geteuid():
            raise ConnectionAbortedError(f"a process of uid {uid} was refused")
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection


def _peer_uid(connection: socket.socket) -> int:
    """Return the peer's effective user at the time it listened or connected, as the kernel recorded it."""
    credentials = struct.Struct("iII")  # struct ucred: pid, uid, gid
    _, uid, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(uid)


def send_json(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one JSON object, and file descriptors if there are any."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_MESSAGE:
        raise ValueError(f"a handshake message of {len(payload)} bytes is over the limit of {MAX_MESSAGE}")
    socket.send_fds(connection, [payload], list(fds))


def recv_json(connection: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Return one JSON object and its file descriptors. The caller must close the descriptors.

    Raises:
        ConnectionResetError: the peer has disconnected.
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
    """Return a descriptor of ``nbytes`` of zeroed anonymous memory. It is freed with the last process that has it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal_size(fd: int) -> None:
    """Make the size of a ``create_memory`` descriptor final. Call it before a peer that can write gets the descriptor.

    Otherwise the peer could shrink the memory, and reading the missing part would kill this process with SIGBUS.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
