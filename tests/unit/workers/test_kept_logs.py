"""The files and copies of workers' logs: the last megabyte is always there, and a bounded number of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from obstore.store import MemoryStore
from structlog.testing import capture_logs

from rlsrl.parameters.objects import Objects, StoreUnreachable
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.coordination import WorkerLog
from rlsrl.workers.kept_logs import KEPT_BYTES, LOGS_FOLDER, KeptLogs, LogCopies, LogName, last_lines, read_copies

ACTOR = LogName("actor", 3)


def part(text: bytes, sequence: int = 0) -> pb.LogPart:
    return pb.LogPart(sequence=sequence, text=text)


def logs_in(folder: Path) -> KeptLogs:
    return KeptLogs(folder, log=structlog.stdlib.get_logger())


def test_each_part_is_kept_once_and_an_empty_line_separates_processes(tmp_path: Path) -> None:
    logs = logs_in(tmp_path / "logs")
    assert (logs.names(), logs.read(ACTOR)) == ([], b"")
    logs.append(ACTOR, "first", [part(b"one\n")])
    logs.append(ACTOR, "first", [part(b"one\n"), part(b"two\n", 1)])
    logs.append(ACTOR, "first", [part(b"two\n", 1)])
    logs.append(ACTOR, "second", [part(b"three\n")])
    assert logs.read(ACTOR) == b"one\ntwo\n\nthree\n"
    assert logs.names() == [ACTOR]
    assert logs_in(tmp_path / "logs").read(ACTOR) == b"one\ntwo\n\nthree\n", "the next coordinator has them, too"


def test_the_last_megabyte_is_always_there_and_never_more_than_two(tmp_path: Path) -> None:
    logs = logs_in(tmp_path)
    text = b""
    size = 60_000
    for sequence in range(4 * KEPT_BYTES // size):
        new = b"".join(b"%09d\n" % number for number in range(sequence * size // 10, (sequence + 1) * size // 10))
        text += new
        logs.append(ACTOR, "first", [part(new, sequence)])
        kept = logs.read(ACTOR)
        assert text.endswith(kept)
        assert len(kept) > min(len(text), KEPT_BYTES) - 10, "but for the line that is cut"
        assert len(kept) <= KEPT_BYTES
        assert kept[:10].strip().isdigit() and kept[9:10] == b"\n", "it begins with a whole line"
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * KEPT_BYTES + size
    assert len(list(tmp_path.iterdir())) == 2


def test_a_line_longer_than_a_log_is_cut(tmp_path: Path) -> None:
    logs = logs_in(tmp_path)
    logs.append(ACTOR, "first", [part(b"x" * 2 * KEPT_BYTES)])
    assert logs.read(ACTOR) == b"x" * KEPT_BYTES


def test_other_files_are_no_logs(tmp_path: Path) -> None:
    for name in ("actor-0.jsonl", "actor-0.out.old", "launcher.out", "..-1.out", "Actor-1.out", "actor-1.out"):
        (tmp_path / name).touch()
    assert logs_in(tmp_path).names() == [LogName("actor", 1)]


def test_a_failing_disk_costs_the_text_and_one_line_of_log(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.touch()  # a file where the folder has to be
    logs = logs_in(folder)
    with capture_logs() as events:
        logs.append(ACTOR, "first", [part(b"lost\n")])
        logs.append(ACTOR, "first", [part(b"lost\n", 1)])
    assert [event["event"] for event in events] == ["log_not_kept"]
    folder.unlink()
    logs.append(ACTOR, "first", [part(b"kept\n", 2)])
    assert logs.read(ACTOR) == b"kept\n"


@pytest.mark.parametrize(("number", "lines"), [(None, b"a\n\nb"), (2, b"\nb"), (1, b"b"), (0, b""), (9, b"a\n\nb")])
def test_the_last_lines_of_a_text(number: int | None, lines: bytes) -> None:
    assert last_lines(b"a\n\nb\n", number) == last_lines(b"a\n\nb", number) == lines


class LostStore(Objects):
    """Objects in memory. Writes of one key fail."""

    refused = ""

    def write(self, key: str, data: bytes) -> None:
        if key == self.refused:
            raise StoreUnreachable("no answer")
        super().write(key, data)


def store() -> LostStore:
    return LostStore(MemoryStore(), root="run", name="memory")


def test_copies_continue_with_the_next_coordinator(tmp_path: Path) -> None:
    """Without a volume, the files of a coordinator end with its pod."""
    objects, log = store(), structlog.stdlib.get_logger()
    for life, name in enumerate((ACTOR, ACTOR, LogName("trainer", 0))):
        logs = logs_in(tmp_path / f"pod-{life}")
        copies = LogCopies(logs, objects, log=log)
        logs.append(name, f"process {life}", [part(b"early %d\n" % life)])  # a worker may be faster than the store
        copies.restore()
        logs.append(name, f"process {life}", [part(b"late %d\n" % life, 1)])
        copies.write()
    assert list(read_copies(objects)) == [
        WorkerLog(role="actor", index=3, text=b"early 0\nlate 0\nearly 1\nlate 1\n"),
        WorkerLog(role="trainer", index=0, text=b"early 2\nlate 2\n"),
    ]
    assert [each.index for each in read_copies(objects, role="trainer")] == [0]
    assert list(read_copies(objects, role="actor", index=0)) == []


def test_a_store_that_fails_delays_only_the_copies(tmp_path: Path) -> None:
    objects, logs = store(), logs_in(tmp_path)
    copies = LogCopies(logs, objects, log=structlog.stdlib.get_logger())
    names = [LogName("actor", index) for index in range(3)]
    for name in names:
        logs.append(name, "first", [part(b"text\n")])
    objects.refused = f"{LOGS_FOLDER}/actor-1.out"
    with capture_logs() as events:
        copies.write()
    assert [event["event"] for event in events] == ["logs_not_copied"]
    assert [each.index for each in read_copies(objects)] == [0]
    objects.refused = f"{LOGS_FOLDER}/actor-0.out"
    copies.write()
    assert [each.index for each in read_copies(objects)] == [0, 1, 2], "only the rest is written"
