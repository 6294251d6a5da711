"""Compare the speed of a commit with that of older ones on a workload: ``make paired BASE=REV W=W1``.

The commits run the workload in turn: 30 rounds, each commit for 20 s, the order reversed from round to round. Each runs
in its own checkout and Python environment, with the workload as its own ``benchmarks/workloads.py`` defines it. A round
counts if other programs used at most 3 % of the machine during all its turns. The others are printed and discarded.

Each round is kept as soon as it is measured. After an interruption the same command goes on with the next round. The
exit status is 0 when all wanted rounds count, 1 when time or tries ran out before, 2 when a commit cannot be run, and
130 after an interruption.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from checkouts import CheckoutFailed, CommitRun, check_out, commit_of, prepare
from contestants import ContestantFailed
from figures import Round, Turn
from pairs import HEAD, closing_lines, counted_rounds, from_json, order_of, round_line, to_json
from results import log, write
from turns import ended_by_signals, throughput_turn
from workloads import WORKLOADS, Workload

FOLDER = machine.REPOSITORY / ".paired"
ROUNDS, SECONDS = 30, 20.0
MAX_SECONDS = 2 * 3600.0
"""No round begins that would end later than this after the start."""
MAX_DISCARDED = 30
"""So many discarded rounds of one invocation end it: the machine is not quiet."""


@dataclass(frozen=True, kw_only=True)
class KeptRounds:
    """The rounds of some commits on one workload, a file each."""

    folder: Path
    conditions: Mapping[str, Any]
    """What rounds of one result share, besides workload and commits."""

    def read(self) -> list[Round]:
        """Return the rounds that were measured under the same conditions, oldest first."""
        documents = (json.loads(path.read_text()) for path in self._files())
        return [found for document in documents if (found := from_json(document, self.conditions)) is not None]

    def add(self, round_: Round) -> None:
        """Keep one more round."""
        files = self._files()
        number = int(files[-1].stem.partition("-")[2]) + 1 if files else 1
        write(self.folder / f"round-{number:04}.json", to_json(round_, self.conditions))

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.json"))


def measure_rounds(
    kept: KeptRounds,
    measure: Callable[[str], Turn],
    bases: Sequence[str],
    *,
    wanted: int,
    cores: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[Round]:
    """Measure rounds, print and keep each, until ``wanted`` rounds count. Ends earlier if time or tries run out."""
    rounds = kept.read()
    if rounds:
        log(f"{len(rounds)} rounds are kept in {kept.folder}, {len(counted_rounds(rounds))} of them count")
    began, longest, discarded = clock(), 0.0, 0
    while (number := len(counted_rounds(rounds))) < wanted and discarded < MAX_DISCARDED:
        round_began = clock()
        if round_began + longest > began + MAX_SECONDS:
            log(f"no time for another round: {MAX_SECONDS:.0f} s are nearly over; the same command goes on")
            break
        round_ = Round(turns=tuple(measure(name) for name in order_of(number, bases)))
        kept.add(round_)
        rounds.append(round_)
        log(round_line(len(rounds), round_, cores=cores))
        longest = max(longest, clock() - round_began)
        discarded += len(counted_rounds(rounds)) == number
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="+", metavar="base", help="an older commit")
    parser.add_argument("workload", choices=[name for name, workload in WORKLOADS.items() if workload.goal is None])
    parser.add_argument("--head", default="HEAD", help="the commit that is judged; by default the one checked out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that have to count")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training that are measured in each turn")
    arguments = parser.parse_args()
    ended_by_signals()
    try:
        return _compare(arguments, WORKLOADS[arguments.workload])
    except (CheckoutFailed, ContestantFailed) as error:
        print(f"paired: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paired: interrupted; whole rounds are kept, and the same command goes on", file=sys.stderr)
        return 130


def _compare(arguments: argparse.Namespace, workload: Workload) -> int:
    bases, head = [commit_of(base) for base in arguments.bases], commit_of(arguments.head)
    log(
        f"{workload.name}: {head} against {', '.join(bases)}, {arguments.rounds} rounds of {arguments.seconds:g} s a "
        "turn (uncommitted changes are not measured)"
    )
    names = {**{base: base for base in bases}, HEAD: head}
    runs = {name: _prepared(name, commit, workload.name) for name, commit in names.items()}
    described = machine.described(machine.REPOSITORY)
    conditions = {key: described[key] for key in ("processor", "cores", "python", "packages")}
    kept = KeptRounds(
        folder=FOLDER / "rounds" / "-".join([workload.name, *bases, head]),
        conditions={**conditions, "window_seconds": arguments.seconds},
    )

    def measure(name: str) -> Turn:
        return throughput_turn(runs[name], workload, (), window_seconds=arguments.seconds)

    cores = conditions["cores"]
    rounds = measure_rounds(kept, measure, bases, wanted=arguments.rounds, cores=cores)
    log("\n".join(closing_lines(workload.name, names, rounds, cores=cores, seconds=arguments.seconds)))
    return 0 if len(counted_rounds(rounds)) >= arguments.rounds else 1


def _prepared(name: str, commit: str, workload: str) -> CommitRun:
    return prepare(name, check_out(commit, FOLDER / "trees"), workload)


if __name__ == "__main__":
    sys.exit(main())
