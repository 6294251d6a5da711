"""A rank's replay store in shards: buffer workers keep the transitions, and draw from them for the rank.

Rows for a training step are requested while the one before computes, so that it need not wait for them. They lack the
priorities of that step, and what arrives during it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
from typing_extensions import override

from rlsrl.buffers.replay.shards import Allotment
from rlsrl.data.slots import Slot
from rlsrl.data.version import INITIAL, Version
from rlsrl.runtime.metrics import Metrics
from rlsrl.streams.grpc_replay.messages import (
    DrawRequest,
    Grant,
    RankWelcome,
    ReplayCodec,
    ReplayMessage,
    Rows,
    RunIsOver,
    Settle,
    Settled,
    ShardContent,
    ShardHello,
    Stored,
)
from rlsrl.workers.replay_store import Drawing, ReplayStore
from rlsrl.workers.shard_lanes import ShardLanes
from rlsrl.workers.stored_transitions import Arrival, DrawnRows, Settlement

_log = structlog.get_logger(__name__)


class Shards(Protocol):
    """The connections of a rank's shards; see ``ShardServer``."""

    show_life_seconds: float

    def take(self) -> Sequence[tuple[int, ReplayMessage | None]]:
        """Return (index of the shard, message) of all that has come since the last call.

        None: its connection has ended, or it has not connected for so long that it counts as dead.
        """

    def send(self, shard: int, message: ReplayMessage) -> None:
        """Send a message to the shard with that index. No effect if it is not connected."""


@dataclass(kw_only=True)
class _Shard:
    """What the rank knows of a shard, connected or not."""

    life: int = -1
    """See ``ShardHello.life``; -1 before the first hello."""
    env_steps: int = 0
    """Env steps of that life that have arrived at the rank."""
    fresh: int = 0
    """Its transitions that the limiter counts as those of the present store; 0 while it is not connected."""
    has_resumed: bool = False
    """Whether this life of the rank has told it from which training step it resumes."""
    is_awaited: bool = True
    """Whether this life of the rank has neither heard it nor given it up; see ``Shards.take``."""
    content: ShardContent | None = None
    """What it holds; None while it is not connected."""
    lanes: int = 0
    """Granted to its actors and not arrived."""
    unsettled: deque[Settle] = field(default_factory=deque)
    """Sent, and not answered."""


@dataclass(kw_only=True)
class _Draw:
    """The rows for one training step."""

    trial: int
    allotment: Allotment
    lives: Mapping[int, int]
    """The life of each shard that was asked."""
    parts: dict[int, list[Rows]]
    """Those that have come, by shard."""

    def num_missing(self, shard: int) -> int:
        """Return how many rows of a shard have not come."""
        return self.allotment.num_rows.get(shard, 0) - sum(part.num_rows for part in self.parts.get(shard, ()))

    @property
    def missing(self) -> list[int]:
        """The shards of which rows have not come."""
        return [shard for shard in self.allotment.num_rows if self.num_missing(shard)]


