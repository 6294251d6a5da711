"""The kept result of a measurement: one JSON file in ``docs/benchmarks``, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from figures import RLSRL, SHOWN, Round
from lineup import Lineup
from machine import REPOSITORY, described
from workloads import Workload

SECONDS = "seconds"
"""The unit of workloads with a goal."""
FOLDER = REPOSITORY / "docs" / "benchmarks"
FLOORS_KEPT_AS = "product-floors"
"""The name of the file with the floors of matrix products."""


def document(workload: Workload, rounds: Sequence[Round], found: Mapping[str, Any], lineup: Lineup) -> dict[str, Any]:
    """Return the result: the verdict ``found`` (``figures.verdict``), settings, versions, machine and all rounds."""
    return {
        "workload": workload.name,
        "title": workload.title,
        "unit": "env steps/s" if workload.goal is None else SECONDS,
        **found,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": lineup.machine,
        "experiment": workload.experiment()["spec"],
        "peer_arguments": workload.peer_arguments(),
        "contestants": {
            name: {
                "setting": " ".join(lineup.chosen[name]),
                "versions": dict(contestant.versions),
                "trials": {" ".join(setting): figure for setting, figure in lineup.trials[name].items()},
            }
            for name, contestant in lineup.contestants.items()
        },
        "absent": dict(lineup.absent),
        "rounds": [{"quiet": round_.is_quiet, "turns": [asdict(turn) for turn in round_.turns]} for round_ in rounds],
    }


def sentence(result: Mapping[str, Any]) -> str:
    """Return the result in one sentence."""
    if result["verdict"] != SHOWN:
        return f"{result['workload']}: {result['verdict']}"
    ratio, figures, peer = result["ratio"], result["figures"], result["fastest_peer"]
    line = (
        f"{result['workload']}: {ratio['median']:.2f} x {peer} ({ratio['low']:.2f} to {ratio['high']:.2f}): "
        f"{figures[RLSRL]['median']:,.1f} against {figures[peer]['median']:,.1f} {result['unit']}; other programs "
        f"used at most {result['others']:.1%} of the machine"
    )
    limit = result.get("of_the_limit")
    return line if limit is None else f"{line}; {limit[RLSRL]:.1%} of the latency limit"


def log(text: str) -> None:
    """Print at once, because a measurement takes minutes."""
    print(text, flush=True)


def write(path: Path, value: Any) -> None:
    """Replace a JSON file. An interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


def keep(result: Mapping[str, Any], folder: Path = FOLDER) -> Path | None:
    """Keep the result and return its path.

    Returns None if the result shows nothing and an earlier one of the same experiment does: then the earlier one stays.
    """
    before = kept(result["workload"], folder) or {}
    same = all(before.get(key) == result.get(key) for key in ("experiment", "peer_arguments"))
    if result["verdict"] != SHOWN and before.get("verdict") == SHOWN and same:
        return None
    path = folder / f"{result['workload']}.json"
    write(path, result)
    return path


def kept(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the kept result of a workload, or None."""
    try:
        result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return result


def kept_rate(name: str) -> float | None:
    """Return rlsrl's median rate in the kept result of a workload; None if none is kept of a machine like this one."""
    result = kept(name)
    here = described(REPOSITORY)
    if result is None or any(result["machine"][key] != here[key] for key in ("processor", "cores")):
        return None
    return float(result["figures"][RLSRL]["median"])
