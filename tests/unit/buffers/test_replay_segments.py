"""Segments of a replay store and their rows, against a plain account of what happened in each lane."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.buffers.replay.layout import FIRST_TRAINED, MARK, ReplayLayout
from rlsrl.buffers.replay.rows import RowForm, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.testing.replay import Numbered, SlotSource

DISCOUNT = 0.9
OBSERVATION = "observation"


def stacked() -> Any:
    return FrameStackObservation(Numbered(image=True), 4)


def segments_of(source: SlotSource, num_segments: int, stacks: dict[str, int] | None = None) -> Segments:
    layout = ReplayLayout.of(source.layout, capacity=num_segments * source.layout.num_steps, stacks=stacks)
    assert layout.num_segments == num_segments
    return Segments(layout, bytearray(layout.nbytes))


def held_keys(segments: Segments) -> np.ndarray:
    """Return the keys of all transitions."""
    marks, mask = segments.arrays[MARK], segments.arrays["mask"]
    place, step = np.nonzero(mask)
    return (marks[place] - 1) * segments.layout.num_steps + step


def check(segments: Segments, places: dict[int, tuple[SlotSource, int, int]], num_steps: int, ends: Any) -> int:
    """Compare all rows with the plain account; return their number.

    ``places`` has (source, lane, first step) of each segment's number; ``ends`` returns where a lane's account ends.
    """
    keys = held_keys(segments)
    rows = rows_of(segments, keys, RowForm(num_steps=num_steps, discount=DISCOUNT))
    for row, key in enumerate(keys.tolist()):
        source, lane, first = places[key // segments.layout.num_steps]
        start = first + key % segments.layout.num_steps
        account = source.lanes[lane]
        assert account.steps[start]["mask"]
        expected = account.transition(start, num_steps=num_steps, discount=DISCOUNT, end=ends(source, lane, first))
        assert rows.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(rows[name][row], value, rtol=1e-5, atol=1e-6, err_msg=name)
            assert name in ("reward", "discount") or np.array_equal(rows[name][row], value)
    return len(keys)


@pytest.mark.parametrize("num_steps", [1, 3, 7])
@pytest.mark.parametrize(("make", "stacks"), [(Numbered, None), (stacked, {OBSERVATION: 4})], ids=["vector", "stacks"])
def test_rows_are_those_of_the_lanes(num_steps: int, make: Any, stacks: dict[str, int] | None) -> None:
    sources = [SlotSource(num_steps=5, num_lanes=lanes, make=make, seed=lanes, index=lanes) for lanes in (1, 3)]
    segments, places = segments_of(sources[0], 23, stacks), {}
    checked = 0
    for turn in range(12):
        for source in sources:
            inserted = segments.insert(source.slot())
            places |= {number: (source, lane, 5 * turn) for lane, number in enumerate(inserted.numbers)}
        checked = check(segments, places, num_steps, lambda source, lane, first: len(source.lanes[lane].steps))
    assert 23 * 5 * 0.7 < checked < 23 * 5


def test_the_age_of_transitions_is_in_env_steps() -> None:
    source = SlotSource(num_steps=4, num_lanes=1, make=partial(Numbered, longest=30))
    segments = segments_of(source, 3)
    stored = [segments.insert(source.slot()).num_transitions for _ in range(5)]
    keys = np.array([2 * 4, 4 * 4 + 3])
    assert segments.mean_age(keys) == (sum(stored[3:]) + 0) / 2


def test_a_missing_slot_ends_the_rows_before_it() -> None:
    source = SlotSource(num_steps=4, num_lanes=2, make=partial(Numbered, longest=30))
    segments, places = segments_of(source, 40), {}
    lost = {3, 4, 8}
    for turn in range(12):
        slot = source.slot()
        if turn not in lost:
            inserted = segments.insert(slot)
            places |= {number: (source, lane, 4 * turn) for lane, number in enumerate(inserted.numbers)}
    ends = [*(4 * turn for turn in sorted(lost)), 4 * 12]
    assert check(segments, places, 9, lambda source, lane, first: min(end for end in ends if end > first)) > 50


@pytest.mark.parametrize("num_segments", [2, 3, 4])
def test_rows_do_not_go_on_in_another_lane_that_took_the_place(num_segments: int) -> None:
    sources = [
        SlotSource(num_steps=4, num_lanes=lanes, make=partial(Numbered, longest=30), seed=lanes, index=lanes)
        for lanes in (1, 3)
    ]
    segments, places = segments_of(sources[0], num_segments), {}

    def end(source: SlotSource, lane: int, _: int) -> int:
        held = [places[int(mark) - 1] for mark in segments.arrays[MARK] if mark]
        return max(first + 4 for other, of, first in held if (other, of) == (source, lane))

    for turn in range(6):
        for source in sources:
            inserted = segments.insert(source.slot())
            places |= {number: (source, lane, 4 * turn) for lane, number in enumerate(inserted.numbers)}
            assert check(segments, places, 9, end)


def test_rows_end_before_a_step_that_is_no_transition_after_a_fault() -> None:
    """A value that is not finite at a slot's first step cannot mark the slot before as truncated: it has been sent."""
    source = SlotSource(num_steps=4, num_lanes=1, make=partial(Numbered, longest=30))
    segments = segments_of(source, 8)
    slots = [source.slot() for _ in range(2)]
    slots[1].arrays["mask"][0] = False
    for slot in slots:
        segments.insert(slot)
    assert slots[0].arrays["mask"].all() and not slots[0].arrays["terminated"].any()
    rows = rows_of(segments, np.array([3]), RowForm(num_steps=3, discount=DISCOUNT))
    assert rows["reward"] == slots[0].arrays["reward"][3, 0]
    np.testing.assert_array_equal(rows["next/observation"][0], slots[0].arrays[OBSERVATION][4, 0])
    assert rows["discount"] == pytest.approx(DISCOUNT)


