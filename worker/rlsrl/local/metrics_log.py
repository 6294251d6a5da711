"""Reads the coordinator's ``metrics.jsonl``: the learning curve, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsrl.api.role_names import EVALUATOR, TRAINER


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One row of metrics."""

    step: int
    """Training step."""
    wall: float
    """Unix seconds."""
    role: str
    """Role of the worker that measured."""
    scalars: Mapping[str, float]
    """By name, for example ``env_steps`` and ``return_mean``."""


def read_rows(path: Path) -> list[MetricsRow]:
    """Return all whole rows, in the order of writing; none if the file does not exist.

    Invalid lines are skipped: a killed coordinator may leave a partial line.
    """
    return read_rows_and_damage(path)[0]


def read_rows_and_damage(path: Path) -> tuple[list[MetricsRow], int]:
    """Return the rows as ``read_rows`` does, and the number of damaged lines.

    A last line that is invalid is no damage: a killed coordinator may leave a partial line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    parsed = [_parse(line) for line in text.splitlines()]
    return [row for row in parsed if row is not None], parsed[:-1].count(None)


def training_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Return the trainer's rows that belong to the history of the newest weights.

    A resumed trainer continues from its last durable version and repeats the steps after it. The rows of the
    rolled-back steps are left out.
    """
    kept: list[MetricsRow] = []
    for row in rows:
        if row.role != TRAINER:
            continue
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return kept


def evaluation_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Return the evaluators' rows by step. The last row of a step counts: it repeats a killed evaluation."""
    by_step = {row.step: row for row in rows if row.role == EVALUATOR}
    return [by_step[step] for step in sorted(by_step)]


def _parse(line: str) -> MetricsRow | None:
    try:
        value: Any = json.loads(line)
        return MetricsRow(
            step=int(value["step"]),
            wall=float(value["wall"]),
            role=str(value["role"]),
            scalars={str(name): float(scalar) for name, scalar in value["scalars"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
