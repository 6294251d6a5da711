"""Which stored version an evaluator plays next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsrl.parameters.evaluations import EVALUATION_KEY, number_of
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.parameters.terminal import TERMINAL_KEY


@dataclass(frozen=True, kw_only=True)
class Share:
    """The versions that are one evaluator's: those whose number, divided by the evaluators, leaves its index.

    It follows from the version alone, so that each version has exactly one evaluator, whoever lives when.
    """

    index: int
    """The evaluator's, from the roster."""
    num_evaluators: int

    def holds(self, info: VersionInfo) -> bool:
        """Whether the version is this evaluator's."""
        return number_of(info) % self.num_evaluators == self.index

    def place_of(self, info: VersionInfo) -> int:
        """The version's place in the share that holds it, from 0."""
        return number_of(info) // self.num_evaluators


@dataclass(frozen=True, kw_only=True)
class EvaluationInterval:
    """How far apart the versions are that one evaluator plays: at either distance; with neither, any is enough."""

    every_seconds: float | None
    """Between the moments at which they were stored."""
    every_versions: int | None
    """In places of the share."""


def choose(
    versions: Sequence[VersionInfo], *, share: Share, interval: EvaluationInterval, last: VersionInfo | None
) -> VersionInfo | None:
    """The version to play now: the newest of the share, if it is due; None if there is nothing to do for now.

    Versions between the last one played and the newest are passed over: an evaluator that is slower than training must
    not fall behind further and further. The last version of a finished run is always due.

    Args:
        versions: All that are stored, oldest first.
        share: The evaluator's.
        interval: What is due.
        last: The newest that this evaluator dealt with in this life; what former lives played is told by the versions.
    """
    mine = [info for info in versions if share.holds(info)]
    played = [info for info in mine if EVALUATION_KEY in info.metadata]
    last = max([*played, *([] if last is None else [last])], key=lambda info: info.version, default=None)
    if not mine or (last is not None and mine[-1].version <= last.version):
        return None
    newest = mine[-1]
    return newest if TERMINAL_KEY in newest.metadata or _is_due(newest, last, share, interval) else None


def _is_due(newest: VersionInfo, last: VersionInfo | None, share: Share, interval: EvaluationInterval) -> bool:
    if last is None or (interval.every_seconds is None and interval.every_versions is None):
        return True
    places = share.place_of(newest) - share.place_of(last)
    seconds = newest.created_at - last.created_at
    return (interval.every_versions is not None and places >= interval.every_versions) or (
        interval.every_seconds is not None and seconds >= interval.every_seconds
    )
