"""The call board shows the calls that have not returned, each with a mark that changes from call to call."""

from __future__ import annotations

import mmap
from typing import get_args

import pytest

from rlsrl.runtime.call_board import (
    BOARD_BYTES,
    CALL,
    CALL_NAMES,
    IDLE,
    LANE,
    NUM_CALLS,
    CallBoard,
    CallEntry,
    CallName,
    close_entry,
    on_board,
    private_entry,
)


def shared() -> tuple[CallBoard, CallBoard]:
    """Return the board of the writer and that of the reader, on the same memory."""
    memory = mmap.mmap(-1, BOARD_BYTES)
    return CallBoard(memory), CallBoard(memory)


def call(entry: CallEntry, lane: int, name: CallName = "step") -> None:
    entry[NUM_CALLS] += 1
    entry[CALL] = CALL_NAMES.index(name)
    entry[LANE] = lane


def test_the_reader_sees_rank_and_name_of_the_calls_of_all_threads() -> None:
    board, reader = shared()
    one, bulk, idle = board.open_entry(40), board.open_entry(8, span=4), board.open_entry(7)
    assert list(reader.calls()) == []
    call(one, 2, "reset")
    call(bulk, 0)
    found = [(each.first_rank, each.num_environments, each.name) for each in reader.calls()]
    assert found == [(42, 1, "reset"), (8, 4, "step")]
    one[LANE] = IDLE
    assert [each.first_rank for each in reader.calls()] == [8]
    assert idle[LANE] == IDLE


def test_a_mark_changes_with_each_call() -> None:
    board, reader = shared()
    entry, marks = board.open_entry(0), list[object]()
    calls: list[tuple[int, CallName]] = [(0, "step"), (0, "step"), (0, "reset"), (1, "step"), (0, "step")]
    for lane, name in calls:
        call(entry, lane, name)
        marks += [each.mark for each in reader.calls()]
    assert len(marks) == len(set(marks)) == 5


@pytest.mark.parametrize("name", get_args(CallName))
def test_a_call_is_on_the_board_while_it_lasts_also_if_it_raises(name: CallName) -> None:
    board, reader = shared()
    entry = board.open_entry(40)

    def look(*calls: str, then: int) -> float:
        assert [(each.first_rank, each.name) for each in reader.calls()] == [(42, call) for call in calls]
        return 1 / then

    assert on_board(entry, 2, name, look, name, then=2) == 0.5
    assert list(reader.calls()) == []
    with pytest.raises(ZeroDivisionError):
        on_board(entry, 2, name, look, name, then=0)
    entry[LANE] = 2
    look("step", then=1)
    assert on_board(private_entry(), 0, name, int, "7") == 7


def test_a_closed_entry_shows_nothing_and_is_used_again() -> None:
    board, reader = shared()
    first, second = board.open_entry(1), board.open_entry(2)
    call(first, 0)
    call(second, 0)
    close_entry(first)
    assert [each.first_rank for each in reader.calls()] == [2]
    call(board.open_entry(3), 0)
    assert sorted((each.first_rank, each.entry) for each in reader.calls()) == [(2, 1), (3, 0)]
