"""Keys of ``info`` by which rlsrl's wrappers tell its vector environments something."""

from __future__ import annotations

EPISODE_CONTINUES = "rlsrl/episode_continues"
"""Set in ``info`` when an episode ends only for training, for example on a lost life. The step reports no episode.
Return and length count on, over a ``reset`` that changes nothing, until the episode really ends."""
