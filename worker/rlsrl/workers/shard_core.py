"""The core of a buffer worker that is a shard: it stores what actors post, and serves its rank."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from rlsrl.data.slots import Slot
from rlsrl.streams.grpc_replay.shard_end import ShardConnection
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.forwarder import MAX_SLOTS_A_POLL, BufferCore, Forwarded
from rlsrl.workers.replay_shard import ReplayShard


class ShardCore(BufferCore):
    """Stores slots. One thread owns it; the connection's thread serves the rank meanwhile."""

    def __init__(self, *, upstream: SampleConsumer, shard: ReplayShard, connection: ShardConnection) -> None:
        """Use a stream of actors and the connection to the rank, and close both."""
        self._upstream = upstream
        self._shard = shard
        self._connection = connection
        self._stored = Forwarded()
        """What was stored since the last ``forward``."""

    @override
    def start(self) -> None:
        self._connection.attend()

    @override
    def check(self) -> None:
        """As ``BufferCore.check``. Connects with the rank, and shows life.

        Raises:
            StreamError: the rank refuses this shard, or answering it failed.
        """
        self._connection.attend()

    @property
    @override
    def has_credits(self) -> bool:
        return self._shard.has_credits

    @override
    def receive(self, timeout: float) -> None:
        self._store(self._upstream.receive(MAX_SLOTS_A_POLL, timeout))

    @override
    def forward(self) -> Forwarded:
        stored, self._stored = self._stored, Forwarded()
        return stored

    @override
    def close(self) -> None:
        """Store what actors have posted, and end both streams."""
        self._upstream.close()
        self._store(self._upstream.receive(MAX_SLOTS_A_POLL, timeout=0))
        self._shard.give_up(run_ended=False)
        self._connection.close()

    @override
    def sync(self) -> None:
        self._shard.sync()

    def _store(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            for message in self._shard.insert([slot]):
                self._connection.send(message)
            num_transitions = slot.num_transitions
            self._upstream.release(slot)
            self._stored = Forwarded(self._stored.num_slots + 1, self._stored.num_transitions + num_transitions)
