"""Chooses the stored version that an evaluator plays next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsrl.parameters.evaluations import EVALUATION_KEY, number_of
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.parameters.terminal import TERMINAL_KEY


@dataclass(frozen=True, kw_only=True)
class Share:
    """The versions that one evaluator plays: those whose number modulo the number of evaluators is its index.

    The version alone decides. So each version has exactly one evaluator, whichever evaluators run.
    """

    index: int
    """The evaluator's leased index."""
    num_evaluators: int

    def holds(self, info: VersionInfo) -> bool:
        """Return whether the version is in this share."""
        return number_of(info) % self.num_evaluators == self.index

    def place_of(self, info: VersionInfo) -> int:
        """Return the version's place in its share, from 0."""
        return number_of(info) // self.num_evaluators


@dataclass(frozen=True, kw_only=True)
class EvaluationInterval:
    """The distance from the version that one evaluator plays to the next that it plays.

    With both intervals, the earlier of the two counts. With neither, every newer version is due.
    """

    every_seconds: float | None
    """Seconds between the times at which the two versions were stored; None: no such interval."""
    every_versions: int | None
    """Number of versions of the evaluator's share from the one to the other; None: no such interval."""


def choose(
    versions: Sequence[VersionInfo], *, share: Share, interval: EvaluationInterval, last: VersionInfo | None
) -> VersionInfo | None:
    """Return the version to play now, the newest of the share if it is due, or None.

    Versions between the last one played and the newest are skipped: an evaluator that is slower than training must not
    fall behind more and more. The last version of a finished run is always due.

    Args:
        versions: All stored versions, oldest first.
        share: The evaluator's share.
        interval: The distance from the version played last.
        last: The newest version that this process handled. Versions themselves record what earlier processes played.
    """
    own = [info for info in versions if share.holds(info)]
    played = [info for info in own if EVALUATION_KEY in info.metadata]
    last = max([*played, *([] if last is None else [last])], key=lambda info: info.version, default=None)
    if not own or (last is not None and own[-1].version <= last.version):
        return None
    newest = own[-1]
    return newest if newest.metadata.get(TERMINAL_KEY) is not None or _is_due(newest, last, share, interval) else None


def _is_due(newest: VersionInfo, last: VersionInfo | None, share: Share, interval: EvaluationInterval) -> bool:
    if last is None or (interval.every_seconds is None and interval.every_versions is None):
        return True
    places = share.place_of(newest) - share.place_of(last)
    seconds = newest.created_at - last.created_at
    return (interval.every_versions is not None and places >= interval.every_versions) or (
        interval.every_seconds is not None and seconds >= interval.every_seconds
    )
