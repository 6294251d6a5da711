"""What a process prints is kept in bounded memory until it is acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys

from rlsrl.runtime.printed_text import HALF_CHARACTERS, PrintedText


def sent(printed: PrintedText, *, after: int = -1, is_last: bool = False) -> list[tuple[int, str]]:
    return [(part.sequence, part.text.decode()) for part in printed.parts(after=after, is_last=is_last)]


def test_text_is_sent_again_until_it_is_acknowledged_and_waits_meanwhile() -> None:
    printed = PrintedText()
    assert sent(printed) == []
    printed.add("one\n")
    assert sent(printed) == [(0, "one\n")]
    printed.add("two")
    printed.add("\n")
    assert sent(printed) == [(0, "one\n")], "at most one part is unacknowledged"
    assert sent(printed, after=0) == []
    printed.acknowledge(0)
    assert sent(printed) == [(1, "two\n")]


def test_the_last_text_waits_for_no_acknowledgement() -> None:
    """A coordinator of an earlier version acknowledges nothing."""
    printed = PrintedText()
    printed.add("one\n")
    sent(printed)
    printed.add("last words\n")
    assert sent(printed, after=0, is_last=True) == [(1, "last words\n")]
    assert sent(printed, is_last=True) == [(0, "one\n"), (1, "last words\n")], "on the next stream"


def test_a_flood_keeps_its_beginning_and_its_end_and_counts_what_is_missing() -> None:
    printed = PrintedText()
    num_lines = 100_000
    for number in range(num_lines):
        printed.add(f"{number:09d}")  # as print() does, which writes the end of the line by itself
        printed.add("\n")
    ((_, text),) = sent(printed)
    assert len(text) < 2 * HALF_CHARACTERS + 100
    lines = text.split("\n")
    (gap,) = (line for line in lines if line.startswith("[rlsrl: missing here: "))
    whole = [line for line in lines if len(line) == 9 and line.isdigit()]
    assert (whole[0], whole[-1]) == ("000000000", f"{num_lines - 1:09d}")
    missing = int(gap.removeprefix("[rlsrl: missing here: ").partition(" lines")[0].replace(",", ""))
    assert abs(missing + len(whole) - num_lines) <= 2, "a line at each end of the gap may be cut"
    printed.acknowledge(0)
    printed.add("later\n")
    assert sent(printed) == [(1, "later\n")], "the count begins anew"


def test_one_long_write_is_bounded_as_well() -> None:
    printed = PrintedText()
    printed.add("a" * HALF_CHARACTERS + "line\n" * 1_000_000 + "z" * HALF_CHARACTERS)
    ((_, text),) = sent(printed)
    beginning, gap, end = text.split("\n")
    assert (beginning, end) == ("a" * HALF_CHARACTERS, "z" * HALF_CHARACTERS)
    assert gap == "[rlsrl: missing here: 1,000,000 lines, 5,000,000 characters]"


def test_text_without_an_encoding_is_kept() -> None:
    printed = PrintedText()
    printed.add("a name \udcff of a file, é\n")
    assert sent(printed) == [(0, "a name ? of a file, é\n")]


PROGRAM = """
import logging, os, sys, threading
from rlsrl.runtime.logs import configure_logging
from rlsrl.runtime.printed_text import keep_printed

printed = keep_printed()
configure_logging(experiment="cartpole", role="actor", index=2)
logging.getLogger("user").warning("logged")
print("printed", end="")
sys.stdout.writelines(["", " and ended\\n"])
print("to standard error", file=sys.stderr)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
assert (sys.stdout.fileno(), sys.stderr.encoding) == (1, "utf-8"), "else, the streams are the process's own"
os.write(1, b"of C code\\n")
(part,) = printed.parts(after=-1, is_last=False)
sys.stdout.flush()
os.write(3, part.text)
"""


def test_what_python_code_prints_logs_and_raises_is_kept_and_still_printed() -> None:
    with subprocess.Popen(
        ["bash", "-c", 'exec "$0" -c "$1" 3>&1 1>&2', sys.executable, PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        kept, printed = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    log, *lines = kept.splitlines()
    assert json.loads(log)["event"] == "logged"
    assert lines[:2] == ["printed and ended", "to standard error"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "Traceback (most recent call last):" in lines
    assert "of C code" not in kept, "the one kind of output that is not kept"
    for line in (log, *lines, "of C code"):
        assert line in printed


FORK = """
import os, threading
from rlsrl.runtime.printed_text import keep_printed

printed = keep_printed()
held, forked = threading.Event(), threading.Event()
def hold():
    with printed._lock:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
if (child := os.fork()) == 0:
    print("of the child", flush=True)
    os._exit(len(printed.parts(after=-1, is_last=False)))
forked.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""


def test_a_forked_child_prints_although_another_thread_was_printing() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "of the child\n"), done.stderr
