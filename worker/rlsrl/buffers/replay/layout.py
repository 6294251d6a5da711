"""What a replay store keeps, and where: one block of memory with an array for each field.

A segment is the part of one slot that belongs to one lane: T steps and T + 1 frames. It holds the successor of each of
its steps, so that nothing about a transition has to be looked up elsewhere.

Stacked images are kept image by image: a segment then has the T + 1 last images of its stacks, after the earlier images
of its first stack.

Rows are what is drawn. A transition is one; or a whole segment, where slots carry the state of a recurrent network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import ALIGNMENT, DISCOUNTED_RETURN, SlotLayout, is_state_field
from rlsrl.data.specs import ArraySpec

STEP_FIELDS = ("action", "reward", "terminated", "truncated", "mask", DISCOUNTED_RETURN)
"""A slot's fields that are kept beside its frames, as far as it has them. The others describe how a step was chosen and
reported."""

MARK = "mark"
"""Header, int64 []: 1 + the segment's number, or 0 where there is no segment. It is written last."""
PRODUCER, INCARNATION, LANE, SEQUENCE = "producer", "incarnation", "lane", "sequence"
"""Headers, int64 []: the lane that a segment belongs to, and the place of its slot among the producer's."""
ENV_STEPS = "env_steps"
"""Header, int64 []: the env steps of the run that were stored up to the segment, its own among them."""
CHECKSUM = "checksum"
"""Header, int64 []: the checksum of what is ``sealed``, or ``UNSEALED``; see ``rlsrl.buffers.replay.checksums``."""
HEADERS = (MARK, PRODUCER, INCARNATION, LANE, SEQUENCE, ENV_STEPS, CHECKSUM)
UNSEALED = 0
FIRST_TRAINED = "first_trained"
"""int64 [T]: the training step that trained on the transition first, or 0, or ``COUNTED_AS_LOST``."""
COUNTED_AS_LOST = -1
"""``FIRST_TRAINED`` of a transition that was found after its machine was lost. The ledger has counted it, at the latest
as lost. It can be drawn, and counts neither as trained nor as evicted."""
PRIORITY = "priority"
"""int64 [R]: with draws by priority, each row's, as ``draws.SCALE`` has it; 0 where there is no row to draw. R is
``ReplayLayout.rows_per_segment``."""
EPISODE_START = "episode_start"
"""int32 [T + 1]: for stacked images, the first frame of each frame's episode, or 0 if that is of an earlier segment."""


@dataclass(frozen=True, kw_only=True)
class ReplayLayout:
    """The arrays of a replay store."""

    fields: Mapping[str, tuple[tuple[int, ...], str]]
    """(shape of a segment's entry, dtype) of each array by name, in memory order."""
    num_segments: int
    num_steps: int
    """T."""
    frames: tuple[str, ...]
    """Paths of the observations."""
    stacks: Mapping[str, int]
    """Number of images of each stacked observation by its path."""

    @classmethod
    def of(
        cls,
        slot: SlotLayout,
        *,
        capacity: int,
        stacks: Mapping[str, int] | None = None,
        has_priorities: bool = False,
    ) -> Self:
        """Return the layout for at least ``capacity`` steps of slots with this layout.

        Args:
            slot: The number of lanes is ignored.
            capacity: Steps that fit. Steps that only reset an environment take a place, too.
            stacks: Number of images by path, for observations [images, ...] whose step to the next frame drops the
                first image and adds one; after a reset all images are the same.
            has_priorities: Whether rows are drawn by priority.

        Raises:
            ValueError: an observation does not have as many images as ``stacks`` says.
        """
        stacks = dict(stacks or {})
        num_steps = slot.num_steps
        frames = tuple(name for name, field in slot.fields.items() if field.axes == "frames")
        fields: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(HEADERS, ((), "int64"))
        fields[FIRST_TRAINED] = ((num_steps,), "int64")
        states = tuple(filter(is_state_field, slot.fields))
        if has_priorities:
            fields[PRIORITY] = ((1 if states else num_steps,), "int64")
        if stacks:
            fields[EPISODE_START] = ((num_steps + 1,), "int32")
        for name in filter(slot.fields.__contains__, STEP_FIELDS):
            array = slot.fields[name].array
            fields[name] = ((num_steps, *array.shape), array.dtype)
        for name in states:
            fields[name] = (slot.fields[name].array.shape, slot.fields[name].array.dtype)
        for name in frames:
            array = slot.fields[name].array
            if name not in stacks:
                fields[name] = ((num_steps + 1, *array.shape), array.dtype)
                continue
            if array.shape[:1] != (stacks[name],):
                raise ValueError(f"{name} has the shape {array.shape}, and not {stacks[name]} images")
            fields[name] = ((num_steps + stacks[name], *array.shape[1:]), array.dtype)
        return cls(
            fields=fields,
            num_segments=-(-capacity // num_steps),
            num_steps=num_steps,
            frames=frames,
            stacks=stacks,
        )

    def frame_spec(self, name: str) -> ArraySpec:
        """Return the spec of an observation as it is drawn, with all images of a stack."""
        shape, dtype = self.fields[name]
        stack = (self.stacks[name],) if name in self.stacks else ()
        return ArraySpec(shape=stack + shape[1:], dtype=dtype)

    @property
    def steps(self) -> tuple[str, ...]:
        """Those of ``STEP_FIELDS`` that are kept."""
        return tuple(name for name in STEP_FIELDS if name in self.fields)

    @property
    def sealed(self) -> tuple[str, ...]:
        """Arrays whose entries a segment keeps as they were inserted. Others change, or follow from these."""
        return tuple(name for name in self.fields if name not in (CHECKSUM, ENV_STEPS, FIRST_TRAINED, PRIORITY))

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Fields of the recurrent state with which frame 0 was acted on; empty where the network has none."""
        return tuple(filter(is_state_field, self.fields))

    @property
    def rows_per_segment(self) -> int:
        """Rows of a segment. A recurrent network is trained on whole segments."""
        return 1 if self.states else self.num_steps

    @property
    def num_places(self) -> int:
        """Places for steps."""
        return self.num_segments * self.num_steps

    def nbytes_of(self, name: str) -> int:
        """Bytes of a whole array."""
        shape, dtype = self.fields[name]
        return self.num_segments * math.prod(shape) * np.dtype(dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store, padding included."""
        return sum(map(_aligned, map(self.nbytes_of, self.fields)))

    def view(self, memory: Any) -> dict[str, NDArray[Any]]:
        """Return the arrays over ``memory``, a buffer of at least ``nbytes``: each [num_segments, ...]."""
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, (shape, dtype) in self.fields.items():
            arrays[name] = np.ndarray((self.num_segments, *shape), dtype, buffer=memory, offset=offset)
            offset += _aligned(self.nbytes_of(name))
        return arrays


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
