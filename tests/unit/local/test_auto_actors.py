from __future__ import annotations

from rlsrl.local.auto_actors import fewest


def test_the_fewest_actors_of_about_the_highest_speed_are_chosen() -> None:
    assert fewest({1: 100.0, 2: 180.0, 3: 199.0, 4: 200.0, 5: 150.0}) == 3
    assert fewest({1: 100.0, 2: 101.0}) == 1
    assert fewest({4: 7.0}) == 4
