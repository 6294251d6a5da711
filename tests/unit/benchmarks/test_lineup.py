"""Who takes part, and in which setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from contestants import Peer, Setting
from figures import Turn
from lineup import fastest, line_up
from peer_environments import PeerUnavailable
from workloads import WORKLOADS

SPEEDS: dict[Setting, float | None] = {("a",): 10.0, ("b",): 30.0, ("c",): None}


@dataclass
class Bench:
    """Trials without anybody who trains."""

    goals: list[float | None]

    def turn(self, contestant: Peer, workload: object, setting: Setting, *, window_seconds: float) -> Turn:
        self.goals.append(workload.goal)  # type: ignore[attr-defined]
        assert window_seconds == workload.trial_seconds  # type: ignore[attr-defined]
        return Turn(contestant=contestant.name, figure=SPEEDS[setting], others=0.0, own=1.0, megabytes=1.0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench([])
    monkeypatch.setattr("lineup.throughput_turn", made.turn)
    return made


def refuse(name: str) -> None:
    raise PeerUnavailable(f"{name} does not install with Python 3.99: no wheel")


PEER = Peer(name="one", program="one.py", ways=tuple(SPEEDS), python=lambda name: name)  # type: ignore[arg-type,return-value]


def test_the_setting_that_comes_to_most_is_chosen() -> None:
    assert fastest(SPEEDS) == ("b",)
    assert fastest({("a",): None}) == ("a",)


def test_each_setting_is_tried_and_all_is_told(bench: Bench) -> None:
    said: list[str] = []
    lineup = line_up(WORKLOADS["L"], [PEER], said.append)
    assert (lineup.chosen, lineup.trials, lineup.absent) == ({"one": ("b",)}, {"one": SPEEDS}, {})
    assert bench.goals == [None] * 3, "trials go on past the goal"
    assert [line.split()[:2] for line in said[:3]] == [["trial", "one"]] * 3
    assert said[-1] == "one: b"


def test_who_is_left_out_later_is_told_with_the_others(bench: Bench) -> None:
    lineup = line_up(WORKLOADS["W1"], [PEER, replace(PEER, name="slow")], lambda text: None)
    left = lineup.without({"slow": "too slow"})
    assert list(left.contestants) == ["one"]
    assert left.absent == {"slow": "too slow"}


def test_of_an_only_setting_nothing_is_asked(bench: Bench) -> None:
    lineup = line_up(WORKLOADS["W1"], [replace(PEER, ways=(("a",),))], lambda text: None)
    assert lineup.chosen == {"one": ("a",)}
    assert bench.goals == []


def test_who_cannot_be_installed_is_told_with_the_error_and_the_others_go_on(bench: Bench) -> None:
    other = replace(PEER, name="other", python=refuse, is_optional=True)
    lineup = line_up(WORKLOADS["W1"], [PEER, other], lambda text: None)
    assert list(lineup.contestants) == ["one"]
    assert lineup.absent == {"other": "other does not install with Python 3.99: no wheel"}


def test_without_one_that_has_to_take_part_nothing_is_measured(bench: Bench) -> None:
    with pytest.raises(PeerUnavailable, match="no wheel"):
        line_up(WORKLOADS["W1"], [replace(PEER, python=refuse)], lambda text: None)
    assert bench.goals == []


def test_who_has_not_the_environment_is_not_even_installed(bench: Bench) -> None:
    other = replace(PEER, name="other", python=refuse, env_ids=("CartPole-v1",))
    lineup = line_up(WORKLOADS["W2"], [PEER, other], lambda text: None)
    assert "its Gymnasium has no ALE/Pong-v5" in lineup.absent["other"]
