"""Where a run of rlsrl spends its time: shares of a window by role, from what its workers show at ``/metrics``."""

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
"""Processor seconds a second of the whole process; and what of its main work none of the other shares has."""
STAGES = {
    ("rlsrl_working_seconds_total", "environment"): "environment",
    ("rlsrl_working_seconds_total", "inference"): "inference",
    ("rlsrl_working_seconds_total", "update"): "update",
    ("rlsrl_working_seconds_total", "copy"): "copy",
    ("rlsrl_inference_seconds_sum", "compute"): "inference",
    ("rlsrl_inference_seconds_sum", "parameters"): "new weights",
    ("rlsrl_inference_seconds_sum", "response"): "responses",
}
"""Work whose duration is measured, by the sample's name and its label ``stage``."""
Worker = tuple[str, int]
"""Role and index."""


@dataclass(frozen=True, kw_only=True)
class RunProfile:
    """What each worker has spent seconds on since its start."""

    at: float
    """Unix seconds."""
    seconds: Mapping[Worker, Mapping[str, float]]

    @classmethod
    def read(cls, run_folder: Path) -> Self | None:
        """Ask all workers that the run's status names; None if there is no status yet, or no worker in it."""
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
    """Seconds by what they were spent on, from the text of a worker's metrics."""
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
    """By role, the mean over its workers of the share of the time between two looks; nothing without two.

    All but ``cpu`` come to 1 together, as far as a worker's threads take turns. Work counts when it ends: with few
    training steps in a window the shares are rough.
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
    names = sorted({name for each in workers for name in each})
    return {name: round(fmean(each.get(name, 0.0) for each in workers), 3) for name in names}


def _fetch(address: str) -> str:
    """What a worker answers; nothing if it does not."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=ANSWER_SECONDS) as answer:
            text: bytes = answer.read()
    except OSError:
        return ""
    return text.decode()
