"""Evaluations of stored versions: where they are kept, and which version is the best.

An evaluation is what a version's policy came to over a fixed number of episodes, in the version's metadata under
``EVALUATION_KEY``: ``episodes``, ``return_mean``, ``return_std`` and others; or only ``unfinished`` with the reason, if
the episodes did not come to an end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import ParameterDB, VersionInfo, VersionNotFound

EVALUATION_KEY = "evaluation"
"""Metadata of a version that was evaluated."""
NUMBER_KEY = "number"
"""Metadata that the trainer gives each version it stores: how many it had stored before, over all lives of the run."""
BEST_TAG = "best"
"""The tag of the version with the best evaluation."""


def evaluation_of(info: VersionInfo) -> Mapping[str, Any] | None:
    """The version's evaluation; None if it has none."""
    evaluation = info.metadata.get(EVALUATION_KEY)
    return evaluation if isinstance(evaluation, Mapping) else None


def return_mean_of(info: VersionInfo) -> float | None:
    """The version's mean return; None if it was not evaluated to the end."""
    mean = (evaluation_of(info) or {}).get("return_mean")
    return float(mean) if isinstance(mean, int | float) else None


def number_of(info: VersionInfo) -> int:
    """The version's place among all that were stored; 0 if it was not stored by a trainer."""
    number = info.metadata.get(NUMBER_KEY)
    return number if isinstance(number, int) else 0


def next_number(versions: Iterable[VersionInfo]) -> int:
    """The number of the next version to be stored."""
    return max((number_of(info) + 1 for info in versions), default=0)


def best_of(versions: Iterable[VersionInfo]) -> VersionInfo | None:
    """The version with the highest mean return, the oldest of equals; None if none was evaluated."""
    evaluated = [(mean, info) for info in versions if (mean := return_mean_of(info)) is not None]
    best = max((mean for mean, _ in evaluated), default=None)
    return min((info for mean, info in evaluated if mean == best), key=lambda info: info.version, default=None)


def tag_best(db: ParameterDB, policy: str) -> Version | None:
    """Put the tag on the best of the stored versions and return that version; None if none was evaluated.

    Evaluators that do this at the same time, each after it stored its result, end in agreement: whoever moves the tag
    looks again afterwards.
    """
    while (best := best_of(db.versions(policy))) is not None and BEST_TAG not in best.tags:
        try:
            db.tag(policy, best.version, BEST_TAG)
        except VersionNotFound:
            continue  # Pruned since it was listed.
    return None if best is None else best.version
