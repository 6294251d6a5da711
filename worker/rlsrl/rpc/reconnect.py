"""A thread that keeps one streaming call open and reconnects after an outage.

It serves clients whose thread only reads a call: the coordinator's Join stream, the publisher and the reader of live
weights. Clients with a loop of their own use ``rlsrl.rpc.back_off``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.channels import END_SECONDS, cancel_call, end_call, open_channel
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls


class ReconnectingCall:
    """A thread that keeps one streaming call open: when a call ends, the thread waits and makes the next one.

    The owner shares its condition variable: ``failure`` and ``is_closed`` change under that lock, and each change is
    notified, so that the owner's threads can wait for them together with the owner's own state.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None,
        name: str,
        changed: threading.Condition,
        converse: Callable[[grpc.Channel], bool],
    ) -> None:
        """Prepare the thread; ``start`` starts it.

        Args:
            address: ``unix-abstract:NAME`` or ``HOST:PORT`` of the server.
            tls: certificates, if the server requires them. Each channel gets the certificates that are current then.
            name: of the thread.
            changed: the owner's condition variable. Its lock must not be held when a method is called.
            converse: make one call over the channel inside ``reading``, and return when the call has ended. True means
                that the server answered, so the next attempt comes after the first delay. An exception is final.

        Raises:
            ValueError: the address has neither form.
        """
        self._address = validate_address(address)
        self._tls = tls
        self._changed = changed
        self._converse = converse
        self._call: grpc.CallIterator[Any] | None = None
        self.channel: grpc.Channel | None = None
        """The channel of the present call; None between two calls. Its thread closes it when the call ends."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None
        """What ``converse`` raised; the thread has ended. Changes under the owner's lock."""
        self.is_closed = False
        """True once no further call is made. Changes under the owner's lock."""

    def start(self) -> None:
        """Make the first call. Call this once."""
        self._thread.start()

    @contextlib.contextmanager
    def reading(self, call: grpc.CallIterator[Any]) -> Iterator[None]:
        """Let ``reconnect`` and ``close`` cancel this call inside the block; end it after the block."""
        with self._changed:
            self._call = call
            if self.is_closed:
                cancel_call(call)
        try:
            yield
        finally:
            end_call(call)

    def reconnect(self) -> None:
        """End the current call; the thread makes a new one, unless it is closed. Any thread may call it."""
        if (call := self._call) is not None:
            cancel_call(call)

    def finish(self) -> None:
        """Make no further call, and let the current one end by itself."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def close(self, grace: float = 0.0) -> bool:
        """Make no further call, end the current one, and wait up to ``END_SECONDS`` for the thread. Idempotent.

        With ``grace``, continue for up to that many seconds first, until ``finish`` or a failure ends the thread.

        Returns:
            Whether the thread has ended or never started.
        """
        self._join(grace)
        self.finish()
        self.reconnect()
        self._join(END_SECONDS)
        return not self._thread.is_alive()

    def _join(self, timeout: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @contextlib.contextmanager
    def _shown(self, channel: grpc.Channel) -> Iterator[None]:
        """Let others use the channel inside the block."""
        self.channel = channel
        try:
            yield
        finally:
            self.channel = None

    def _run(self) -> None:
        """Make one call after another until ``close``, ``finish`` or a failure. ``converse`` waits for the server."""
        back_off = BackOff()
        try:
            while not self.is_closed:
                with contextlib.closing(open_channel(self._address, self._tls)) as channel, self._shown(channel):
                    has_answered = self._converse(channel)
                if has_answered:
                    back_off.reset()
                with self._changed:
                    self._changed.wait_for(lambda: self.is_closed, back_off.next_delay())
        except BaseException as failure:  # noqa: BLE001 - the owner raises it in the thread that can act on it
            with self._changed:
                self.failure = failure
                self._changed.notify_all()
