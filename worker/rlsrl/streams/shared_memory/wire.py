"""Messages after the handshake: six integers each, sent and received whole."""

from __future__ import annotations

import socket
import struct

MESSAGE = struct.Struct("<6q")
"""(kind, and five integers); unused integers are 0."""
CREDIT = 1
"""slot, order, attempt and step of min_version"""
ACK = 2
"""sequence: the consumer has every slot up to it"""
POST = 3
"""slot, order of its credit, sequence, num_transitions, the producer's total with this slot"""


class PeerGone(Exception):
    """The peer has closed the socket, and every message sent before has been read."""


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message, or None if none has arrived. A message that is too long is cut to one byte too many.

    Raises:
        PeerGone: the peer has closed the socket.
    """
    while True:
        try:
            message = connection.recv(MESSAGE.size + 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # The peer died with unread messages. The kernel reports this once, before the messages the peer had sent.
            continue
        except OSError as error:
            raise PeerGone from error
        if not message:
            raise PeerGone
        return message


def send(connection: socket.socket, *words: int) -> None:
    """Send one message. If the peer cannot take it, shut the socket, so that reading from it ends."""
    try:
        connection.send(MESSAGE.pack(*words))
    except OSError:
        # The peer is gone, or has left more messages unread than a correct peer is ever sent.
        shut(connection)


def shut(connection: socket.socket) -> None:
    """Shut the socket: a reader still gets the messages sent before, then the end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer has closed it already
