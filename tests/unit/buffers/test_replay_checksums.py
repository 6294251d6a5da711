"""What is found in a store whose machine was lost: pages that the disk never got are zeros or older bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.buffers.replay.checksums import FoundInPart, drop_torn, seal
from rlsrl.buffers.replay.draws import PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.layout import CHECKSUM, ENV_STEPS, MARK, PRIORITY, ReplayLayout
from rlsrl.buffers.replay.rows import RowForm, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.testing.replay import Numbered, SlotSource

NUM_SEGMENTS, STEPS, LANES = 7, 4, 2
ENV_STEPS_BEFORE = 1000
SECTOR = 64
"""Bytes that are lost together. Smaller than a disk's, so that small stores have many."""


class Store:
    """A store, and all that its disk may have of it: its memory at each moment."""

    def __init__(self, *, seed: int = 0, is_stacked: bool = False) -> None:
        make: Any = (lambda: FrameStackObservation(Numbered(image=True), 4)) if is_stacked else Numbered
        self._source = SlotSource(num_steps=STEPS, num_lanes=LANES, make=make, seed=seed)
        stacks = {"observation": 4} if is_stacked else {}
        self.layout = ReplayLayout.of(
            self._source.layout, capacity=NUM_SEGMENTS * STEPS, stacks=stacks, has_priorities=True
        )
        self._memory = bytearray(self.layout.nbytes)
        self.segments = Segments(self.layout, self._memory)
        self.moments = [bytes(self._memory)]
        self.sealed: dict[int, dict[str, Any]] = {}
        """What was sealed, by the segment's number: entries by name."""

    def insert(self) -> None:
        inserted = self.segments.insert(self._source.slot())
        PrioritizedDraws(self.segments, exponent=0.6, offset=1e-6).inserted(inserted.numbers)
        self.moments.append(bytes(self._memory))

    def seal(self) -> None:
        self.segments.seal()
        self.moments.append(bytes(self._memory))
        self.sealed |= {number: self.entries(self.segments.arrays, number) for number in numbers_in(self.segments)}

    def entries(self, arrays: Any, number: int) -> dict[str, Any]:
        place = number % NUM_SEGMENTS
        return {name: arrays[name][place].copy() for name in (*self.layout.sealed, CHECKSUM)}

    def is_whole(self, arrays: Any, number: int) -> bool:
        """Return whether these arrays have all of a sealed segment."""
        there = self.entries(arrays, number)
        return all(np.array_equal(there[name], entry) for name, entry in self.sealed[number].items())

    def disk(self, lost: list[tuple[int, int]]) -> bytearray:
        """Return the memory with some sectors as they were earlier: (sector, moment), both taken modulo."""
        found = bytearray(self._memory)
        for sector, moment in lost:
            start = sector % -(-len(found) // SECTOR) * SECTOR
            found[start : start + SECTOR] = self.moments[moment % len(self.moments)][start : start + SECTOR]
        return found

    def recover(self, memory: bytearray) -> tuple[FoundInPart, Segments]:
        recovered = drop_torn(self.layout, memory, env_steps=ENV_STEPS_BEFORE)
        return recovered, Segments(self.layout, memory)


def numbers_in(segments: Segments) -> set[int]:
    return {int(mark) - 1 for mark in segments.arrays[MARK] if mark}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 100),
    is_stacked=st.booleans(),
    turns=st.lists(st.sampled_from(["insert", "insert", "seal"]), min_size=1, max_size=14),
    lost=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=30),
)
def test_whatever_the_disk_lacks_no_torn_row_is_drawn_and_all_that_is_whole_is_found(
    seed: int, is_stacked: bool, turns: list[str], lost: list[tuple[int, int]]
) -> None:
    store = Store(seed=seed, is_stacked=is_stacked)
    for turn in (*turns, "seal"):
        getattr(store, turn)()
    memory = store.disk(lost)
    before = store.layout.view(bytes(memory))
    whole = {number for number in store.sealed if store.is_whole(before, number)}
    newest = max(whole, default=0)

    recovered, segments = store.recover(memory)

    assert numbers_in(segments) == {number for number in whole if number > newest - NUM_SEGMENTS}
    assert all(store.is_whole(segments.arrays, number) for number in numbers_in(segments))
    assert recovered.found == segments.num_transitions <= segments.env_steps
    assert segments.count_untrained() == segments.count_trained_after(0) == 0, "the ledger has counted them"
    if not segments.num_transitions:
        return
    assert segments.env_steps == ENV_STEPS_BEFORE, "nothing counts as gathered again"
    for draws in (UniformDraws(segments), PrioritizedDraws(segments, exponent=0.6, offset=1e-6)):
        keys = draws.draw(64, np.random.default_rng(seed)).keys
        assert segments.are_held(keys // STEPS).all()
        assert segments.flat["mask"][keys % segments.layout.num_places].all()
        assert 0 <= segments.mean_age(keys) < segments.num_transitions
        rows_of(segments, keys, RowForm(num_steps=3, discount=0.9))


def test_a_whole_disk_has_all() -> None:
    store = Store()
    for _ in range(5):
        store.insert()
    held = numbers_in(store.segments)
    rows = rows_of(store.segments, store.segments.keys_after(0), RowForm(num_steps=3, discount=0.9))
    store.seal()
    recovered, segments = store.recover(store.disk([]))
    assert numbers_in(segments) == held
    assert recovered == FoundInPart(found=store.segments.num_transitions, marked=store.segments.num_transitions)
    again = rows_of(segments, store.segments.keys_after(0), RowForm(num_steps=3, discount=0.9))
    assert all(np.array_equal(again[name], array) for name, array in rows.items())


@pytest.mark.parametrize("name", ["observation", "reward", "mask", "sequence", CHECKSUM])
def test_a_segment_without_one_of_its_pages_is_dropped_and_counted(name: str) -> None:
    store = Store()
    for _ in range(3):
        store.insert()
    store.seal()
    memory = store.disk([])
    torn = store.segments.num_transitions - int(np.count_nonzero(store.segments.arrays["mask"][5]))
    of = store.segments.num_transitions if name != "mask" else torn
    store.layout.view(memory)[name][5] = 0
    if name == "sequence":
        store.layout.view(memory)[name][5] = 7
    recovered, segments = store.recover(memory)
    assert numbers_in(segments) == {0, 1, 2, 3, 4}
    assert recovered == FoundInPart(found=torn, marked=of)


def test_what_is_not_sealed_is_dropped() -> None:
    store = Store()
    store.insert()
    store.seal()
    store.insert()
    _, segments = store.recover(store.disk([]))
    assert numbers_in(segments) == {0, 1}


def test_priorities_and_later_slots_need_no_new_seal() -> None:
    """They change while a segment is held; a checksum over them would be wrong until the next one."""
    store = Store()
    store.insert()
    store.seal()
    store.segments.arrays[PRIORITY][0] = 5
    store.segments.arrays[ENV_STEPS][0] += 1
    store.segments.arrays["first_trained"][0] = 9
    _, segments = store.recover(store.disk([]))
    assert numbers_in(segments) == {0, 1}


def test_what_is_found_again_is_replaced_without_being_counted() -> None:
    store = Store()
    for _ in range(3):
        store.insert()
    store.seal()
    recovered, segments = store.recover(store.disk([]))
    inserted = [segments.insert(SlotSource(num_steps=STEPS, num_lanes=LANES, seed=1).slot()) for _ in range(3)]
    assert sum(each.num_evicted for each in inserted) > 0
    assert not any(each.num_evicted_untrained for each in inserted)
    assert segments.count_untrained() == sum(each.num_transitions for each in inserted)
    assert recovered.found < segments.env_steps


def test_a_second_check_of_the_same_store_finds_the_same() -> None:
    """As after a kill while it was checked."""
    store = Store()
    for _ in range(5):
        store.insert()
    store.seal()
    memory = store.disk([(3, 0), (9, 0), (20, 2)])
    first, segments = store.recover(memory)
    numbers = numbers_in(segments)
    second, segments = store.recover(memory)
    assert (second.found, numbers_in(segments)) == (first.found, numbers)
    assert 0 < len(numbers) < NUM_SEGMENTS


@pytest.mark.parametrize(("name", "access"), [("reward", "__getitem__"), (CHECKSUM, "__setitem__")])
def test_segments_that_are_replaced_while_they_are_sealed_are_sealed_the_next_time(name: str, access: str) -> None:
    """All are replaced within the first access to that array."""
    store, is_left = Store(), [True]
    for _ in range(4):
        store.insert()

    def replace(array: Any, *arguments: Any) -> Any:
        if is_left:
            is_left.clear()
            for _ in range(4):
                store.insert()
        return getattr(np.ndarray, access)(array, *arguments)

    replacing = type("Replacing", (np.ndarray,), {access: replace})
    arrays = store.segments.arrays
    seal(store.layout, {**arrays, name: arrays[name].view(replacing)})
    assert not is_left
    store.seal()
    _, segments = store.recover(store.disk([]))
    assert len(numbers_in(segments)) == NUM_SEGMENTS
    assert numbers_in(segments) == numbers_in(store.segments)


def test_a_segment_that_a_newer_one_had_replaced_is_dropped() -> None:
    """The disk has all of it, and nothing of the newer one."""
    store = Store()
    for _ in range(3):
        store.insert()
    store.seal()
    old = store.layout.view(store.disk([]))
    for _ in range(3):
        store.insert()
    store.seal()
    memory = store.disk([])
    for name, array in store.layout.view(memory).items():
        array[3] = old[name][3]
    _, segments = store.recover(memory)
    assert numbers_in(segments) == {5, 6, 7, 8, 9, 11}
