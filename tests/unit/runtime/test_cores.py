from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsrl.runtime.cores import usable_cores


@pytest.mark.parametrize(
    ("own", "parent", "expected"),
    [
        ("max 100000", "max 100000", 4),
        ("250000 100000", "max 100000", 2),
        ("max 100000", "300000 100000", 3),
        ("50000 100000", "300000 100000", 1),
        ("800000 100000", "garbage", 4),
    ],
)
def test_the_lowest_quota_above_the_process_counts(
    own: str, parent: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    group = tmp_path / "cgroup" / "pods" / "this"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(f"{own}\n")
    (group.parent / "cpu.max").write_text(f"{parent}\n")
    names = tmp_path / "self"
    names.write_text("1:name=systemd:/other\n0::/pods/this\n")
    assert usable_cores(cgroups=tmp_path / "cgroup", own=names) == expected
    assert usable_cores(cgroups=tmp_path / "cgroup", own=tmp_path / "absent") == 4


@pytest.mark.parametrize(("quota", "expected"), [(-1, 4), (250_000, 2)])
def test_quotas_of_version_1_count_too(
    quota: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    group = tmp_path / "cgroup" / "cpu" / "pods"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    names = tmp_path / "self"
    names.write_text("3:cpu,cpuacct:/pods\n0::/\n")
    assert usable_cores(cgroups=tmp_path / "cgroup", own=names) == expected
