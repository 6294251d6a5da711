"""A ring of segments: inserting slots lane by lane, and finding where each lane goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.buffers.replay import checksums
from rlsrl.buffers.replay.layout import (
    CHECKSUM,
    ENV_STEPS,
    EPISODE_START,
    FIRST_TRAINED,
    INCARNATION,
    LANE,
    MARK,
    PRIORITY,
    PRODUCER,
    SEQUENCE,
    UNSEALED,
    ReplayLayout,
)
from rlsrl.data.slots import Slot

Indices = NDArray[np.int64]

NONE = -1
"""The number of no segment."""


@dataclass(frozen=True, kw_only=True)
class Inserted:
    """What an insertion changed."""

    numbers: range
    """The numbers of the new segments."""
    num_transitions: int
    """Transitions inserted."""
    num_evicted: int
    """Transitions removed for them that were trained before."""
    num_evicted_untrained: int
    """Transitions removed for them that were not."""


class Segments:
    """Segments in a ring, over memory that may outlive the process. Not thread-safe, except ``seal``.

    Segments are numbered in the order of insertion; a number says the place, ``number % num_segments``. The mark in the
    memory says that a segment is whole: it is removed before its place is overwritten, and written last. So what a
    killed process left is either whole or free. At a free place ``mask`` is False: it says which steps are transitions
    that are held.
    """

    def __init__(self, layout: ReplayLayout, memory: Any, *, env_steps: int = 0) -> None:
        """Use ``memory``: zeros, or what an earlier process left of a store with this layout.

        ``env_steps``: the run's env steps before an empty store.
        """
        self.layout = layout
        self.arrays: Mapping[str, NDArray[Any]] = layout.view(memory)
        """All arrays by field, each [num_segments, ...]."""
        self.flat: Mapping[str, NDArray[Any]] = {
            name: array.reshape(-1, *array.shape[2:])
            for name, array in self.arrays.items()
            if array.ndim > 1 and name not in layout.states
        }
        """Those of steps, each [num_places, ...], and those of frames, each [num_segments * frames, ...]."""
        self.following: Indices = np.full(layout.num_segments, NONE, np.int64)
        """The number of the segment with which the lane of each goes on, by place, or ``NONE``: not known yet."""
        self.preceding: Indices = np.full(layout.num_segments, NONE, np.int64)
        """The number of the segment that the lane of each had before, by place, or ``NONE``. It may be gone."""
        self._newest: dict[tuple[int, int, int], int] = {}
        """The number of each lane's newest segment, by producer, incarnation and lane."""
        self.next_number = 0
        """The number of the next segment."""
        self.env_steps = env_steps
        """Env steps of the run that were ever stored."""
        self._recover()
        self.num_transitions = int(np.count_nonzero(self.arrays["mask"]))
        """Transitions held."""
        self.num_rows = int(np.count_nonzero(self.rows_held()))
        """Rows that can be drawn."""

    def insert(self, slot: Slot) -> Inserted:
        """Copy a slot's lanes into the places of the oldest segments.

        Raises:
            ValueError: a stacked observation is no stack of the images of successive frames.
        """
        assert slot.producer is not None, "set on arrival"
        first, trained, untrained = self.next_number, 0, 0
        for lane in range(slot.num_lanes):
            evicted = self._free(self.next_number % self.layout.num_segments)
            trained, untrained = trained + evicted[0], untrained + evicted[1]
            self._write(slot, lane)
            inserted = int(np.count_nonzero(slot.arrays["mask"][:, lane]))
            self.num_transitions += inserted - sum(evicted)
            self.num_rows += self._rows_in(inserted) - self._rows_in(sum(evicted))
        num_transitions = int(np.count_nonzero(slot.arrays["mask"]))
        return Inserted(
            numbers=range(first, self.next_number),
            num_transitions=num_transitions,
            num_evicted=trained,
            num_evicted_untrained=untrained,
        )

    def seal(self) -> None:
        """Write the checksums of new segments. A thread of its own may call it."""
        checksums.seal(self.layout, self.arrays)

    def rows_held(self) -> NDArray[np.bool_]:
        """Return which places of rows have one that can be drawn, [num_segments * rows_per_segment].

        A sequence of steps that are no transitions has nothing to train on.
        """
        return self.has_row(np.arange(self.layout.num_segments * self.layout.rows_per_segment))

    def has_row(self, places: Indices) -> NDArray[np.bool_]:
        """Return what ``rows_held`` does of some places only."""
        if self.layout.states:
            in_segments: NDArray[np.bool_] = np.logical_or.reduce(self.arrays["mask"][places], axis=1)
            return in_segments
        of_steps: NDArray[np.bool_] = self.flat["mask"][places]
        return of_steps

    def _rows_in(self, num_transitions: int) -> int:
        """Return the rows of a segment with so many transitions."""
        return min(num_transitions, 1) if self.layout.states else num_transitions

    def count_untrained(self) -> int:
        """Return the number of transitions held that were never trained."""
        return int(np.count_nonzero(self.arrays["mask"] & (self.arrays[FIRST_TRAINED] == 0)))

    def count_trained_after(self, step: int) -> int:
        """Return the number of transitions held that were trained first after that training step."""
        return int(np.count_nonzero(self.arrays["mask"] & (self.arrays[FIRST_TRAINED] > step)))

    def forget_training_after(self, step: int) -> None:
        """Count the transitions that were trained first after that training step as never trained."""
        first_trained = self.arrays[FIRST_TRAINED]
        first_trained[first_trained > step] = 0

    def keys_after(self, env_steps: int) -> Indices:
        """Return the keys of the transitions held that were stored after so many env steps of the run, oldest first."""
        is_after = self.arrays[ENV_STEPS] > env_steps
        place, step = np.nonzero(self.arrays["mask"] & is_after[:, np.newaxis])
        return np.sort((self.arrays[MARK][place] - 1) * self.layout.num_steps + step)

    def mean_age(self, keys: Indices) -> float:
        """Return the mean number of env steps that were stored after the segments of these rows."""
        places = keys // self.layout.num_steps % self.layout.num_segments
        return float(self.env_steps - self.arrays[ENV_STEPS][places].mean())

    def are_held(self, numbers: Indices) -> NDArray[np.bool_]:
        """Return which of these segments are still there."""
        marks: Indices = self.arrays[MARK][numbers % self.layout.num_segments]
        held: NDArray[np.bool_] = (numbers != NONE) & (marks == numbers + 1)
        return held

    def _free(self, place: int) -> tuple[int, int]:
        """Remove the segment at a place, if there is one; return its transitions (trained, untrained)."""
        number = int(self.arrays[MARK][place]) - 1
        if number == NONE:
            return 0, 0
        self.arrays[MARK][place] = 0
        self.following[place] = self.preceding[place] = NONE
        lane = self._lane_at(place)
        if self._newest.get(lane) == number:
            del self._newest[lane]
        mask = self.arrays["mask"][place]
        num_transitions = int(np.count_nonzero(mask))
        num_trained = int(np.count_nonzero(mask & (self.arrays[FIRST_TRAINED][place] != 0)))
        mask.fill(False)
        return num_trained, num_transitions - num_trained

    def _write(self, slot: Slot, lane: int) -> None:
        assert slot.producer is not None, "checked by the caller"
        number, layout = self.next_number, self.layout
        place = number % layout.num_segments
        if layout.stacks:
            self._write_images(slot, lane, place)  # first: where it raises, the place stays free
        for name in (*layout.steps, *layout.frames):
            if name not in layout.stacks:
                self.arrays[name][place] = slot.arrays[name][:, lane]
        for name in layout.states:
            self.arrays[name][place] = slot.arrays[name][lane]
        env_steps = self.env_steps + int(np.count_nonzero(slot.arrays["mask"][:, lane]))
        headers = (slot.producer.index, slot.producer.incarnation, lane, slot.sequence, env_steps)
        for name, value in zip((PRODUCER, INCARNATION, LANE, SEQUENCE, ENV_STEPS), headers, strict=True):
            self.arrays[name][place] = value
        self.arrays[FIRST_TRAINED][place] = 0
        if PRIORITY in self.arrays:
            self.arrays[PRIORITY][place] = 0
        self.arrays[CHECKSUM][place] = UNSEALED
        self.arrays[MARK][place] = number + 1
        self.next_number, self.env_steps = number + 1, env_steps
        self._link(number)

    def _write_images(self, slot: Slot, lane: int, place: int) -> None:
        """Write the first stack and the last image of each further one.

        The episode of the frame after a step that is no transition begins with that frame.
        """
        begins = np.zeros(self.layout.num_steps + 1, np.int32)
        begins[1:] = np.where(slot.arrays["mask"][:, lane], 0, np.arange(1, self.layout.num_steps + 1))
        starts = np.maximum.accumulate(begins)
        self.arrays[EPISODE_START][place] = starts
        for name, depth in self.layout.stacks.items():
            stacks, images = slot.arrays[name][:, lane], self.arrays[name][place]
            images[:depth] = stacks[0]
            images[depth:] = stacks[1:, -1]
            last = images[stack_places(np.int64(self.layout.num_steps), starts[-1], depth)]
            if slot.arrays["mask"][-1, lane] and not np.array_equal(last, stacks[-1]):
                raise ValueError(
                    f"{name}: after {self.layout.num_steps} steps the {depth} images of lane {lane} are not the last "
                    "images of its frames"
                )

    def _link(self, number: int) -> None:
        """Note that a segment is its lane's newest, and follows the one before if no slot between them is missing."""
        place = number % self.layout.num_segments
        lane = self._lane_at(place)
        before = self._newest.get(lane, NONE)
        if before != NONE:
            before_place = before % self.layout.num_segments
            if self.arrays[SEQUENCE][before_place] + 1 == self.arrays[SEQUENCE][place]:
                self.following[before_place] = number
                self.preceding[place] = before
        self._newest[lane] = number

    def _lane_at(self, place: int) -> tuple[int, int, int]:
        producer, incarnation, lane = (int(self.arrays[name][place]) for name in (PRODUCER, INCARNATION, LANE))
        return producer, incarnation, lane

    def _recover(self) -> None:
        """Find the whole segments in the memory. Others are free."""
        marks = self.arrays[MARK]
        misplaced = (marks < 0) | ((marks - 1) % self.layout.num_segments != np.arange(self.layout.num_segments))
        marks[misplaced] = 0
        self.arrays["mask"][marks == 0] = False
        numbers = np.sort(marks[marks > 0]) - 1
        for number in numbers.tolist():
            self._link(number)
        if numbers.size:
            newest = int(numbers[-1])
            self.next_number = newest + 1
            self.env_steps = int(self.arrays[ENV_STEPS][newest % self.layout.num_segments])


def stack_places(frame: Any, start: Any, depth: int) -> Indices:
    """Return the places of a frame's images among those of its segment, [..., depth], oldest first.

    ``frame`` [...] is the frame's number in the segment, ``start`` [...] that of the first frame of its episode, or 0
    if that is of an earlier segment. Frame f's last image is at place ``f + depth - 1``. A stack repeats the first
    image of an episode until there are enough.
    """
    start = np.asarray(start, np.int64)
    first = np.where(start > 0, start + depth - 1, 0)
    places: Indices = np.maximum(np.asarray(frame, np.int64)[..., None] + np.arange(depth), first[..., None])
    return places
