"""The call board shows the calls that have not returned, each with a mark that changes from call to call."""

from __future__ import annotations

import mmap

from rlsrl.runtime.call_board import BOARD_BYTES, IDLE, IS_RESET, LANE, NUM_CALLS, CallBoard, CallEntry, close_entry


def shared() -> tuple[CallBoard, CallBoard]:
    """Return the board of the writer and that of the reader, on the same memory."""
    memory = mmap.mmap(-1, BOARD_BYTES)
    return CallBoard(memory), CallBoard(memory)


def call(entry: CallEntry, lane: int, *, is_reset: bool = False) -> None:
    entry[NUM_CALLS] += 1
    entry[IS_RESET] = is_reset
    entry[LANE] = lane


def test_the_reader_sees_rank_and_name_of_the_calls_of_all_threads() -> None:
    board, reader = shared()
    one, bulk, idle = board.open_entry(40), board.open_entry(8, span=4), board.open_entry(7)
    assert list(reader.calls()) == []
    call(one, 2, is_reset=True)
    call(bulk, 0)
    found = [(each.first_rank, each.num_environments, each.name) for each in reader.calls()]
    assert found == [(42, 1, "reset"), (8, 4, "step")]
    one[LANE] = IDLE
    assert [each.first_rank for each in reader.calls()] == [8]
    assert idle[LANE] == IDLE


def test_a_mark_changes_with_each_call() -> None:
    board, reader = shared()
    entry, marks = board.open_entry(0), list[object]()
    for lane, is_reset in ((0, False), (0, False), (0, True), (1, False), (0, False)):
        call(entry, lane, is_reset=is_reset)
        marks += [each.mark for each in reader.calls()]
    assert len(marks) == len(set(marks)) == 5


def test_a_closed_entry_shows_nothing_and_is_used_again() -> None:
    board, reader = shared()
    first, second = board.open_entry(1), board.open_entry(2)
    call(first, 0)
    call(second, 0)
    close_entry(first)
    assert [each.first_rank for each in reader.calls()] == [2]
    call(board.open_entry(3), 0)
    assert sorted((each.first_rank, each.entry) for each in reader.calls()) == [(2, 1), (3, 0)]
