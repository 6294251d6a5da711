"""The surviving history of a rank's ratio limiter, rebuilt from its traced events and checked at each of them.

``rlsrl.testing.ratio_trace`` writes the events. The sums here do not depend on the limiter's: what is due follows from
the env steps that survive and from the ratio with which each was stored. Not for runs where gathering and training take
turns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlsrl.buffers.replay.ratio import ROUNDING, Pace


@dataclass(frozen=True, kw_only=True)
class LimiterEvent:
    """Something that a limiter has counted or learned."""

    debt: float
    """Updates due and not made, as the limiter says after the event."""

    def to_json(self) -> str:
        """Return the event's line in a trace."""
        return json.dumps({"event": type(self).__name__, **asdict(self)})


@dataclass(frozen=True, kw_only=True)
class LimiterStarted(LimiterEvent):
    """A life of the rank has made its limiter: the first event of each life."""

    pace: Pace
    start: int
    """Env steps of a store before training begins."""
    updates_per_step: int
    steps_per_lane: int


@dataclass(frozen=True, kw_only=True)
class LimiterRestored(LimiterEvent):
    """The limiter continues from a checkpoint's counts, with what the store holds."""

    counted: int
    """Env steps of the checkpoint."""
    due: float
    """Updates due for them."""
    updates: int
    """Updates of the checkpoint."""
    stored: int
    """Env steps that the rank has stored in the whole run."""
    held: int
    """Transitions in the store."""


@dataclass(frozen=True, kw_only=True)
class LanesGranted(LimiterEvent):
    """Lanes may be gathered."""

    lanes: int


@dataclass(frozen=True, kw_only=True)
class SlotStored(LimiterEvent):
    """A slot is in the store."""

    env_steps: int
    lanes: int
    fresh: int
    """By how many transitions the present store has grown."""


@dataclass(frozen=True, kw_only=True)
class StepTrained(LimiterEvent):
    """A training step is made."""


@dataclass(frozen=True, kw_only=True)
class CountsSaved(LimiterEvent):
    """A checkpoint has these counts. It becomes durable later, or never."""

    counted: int
    """Env steps that the run's progress contains; more may be stored."""
    due: float
    updates: int


@dataclass(frozen=True, kw_only=True)
class PaceTuned(LimiterEvent):
    """The ratio or the bound has changed."""

    pace: Pace


@dataclass(frozen=True, kw_only=True)
class EndExpected(LimiterEvent):
    """The run ends after so many env steps of this rank; None: that is not known."""

    end: int | None


EVENTS = {
    each.__name__: each
    for each in (
        *(LimiterStarted, LimiterRestored, LanesGranted, SlotStored),
        *(StepTrained, CountsSaved, PaceTuned, EndExpected),
    )
}


class RatioBroken(AssertionError):
    """A history in which the ratio does not hold at some event."""

    def __init__(self, life: int, number: int, event: LimiterEvent, why: str) -> None:
        """``life`` and the event's ``number`` in it count from 0."""
        super().__init__(f"life {life}, event {number}, {event}: {why}")
        self.life, self.number = life, number


class Restore(NamedTuple):
    """What a restore found."""

    rolled_back: int
    """Updates that the former life had made after the checkpoint."""
    deficit: float
    """Updates due and not made after the restore."""
    bound: float


@dataclass
class RatioReport:
    """What a checked history says."""

    events: Counter[str] = field(default_factory=Counter)
    """Events by the name of their class."""
    largest_share: float = 0.0
    """The largest deficit as a share of its bound, over all events but those while a debt is paid back."""
    smallest: float = 0.0
    """The smallest deficit: below 0, by rounding alone, training leads."""
    num_in_debt: int = 0
    """Events at which the deficit was above the bound: after a restore or a change."""
    num_claimed: int = 0
    """Lanes that arrived beyond those granted: a former life had granted them. See ``rlsrl.streams.credits``."""
    restores: list[Restore] = field(default_factory=list)
    num_env_steps: int = 0
    """Env steps that survive at the end."""
    updates: int = 0
    """Updates that survive at the end."""
    deficit: float = 0.0
    """Updates due and not made at the end."""
    updates_per_step: int = 0
    """Updates of the last life's training step."""


def read_lives(folder: Path) -> list[list[LimiterEvent]]:
    """Return the events of each life of a rank, from its folder of traces, in order.

    Raises:
        ValueError: a line before the last one of its life is damaged.
    """
    return [_events_of(path) for path in sorted(folder.glob("*.jsonl"))]


