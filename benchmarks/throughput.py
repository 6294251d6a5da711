"""One workload against peers, in the same run and interleaved.

What counts is environment steps whose training is finished, per second of a window that begins once the start is over.
Peers are measured in their fastest setting, which short turns find. The processor time of everybody else is watched: a
round in which others used the machine counts for nothing, and without enough quiet rounds there is no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contestants import Contestant
from figures import Turn, verdict
from lineup import line_up
from results import document, say
from rounds import play
from turns import throughput_turn
from workloads import Workload

ROUNDS = 3
"""Quiet ones, without which there is no result."""


def measure(workload: Workload, contestants: Sequence[Contestant], *, wanted: int = ROUNDS) -> dict[str, Any]:
    """The workload's result, as it is kept.

    Raises:
        PeerUnavailable: one that has to take part cannot be installed.
        ContestantFailed: somebody did not train as it should.
    """
    lineup = line_up(workload, contestants, say)

    def turn(name: str, number: int) -> Turn:
        del number
        contestant, setting = lineup.contestants[name], lineup.chosen[name]
        return throughput_turn(contestant, workload, setting, window_seconds=workload.window_seconds)

    played = play(list(lineup.contestants), turn, wanted=wanted, say=say, began=lineup.began)
    return document(workload, played, verdict(played, wanted=wanted, limit=workload.latency_limit), lineup)
