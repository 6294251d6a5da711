"""The outside view of a live run at one moment: its pages, mapped files and sockets. Linux."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsrl.testing.live_runs import Desk, LiveRun, fetch


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """The outside view of a live run."""

    status: Mapping[str, Any]
    """The coordinator's ``/status``."""
    expositions: Mapping[str, str]
    """The text of each worker's metrics endpoint, by ``role-index``."""
    mapped_files: Mapping[str, frozenset[str]]
    """Files mapped into a worker's memory, by role."""
    sockets: tuple[str, ...]
    """The run's lines of ``/proc/net/unix``."""


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """An ended run with its snapshot while it lived."""

    desk: Desk
    exit_code: int
    output: str
    snapshot: RunSnapshot
    top: str
    """The output of ``rlsrl top`` while it lived."""


def take_snapshot(run: LiveRun) -> RunSnapshot:
    """Return the snapshot of a run whose processes are all running."""
    status = run.facts.status()
    if status is None:
        raise RuntimeError("the coordinator does not answer")
    addresses = {
        f"{role}-{worker['index']}": worker["endpoints"]["metrics"]
        for role, workers in status["roles"].items()
        for worker in workers
    }
    addresses["coordinator-0"] = status["endpoints"]["http"]
    uid = run.facts.run_uid
    return RunSnapshot(
        status=status,
        expositions={name: fetch(f"http://{address}/metrics") for name, address in addresses.items()},
        mapped_files={worker.role: _mapped_files(worker.pid) for worker in run.workers()},
        sockets=tuple(line for line in Path("/proc/net/unix").read_text().splitlines() if uid in line),
    )


def _mapped_files(pid: int) -> frozenset[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return frozenset(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
