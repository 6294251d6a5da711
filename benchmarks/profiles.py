"""How a run of rlsrl spends its time: shares of a window by role, from the workers' ``/metrics``."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

ANSWER_SECONDS = 5.0
CPU, REST = "cpu", "rest"
"""Processor seconds a second of the whole process; and the rest of its main thread's time."""
STAGES = {
    ("rlsrl_working_seconds_total", "environment"): "environment",
    ("rlsrl_working_seconds_total", "inference"): "inference",
    ("rlsrl_working_seconds_total", "update"): "update",
    ("rlsrl_working_seconds_total", "copy"): "copy",
    ("rlsrl_inference_seconds_sum", "compute"): "inference",
    ("rlsrl_inference_seconds_sum", "parameters"): "new weights",
    ("rlsrl_inference_seconds_sum", "response"): "responses",
}
"""Measured work, by the sample's name and its label ``stage``."""
Worker = tuple[str, int]
"""Role and index."""


@dataclass(frozen=True, kw_only=True)
class RunProfile:
    """Seconds that each worker has spent since its start, by activity."""

    at: float
    """Unix seconds."""
    seconds: Mapping[Worker, Mapping[str, float]]

    @classmethod
    def read(cls, run_folder: Path) -> Self | None:
        """Read the metrics of all workers in the run's status. Returns None while the status has no workers."""
        try:
            status = json.loads((run_folder / "status.json").read_text())
        except FileNotFoundError:
            return None
        addresses = {
            (role, int(worker["index"])): worker["endpoints"].get("metrics")
            for role, workers in status["roles"].items()
            for worker in workers
        }
        if not addresses:
            return None
        at = time.time()
        return cls(at=at, seconds={who: spent(_fetch(address)) for who, address in addresses.items() if address})


def spent(exposition: str) -> dict[str, float]:
    """Return the seconds by activity, from the text of a worker's metrics."""
    seconds: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "rlsrl_waiting_seconds_total":
                seconds[f"waits for {sample.labels['reason']}"] = sample.value
            elif sample.name == "process_cpu_seconds_total":
                seconds[CPU] = sample.value
            elif (stage := STAGES.get((sample.name, sample.labels.get("stage", "")))) is not None:
                seconds[stage] = sample.value
    return seconds


def time_shares(before: RunProfile | None, after: RunProfile | None) -> dict[str, dict[str, float]]:
    """Return each activity's share of the time between two profiles, by role, the mean over its workers.

    Returns an empty mapping without two profiles. The shares except ``cpu`` add up to about 1. Work counts when it
    ends, so that shares are rough with few training steps in a window.
    """
    if before is None or after is None or after.at <= before.at:
        return {}
    by_role: dict[str, list[dict[str, float]]] = {}
    for (role, index), now in after.seconds.items():
        then = before.seconds.get((role, index), {})
        shares = {what: max(0.0, now[what] - then.get(what, 0.0)) / (after.at - before.at) for what in now}
        accounted = sum(share for what, share in shares.items() if what != CPU)
        by_role.setdefault(role, []).append({**shares, REST: max(0.0, 1.0 - accounted)})
    return {role: _means(workers) for role, workers in by_role.items()}


def _means(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for worker in workers for name in worker})
    return {name: round(fmean(worker.get(name, 0.0) for worker in workers), 3) for name in names}


def _fetch(address: str) -> str:
    """Return a worker's metrics, or an empty text if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=ANSWER_SECONDS) as answer:
            text: bytes = answer.read()
    except OSError:
        return ""
    return text.decode()
