"""The measurement of ``rlsrl ui``: its client asks a real server what the page asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contestants import RUN, Rlsrl
from ui_cost import MAX_MEGABYTES, MAX_SHARE, PageClient, UiCost, served, watch

from rlsrl.local.run_folder import METRICS
from rlsrl.local.run_names import RECORD


def test_a_server_is_measured_while_it_answers(tmp_path: Path) -> None:
    run = tmp_path / RUN
    (run / "logs").mkdir(parents=True)
    (run / RECORD).write_text("{}")
    (run / METRICS).write_text(json.dumps({"step": 1, "role": "trainer", "scalars": {"return_mean": 3}}) + "\n")
    (run / "logs" / "actor-0.jsonl").write_text("a line")
    with served(Rlsrl().program, tmp_path) as (server, url):
        cost = watch(server, PageClient(url, RUN), seconds=0.0)
        assert cost.share > 0.0
        assert cost.megabytes > 1.0
        with pytest.raises(ValueError, match="the server answers 404"):
            PageClient(url, "absent").ask(0)


@pytest.mark.parametrize(
    ("share", "megabytes", "is_within"),
    [
        (MAX_SHARE, MAX_MEGABYTES, True),
        (MAX_SHARE + 0.001, MAX_MEGABYTES, False),
        (MAX_SHARE, MAX_MEGABYTES + 1, False),
    ],
)
def test_both_bounds_count(share: float, megabytes: float, is_within: bool) -> None:
    assert UiCost(share=share, megabytes=megabytes).is_within is is_within
