"""The run ends for non-finite values only if no actor of the fleet has had a finite transition meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlsrl.workers.fleet_row import LENGTH, LOOK_SECONDS, NUM_ENDED, ReportedFleetRow


class Fleet:
    """A status document whose reports the test writes, and the row that one of its actors reads from it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.actors: dict[int, dict[str, Any]] = {}
        self.sent: list[Mapping[str, float]] = []
        self.num_looks = 0
        self.answers = True
        self.row = ReportedFleetRow(report=self.sent.append, status=self._page, now=lambda: self.now)

    def says(self, index: int, *, length: int | None, ended: int = 0, incarnation: int = 1) -> None:
        """Let an actor's heartbeat arrive; ``length`` None: it has had no fault."""
        stats = {} if length is None else {NUM_ENDED: float(ended), LENGTH: float(length)}
        self.actors[index] = {"index": index, "incarnation": incarnation, "stats": stats, "heard_at": self.now}

    def look(self, own: int = 7) -> int:
        """Return what the row is after a second."""
        self.now += LOOK_SECONDS
        return self.row.length(own)

    def _page(self) -> dict[str, Any] | None:
        self.num_looks += 1
        if not self.answers:
            return None
        return {
            "roles": {
                "actor": [{**each, "age_seconds": self.now - each["heard_at"]} for each in self.actors.values()],
                "trainer": [{"index": 0, "incarnation": 1, "stats": {}, "age_seconds": 0.0}],
            }
        }


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_an_actor_alone_counts_by_itself(fleet: Fleet) -> None:
    fleet.says(0, length=40)
    assert fleet.look(own=50) == 50
    assert [fleet.row.length(51), fleet.row.length(52)] == [51, 52], "without a second look"
    assert fleet.num_looks == 1


def test_faults_of_all_actors_count_together_from_the_first_look(fleet: Fleet) -> None:
    for length in (100, 300, 700):
        fleet.says(0, length=length)
        fleet.says(1, length=2 * length)
        seen = fleet.look()
        fleet.now += 0.1
    assert seen == 600 + 1200
    assert fleet.row.length(7) == 0, "no second look within a second"


@pytest.mark.parametrize("healthy", [None, 0])
def test_an_actor_without_faults_keeps_the_run_alive(fleet: Fleet, healthy: int | None) -> None:
    for length in range(1000, 9000, 1000):
        fleet.says(0, length=length)
        fleet.says(1, length=healthy)
        assert fleet.look() == 0


def test_a_single_finite_transition_between_two_heartbeats_starts_the_count_anew(fleet: Fleet) -> None:
    seen = []
    for ended in (0, 0, 1, 1, 1):
        fleet.says(0, length=100 * len(seen) + 100)
        fleet.says(1, length=1, ended=ended)
        seen.append(fleet.look())
        fleet.now += 0.1
    assert seen == [0, 100, 0, 100, 200]


def test_an_actor_that_was_started_again_or_joined_or_left_starts_the_count_anew(fleet: Fleet) -> None:
    def look(length: int, **options: int) -> int:
        fleet.now += 0.1
        fleet.says(0, length=length)
        fleet.says(1, length=length, **options)
        return fleet.look()

    assert [look(10), look(20), look(30, incarnation=2), look(40, incarnation=2)] == [0, 20, 0, 20]
    fleet.says(2, length=1)
    assert look(50, incarnation=2) == 0
    del fleet.actors[2]
    assert look(60, incarnation=2) == 0


def test_an_actor_that_is_silent_since_the_count_began_may_be_well(fleet: Fleet) -> None:
    fleet.says(1, length=5)
    for length in (1000, 2000, 3000):
        fleet.says(0, length=length)
        assert fleet.look() == 0
    fleet.now += 0.1
    fleet.says(0, length=4000)
    fleet.says(1, length=6)
    assert fleet.look() == 3001


def test_without_the_coordinator_nothing_is_known(fleet: Fleet) -> None:
    fleet.says(0, length=1000)
    fleet.answers = False
    assert fleet.look(own=1000) == 0
    fleet.answers = True
    assert fleet.look(own=1000) == 1000


def test_each_change_is_reported(fleet: Fleet) -> None:
    fleet.row.report(0, 3)
    fleet.row.report(1, 0)
    assert fleet.sent == [{NUM_ENDED: 0.0, LENGTH: 3.0}, {NUM_ENDED: 1.0, LENGTH: 0.0}]
