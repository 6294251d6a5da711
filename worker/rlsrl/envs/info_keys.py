"""Keys of ``info`` that rlsrl's vector environments read at the ends of episodes."""

from __future__ import annotations

EPISODE_CONTINUES = "rlsrl/episode_continues"
"""Set in ``info`` when an episode ends only for training, for example on a lost life. The step reports no episode.
Return and length count on, over a ``reset`` that changes nothing, until the episode really ends."""
RECORDED = "episode"
"""Set in ``info`` by Gymnasium's ``RecordEpisodeStatistics`` at an episode's end: its return ``r`` and length ``l``."""
