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

    def __init__(self, descriptor: int, layout: SlotLayout, num_slots: int) -> None:
        """Map the descriptor, which is the segment's own from here on.

        Raises:
            OSError, ValueError: it cannot be mapped, or is too short; it was closed.
        """
        self._descriptor = descriptor
        try:
            self._view = memoryview(mmap.mmap(descriptor, segment_nbytes(layout, num_slots)))
        except BaseException:
            os.close(descriptor)
            raise
        self.progress: memoryview = self._view[:8].cast("q")
        """One integer: the producer changes it to show that it is alive."""
        self.slots: list[dict[str, NDArray[Any]]] = [
            layout.view(self._view[ALIGNMENT + place * layout.nbytes :]) for place in range(num_slots)
        ]
        """Each slot's arrays, over the shared memory."""

    @classmethod
    def create(cls, layout: SlotLayout, num_slots: int) -> Self:
        """Fresh memory of zeros.

        Raises:
            OSError: there is none.
        """
        descriptor = create_memory("rlsrl-slots", segment_nbytes(layout, num_slots))
        seal_size(descriptor)
        return cls(descriptor, layout, num_slots)

    @property
    def descriptor(self) -> int:
        """What to send to the other end; -1 after ``close_descriptor``."""
        return self._descriptor

    def close_descriptor(self) -> None:
        """The memory has been sent, or was received: only the mapping is needed from now on. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def segment_nbytes(layout: SlotLayout, num_slots: int) -> int:
    """Bytes of a segment: one cache line for the word of progress, then the slots."""
    return ALIGNMENT + num_slots * layout.nbytes
