"""Compare the speed of two commits on a workload: ``make paired BASE=REV W=W1``.

Both commits run the workload in turn: 30 pairs of 20 s, the order alternating from pair to pair. Each runs in its own
checkout and Python environment, with the workload as its own ``benchmarks/workloads.py`` defines it. A pair counts if
other programs used at most 3 % of the machine during both turns. The other pairs are printed and discarded.

Each pair is kept as soon as it is measured. After an interruption the same command goes on with the next pair. The exit
status is 0 when all wanted pairs count, 1 when time or tries ran out before, 2 when a commit cannot be run, and 130
after an interruption.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from checkouts import CheckoutFailed, CommitRun, check_out, commit_of, prepare
from contestants import ContestantFailed
from figures import Round, Turn
from pairs import BASE, HEAD, closing_line, counted_pairs, from_json, order_of, pair_line, summarize, to_json
from results import log, write
from turns import ended_by_signals, throughput_turn
from workloads import WORKLOADS, Workload

FOLDER = machine.REPOSITORY / ".paired"
PAIRS, SECONDS = 30, 20.0
MAX_SECONDS = 2 * 3600.0
"""No pair begins that would end later than this after the start."""
MAX_DISCARDED = 30
"""So many discarded pairs of one invocation end it: the machine is not quiet."""


@dataclass(frozen=True, kw_only=True)
class KeptPairs:
    """The pairs of two commits on one workload, a file each."""

    folder: Path
    conditions: Mapping[str, Any]
    """What pairs of one result share, besides workload and commits."""

    def read(self) -> list[Round]:
        """Return the pairs that were measured under the same conditions, oldest first."""
        documents = (json.loads(path.read_text()) for path in self._files())
        return [pair for document in documents if (pair := from_json(document, self.conditions)) is not None]

    def add(self, pair: Round) -> None:
        """Keep one more pair."""
        files = self._files()
        number = int(files[-1].stem.partition("-")[2]) + 1 if files else 1
        write(self.folder / f"pair-{number:04}.json", to_json(pair, self.conditions))

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("pair-*.json"))


def measure_pairs(
    kept: KeptPairs,
    measure: Callable[[str], Turn],
    *,
    wanted: int,
    cores: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[Round]:
    """Measure pairs, print and keep each, until ``wanted`` pairs count. Ends earlier if time or tries run out."""
    pairs = kept.read()
    if pairs:
        log(f"{len(pairs)} pairs are kept in {kept.folder}, {len(counted_pairs(pairs))} of them count")
    began, longest, discarded = clock(), 0.0, 0
    while (number := len(counted_pairs(pairs))) < wanted and discarded < MAX_DISCARDED:
        pair_began = clock()
        if pair_began + longest > began + MAX_SECONDS:
            log(f"no time for another pair: {MAX_SECONDS:.0f} s are nearly over; the same command goes on")
            break
        pair = Round(turns=tuple(measure(name) for name in order_of(number)))
        kept.add(pair)
        pairs.append(pair)
        log(pair_line(len(pairs), pair, cores=cores))
        longest = max(longest, clock() - pair_began)
        discarded += len(counted_pairs(pairs)) == number
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the older commit")
    parser.add_argument("workload", choices=[name for name, workload in WORKLOADS.items() if workload.goal is None])
    parser.add_argument("--head", default="HEAD", help="the commit that is judged; by default the one checked out")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs that have to count")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training that are measured in each turn")
    arguments = parser.parse_args()
    ended_by_signals()
    try:
        return _compare(arguments, WORKLOADS[arguments.workload])
    except (CheckoutFailed, ContestantFailed) as error:
        print(f"paired: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paired: interrupted; whole pairs are kept, and the same command goes on", file=sys.stderr)
        return 130


def _compare(arguments: argparse.Namespace, workload: Workload) -> int:
    commits = {BASE: commit_of(arguments.base), HEAD: commit_of(arguments.head)}
    log(
        f"{workload.name}: {commits[HEAD]} against {commits[BASE]}, {arguments.pairs} pairs of {arguments.seconds:g} s "
        "(uncommitted changes are not measured)"
    )
    runs = {name: _prepared(name, commit, workload.name) for name, commit in commits.items()}
    described = machine.described(machine.REPOSITORY)
    conditions = {key: described[key] for key in ("processor", "cores", "python", "packages")}
    kept = KeptPairs(
        folder=FOLDER / "pairs" / f"{workload.name}-{commits[BASE]}-{commits[HEAD]}",
        conditions={**conditions, "window_seconds": arguments.seconds},
    )

    def measure(name: str) -> Turn:
        return throughput_turn(runs[name], workload, (), window_seconds=arguments.seconds)

    cores = conditions["cores"]
    pairs = measure_pairs(kept, measure, wanted=arguments.pairs, cores=cores)
    log(closing_line(workload.name, commits, summarize(pairs, cores=cores), seconds=arguments.seconds))
    return 0 if len(counted_pairs(pairs)) >= arguments.pairs else 1


def _prepared(name: str, commit: str, workload: str) -> CommitRun:
    return prepare(name, check_out(commit, FOLDER / "trees"), workload)


if __name__ == "__main__":
    sys.exit(main())
