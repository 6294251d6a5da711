"""Who takes part in a measurement, and in which setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import machine
from contestants import Contestant, Setting
from peer_environments import PeerUnavailable
from turns import throughput_turn
from workloads import Workload

TRIES = 2
"""Turns of a setting that others may spoil."""
Say = Callable[[str], None]
Tried = Mapping[Setting, float | None]
"""Environment steps a second of each setting; None for too few iterations in a trial, and where there is but one."""


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Those who take part, in their fastest settings."""

    contestants: Mapping[str, Contestant]
    chosen: Mapping[str, Setting]
    trials: Mapping[str, Tried]
    absent: Mapping[str, str]
    """Who takes no part, and why."""
    machine: Mapping[str, Any]
    """What they are measured on, and with what (``machine.described``)."""
    began: float
    """Monotonic seconds at which everything was installed, and the measurement began."""

    def without(self, absent: Mapping[str, str]) -> Lineup:
        """The same less those, and why."""
        left = {name: each for name, each in self.contestants.items() if name not in absent}
        return replace(self, contestants=left, absent={**self.absent, **absent})


def line_up(workload: Workload, contestants: Sequence[Contestant], say: Say) -> Lineup:
    """Make everybody's environment and find everybody's fastest setting, by short turns.

    Raises:
        PeerUnavailable: one that has to take part cannot be installed.
        ContestantFailed: somebody did not train as it should.
    """
    present, absent = _able(workload, contestants, say)
    described = machine.described(machine.REPOSITORY)  # now, as somebody may commit meanwhile
    began, endless = time.monotonic(), replace(workload, goal=None)
    trials = {name: _try_settings(each, endless, say) for name, each in present.items()}
    chosen = {name: fastest(tried) for name, tried in trials.items()}
    for name, setting in chosen.items():
        say(f"{name}: {' '.join(setting) or 'as the experiment says'}")
    return Lineup(contestants=present, chosen=chosen, trials=trials, absent=absent, machine=described, began=began)


def fastest(tried: Tried) -> Setting:
    """The setting that came to most."""
    return max(tried, key=lambda setting: tried[setting] or 0.0)


def _able(
    workload: Workload, contestants: Sequence[Contestant], say: Say
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Those who can take part, and why others cannot."""
    present: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    for each in contestants:
        why = each.unable(workload) or _not_installed(each)
        if why is None:
            present[each.name] = each
        else:
            absent[each.name] = why
            say(f"{each.name} takes no part: {why}")
    return present, absent


def _not_installed(contestant: Contestant) -> str | None:
    try:
        contestant.install()
    except PeerUnavailable as error:
        if not contestant.is_optional:
            raise
        return str(error)
    return None


def _try_settings(contestant: Contestant, workload: Workload, say: Say) -> Tried:
    settings = contestant.settings(workload)
    if len(settings) == 1:
        return {settings[0]: None}
    return {setting: _try(contestant, workload, setting, say) for setting in settings}


def _try(contestant: Contestant, workload: Workload, setting: Setting, say: Say) -> float | None:
    """The best of a few turns, of which the first that is left in peace is the last: others only make it slower."""
    best = None
    for _ in range(TRIES):
        turn = throughput_turn(contestant, workload, setting, window_seconds=workload.trial_seconds)
        words = " ".join(setting)
        say(f"trial    {contestant.name:18} {turn.figure or 0:12,.1f}  {words}, others used {turn.others:.1%}")
        best = max((figure for figure in (best, turn.figure) if figure is not None), default=None)
        if turn.is_quiet:
            break
    return best
