from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.local.processes import count_oom_kills


@pytest.mark.parametrize(
    ("content", "count"),
    [("nr_free_pages 7\noom_kill 3\noom_kill_other 9\n", 3), ("nr_free_pages 7\n", 0), ("oom_kill many\n", 0), ("", 0)],
)
def test_the_kernels_count_of_processes_killed_for_lack_of_memory(tmp_path: Path, content: str, count: int) -> None:
    vmstat = tmp_path / "vmstat"
    assert count_oom_kills(vmstat) == 0, "a kernel that does not count"
    vmstat.write_text(content)
    assert count_oom_kills(vmstat) == count
