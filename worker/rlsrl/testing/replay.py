"""Slots of environments whose every frame is another, and a plain account of the transitions in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.buffers.replay.layout import STEP_FIELDS, ReplayLayout
from rlsrl.buffers.replay.segments import Segments
from rlsrl.buffers.replay.store_file import SUFFIX, StoreFile
from rlsrl.data.slots import ProducerId, Slot, rollout_layout
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.streams.grpc_replay.messages import FROM_RANK, FROM_SHARD, ReplayCodec, ReplayMessage
from rlsrl.workers.replay_shard import ReplayShard
from rlsrl.workers.stored_transitions import OpenedStore


class Numbered(gymnasium.Env[Any, Any]):
    """Observations are all different. Episodes have 1 to ``longest`` steps; a third are truncated, at the end."""

    def __init__(self, *, longest: int = 9, image: bool = False) -> None:
        self._longest = longest
        self._image = image
        self.observation_space = (
            gymnasium.spaces.Box(0, 255, (6, 5), np.uint8)
            if image
            else gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float32)
        )
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(3)
        self._frame = 0
        self._left = 0

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, self._longest + 1))
        return self._observation(), {}

    @override
    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        has_ended, is_cut = self._left == 0, self.np_random.random() < 1 / 3
        reward = float(self.np_random.standard_normal())
        return self._observation(), reward, has_ended and not is_cut, has_ended and is_cut, {}

    def _observation(self) -> NDArray[Any]:
        self._frame += 1
        if self._image:
            return self.np_random.integers(0, 256, (6, 5), np.uint8)
        return np.array([self._frame, self.np_random.random()], np.float32)


@dataclass
class Lane:
    """All that happened in one lane, in order."""

    frames: list[dict[str, Any]] = field(default_factory=list)
    """One more than steps."""
    steps: list[dict[str, Any]] = field(default_factory=list)

    def transition(self, start: int, *, num_steps: int, discount: float, end: int) -> dict[str, Any]:
        """Return the transition from the step ``start`` over at most n steps, none at ``end`` or later."""
        total, weight, step = 0.0, 1.0, start
        while True:
            total += weight * self.steps[step]["reward"]
            weight *= discount
            step += 1
            before = self.steps[step - 1]
            if before["terminated"] or before["truncated"] or step == start + num_steps or step == end:
                break
            if not self.steps[step]["mask"]:
                break
        return {
            "action": self.steps[start]["action"],
            "reward": total,
            "discount": 0.0 if self.steps[step - 1]["terminated"] else weight,
            **self.frames[start],
            **{f"next/{name}": array for name, array in self.frames[step].items()},
        }


def empty_replay_store(folder: Path, layout: ReplayLayout) -> OpenedStore:
    """Return an empty store with a file in that folder."""
    file = StoreFile.open(folder / f"trainer-0{SUFFIX}", layout, former=None, owner=0)
    return OpenedStore(segments=Segments(layout, file.content), file=file, outlives=True, step=0, env_steps=0)


class LedgerTerms:
    """Stands for a trainer's ledger: it counts by term."""

    def __init__(self) -> None:
        self.terms: Counter[str] = Counter()

    def trained(self, num_transitions: int, *, num_untrained: int = 0) -> None:
        """Count transitions that were trained for the first time."""
        self.terms["trained"] += num_transitions
        assert num_untrained == 0

    def dropped(self, reason: str, num_transitions: int) -> None:
        """Count transitions that were dropped for that reason."""
        self.terms[reason] += num_transitions

    def snapshot(self) -> dict[str, Any]:
        """Return the counts."""
        return dict(self.terms)