def check_history(lives: Iterable[Sequence[LimiterEvent]]) -> RatioReport:
    """Check the ratio at every event of a rank's lives, and return what they say.

    Raises:
        RatioBroken: the ratio does not hold at some event, or the limiter counts something else.
    """
    history = _SurvivingHistory()
    for life, events in enumerate(lives):
        for number, event in enumerate(events):
            try:
                history.add(event)
            except AssertionError as error:
                raise RatioBroken(life, number, event, str(error)) from error
    return history.report


def _events_of(path: Path) -> list[LimiterEvent]:
    whole, _, _torn = path.read_text().rpartition("\n")  # a SIGKILL may have cut the last line
    return [_event_of(json.loads(line)) for line in whole.splitlines()]


def _event_of(values: Mapping[str, Any]) -> LimiterEvent:
    fields = dict(values)
    made = EVENTS[fields.pop("event")]
    if (pace := fields.get("pace")) is not None:
        fields["pace"] = Pace(**pace)
    return made(**fields)


class _Gathered(NamedTuple):
    """Env steps that were stored with one ratio."""

    begin: int
    """How many the rank had stored before them."""
    end: int
    ratio: float
    """Updates for each; 0 before the start."""


class _SurvivingHistory:
    """Adds up what survives, and checks each event.

    ``limit`` is the most updates by which gathering may lead, all that is granted counted as stored: the bound, or what
    a restore, a change or a claimed slot has left above it. Training lowers it to the bound, and only these raise it.
    """

    def __init__(self) -> None:
        self.report = RatioReport()
        self._gathered: list[_Gathered] = []
        self._stored = 0
        self._fresh = 0
        self._outstanding = 0
        self._claimable = 0
        """Lanes that former lives had granted and that had not arrived. Actors that reconnect may claim them."""
        self._updates = 0
        self._limit = 0.0
        self._end: int | None = None
        self._saves: dict[tuple[int, int], float] = {}
        """Updates due by a checkpoint's env steps and updates."""
        self._life: LimiterStarted
        self._pace: Pace
        self._has_begun = self._may_be_restored = False
        """Whether there is a life, and whether it has done nothing yet."""

    def add(self, event: LimiterEvent) -> None:
        """Add the next event.

        Raises:
            AssertionError: the ratio does not hold.
        """
        if isinstance(event, LimiterStarted):
            self._begin(event)
            return  # what survives follows from the restore
        assert self._has_begun, "a life begins with its limiter"
        if self._may_be_restored and not isinstance(event, LimiterRestored):
            self._begin_anew()
        match event:
            case LimiterRestored():
                self._restore(event)
            case LanesGranted():
                self._grant(event)
            case SlotStored():
                self._store(event)
            case StepTrained():
                self._train()
            case CountsSaved():
                self._save(event)
            case PaceTuned():
                self._pace = event.pace
                self._limit = max(event.pace.bound, self._lead)
            case EndExpected():
                self._end = event.end
        self._check(event)

    def _due(self, env_steps: int | None = None) -> float:
        """Return the updates due for the first ``env_steps``; None: for all."""
        most = self._stored if env_steps is None else env_steps
        return sum(max(0, min(each.end, most) - each.begin) * each.ratio for each in self._gathered)

    @property
    def _deficit(self) -> float:
        return self._due() - self._updates

    @property
    def _lead(self) -> float:
        """Updates due and not made, if all that is granted comes."""
        coming = max(0, self._outstanding) * self._life.steps_per_lane
        return self._deficit + max(0, coming - max(0, self._life.start - self._stored)) * self._ratio

    @property
    def _ratio(self) -> float:
        return self._pace.updates_per_env_step

    @property
    def _rounding(self) -> float:
        """By so many updates two sums of the same ratios may differ."""
        return ROUNDING * max(1.0, self._due())

    def _begin(self, event: LimiterStarted) -> None:
        self._life, self._pace = event, event.pace
        self._limit = max(self._limit, event.pace.bound)
        self._claimable += max(0, self._outstanding)
        self._outstanding, self._end = 0, None
        self._has_begun = self._may_be_restored = True

    def _begin_anew(self) -> None:
        """Forget a life that was killed before its first checkpoint."""
        assert not self._updates, "the run had trained, and nothing is restored"
        self._may_be_restored = False
        self._gathered, self._stored, self._fresh, self._saves = [], 0, 0, {}

    def _restore(self, event: LimiterRestored) -> None:
        """Remove what was trained after the checkpoint. What was stored after it counts with the present ratio."""
        assert self._may_be_restored, "a life is restored before all else"
        self._may_be_restored = False
        due = self._saves.get((event.counted, event.updates))
        assert due is not None, (
            f"no checkpoint of the surviving history has these counts; the last ones have {sorted(self._saves)[-3:]}"
        )
        assert abs(event.due - due) <= self._rounding, f"the checkpoint had {due} updates due"
        slot = self._life.steps_per_lane * self._pace.most_lanes
        assert event.counted <= event.stored <= self._stored + slot, (
            f"{self._stored} env steps were stored, and at most one slot of {slot} without an event"
        )
        rolled_back, due_before = self._updates - event.updates, self._due()
        self._saves = {
            counts: due
            for counts, due in self._saves.items()
            if counts[0] <= event.counted and counts[1] <= event.updates
        }
        self._gathered = [
            each._replace(end=min(each.end, event.counted)) for each in self._gathered if each.begin < event.counted
        ]
        unlogged = max(0, event.stored - self._stored)
        self._stored, self._fresh, self._updates = event.counted, event.held, event.updates
        self._gather(event.stored - event.counted)
        # One slot may have been stored whose event the kill has taken: it was granted, and the limit contains it.
        repriced = max(0.0, self._due() - unlogged * self._ratio - due_before)
        allowed = self._limit + rolled_back + repriced
        assert event.debt <= allowed + self._rounding, (
            f"gathering led by at most {self._limit} updates, and {rolled_back} were rolled back"
        )
        self._limit = max(self._pace.bound, self._deficit)
        self.report.restores.append(Restore(rolled_back, self._deficit, self._pace.bound))

    def _grant(self, event: LanesGranted) -> None:
        start, before_last = self._life.start, self._outstanding + event.lanes - 1
        self._outstanding += event.lanes
        if self._outstanding <= 0:
            return  # nothing more may be gathered: a claimed slot has taken these lanes before
        if self._fresh < max(start, 1):  # the store fills, whatever is due: training waits for its start
            of_start = self._fresh + before_last * self._life.steps_per_lane < start
            if of_start or before_last < self._pace.most_lanes:
                self._limit = max(self._limit, self._lead)
                return
        lead, bound = self._lead, self._pace.bound
        assert lead <= bound + self._rounding, f"gathering may lead by {lead} updates, and the bound is {bound}"

    def _store(self, event: SlotStored) -> None:
        coming = max(0, self._outstanding)
        reaches = self._stored + coming * self._life.steps_per_lane
        is_complete = self._end is not None and reaches >= self._end
        room = self._pace.most_lanes - 1 if is_complete else 0  # the last slot is whole
        claimed = max(0, event.lanes - coming - room)
        assert claimed <= self._claimable, (
            f"{coming} lanes were granted and had not arrived, {self._claimable} in former lives, with room for {room}"
        )
        self._claimable -= claimed
        self.report.num_claimed += claimed
        most = event.lanes * self._life.steps_per_lane
        assert event.env_steps <= most, f"so many lanes have {most} env steps"
        self._outstanding -= event.lanes
        self._gather(event.env_steps)
        self._fresh += event.fresh
        if self._outstanding < 0:
            self._limit = max(self._limit, self._lead)

    def _gather(self, env_steps: int) -> None:
        begin, end = self._stored, self._stored + env_steps
        start = min(max(self._life.start, begin), end)
        for each in (_Gathered(begin, start, 0.0), _Gathered(start, end, self._ratio)):
            last = self._gathered[-1] if self._gathered else None
            if last is not None and last.ratio == each.ratio:
                self._gathered[-1] = last._replace(end=each.end)
            elif each.end > each.begin:
                self._gathered.append(each)
        self._stored = end

    def _train(self) -> None:
        assert self._fresh >= max(self._life.start, 1), f"training begins with {self._life.start} transitions"
        self._updates += self._life.updates_per_step
        assert self._deficit >= -self._rounding, f"training leads by {-self._deficit} updates"
        self._limit = max(self._pace.bound, min(self._limit, self._lead))

    def _save(self, event: CountsSaved) -> None:
        due = self._due(event.counted)
        assert event.counted <= self._stored, f"{self._stored} env steps are stored"
        assert event.updates == self._updates, f"{self._updates} updates were made"
        assert abs(event.due - due) <= self._rounding, f"{due} updates are due for these env steps"
        self._saves[event.counted, event.updates] = event.due

    def _check(self, event: LimiterEvent) -> None:
        deficit, bound = self._deficit, self._pace.bound
        assert abs(event.debt - deficit) <= self._rounding, f"the surviving history is behind by {deficit} updates"
        assert deficit >= -self._rounding, f"training leads by {-deficit} updates"
        assert self._lead <= self._limit + self._rounding, f"gathering leads by {self._lead}, and may by {self._limit}"
        report = self.report
        report.events[type(event).__name__] += 1
        report.smallest = min(report.smallest, deficit)
        if deficit > bound + self._rounding:
            report.num_in_debt += 1
        else:
            report.largest_share = max(report.largest_share, deficit / bound)
        report.num_env_steps, report.updates, report.deficit = self._stored, self._updates, deficit
        report.updates_per_step = self._life.updates_per_step
