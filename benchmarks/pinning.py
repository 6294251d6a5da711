"""Does it pay to pin workers to cores? Pairs of runs of one workload, with the scheduler's choice and pinned.

    python benchmarks/pinning.py [--rounds N] [--seconds S] W1 B1 ...

Pinned: the threads of each trainer run on one core of its own, the last ones, and all other workers on the rest. A
thread of this program pins workers twice a second, as they and their threads appear. Prints each round, and for
each workload the ratio of the speeds, pinned to free. Rounds count and are kept as in ``paired.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
from checkouts import commit_of
from contestants import ContestantFailed, Rlsrl
from figures import Turn
from paired import FOLDER, KeptRounds, measure_rounds
from pairs import HEAD, closing_lines
from results import log
from turns import ended_by_signals, throughput_turn
from workloads import WORKLOADS

FREE = "free"
"""The contestant whose workers are where the scheduler puts them."""
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

    with ThreadPoolExecutor(1) as pool:
        pinning = pool.submit(pin)
        try:
            yield
        finally:
            done.set()
        pinning.result()  # a run that could not be pinned is no result


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


def measure(name: str, rounds: int, seconds: float) -> None:
    """Measure and print the rounds of one workload.

    Raises:
        ContestantFailed: a run failed.
    """

    def turn(way: str) -> Turn:
        with pinned() if way == HEAD else contextlib.nullcontext():
            return throughput_turn(Rlsrl(name=way), WORKLOADS[name], (), window_seconds=seconds)

    kept = KeptRounds(folder=FOLDER / "pinning" / f"{name}-{commit_of('HEAD')}", conditions={"window_seconds": seconds})
    cores = len(CORES)
    found = measure_rounds(kept, turn, [FREE], wanted=rounds, cores=cores)
    log("\n".join(closing_lines(name, {FREE: FREE, HEAD: "pinned"}, found, cores=cores, seconds=seconds)))


def main() -> int:
    """Measure each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    ended_by_signals()
    try:
        for name in arguments.workloads:
            measure(name, arguments.rounds, arguments.seconds)
    except ContestantFailed as error:
        log(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
