"""Does it pay to pin workers to cores? Pairs of runs of one workload, with the scheduler's choice and pinned.

    python benchmarks/pinning.py [--pairs N] [--seconds S] W1 B1 ...

Pinned: the threads of each trainer run on one core of its own, the last ones, and all other workers on the rest. A
thread of this program pins workers twice a second, as they and their threads appear. Prints each pair, and for each
workload the ratio of the speeds, pinned to free. A pair counts as in ``paired.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import psutil
from contestants import ContestantFailed, Rlsrl
from figures import Round
from pairs import BASE, HEAD, counted_pairs, order_of, pair_line, summarize
from results import log
from turns import ended_by_signals, throughput_turn
from workloads import WORKLOADS

CORES = sorted(os.sched_getaffinity(0))
LOOK_SECONDS = 0.5


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Pin the workers that this process has started, and their descendants, until the end of the body."""
    done = threading.Event()

    def pin() -> None:
        while not done.wait(LOOK_SECONDS):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                _pin_all()

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _pin_all() -> None:
    workers = [each for each in psutil.Process().children(recursive=True) if "rlsrl.workers" in each.cmdline()]
    trainers = [each for each in workers if "trainer" in each.cmdline()]
    assert len(trainers) < len(CORES), "a core for each trainer, and one for the rest"
    places = dict(zip((each.pid for each in trainers), reversed(CORES), strict=False))
    rest = CORES[: len(CORES) - len(trainers)]
    for worker in workers:
        cores = {places[worker.pid]} if worker.pid in places else set(rest)
        for each in worker.threads():
            os.sched_setaffinity(each.id, cores)


def measure(name: str, pairs: int, seconds: float) -> None:
    """Measure and print the pairs of one workload.

    Raises:
        ContestantFailed: a run failed.
    """
    workload, found = WORKLOADS[name], list[Round]()
    while len(counted_pairs(found)) < pairs and len(found) < 2 * pairs:
        turns = []
        for way in order_of(len(counted_pairs(found))):
            with pinned() if way == HEAD else contextlib.nullcontext():
                turns.append(throughput_turn(Rlsrl(name=way), workload, (), window_seconds=seconds))
        found.append(Round(turns=tuple(turns)))
        log(pair_line(len(found), found[-1], cores=len(CORES)))
    summary = summarize(found, cores=len(CORES))
    if summary is None:
        log(f"{name}: no pair counts")
        return
    print(
        f"{name}, {BASE}: free, {HEAD}: pinned: speed ratio {summary.speed_ratio}, {summary.speeds[BASE]:,.0f} to "
        f"{summary.speeds[HEAD]:,.0f} env steps/s; processor time per env step: ratio {summary.cpu_ratio}; "
        f"{summary.pairs} pairs of {seconds:g} s; discarded: {summary.discarded}",
        flush=True,
    )


def main() -> int:
    """Measure each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    ended_by_signals()
    try:
        for name in arguments.workloads:
            measure(name, arguments.pairs, arguments.seconds)
    except ContestantFailed as error:
        log(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