def test_stacks_are_right_in_the_longest_rollouts() -> None:
    num_steps, places = 65_536, [40_000, 40_001, 65_535]
    env_spec = EnvSpec(
        observation={OBSERVATION: ArraySpec(shape=(2, 1), dtype="uint8")},
        action=ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=2),
    )
    slot_layout = rollout_layout(env_spec, num_steps=num_steps, num_lanes=1)
    slot = Slot(arrays=slot_layout.view(bytearray(slot_layout.nbytes)), producer=ProducerId(0, 0), sequence=0)
    slot.arrays["mask"][...] = True
    slot.arrays["mask"][39_999] = False
    images = np.arange(num_steps + 2).astype(np.uint8)
    slot.arrays[OBSERVATION][:, 0, :, 0] = np.stack([images[:-1], images[1:]], axis=1)
    slot.arrays[OBSERVATION][40_000, 0] = images[40_001]
    layout = ReplayLayout.of(slot_layout, capacity=num_steps, stacks={OBSERVATION: 2})
    segments = Segments(layout, bytearray(layout.nbytes))
    segments.insert(slot)
    rows = rows_of(segments, np.array(places), RowForm(num_steps=1, discount=DISCOUNT))
    np.testing.assert_array_equal(rows[OBSERVATION], slot.arrays[OBSERVATION][places, 0])


def test_another_incarnation_of_a_producer_starts_anew() -> None:
    source = SlotSource(num_steps=4, num_lanes=1, make=partial(Numbered, longest=30))
    segments, places = segments_of(source, 8), {}
    for turn in range(6):
        slot = source.slot()
        if turn >= 3:
            assert slot.producer is not None
            slot.producer = type(slot.producer)(slot.producer.index, 2)
        places |= dict.fromkeys(segments.insert(slot).numbers, (source, 0, 4 * turn))
    check(segments, places, 9, lambda source, lane, first: 12 if first < 12 else 24)


def test_evicted_transitions_are_counted_by_whether_they_were_trained() -> None:
    source = SlotSource(num_steps=4, num_lanes=2)
    segments = segments_of(source, 6)
    counts = [segments.insert(source.slot()) for _ in range(3)]
    assert [(each.num_evicted, each.num_evicted_untrained) for each in counts] == [(0, 0)] * 3
    first = counts[0]
    segments.arrays[FIRST_TRAINED][0, :] = 7
    mask = segments.arrays["mask"]
    trained, untrained = int(mask[0].sum()), int(mask[1].sum())
    assert segments.num_transitions == sum(each.num_transitions for each in counts)
    following = segments.insert(source.slot())
    assert segments.num_transitions == len(held_keys(segments))
    assert (following.num_evicted, following.num_evicted_untrained) == (trained, untrained)
    assert trained + untrained == first.num_transitions
    assert not segments.are_held(np.array([0, 1])).any()
    assert segments.are_held(np.array([2, 7])).all()
    assert not segments.are_held(np.array([-1, 8, 14])).any()
    assert not segments.arrays[FIRST_TRAINED][:2].any(), "new transitions are untrained"


