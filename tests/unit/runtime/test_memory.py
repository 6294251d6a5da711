"""The memory that is left, on the machine and in the control groups of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.runtime.memory import anonymous_memory, available_memory

GIB = 1024**3


MEMINFO_TEXT = f"MemTotal:  99 kB\nHugePages_Total:       0\nMemAvailable:  {8 * 1024**2} kB\n"


def group(folder: Path, limit: str, current: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {cached // 2}\ninactive_file {cached // 2}\n")


@pytest.mark.parametrize(
    ("own", "parent", "expected"),
    [
        (("max", GIB, 0), ("max", GIB, 0), 8 * GIB),
        ((f"{4 * GIB}", GIB, 0), ("max", GIB, 0), 3 * GIB),
        ((f"{4 * GIB}", 3 * GIB, 2 * GIB), ("max", GIB, 0), 3 * GIB),
        ((f"{4 * GIB}", GIB, 0), (f"{5 * GIB}", 4 * GIB, 0), GIB),
        ((f"{4 * GIB}", 5 * GIB, 0), ("max", GIB, 0), 0),
        ((f"{16 * GIB}", 0, 0), ("max", GIB, 0), 8 * GIB),
    ],
)
def test_the_fullest_group_counts_without_its_caches(
    own: tuple[str, int, int], parent: tuple[str, int, int], expected: int, tmp_path: Path
) -> None:
    groups, names, meminfo = tmp_path / "cgroup", tmp_path / "self", tmp_path / "meminfo"
    group(groups / "pods" / "this", *own)
    group(groups / "pods", *parent)
    names.write_text("0::/pods/this\n")
    meminfo.write_text(MEMINFO_TEXT)
    assert available_memory(meminfo=meminfo, cgroups=groups, own=names) == expected


@pytest.mark.parametrize("inside", [True, False], ids=["container", "machine"])
def test_version_1_of_control_groups_counts_too(inside: bool, tmp_path: Path) -> None:
    groups, names, meminfo = tmp_path / "cgroup", tmp_path / "self", tmp_path / "meminfo"
    own = groups / "memory" if inside else groups / "memory" / "pods" / "this"
    own.mkdir(parents=True)
    for name, number in {"limit": 4 * GIB, "usage": 3 * GIB}.items():
        (own / f"memory.{name}_in_bytes").write_text(f"{number}\n")
    (own / "memory.stat").write_text(f"active_file 7\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n")
    names.write_text("4:memory:/pods/this\n3:cpu,cpuacct:/other\n0::/\n")
    meminfo.write_text(MEMINFO_TEXT)
    assert available_memory(meminfo=meminfo, cgroups=groups, own=names) == 3 * GIB


def test_without_the_sizes_of_caches_the_limit_counts(tmp_path: Path) -> None:
    groups, names, meminfo = tmp_path / "cgroup", tmp_path / "self", tmp_path / "meminfo"
    group(groups, f"{4 * GIB}", 3 * GIB, 0)
    (groups / "memory.stat").unlink()
    (groups / "memory").mkdir()  # a child of this group, not the controller of version 1
    names.write_text("0::/\n")
    meminfo.write_text(MEMINFO_TEXT)
    assert available_memory(meminfo=meminfo, cgroups=groups, own=names) == GIB


def test_beside_version_1_groups_of_version_2_are_found(tmp_path: Path) -> None:
    groups, names, meminfo = tmp_path / "cgroup", tmp_path / "self", tmp_path / "meminfo"
    group(groups / "unified" / "pods", f"{4 * GIB}", 3 * GIB, 0)
    (groups / "cpu").mkdir()
    names.write_text("3:cpu,cpuacct:/other\n0::/pods\n")
    meminfo.write_text(MEMINFO_TEXT)
    assert available_memory(meminfo=meminfo, cgroups=groups, own=names) == GIB


def test_written_memory_is_the_processs_own() -> None:
    before = anonymous_memory()
    written = bytearray(b"x" * 50_000_000)
    assert 40_000_000 < anonymous_memory() - before < 200_000_000
    assert len(written) == 50_000_000