class SlotSource:
    """Slots of one producer, with what is in them in plain lists."""

    def __init__(
        self,
        *,
        num_steps: int,
        num_lanes: int,
        make: Any = Numbered,
        seed: int = 0,
        index: int = 0,
        return_discount: float | None = None,
    ) -> None:
        """``return_discount``: that of the field ``discounted_return``; None: slots do not have it."""
        self._envs = LoopVectorEnv(lambda _: make(), seeds=[100 * seed + lane for lane in range(num_lanes)])
        self.env_spec: EnvSpec = self._envs.spec
        self._returns = None
        if return_discount is not None:
            self._returns = DiscountedReturns(discount=return_discount, num_lanes=num_lanes)
        self.layout = rollout_layout(
            self.env_spec, num_steps=num_steps, num_lanes=num_lanes, discounted_return=self._returns is not None
        )
        self.lanes = [Lane() for _ in range(num_lanes)]
        self._producer = ProducerId(index, 1)
        self._rng = np.random.default_rng(seed)
        self._sequence = 0

    def slot(self) -> Slot:
        """Step all lanes by random actions and return a slot."""
        arrays = self.layout.view(bytearray(self.layout.nbytes))
        self._envs.begin(arrays)
        for step in range(self.layout.num_steps):
            arrays["action"][step] = self._rng.integers(0, 3, self.layout.num_lanes)
            self._envs.step(arrays, step, arrays["action"][step])
        if self._returns is not None:
            self._returns.write(arrays)
        for lane, kept in enumerate(self.lanes):
            self._keep(arrays, lane, kept)
        num_transitions = int(np.count_nonzero(arrays["mask"]))
        slot = Slot(arrays=arrays, producer=self._producer, sequence=self._sequence, num_transitions=num_transitions)
        self._sequence += 1
        return slot

    def _keep(self, arrays: Mapping[str, NDArray[Any]], lane: int, kept: Lane) -> None:
        frames: Arrays = {name: arrays[name][:, lane].copy() for name in self.env_spec.observation}
        first = len(kept.frames) > 0
        kept.frames += [
            {name: array[frame] for name, array in frames.items()} for frame in range(first, self.layout.num_steps + 1)
        ]
        names = [name for name in STEP_FIELDS if name in arrays]
        kept.steps += [
            {name: arrays[name][step, lane].copy() for name in names} for step in range(self.layout.num_steps)
        ]


class LinkedShards:
    """The connections of shards in this process. Every message is encoded and decoded; nothing is sent of itself.

    A shard that is not connected hears nothing. ``cut`` breaks a connection with all that is on its way.
    """

    show_life_seconds = 1.0

    def __init__(self, codec: ReplayCodec) -> None:
        self.requests: list[ReplayMessage] = []
        """All that the rank has sent, whether or not it arrived."""
        self.is_held = False
        """Whether what the rank sends waits for ``deliver``."""
        self._codec = codec
        self._connected: dict[int, ReplayShard] = {}
        self._on_the_way: list[tuple[int, ReplayMessage]] = []
        self._inbox: list[tuple[int, ReplayMessage | None]] = []

    def connect(self, index: int, shard: ReplayShard) -> None:
        """Connect a shard."""
        self._connected[index] = shard
        self._report(index, shard.hello())

    def cut(self, index: int) -> None:
        """Break a shard's connection: what it was sent, and what it has sent, does not arrive."""
        del self._connected[index]
        self._on_the_way = [each for each in self._on_the_way if each[0] != index]
        self._inbox = [each for each in self._inbox if each[0] != index]
        self._inbox.append((index, None))

    def give_up(self, index: int) -> None:
        """Count a shard that has not connected as dead."""
        self._inbox.append((index, None))

    def post(self, index: int, slot: Slot) -> None:
        """Have a shard store a slot, and report it if the shard is connected."""
        for message in self._connected[index].insert([slot]):
            self._report(index, message)

    def deliver(self) -> None:
        """Have the shards receive and answer what is on its way."""
        sent, self._on_the_way = self._on_the_way, []
        for index, message in sent:
            decoded = self._codec.decode(self._codec.encode(message), FROM_RANK)
            for answer in self._connected[index].answers(decoded):
                self._report(index, answer)

    def take(self) -> Sequence[tuple[int, ReplayMessage | None]]:
        """See ``Shards.take``."""
        taken, self._inbox = self._inbox, []
        return taken

    def send(self, shard: int, message: ReplayMessage) -> None:
        """See ``Shards.send``."""
        self.requests.append(message)
        if shard in self._connected:
            self._on_the_way.append((shard, message))
            if not self.is_held:
                self.deliver()

    def _report(self, index: int, message: ReplayMessage) -> None:
        self._inbox.append((index, self._codec.decode(self._codec.encode(message), FROM_SHARD)))
