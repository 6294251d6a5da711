"""Checksums of segments: after a machine is lost they show which segments the disk has whole.

A segment is *sealed* when its checksum is written, by the thread that writes the store back. So inserting takes no time
for checksums. What is sealed and whole is found again; everything else is dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsrl.buffers.replay.layout import (
    CHECKSUM,
    COUNTED_AS_LOST,
    ENV_STEPS,
    FIRST_TRAINED,
    MARK,
    UNSEALED,
    ReplayLayout,
)
from rlsrl.data.specs import Arrays

_SEALED = 1 << 32
"""Above each checksum, so that none is ``UNSEALED``."""


@dataclass(frozen=True, kw_only=True)
class FoundInPart:
    """What is left of a store whose machine was lost, in transitions."""

    found: int
    """In whole segments."""
    marked: int
    """In all segments, as far as their marks and masks show."""


def seal(layout: ReplayLayout, arrays: Arrays) -> None:
    """Write the checksums of segments that have none. Another thread may insert meanwhile."""
    marks, checksums, sealed = arrays[MARK].copy(), arrays[CHECKSUM], layout.sealed
    for place in np.flatnonzero((marks > 0) & (checksums == UNSEALED)).tolist():
        checksums[place] = _checksum_of(arrays, sealed, place)
        if arrays[MARK][place] != marks[place]:  # replaced meanwhile: the new segment is sealed the next time
            checksums[place] = UNSEALED


def drop_torn(layout: ReplayLayout, memory: Any, *, env_steps: int) -> FoundInPart:
    """Free the places of segments that are not whole, in a store whose machine was lost. Idempotent.

    A whole segment that a newer one had replaced goes, too. Transitions that are left have the ledger's former counts:
    see ``COUNTED_AS_LOST``.

    Args:
        layout: The store's.
        memory: What the disk has.
        env_steps: Those of the run, as for an empty store. They contain the transitions that are left.
    """
    arrays, sealed = layout.view(memory), layout.sealed
    marks, mask, checksums = arrays[MARK], arrays["mask"], arrays[CHECKSUM]
    marked = int(np.count_nonzero(mask[marks != 0]))
    is_whole = np.zeros(layout.num_segments, np.bool_)
    for place in np.flatnonzero((marks > 0) & (checksums != UNSEALED)).tolist():
        is_whole[place] = checksums[place] == _checksum_of(arrays, sealed, place)
    is_whole &= marks > marks[is_whole].max(initial=0) - layout.num_segments
    marks[~is_whole] = 0
    mask[~is_whole] = False
    arrays[FIRST_TRAINED].fill(COUNTED_AS_LOST)
    oldest_first = np.flatnonzero(is_whole)[np.argsort(marks[is_whole])]
    ends = np.count_nonzero(mask[oldest_first], axis=1).cumsum()
    found = int(ends[-1]) if ends.size else 0
    arrays[ENV_STEPS][oldest_first] = env_steps - found + ends
    return FoundInPart(found=found, marked=marked)


def _checksum_of(arrays: Arrays, sealed: Iterable[str], place: int) -> int:
    checksum = 0
    for name in sealed:
        checksum = zlib.crc32(arrays[name][place], checksum)
    return _SEALED | checksum
