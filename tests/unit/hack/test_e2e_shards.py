from __future__ import annotations

import runpy
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_every_file_with_tests_for_e2e_full_is_in_a_shard() -> None:
    shards = runpy.run_path(str(REPOSITORY / "hack" / "e2e-full"))["SHARDS"]
    files = {path for path in (REPOSITORY / "tests" / "e2e").glob("test_*.py") if "mark.full" in path.read_text()}
    in_shards = {REPOSITORY / argument for shard in shards for argument in shard.arguments}
    assert files
    assert files - in_shards == set()
