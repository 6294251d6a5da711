"""Reads the coordinator's ``metrics.jsonl``: the learning curve, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINER = "trainer"
EVALUATOR = "evaluator"


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """What was measured at one moment of training."""

    step: int
    """Training step."""
    wall: float
    """Unix seconds."""
    role: str
    """Of the worker that measured."""
    scalars: Mapping[str, float]
    """By name, for example ``env_steps`` and ``return_mean``."""


def read_rows(path: Path) -> list[MetricsRow]:
    """All whole rows, in the order in which they were written; none if there is no file.

    A line that is no row is left out: a killed coordinator leaves a part of one at the end of its life.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [row for line in text.splitlines() if (row := _parse(line)) is not None]


def training_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """The trainer's rows, of the history that the newest weights have.

    A resumed trainer goes on from its last durable version and passes the same steps again; what was measured on the
    way that led nowhere is left out.
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
    """The evaluators' rows by step; of several for one step the last, since a killed evaluator's work is done again."""
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
