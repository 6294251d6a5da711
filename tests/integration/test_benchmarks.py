"""The benchmark's driver on tiny windows: real runs of rlsrl, and the single file by this Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import throughput
import time_to_goal
from contestants import PEERS, Contestant, ContestantFailed, Peer, Rlsrl
from figures import RLSRL, SHOWN, SINGLE_FILE
from report import Measured, page
from results import sentence
from turns import GOAL_SECONDS, throughput_turn
from workloads import WORKLOADS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

W1 = replace(WORKLOADS["W1"], warm_seconds=1.0, window_seconds=4.0, trial_seconds=4.0)
WAYS = tuple(("--vector", vector, "--threads", "1") for vector in ("sync", "async"))
SINGLE = replace(
    next(peer for peer in PEERS if peer.name == SINGLE_FILE), ways=WAYS, python=lambda name: Path(sys.executable)
)
CONTESTANTS: Sequence[Contestant] = (Rlsrl(), SINGLE)


def turns_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn for each in result["rounds"] for turn in each["turns"]]


@pytest.fixture(scope="module", autouse=True)
def any_round_counts() -> Iterator[None]:
    """Let noisy rounds count, because other tests run on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("figures.QUIET_SHARE", 1.0)
        yield


@pytest.fixture(scope="module")
def result(any_round_counts: None) -> dict[str, Any]:
    """The result of one round."""
    return throughput.measure(W1, CONTESTANTS, wanted=1)


def test_each_contestant_trains_and_is_measured(result: dict[str, Any]) -> None:
    turns = turns_of(result)
    assert [turn["contestant"] for turn in turns] == [RLSRL, SINGLE_FILE]
    for turn in turns:
        assert turn["figure"] > 0
        assert 0.02 < turn["own"] <= 1.0
        assert turn["megabytes"] > 50.0


def test_the_ratio_is_that_of_the_two_figures(result: dict[str, Any]) -> None:
    assert result["verdict"] == SHOWN
    mine, theirs = (turn["figure"] for turn in turns_of(result))
    assert result["ratio"]["median"] == pytest.approx(mine / theirs)
    assert f"x {SINGLE_FILE}" in sentence(result)


def test_a_setting_was_chosen_and_all_results_are_stored(result: dict[str, Any]) -> None:
    contestant = result["contestants"][SINGLE_FILE]
    assert len(contestant["trials"]) == 2
    assert contestant["setting"] == max(contestant["trials"], key=lambda setting: contestant["trials"][setting] or 0.0)
    assert json.loads(json.dumps(result)) == result
    assert "How rlsrl spent its time" in page(Measured(throughput={"W1": result}))


def test_the_profile_has_the_activities_of_each_role(result: dict[str, Any]) -> None:
    profile = next(turn for turn in turns_of(result) if turn["contestant"] == RLSRL)["more"]["profile"]
    assert profile.keys() == {"actor", "trainer"}
    assert {"waits for credit", "rest", "cpu"} <= profile["actor"].keys()
    assert profile["trainer"]["update"] > 0.1
    for shares in profile.values():
        assert sum(share for what, share in shares.items() if what != "cpu") == pytest.approx(1.0, abs=0.2)


def test_seconds_to_the_goal_are_from_the_start_of_the_process() -> None:
    easy = replace(WORKLOADS["L"], goal=30.0, warm_seconds=1.0, trial_seconds=2.0)
    single = replace(SINGLE, ways=WAYS[:1])
    result = time_to_goal.measure(easy, [Rlsrl(), single], wanted=1)
    turns = turns_of(result)
    assert {turn["contestant"] for turn in turns} == {RLSRL, SINGLE_FILE}
    for turn in turns:
        assert turn["more"]["reached"]
        assert turn["more"]["env_steps"] > 0
        assert 1.0 < turn["figure"] < GOAL_SECONDS
        assert turn["more"]["seed"] == 1


def test_a_failed_contestant_is_reported_with_its_output(tmp_path: Path) -> None:
    (program := tmp_path / "fails.py").write_text("raise SystemExit('there is no such thing')")
    programs = {"ppo": (str(program),)}
    failing = Peer(name="failing", programs=programs, ways=((),), python=lambda name: Path(sys.executable))
    with pytest.raises(ContestantFailed, match="failing ended before it trained:\nthere is no such thing"):
        throughput_turn(failing, W1, (), window_seconds=1.0)