def known_shards(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the newest that the states of all ranks (``ShardedStore.state_dict``) tell of each shard.

    After an edit of ``trainers.replicas`` another rank, one alone, knows how far a shard's env steps have arrived.
    """
    known: dict[str, Any] = {}
    for state in states:
        for index, shard in state.get("shards", {}).items():
            known[index] = max(known.get(index, shard), shard, key=lambda each: (each["life"], each["env_steps"]))
    return known


class ShardedStore(ReplayStore):
    """A store in shards, each with draws of its own. A shard that is gone is left out until it comes back."""

    def __init__(
        self,
        shards: Shards,
        *,
        codec: ReplayCodec,
        drawing: Drawing,
        indices: Iterable[int],
        lanes_per_slot: int,
        step: int = 0,
        state: Mapping[str, Any] | None = None,
        metrics: Metrics,
    ) -> None:
        """Begin without a connection.

        Args:
            shards: The connections.
            codec: The stream's messages.
            drawing: What is drawn for a training step.
            indices: The shards of this rank, by the index of their buffer workers.
            lanes_per_slot: Lanes of each actor's slots.
            step: The training step from which the rank resumes: the shards forget what was trained after it.
            state: What ``state_dict`` returned for that step; it may tell of other ranks' shards, too.
            metrics: The rank's.
        """
        self._connections = shards
        self._codec = codec
        self._drawing = drawing
        self._step = self._resumes_from = step
        """The last training step."""
        self._saved: Mapping[str, Any] = {} if state is None else state["shards"]
        """The state's: of shards that an edit took away, which may come back with what they had, too."""
        self._shards = {index: _Shard(**self._saved.get(str(index), {})) for index in indices}
        self._env_steps = 0 if state is None else int(state["arrived"])
        self._lanes = ShardLanes(lanes_per_slot=lanes_per_slot)
        self._min_version, self._room = INITIAL, 0
        self._draws: dict[int, _Draw] = {}
        """By training step: those for the present and the next one."""
        self._trials: dict[int, int] = {}
        """The last trial of each step for which rows were requested."""
        self._num_trained = 0
        """Transitions first trained of which the shards have told since the last ``settle``."""
        self._shards_away = metrics.replay_shards_away
        self._shards_away.set(len(self._shards))

    @property
    @override
    def env_steps(self) -> int:
        return self._env_steps

    @property
    @override
    def num_transitions(self) -> int:
        return sum(content.num_transitions for content in self._contents.values())

    @property
    @override
    def takes_slots(self) -> bool:
        """Whether one shard is connected, and each other one was heard in this life of the rank or counts as dead.

        Until then it is not known how much can be drawn, and what would be granted beyond the bound.
        """
        return bool(self._contents) and not any(shard.is_awaited for shard in self._shards.values())

    @property
    def _contents(self) -> dict[int, ShardContent]:
        """What the connected shards hold."""
        return {index: shard.content for index, shard in self._shards.items() if shard.content is not None}

    def grant(self, num_lanes: int, min_version: Version, room: int) -> None:
        """Grant lanes to the shards' actors: see ``SampleConsumer.grant``."""
        self._min_version, self._room = max(min_version, self._min_version), room
        outstanding = {index: self._shards[index].lanes for index in self._contents}
        for index, lanes in self._lanes.spread(num_lanes, room=room, outstanding=outstanding).items():
            self._shards[index].lanes += lanes
            version = self._min_version
            grant = Grant(lanes=lanes, room=room, attempt=version.attempt, step=version.step)
            self._connections.send(index, grant)

    @override
    def insert(self, slots: Sequence[Slot]) -> Sequence[Arrival]:
        """As ``ReplayStore.insert``: take what the shards have sent. There are no slots: they have them."""
        assert not slots, "actors post to the shards"
        arrivals = [arrival for index, message in self._connections.take() for arrival in self._take(index, message)]
        for step in sorted(self._trials.keys() - self._draws.keys()):
            self._request(step)
        return arrivals

    def _take(self, index: int, message: ReplayMessage | None) -> Iterator[Arrival]:
        if (shard := self._shards.get(index)) is None:
            _log.warning("foreign_shard", index=index)
        elif message is None:
            shard.content, shard.is_awaited = None, False
            lanes, shard.lanes = shard.lanes, 0
            fresh, shard.fresh = shard.fresh, 0
            self._draws = {step: draw for step, draw in self._draws.items() if index not in draw.missing}
            yield Arrival(env_steps=0, lanes=lanes, fresh=-fresh)
        elif isinstance(message, ShardHello):
            yield self._met(index, shard, message)
        elif isinstance(message, Stored):
            yield self._stored(shard, message)
        elif isinstance(message, Rows):
            self._receive_rows(index, message)
        elif isinstance(message, Settled):
            self._num_trained += message.num_trained
            while shard.unsettled and shard.unsettled[0].step <= message.step:
                shard.unsettled.popleft()
        if shard is not None and isinstance(message, ShardContent):
            shard.content = ShardContent(mass=message.mass, num_transitions=message.num_transitions)
        self._shards_away.set(len(self._shards) - len(self._contents))

    def _met(self, index: int, shard: _Shard, hello: ShardHello) -> Arrival:
        """Welcome a shard, and return what it has stored since it was last heard."""
        if hello.life != shard.life:
            shard.life, shard.env_steps = hello.life, 0
            shard.unsettled.clear()
        new, shard.env_steps = max(hello.env_steps - shard.env_steps, 0), max(hello.env_steps, shard.env_steps)
        fresh, shard.fresh = hello.num_transitions - shard.fresh, hello.num_transitions
        shard.lanes, shard.content = hello.lanes, hello
        self._env_steps += new
        # One that comes late has trained nothing in this life of the rank, and may have in a former one.
        step = self._step if shard.has_resumed else self._resumes_from
        shard.has_resumed, shard.is_awaited = True, False
        seconds = self._connections.show_life_seconds
        self._connections.send(index, RankWelcome(step=step, show_life_seconds=seconds))
        for settle in shard.unsettled:
            self._connections.send(index, settle)
        self.grant(0, self._min_version, self._room)
        return Arrival(env_steps=new, lanes=-hello.lanes, fresh=fresh)

    def _stored(self, shard: _Shard, message: Stored) -> Arrival:
        new, shard.env_steps = max(message.env_steps - shard.env_steps, 0), max(message.env_steps, shard.env_steps)
        shard.lanes -= message.lanes
        shard.fresh += new
        self._env_steps += new
        return Arrival(
            env_steps=new,
            lanes=message.lanes,
            fresh=new,
            episodes=message.episodes,
            oldest_version=Version(message.attempt, message.step),
        )

    @override
    def is_ready(self, step: int) -> bool:
        self._request(step)
        return step in self._draws and not self._draws[step].missing

    def _request(self, step: int) -> None:
        """Request rows for the training step after ``step``, unless they were, or no shard has a transition."""
        masses = {index: content.mass for index, content in self._contents.items() if content.mass > 0}
        if step in self._draws or not masses:
            return
        trial = self._trials[step] = self._trials.get(step, -1) + 1
        rng = np.random.default_rng((self._drawing.seed, step, trial))
        allotment = Allotment.draw(masses, self._drawing.num_rows, rng)
        lives = {index: self._shards[index].life for index in allotment.num_rows}
        self._draws[step] = _Draw(trial=trial, allotment=allotment, lives=lives, parts={})
        for index, num_rows in allotment.num_rows.items():
            request = DrawRequest(step=step, trial=trial, num_rows=num_rows, seed=self._drawing.seed)
            self._connections.send(index, request)

    def _receive_rows(self, index: int, rows: Rows) -> None:
        draw = self._draws.get(rows.step)
        if draw is None or draw.trial != rows.trial or rows.num_rows > draw.num_missing(index):
            return
        if rows.num_rows:
            draw.parts.setdefault(index, []).append(rows)
        else:
            del self._draws[rows.step]  # requested anew, by the mass that the shard has reported with it

    @override
    def draw(self, step: int) -> DrawnRows:
        """As ``ReplayStore.draw``. Requests the rows of the step after it, too."""
        draw = self._draws[step]
        parts = {
            index: {name: np.concatenate([part.arrays[name] for part in of_shard]) for name in of_shard[0].arrays}
            for index, of_shard in draw.parts.items()
        }
        joined = {
            name: draw.allotment.joined({index: arrays[name] for index, arrays in parts.items()})
            for name in next(iter(parts.values()))
        }
        ages = [(part.mean_age, part.num_rows) for of_shard in draw.parts.values() for part in of_shard]
        self._request(step + 1)
        return DrawnRows(
            arrays=self._codec.fields_of(joined),
            keys=joined["key"],
            share=draw.allotment.share({index: arrays["share"] for index, arrays in parts.items()}),
            mean_age=sum(age * number for age, number in ages) / self._drawing.num_rows,
        )

    @override
    def settle(self, settlement: Settlement) -> int:
        """As ``ReplayStore.settle``. The shards count later, and the number is of what they have told since.

        A shard that has lost its content since the draw gets no message: the drawn keys name other transitions now.
        """
        self._step = settlement.step
        draw = self._draws.pop(settlement.step - 1)
        allotment = draw.allotment
        self._trials.pop(settlement.step - 1)
        num_rows = len(settlement.keys)
        is_trained = np.full(num_rows, settlement.trained_rows is None)
        if settlement.trained_rows is not None:
            is_trained[settlement.trained_rows] = True
        errors = settlement.errors
        error = np.full(num_rows, np.nan, np.float32) if errors is None else errors
        parts = {
            name: allotment.parted(rows)
            for name, rows in (("key", settlement.keys), ("is_trained", is_trained), ("error", error))
        }
        for index, rows in allotment.num_rows.items():
            if draw.lives[index] != self._shards[index].life:
                continue
            arrays = {name: of_shards[index] for name, of_shards in parts.items()}
            settle = Settle(step=settlement.step, num_rows=rows, arrays=arrays)
            self._shards[index].unsettled.append(settle)
            self._connections.send(index, settle)
        told, self._num_trained = self._num_trained, 0
        return told

    @override
    def give_up(self, *, run_ended: bool) -> None:
        for index in self._contents if run_ended else ():
            self._connections.send(index, RunIsOver())

    @override
    def sync(self) -> None:
        """The shards outlive the rank."""

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return how far each shard's env steps have arrived, former ones included, and all of them."""
        shards = {
            str(index): {"life": shard.life, "env_steps": shard.env_steps} for index, shard in self._shards.items()
        }
        return {"arrived": self._env_steps, "shards": {**self._saved, **shards}}
