"""Measure one workload against peers: ``make bench W=W1``. Prints all turns, and keeps the result.

The exit status is 0 with a result, 1 without one, and 2 if a contestant could not be measured.
"""

from __future__ import annotations

import argparse
import sys

import throughput
import time_to_goal
import torch
from contestants import PEERS, ContestantFailed, Rlsrl
from figures import SHOWN
from peer_environments import PeerUnavailable
from results import keep, log, sentence
from turns import ended_by_signals
from workloads import WORKLOADS


def main() -> int:
    """Measure, print and keep; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    workload = WORKLOADS[parser.parse_args().workload]
    log(f"{workload.name}: {workload.title}")
    if workload.device == "cuda" and not torch.cuda.is_available():
        print(f"bench: {workload.name} is skipped: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    measure = throughput.measure if workload.goal is None else time_to_goal.measure
    ended_by_signals()
    try:
        result = measure(workload, [Rlsrl(), *PEERS])
    except (ContestantFailed, PeerUnavailable) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    log(sentence(result))
    path = keep(result)
    log("not kept: the earlier result stays" if path is None else f"kept in {path}")
    return 0 if result["verdict"] == SHOWN else 1


if __name__ == "__main__":
    sys.exit(main())
