"""Choose who takes part in a measurement, and each contestant's setting."""

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
"""Most turns of one setting, until one is quiet."""
Log = Callable[[str], None]
Tried = Mapping[Setting, float | None]
"""Environment steps a second of each setting. None: too few iterations, or the only setting."""


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """The contestants that take part, in their fastest settings."""

    contestants: Mapping[str, Contestant]
    chosen: Mapping[str, Setting]
    trials: Mapping[str, Tried]
    absent: Mapping[str, str]
    """Contestants that take no part, with the reason."""
    machine: Mapping[str, Any]
    """The machine and the versions (``machine.described``)."""
    began: float
    """Start of the measurement, after all installations, in monotonic seconds."""

    def without(self, absent: Mapping[str, str]) -> Lineup:
        """Return the lineup without some contestants, each with the reason."""
        left = {name: contestant for name, contestant in self.contestants.items() if name not in absent}
        return replace(self, contestants=left, absent={**self.absent, **absent})


def line_up(workload: Workload, contestants: Sequence[Contestant], log: Log) -> Lineup:
    """Make each contestant's environment and find its fastest setting in short turns.

    Raises:
        PeerUnavailable: a required peer cannot be installed.
        ContestantFailed: a contestant did not train correctly.
    """
    present, absent = _able(workload, contestants, log)
    described = machine.described(machine.REPOSITORY)  # now, because the commit may change meanwhile
    began, endless = time.monotonic(), replace(workload, goal=None)
    trials = {name: _try_settings(contestant, endless, log) for name, contestant in present.items()}
    chosen = {name: fastest(tried) for name, tried in trials.items()}
    for name, setting in chosen.items():
        log(f"{name}: {' '.join(setting) or 'as the experiment says'}")
    return Lineup(contestants=present, chosen=chosen, trials=trials, absent=absent, machine=described, began=began)


def fastest(tried: Tried) -> Setting:
    """Return the fastest setting."""
    return max(tried, key=lambda setting: tried[setting] or 0.0)


def _able(
    workload: Workload, contestants: Sequence[Contestant], log: Log
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the contestants that can take part, and the reasons of the others."""
    present: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    for contestant in contestants:
        why = contestant.unable(workload) or _not_installed(contestant)
        if why is None:
            present[contestant.name] = contestant
        else:
            absent[contestant.name] = why
            log(f"{contestant.name} takes no part: {why}")
    return present, absent


def _not_installed(contestant: Contestant) -> str | None:
    try:
        contestant.install()
    except PeerUnavailable as error:
        if not contestant.is_optional:
            raise
        return str(error)
    return None


def _try_settings(contestant: Contestant, workload: Workload, log: Log) -> Tried:
    settings = contestant.settings(workload)
    if len(settings) == 1:
        return {settings[0]: None}
    return {setting: _try(contestant, workload, setting, log) for setting in settings}


def _try(contestant: Contestant, workload: Workload, setting: Setting, log: Log) -> float | None:
    """Return the best figure of a few turns. A quiet turn is the last: noise only makes it slower."""
    best = None
    for _ in range(TRIES):
        turn = throughput_turn(contestant, workload, setting, window_seconds=workload.trial_seconds)
        words = " ".join(setting)
        log(f"trial    {contestant.name:18} {turn.figure or 0:12,.1f}  {words}, others used {turn.others:.1%}")
        best = max((figure for figure in (best, turn.figure) if figure is not None), default=None)
        if turn.is_quiet:
            break
    return best
