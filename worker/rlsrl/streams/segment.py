"""The memory that a producer and a consumer of one machine share: a word of progress and the slots' arrays.

One segment belongs to one connection and is never given to another, so a producer that was given up and wakes again
writes only where nobody else does. It is anonymous and sealed against resizing, so that neither end can take it from
under the other; the kernel frees it when the last array over it is gone, however the processes end.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Self

from numpy.typing import NDArray

from rlsrl.data.slots import ALIGNMENT, SlotLayout
from rlsrl.rpc.local import create_memory, seal_size


class Segment:
    """``num_slots`` slots in a mapped memory descriptor."""

    def __init__(self, fd: int, layout: SlotLayout, num_slots: int) -> None:
        """Map the descriptor, which the caller may close afterwards.

        Raises:
            OSError, ValueError: it cannot be mapped, or is too short.
        """
        self._view = memoryview(mmap.mmap(fd, segment_nbytes(layout, num_slots)))
        self.progress: memoryview = self._view[:8].cast("q")
        """One integer: the producer changes it to show that it is alive."""
        self.slots: list[dict[str, NDArray[Any]]] = [
            layout.view(self._view[ALIGNMENT + place * layout.nbytes :]) for place in range(num_slots)
        ]
        """Each slot's arrays, over the shared memory."""

    @classmethod
    def create(cls, layout: SlotLayout, num_slots: int) -> tuple[Self, int]:
        """Fresh memory of zeros; returns it with the descriptor to send, which the caller closes."""
        fd = create_memory("rlsrl-slots", segment_nbytes(layout, num_slots))
        try:
            seal_size(fd)
            return cls(fd, layout, num_slots), fd
        except BaseException:
            os.close(fd)
            raise


def segment_nbytes(layout: SlotLayout, num_slots: int) -> int:
    """Bytes of a segment: one cache line for the word of progress, then the slots."""
    return ALIGNMENT + num_slots * layout.nbytes
