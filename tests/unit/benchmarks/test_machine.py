"""The use of the processors and the description of the machine."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Usage, described, megabytes_of, processor, processor_seconds, shares, tree_of, written_megabytes_of

TICKS = os.sysconf("SC_CLK_TCK")
BURN = "import time\nwhile time.process_time() < 0.5: pass"


def test_busy_time_includes_stolen_time_and_excludes_interrupts() -> None:
    user, nice, system, idle, iowait, irq, softirq, steal = (each * TICKS for each in (5, 1, 2, 80, 3, 1, 2, 6))
    stat = f"cpu  {user} {nice} {system} {idle} {iowait} {irq} {softirq} {steal} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert processor_seconds(stat) == (100.0, 14.0)


def test_other_programs_used_the_rest_of_the_busy_time() -> None:
    before, after = Usage(all=100.0, busy=10.0, own=5.0), Usage(all=120.0, busy=25.0, own=18.0)
    assert shares(before, after) == (0.65, 0.1)


def test_a_share_may_be_below_zero_and_is_zero_without_time() -> None:
    before = Usage(all=100.0, busy=10.0, own=5.0)
    assert shares(before, Usage(all=110.0, busy=11.0, own=6.5)) == (0.15, -0.05)
    assert shares(before, before) == (0.0, 0.0)


def test_the_time_of_ended_children_is_own_time() -> None:
    before = Usage.now()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert Usage.now().own - before.own >= 0.45


def test_an_ended_process_has_no_tree_and_no_memory() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert tree_of(gone.pid) == []
    assert megabytes_of(gone.pid) == written_megabytes_of(gone.pid) == 0.0
    assert megabytes_of(os.getpid()) > written_megabytes_of(os.getpid()) > 5.0


def test_written_memory_includes_private_and_shared_pages() -> None:
    content = b"x" * 20_000_000
    before = written_megabytes_of(os.getpid())
    private, shared = mmap.mmap(-1, 20_000_000, flags=mmap.MAP_PRIVATE), mmap.mmap(-1, 10_000_000)
    assert written_megabytes_of(os.getpid()) - before < 5.0, "none of it yet"
    private.write(content)
    shared.write(memoryview(content)[:10_000_000])
    assert written_megabytes_of(os.getpid()) - before == pytest.approx(30.0, abs=5.0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [("fpu avx2 amx_bf16 avx512f avx512_bf16", ["amx_bf16", "avx512_bf16", "avx512f", "avx2"]), ("fpu sse2", [])],
)
def test_the_processor_is_named_with_its_relevant_flags(flags: str, told: list[str]) -> None:
    text = (
        f"processor\t: 0\nmodel name\t: A Processor @ 2: fast\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: other\n"
    )
    assert processor(text) == {"processor": "A Processor @ 2: fast", "flags": told}


def test_a_commit_is_dirty_by_sources_and_not_by_results(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for written in ("docs/benchmarks/W1.json", "README.md", "source.py", "worker/module.py"):
        (tmp_path / written).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / written).write_text("first\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    commit, tree = described(tmp_path)["commit"], described(tmp_path)["worker_tree"]
    assert re.fullmatch("[0-9a-f]{12}", commit)
    (tmp_path / "docs/benchmarks/W1.json").write_text("measured\n")
    (tmp_path / "README.md").write_text("a table\n")
    assert described(tmp_path)["commit"] == commit
    (tmp_path / "source.py").write_text("faster\n")
    assert described(tmp_path)["commit"] == f"{commit}-dirty"
    git("commit", "--amend", "-a", "-m", "amended")
    assert described(tmp_path)["commit"] != commit
    assert described(tmp_path)["worker_tree"] == tree, "by which the package is found again"
