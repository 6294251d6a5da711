"""Which contestants take part, with which setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

import pytest
from contestants import Peer, Setting
from figures import Turn
from lineup import TRIES, fastest, line_up
from peer_environments import PeerUnavailable
from workloads import WORKLOADS, Workload

SPEEDS: dict[Setting, float | None] = {("a",): 10.0, ("b",): 30.0, ("c",): None}


@dataclass
class Bench:
    """Trials without real contestants."""

    goals: list[float | None]
    others: Iterator[float]

    def turn(self, contestant: Peer, workload: Workload, setting: Setting, *, window_seconds: float) -> Turn:
        self.goals.append(workload.goal)
        assert window_seconds == workload.trial_seconds
        others, speed = next(self.others), SPEEDS[setting]
        figure = None if speed is None else speed * (1.0 - others)
        return Turn(contestant=contestant.name, figure=figure, others=others, own=1.0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench([], repeat(0.0))
    monkeypatch.setattr("lineup.throughput_turn", made.turn)
    return made


def refuse(name: str) -> None:
    raise PeerUnavailable(f"{name} does not install with Python 3.99: no wheel")


PROGRAMS = {"ppo": ("one.py",)}
PEER = Peer(name="one", programs=PROGRAMS, ways=tuple(SPEEDS), python=lambda name: name)  # type: ignore[arg-type,return-value]


def test_the_fastest_setting_is_chosen() -> None:
    assert fastest(SPEEDS) == ("b",)
    assert fastest({("a",): None}) == ("a",)


def test_each_setting_is_tried_and_printed(bench: Bench) -> None:
    said: list[str] = []
    lineup = line_up(WORKLOADS["L"], [PEER], said.append)
    assert (lineup.chosen, lineup.trials, lineup.absent) == ({"one": ("b",)}, {"one": SPEEDS}, {})
    assert bench.goals == [None] * 3, "trials go on past the goal"
    assert [line.split()[:2] for line in said[:3]] == [["trial", "one"]] * 3
    assert said[-1] == "one: b"


def test_a_noisy_trial_is_repeated_and_the_best_counts(
    bench: Bench,
) -> None:
    bench.others = chain([0.5], repeat(0.0))
    lineup = line_up(WORKLOADS["W1"], [PEER], lambda text: None)
    assert len(bench.goals) == len(SPEEDS) + 1
    assert lineup.trials["one"] == SPEEDS, "the noisy trial does not count"
    bench.others = repeat(0.5)
    line_up(WORKLOADS["W1"], [PEER], lambda text: None)
    assert len(bench.goals) == len(SPEEDS) + 1 + TRIES * len(SPEEDS), "it goes on: noisy rounds are discarded later"


def test_a_contestant_that_is_left_out_later_is_listed_as_absent(bench: Bench) -> None:
    lineup = line_up(WORKLOADS["W1"], [PEER, replace(PEER, name="slow")], lambda text: None)
    left = lineup.without({"slow": "too slow"})
    assert list(left.contestants) == ["one"]
    assert left.absent == {"slow": "too slow"}


def test_an_only_setting_needs_no_trial(bench: Bench) -> None:
    lineup = line_up(WORKLOADS["W1"], [replace(PEER, ways=(("a",),))], lambda text: None)
    assert lineup.chosen == {"one": ("a",)}
    assert bench.goals == []


def test_an_optional_peer_that_cannot_be_installed_is_listed_as_absent(bench: Bench) -> None:
    other = replace(PEER, name="other", python=refuse, is_optional=True)
    lineup = line_up(WORKLOADS["W1"], [PEER, other], lambda text: None)
    assert list(lineup.contestants) == ["one"]
    assert lineup.absent == {"other": "other does not install with Python 3.99: no wheel"}


def test_without_a_required_peer_nothing_is_measured(bench: Bench) -> None:
    with pytest.raises(PeerUnavailable, match="no wheel"):
        line_up(WORKLOADS["W1"], [replace(PEER, python=refuse)], lambda text: None)
    assert bench.goals == []


def test_a_peer_without_the_environment_is_not_installed(bench: Bench) -> None:
    other = replace(PEER, name="other", python=refuse, env_ids=("CartPole-v1",))
    lineup = line_up(WORKLOADS["W2"], [PEER, other], lambda text: None)
    assert "its Gymnasium has no ALE/Pong-v5" in lineup.absent["other"]
