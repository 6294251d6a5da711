"""What is kept of a measurement: one JSON file in ``docs/benchmarks``, which is there whole or as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from figures import RLSRL, SHOWN, Round
from lineup import Lineup
from machine import REPOSITORY
from workloads import Workload

SECONDS = "seconds"
"""What is measured where there is a goal."""
FOLDER = REPOSITORY / "docs" / "benchmarks"


def document(workload: Workload, rounds: Sequence[Round], told: Mapping[str, Any], lineup: Lineup) -> dict[str, Any]:
    """All that was measured, with what, on what, and what it comes to, which ``told`` says (``figures.verdict``)."""
    return {
        "workload": workload.name,
        "title": workload.title,
        "unit": "env steps/s" if workload.goal is None else SECONDS,
        **told,
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
        "rounds": [{"quiet": each.is_quiet, "turns": [asdict(turn) for turn in each.turns]} for each in rounds],
    }


def sentence(result: Mapping[str, Any]) -> str:
    """What came of it, in words."""
    if result["verdict"] != SHOWN:
        return f"{result['workload']}: {result['verdict']}"
    ratio, figures, peer = result["ratio"], result["figures"], result["fastest_peer"]
    line = (
        f"{result['workload']}: {ratio['median']:.2f} x {peer} ({ratio['low']:.2f} to {ratio['high']:.2f}): "
        f"{figures[RLSRL]['median']:,.1f} against {figures[peer]['median']:,.1f} {result['unit']}; others used at most "
        f"{result['others']:.1%} of the machine"
    )
    limit = result.get("of_the_limit")
    return line if limit is None else f"{line}; {limit[RLSRL]:.1%} of the latency limit"


def say(text: str) -> None:
    """Print at once: a measurement takes minutes."""
    print(text, flush=True)


def write(path: Path, value: Any) -> None:
    """Write it as JSON in place of what is there; whoever is interrupted leaves that as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


def keep(result: Mapping[str, Any], folder: Path = FOLDER) -> Path | None:
    """Write it in place of what was measured before; returns where.

    None if it is not: it shows nothing, and what was shown before, of the same experiment, stays.
    """
    before = kept(result["workload"], folder) or {}
    same = all(before.get(told) == result.get(told) for told in ("experiment", "peer_arguments"))
    if result["verdict"] != SHOWN and before.get("verdict") == SHOWN and same:
        return None
    path = folder / f"{result['workload']}.json"
    write(path, result)
    return path


def kept(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """What is known of a workload; None if it was not measured."""
    try:
        result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return result
