"""Reads the coordinator's ``metrics.jsonl``: the learning curve, one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsrl.api.role_names import EVALUATOR, TRAINER
from rlsrl.data.episodes import info_statistics
from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import FIXED_EVALUATION
from rlsrl.runtime.coordination import PROGRAM

_FIXED = f"{FIXED_EVALUATION}/"


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


def program_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Return the rows of programs that followed the run, without those of steps that were rolled back."""
    kept: list[MetricsRow] = []
    for row in rows:
        if row.role == PROGRAM:
            while kept and kept[-1].step > row.step:
                kept.pop()
            kept.append(row)
    return kept


def evaluation_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Return the evaluators' rows by step. The last row of a step counts: it repeats a killed evaluation.

    Rows of fixed versions are left out: these may be versions of another run.
    """
    by_step = {row.step: row for row in rows if row.role == EVALUATOR and not _is_of_fixed_version(row)}
    return [by_step[step] for step in sorted(by_step)]


def fixed_evaluations(rows: Sequence[MetricsRow]) -> list[dict[str, Any]]:
    """Return the result of each fixed version that was played to the end, in the order of playing, as JSON values.

    An evaluator plays its fixed version again after a restart: the last result of a version counts.
    """
    found = {}
    for row in rows:
        scalars = {name.removeprefix(_FIXED): each for name, each in row.scalars.items() if name.startswith(_FIXED)}
        if "attempt" in scalars:
            version = str(Version(int(scalars["attempt"]), row.step))
            found[version] = {"version": version, **_result(scalars)}
    return list(found.values())


def _is_of_fixed_version(row: MetricsRow) -> bool:
    return any(_FIXED in name for name in row.scalars)  # also within ``unfinished_...``


def _result(scalars: Mapping[str, float]) -> dict[str, Any]:
    """Return an evaluation as its JSON value; null for a value that is NaN or infinite, which JSON lacks."""
    values = {name: scalars.get(name, math.nan) for name in ("return_mean", "return_std", "length_mean")}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"episodes": int(scalars.get("episodes", 0)), **finite, "episode_info": info_statistics(scalars)}


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
