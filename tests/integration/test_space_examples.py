"""The examples of other spaces reach their goals with the most probable actions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import Desk

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "stop", "play", "episodes", "goal"),
    [
        ("frozenlake", (), (), 200, 1.0),
        ("taxi", (), (), 1000, 5.0),
        ("blackjack", (), (), 10_000, -0.08),
        ("lunarlander", (), (), 100, 200.0),
        # Some minutes of an hour. By then a policy may need its noise: one returned 240 with it, and -125 without.
        ("bipedalwalker", ("--set", "spec.stop={returnMean: 210, envSteps: 5000000}"), ("--stochastic",), 50, 150.0),
    ],
)
def test_an_example_reaches_its_goal(
    tmp_path: Path, name: str, stop: tuple[str, ...], play: tuple[str, ...], episodes: int, goal: float
) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    desk = Desk(tmp_path, re.sub(f"name: {name}", "name: live", text))
    with desk.begin(*stop) as run:
        assert run.wait(timeout=900) == 0, run.output
    assert desk.facts().json("summary.json")["ledger"]["balanced"]
    played = desk.call("eval", "runs/live", "--episodes", str(episodes), "--environments", "16", "--json", *play)
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["return_mean"] >= goal
