"""Measure the seconds from the start of the process to the goal, against peers, interleaved seed by seed.

Caches are warm: each contestant first has a turn that does not count, with its own seed. Peers run in the setting with
the highest throughput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contestants import Contestant
from figures import RLSRL, Turn, verdict
from lineup import line_up
from results import document, log
from rounds import play
from turns import GOAL_SECONDS, goal_turn
from workloads import Workload

SEEDS = 10
WARMING_SEED = 1000
HOPELESS = 3.0
"""A peer that takes this many times as long as the fastest peer is left out: only the fastest is compared."""


def measure(workload: Workload, contestants: Sequence[Contestant], *, wanted: int = SEEDS) -> dict[str, Any]:
    """Return the workload's result, as it is kept, from ``wanted`` seeds, each a round.

    Raises:
        PeerUnavailable: a required peer cannot be installed.
        ContestantFailed: a contestant did not train correctly.
    """
    lineup = line_up(workload, contestants, log)
    warming = {}
    for name, contestant in lineup.contestants.items():
        warming[name] = goal_turn(contestant, workload, lineup.chosen[name], seed=WARMING_SEED).figure or GOAL_SECONDS
        log(f"warming  {name:18} {warming[name]:12,.1f}")
    lineup = lineup.without(hopeless(warming))

    def turn(name: str, number: int) -> Turn:
        return goal_turn(lineup.contestants[name], workload, lineup.chosen[name], seed=number + 1)

    played = play(list(lineup.contestants), turn, wanted=wanted, log=log, began=lineup.began)
    return document(workload, played, verdict(played, wanted=wanted, less_is_better=True), lineup)


def hopeless(warming: Mapping[str, float]) -> dict[str, str]:
    """Return the peers that were far slower than another in the warming turns, each with the reason to leave it out."""
    peers = {name: seconds for name, seconds in warming.items() if name != RLSRL}
    best = min(peers.values())
    return {
        name: f"{seconds:.0f} s to the goal, where another peer took {best:.0f}"
        for name, seconds in peers.items()
        if seconds > HOPELESS * best
    }
