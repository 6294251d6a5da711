"""Measure the throughput of one workload against peers, interleaved in one run.

The figure is environment steps whose training is finished, per second of a window after the start. Peers run in their
fastest setting, which short turns find. A round in which other programs used the machine does not count. Without enough
quiet rounds there is no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contestants import Contestant
from figures import JAX, Round, Turn, verdict
from lineup import line_up
from results import document, log
from rounds import play
from turns import throughput_turn
from workloads import Workload

ROUNDS = 3
"""Quiet rounds that a result needs."""


def measure(workload: Workload, contestants: Sequence[Contestant], *, wanted: int = ROUNDS) -> dict[str, Any]:
    """Return the workload's result, as it is kept.

    Raises:
        PeerUnavailable: a required peer cannot be installed.
        ContestantFailed: a contestant did not train correctly.
    """
    lineup = line_up(workload, contestants, log)

    def turn(name: str, number: int) -> Turn:
        del number
        contestant, setting = lineup.contestants[name], lineup.chosen[name]
        return throughput_turn(contestant, workload, setting, window_seconds=workload.window_seconds)

    played = play(list(lineup.contestants), turn, wanted=wanted, log=log, began=lineup.began)
    return document(workload, played, _verdict(workload, played, wanted), lineup)


def _verdict(workload: Workload, played: Sequence[Round], wanted: int) -> dict[str, Any]:
    apart = () if workload.vectorization == "native" else (JAX,)
    return verdict(played, wanted=wanted, limit=workload.latency_limit, apart=apart)
