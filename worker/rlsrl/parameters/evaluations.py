"""Evaluations of stored versions: where they are stored, and which version is the best.

An evaluation is the result of a fixed number of episodes with one version. It is stored in the version's metadata under
``EVALUATION_KEY``: ``episodes``, ``return_mean``, ``return_std`` and others. If some episodes did not end, it also has
the reason, ``unfinished``, and the numbers are those of the others; if none ended, it has only the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import ParameterDB, VersionInfo, VersionNotFound

EVALUATION_KEY = "evaluation"
"""Metadata key of a version's evaluation."""
FIXED_EVALUATION = "fixed_evaluation"
"""Begins the names of a fixed version's result on the learning curve, where ``EVALUATION_KEY`` begins those of others.
Such a result (``evaluators.parameters``) is in no version's metadata."""
NUMBER_KEY = "number"
"""Metadata key of a version's number: how many versions the run's trainers had stored before it, restarts included."""
BEST_TAG = "best"
"""The tag of the version with the best evaluation."""


def evaluation_of(info: VersionInfo) -> Mapping[str, Any] | None:
    """Return the version's evaluation; None if it has none."""
    evaluation = info.metadata.get(EVALUATION_KEY)
    return evaluation if isinstance(evaluation, Mapping) else None


def return_mean_of(info: VersionInfo) -> float | None:
    """Return the version's mean return; None if its evaluation is missing or unfinished.

    The mean of an unfinished evaluation is no estimate: the long episodes are missing.
    """
    evaluation = evaluation_of(info) or {}
    mean = evaluation.get("return_mean")
    return float(mean) if isinstance(mean, int | float) and "unfinished" not in evaluation else None


def number_of(info: VersionInfo) -> int:
    """Return the version's number (see ``NUMBER_KEY``); 0 if no trainer stored it."""
    number = info.metadata.get(NUMBER_KEY)
    return number if isinstance(number, int) else 0


def next_number(versions: Iterable[VersionInfo]) -> int:
    """Return the number of the next version that will be stored."""
    return max((number_of(info) + 1 for info in versions), default=0)


def best_of(versions: Iterable[VersionInfo]) -> VersionInfo | None:
    """Return the version with the highest mean return, the oldest of equal ones; None if none was evaluated."""
    evaluated = [(mean, info) for info in versions if (mean := return_mean_of(info)) is not None]
    best = max((mean for mean, _ in evaluated), default=None)
    return min((info for mean, info in evaluated if mean == best), key=lambda info: info.version, default=None)


def tag_best(db: ParameterDB, policy: str) -> Version | None:
    """Tag the best of the stored versions with ``BEST_TAG`` and return it; None if none was evaluated.

    Several evaluators may call this at the same time, each after it has stored its result. They end in agreement,
    because each one checks again after it has moved the tag.
    """
    while (best := best_of(db.versions(policy))) is not None and BEST_TAG not in best.tags:
        try:
            db.tag(policy, best.version, BEST_TAG)
        except VersionNotFound:
            continue  # The version was pruned after the listing.
    return None if best is None else best.version
