"""Peers that are left out because they are too slow."""

from __future__ import annotations

from figures import RLSRL
from time_to_goal import HOPELESS, hopeless


def test_peers_far_slower_than_another_are_left_out() -> None:
    warming = {RLSRL: 1000.0, "fast": 10.0, "slow": 10.0 * HOPELESS, "slower": 10.0 * HOPELESS + 5.0}
    assert hopeless(warming) == {"slower": "35 s to the goal, where another peer took 10"}


def test_rlsrl_and_an_only_peer_are_never_left_out() -> None:
    assert hopeless({RLSRL: 1000.0, "only": 100.0}) == {}
