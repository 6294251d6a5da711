"""Who is waited for."""

from __future__ import annotations

from figures import RLSRL
from time_to_goal import HOPELESS, hopeless


def test_peers_far_slower_than_another_are_not_waited_for() -> None:
    warming = {RLSRL: 1000.0, "fast": 10.0, "slow": 10.0 * HOPELESS, "slower": 10.0 * HOPELESS + 5.0}
    assert hopeless(warming) == {"slower": "35 s to the goal, where another peer took 10"}


def test_rlsrl_is_always_measured_and_an_only_peer_too() -> None:
    assert hopeless({RLSRL: 1000.0, "only": 100.0}) == {}
