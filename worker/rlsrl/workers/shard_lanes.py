"""How the lanes that a rank grants are spread over its shards. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class ShardLanes:
    """Gives out granted lanes by whole slots: part of one would wait at a shard, while no other shard could use it."""

    def __init__(self, *, lanes_per_slot: int) -> None:
        """Spread slots of that many lanes each."""
        self._lanes_per_slot = lanes_per_slot
        self._left = 0
        """Lanes that were granted and not given to a shard. Below 0: so many were given beyond them."""

    def spread(self, num_lanes: int, *, room: int, outstanding: Mapping[int, int]) -> dict[int, int]:
        """Return the lanes for each shard that gets some, of ``num_lanes`` further ones and of those left before.

        The shard with the fewest ``outstanding`` lanes, granted and not arrived, gets the next slot. A slot may exceed
        what is granted by ``room`` lanes. Without a shard all are left for later.
        """
        self._left += num_lanes
        loads = dict(sorted(outstanding.items()))
        while loads and self._left > 0 and self._left + room >= self._lanes_per_slot:
            shard = min(loads, key=loads.__getitem__)
            loads[shard] += self._lanes_per_slot
            self._left -= self._lanes_per_slot
        return {shard: load - outstanding[shard] for shard, load in loads.items() if load > outstanding[shard]}
