"""Messages after the handshake: six integers each, whole or not at all."""

from __future__ import annotations

import socket
import struct

MESSAGE = struct.Struct("<6q")
"""(what, and five integers); what is not used is 0."""
CREDIT = 1
"""slot, order, attempt and step of min_version"""
ACK = 2
"""sequence: everything up to it is held"""
POST = 3
"""slot, order of its credit, sequence, num_transitions, the producer's count at it"""


class PeerGone(Exception):
    """The socket has ended and everything that was sent before has been read."""


def receive(connection: socket.socket) -> bytes | None:
    """The next message, None if there is none yet. One byte too many is asked for: so a longer one shows.

    Raises:
        PeerGone: see there.
    """
    while True:
        try:
            message = connection.recv(MESSAGE.size + 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # A peer that died without reading all of ours: reported once, and before what it had sent.
            continue
        except OSError as error:
            raise PeerGone from error
        if not message:
            raise PeerGone
        return message


def send(connection: socket.socket, *words: int) -> None:
    """Send one message; a peer that cannot take it is shut off, so that reading from it ends."""
    try:
        connection.send(MESSAGE.pack(*words))
    except OSError:
        # Gone; or it left unread more than a well-behaved peer could ever be sent.
        shut(connection)


def shut(connection: socket.socket) -> None:
    """End a connection: reading from it gives what had been sent, and then the end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster
