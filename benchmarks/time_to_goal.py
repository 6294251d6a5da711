"""Seconds from the start of the process to the goal, against peers, interleaved seed by seed.

Caches are warm: a first turn of everybody, with a seed of its own, is not counted. Peers run in the setting that is
fastest in throughput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contestants import Contestant
from figures import RLSRL, Turn, verdict
from lineup import line_up
from results import document, say
from rounds import play
from turns import GOAL_SECONDS, goal_turn
from workloads import Workload

SEEDS = 10
WARMING_SEED = 1000
HOPELESS = 3.0
"""Who takes so many times as long as the fastest peer is not waited for: the comparison is with the fastest."""


def measure(workload: Workload, contestants: Sequence[Contestant], *, wanted: int = SEEDS) -> dict[str, Any]:
    """The workload's result, as it is kept; ``wanted`` seeds, each a round.

    Raises:
        PeerUnavailable: one that has to take part cannot be installed.
        ContestantFailed: somebody did not train as it should.
    """
    lineup = line_up(workload, contestants, say)
    warming = {}
    for name, contestant in lineup.contestants.items():
        warming[name] = goal_turn(contestant, workload, lineup.chosen[name], seed=WARMING_SEED).figure or GOAL_SECONDS
        say(f"warming  {name:18} {warming[name]:12,.1f}")
    lineup = lineup.without(hopeless(warming))

    def turn(name: str, number: int) -> Turn:
        return goal_turn(lineup.contestants[name], workload, lineup.chosen[name], seed=number + 1)

    played = play(list(lineup.contestants), turn, wanted=wanted, say=say, began=lineup.began)
    return document(workload, played, verdict(played, wanted=wanted, less_is_better=True), lineup)


def hopeless(warming: Mapping[str, float]) -> dict[str, str]:
    """Peers that were far slower than another, by their seconds in the turns that warmed caches; and how slow."""
    peers = {name: seconds for name, seconds in warming.items() if name != RLSRL}
    best = min(peers.values())
    return {
        name: f"{seconds:.0f} s to the goal, where another peer took {best:.0f}"
        for name, seconds in peers.items()
        if seconds > HOPELESS * best
    }
