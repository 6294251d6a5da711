"""Measure what ``rlsrl ui`` costs beside a run: its share of a core and its memory, with one client.

    python benchmarks/ui_cost.py

The client asks what the page of one run asks, at the same intervals. The exit status is 0 within the bounds, 1 beyond
them, and 2 if the run or the server failed.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
from contestants import RUN, ContestantFailed, Rlsrl
from results import log
from turns import end, ended_by_signals, started
from workloads import WORKLOADS, Workload

MAX_SHARE = 0.02
"""Bound of the server's processor time, as a share of one core."""
MAX_MEGABYTES = 100.0
"""Bound of the server's resident memory."""
VERSIONS_EVERY, LOG_EVERY = 2, 3
"""Seconds between two questions of the page for the versions, and for a log. It asks for the rest each second."""


@dataclass(frozen=True, kw_only=True)
class UiCost:
    """The cost of the server."""

    share: float
    """Processor time as a share of one core."""
    megabytes: float
    """The largest resident memory."""

    @property
    def is_within(self) -> bool:
        """Whether the cost is within the bounds."""
        return self.share <= MAX_SHARE and self.megabytes <= MAX_MEGABYTES


class PageClient:
    """Asks what the page of a run asks."""

    def __init__(self, url: str, run: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10.0)
        self._path = f"/api/runs/{quote(run)}"
        self._after, self._file = 0, ""

    def ask(self, second: int) -> None:
        """Ask what the page asks in that second of its life.

        Raises:
            OSError, ValueError: the server does not answer well.
        """
        logs = self._get("")["logs"]
        self._read_curve()
        if second % VERSIONS_EVERY == 0:
            self._get("/versions")
        if second % LOG_EVERY == 0 and logs:
            self._get(f"/logs/{quote(logs[0])}")

    def _read_curve(self) -> None:
        answer = self._get(f"/curve?after={self._after}&file={quote(self._file)}")
        self._after, self._file = answer["next"], answer["file"]

    def _get(self, path: str) -> Any:
        self._connection.request("GET", self._path + path)
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise ValueError(f"{path or 'the run'}: the server answers {response.status}")
        return json.loads(data)


@contextmanager
def served(program: Path, runs: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Serve the folder's runs during the body; yield the server's process and address."""
    command = [str(program), "ui", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        found = re.search(rb"http://\S+/", process.stdout.readline())
        if found is None:
            raise ContestantFailed("`rlsrl ui` did not start")
        yield psutil.Process(process.pid), found[0].decode()
    finally:
        end(process, signal.SIGINT)


def watch(server: psutil.Process, client: PageClient, *, seconds: float) -> UiCost:
    """Ask each second, and return what the server needs."""
    began, megabytes = time.monotonic(), 0.0
    before = sum(server.cpu_times()[:2])
    for second in itertools.count():
        client.ask(second)
        megabytes = max(megabytes, server.memory_info().rss / 1e6)
        time.sleep(max(0.0, began + second + 1 - time.monotonic()))
        if (passed := time.monotonic() - began) >= seconds:
            break
    return UiCost(share=(sum(server.cpu_times()[:2]) - before) / passed, megabytes=megabytes)


def measure(workload: Workload, *, warm_seconds: float, seconds: float) -> UiCost:
    """Run the workload and the server, and return the server's cost.

    Raises:
        ContestantFailed: the run or the server failed.
        OSError, ValueError: the server does not answer well.
    """
    contestant = Rlsrl()
    with started(contestant, workload, (), seed=1) as running:
        running.await_training()
        with served(contestant.program, running.folder) as (server, url):
            client = PageClient(url, RUN)
            watch(server, client, seconds=warm_seconds)
            return watch(server, client, seconds=seconds)


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS, nargs="?", default="W1")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-seconds", type=float, default=10.0, help="before the measurement")
    args = parser.parse_args()
    ended_by_signals()
    try:
        cost = measure(WORKLOADS[args.workload], warm_seconds=args.warm_seconds, seconds=args.seconds)
    except (ContestantFailed, OSError, ValueError, psutil.Error) as error:
        print(f"ui: {error}", file=sys.stderr)
        return 2
    verdict = "within the bounds" if cost.is_within else "beyond the bounds"
    log(f"{args.workload}: {cost.share:.1%} of a core, {cost.megabytes:.0f} MB: {verdict}")
    return 0 if cost.is_within else 1


if __name__ == "__main__":
    sys.exit(main())