class Stopped(Exception):
    """Stands for the end of the process."""


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), writes=st.integers(0, 40), num_slots=st.integers(0, 6))
def test_what_a_killed_process_left_is_whole_or_free(seed: int, writes: int, num_slots: int) -> None:
    """Stop between any two writes to the memory; what goes on from it has the rows of the whole segments."""
    source = SlotSource(num_steps=4, num_lanes=2, seed=seed)
    layout = ReplayLayout.of(source.layout, capacity=7 * 4)
    memory = bytearray(layout.nbytes)
    segments, places = Segments(layout, memory), {}

    def insert(slot: Slot, turn: int) -> None:
        first = segments.next_number
        places.update({first + lane: (source, lane, 4 * turn) for lane in range(2)})
        segments.insert(slot)

    for turn in range(num_slots):
        insert(source.slot(), turn)
    whole_before = segments.next_number

    left = writes

    class Guarded(np.ndarray):  # type: ignore[type-arg]
        def __setitem__(self, place: Any, value: Any) -> None:
            nonlocal left
            if left == 0:
                raise Stopped
            left -= 1
            super().__setitem__(place, value)

    segments.arrays = {name: array.view(Guarded) for name, array in segments.arrays.items()}
    try:
        insert(source.slot(), num_slots)
        insert(source.slot(), num_slots + 1)
    except Stopped:
        pass
    again = Segments(layout, memory)
    assert whole_before <= again.next_number <= whole_before + 4
    assert again.num_transitions == len(held_keys(again))
    ends = dict.fromkeys(range(2), 0)
    for number in range(again.next_number):
        ends[number % 2] = 4 * (number // 2) + 4
    check(again, places, 3, lambda source, lane, first: ends[lane])
    recovered = {int(mark) - 1 for mark in again.arrays[MARK] if mark}
    newest = range(max(0, again.next_number - 7), again.next_number)
    assert recovered <= set(newest)
    assert len(newest) - len(recovered) <= 1, "only the place that was being written is free"


def test_marks_that_belong_to_no_place_are_removed() -> None:
    source = SlotSource(num_steps=4, num_lanes=2)
    layout = ReplayLayout.of(source.layout, capacity=7 * 4)
    memory = bytearray(layout.nbytes)
    segments = Segments(layout, memory)
    segments.arrays[MARK][...] = [3, 9, -5, 0, 5, 13, 700]
    again = Segments(layout, memory)
    assert again.arrays[MARK].tolist() == [0, 9, 0, 0, 5, 13, 700]
    assert again.next_number == 700


@pytest.mark.parametrize("num_steps", [32, 64])
def test_stacked_images_take_the_room_of_one_image_a_step(num_steps: int) -> None:
    source = SlotSource(num_steps=num_steps, num_lanes=1, make=stacked)
    layout = ReplayLayout.of(source.layout, capacity=100 * num_steps, stacks={OBSERVATION: 4})
    of_one = layout.nbytes_of(OBSERVATION) / layout.num_places
    assert of_one < 4 * 6 * 5 / 3.5
    assert layout.frame_spec(OBSERVATION) == source.env_spec.observation[OBSERVATION]


def test_observations_that_are_no_stacks_are_refused() -> None:
    source = SlotSource(num_steps=5, num_lanes=1, make=stacked)
    segments = segments_of(source, 1, {OBSERVATION: 4})
    slot = source.slot()
    while not slot.arrays["mask"][-1, 0]:
        slot = source.slot()
    segments.insert(slot)
    slot.arrays[OBSERVATION][-1, 0, 0] += 1
    with pytest.raises(ValueError, match="after 5 steps the 4 images of lane 0 are not the last images of its frames"):
        segments.insert(slot)
    assert not segments.flat["mask"].any(), "nothing can be drawn from the place that was freed for it"
    with pytest.raises(ValueError, match=r"observation has the shape \(4, 6, 5\), and not 3 images"):
        ReplayLayout.of(source.layout, capacity=100, stacks={OBSERVATION: 3})
