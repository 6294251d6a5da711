"""The memory that a producer and a consumer on one machine share: a progress counter and the slots' arrays.

One segment belongs to one connection and is never reused: a revoked producer that continues writes only there. The
memory is anonymous and its size is sealed, so neither end can remove it while the other reads. The kernel frees it
after both processes have dropped their last array over it, however they end.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Self

from numpy.typing import NDArray

from rlsrl.data.slots import ALIGNMENT, SlotLayout
from rlsrl.rpc.local import create_memory, seal_size


class Segment:
    """``num_slots`` slots in mapped memory."""

    def __init__(self, descriptor: int, layout: SlotLayout, num_slots: int) -> None:
        """Map the memory of ``descriptor`` and own the descriptor.

        Raises:
            OSError, ValueError: the memory cannot be mapped or is too short. The descriptor is closed.
        """
        self._descriptor = descriptor
        try:
            self._view = memoryview(mmap.mmap(descriptor, segment_nbytes(layout, num_slots)))
        except BaseException:
            os.close(descriptor)
            raise
        self.progress: memoryview = self._view[:8].cast("q")
        """One integer. The producer changes it to show that it is alive."""
        self.slots: list[dict[str, NDArray[Any]]] = [
            layout.view(self._view[ALIGNMENT + place * layout.nbytes :]) for place in range(num_slots)
        ]
        """Each slot's arrays, over the shared memory."""

    @classmethod
    def create(cls, layout: SlotLayout, num_slots: int) -> Self:
        """Return a segment of new memory, filled with zeros.

        Raises:
            OSError: there is not enough memory.
        """
        descriptor = create_memory("rlsrl-slots", segment_nbytes(layout, num_slots))
        seal_size(descriptor)
        return cls(descriptor, layout, num_slots)

    @property
    def descriptor(self) -> int:
        """The descriptor to send to the other end, or -1 after ``close_descriptor``."""
        return self._descriptor

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def segment_nbytes(layout: SlotLayout, num_slots: int) -> int:
    """Return the bytes of a segment: one cache line for the progress counter, then the slots."""
    return ALIGNMENT + num_slots * layout.nbytes
