"""The discrete-event model of one experiment: who computes, asks, waits for a credit, for weights, for a batch.

Level of detail: a slot, not a step. An actor fills a slot in a few pieces of equally many steps (``PIECES``, fewer with
thousands of actors); a piece is one job of the actor's, and where policy workers act, one request that stands for as
many. So ten thousand actors take seconds, what runs short runs short at the same rate, and what is lost is how
requests meet within a piece. Credits, slots, the order of batches, the policy lag, the steps of the gang and the
versions' way to those who act are the system's own, one for one. A process does one thing at a time (Python's lock), so
receiving and training of one rank add up, which is the cautious side for large networks. Heartbeats make the
coordinator slower, and are no events.

Not in it: evaluators, checkpoints, failures, the time it takes to start. No clock and no randomness: equal workloads
and costs give equal outcomes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsrl.api.role_configs import MAX_SLOTS_PER_PRODUCER
from rlsrl.sizing.costs import Costs
from rlsrl.sizing.machines import Clock, Link, Machine, Process
from rlsrl.sizing.traffic import Rates
from rlsrl.sizing.work import Work
from rlsrl.sizing.workload import Workload

PIECES, LEAST_PIECES = 16, 2
"""Pieces that the steps of a slot are divided into, at most, and where there are very many slots."""
MAX_EVENTS = 120_000
"""Of one simulation, about: it is as long as that allows. They take a second or less."""
MIN_BATCHES, MAX_BATCHES = 4, 200
"""Training steps that are counted at least, however many events they are, and at most."""
WARM_BATCHES = 3
"""Beside those of the policy lag, before counting begins: the pipeline fills."""


class Stuck(RuntimeError):
    """Nothing can happen any more: no slot fits what is granted."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a simulated experiment."""

    env_steps_a_second: float
    """Transitions trained."""
    train_steps_a_second: float
    seconds: float
    """That were counted, on the model's clock."""
    busy: dict[str, float]
    """Share of the time that the workers of a role computed, the mean over them, by role."""
    rates: Rates
    produced: int
    """Lanes posted, from the beginning to the end."""
    trained: int
    """Lanes trained."""
    in_flight: int
    """Lanes posted and not trained at the end: on their way, held, or in the step at hand."""
    max_policy_lag: int
    """Most training steps between the weights that a slot was begun with and those that it was trained on."""


def simulate(workload: Workload, costs: Costs, *, num_batches: int | None = None) -> Outcome:
    """Run the model until it has settled, then count ``num_batches`` training steps; by default as many as
    ``MAX_EVENTS`` allows.

    Raises:
        Stuck: the experiment cannot make progress as it is.
    """
    pieces, affordable = _detail(workload)
    return _Simulation(workload, costs, pieces).run(num_batches or affordable)


def _detail(workload: Workload) -> tuple[int, int]:
    """How many pieces a slot has, and how many training steps are counted."""
    slots = max(1.0, workload.batch_lanes / workload.group_lanes)
    events_a_piece = 8 if workload.num_policy_workers else 2 + bool(workload.environment.wait_seconds)
    settling = WARM_BATCHES + workload.max_policy_lag + MIN_BATCHES
    pieces = int(MAX_EVENTS / (slots * settling * events_a_piece))
    pieces = min(PIECES, workload.rollout_length, max(LEAST_PIECES, pieces))
    batches = int(MAX_EVENTS / (slots * (pieces * events_a_piece + 10)))
    return pieces, max(MIN_BATCHES, min(MAX_BATCHES, batches))


@dataclass(eq=False, slots=True, kw_only=True)
class _Slot:
    """One granted slot."""

    rank: _Rank
    producer: int
    """Whom the rank granted it: an actor, or a buffer worker, which grants it on."""
    actor: _Actor = field(init=False)
    """Who fills it."""
    lanes: int
    min_version: int
    began_with: int = 0
    posted: bool = False
    received: bool = False
    left: int = 0
    """Lanes that no batch has taken."""


class _Rotation:
    """Producers with free slots, those first that were granted one longest ago, as in ``CreditBook``."""

    def __init__(self, num_producers: int, num_slots: int) -> None:
        self._free = [num_slots] * num_producers
        self._newest = [-1] * num_producers
        self._ready = [(-1, number) for number in range(num_producers)]
        self._orders = itertools.count()

    @property
    def first(self) -> int | None:
        """Whose turn it is; None while nobody has a free slot."""
        return self._ready[0][1] if self._ready else None

    def take(self) -> None:
        """The first was granted a slot."""
        _, number = heapq.heappop(self._ready)
        self._newest[number] = next(self._orders)
        self._free[number] -= 1
        if self._free[number]:
            heapq.heappush(self._ready, (self._newest[number], number))

    def release(self, number: int) -> None:
        """A slot is free again."""
        self._free[number] += 1
        if self._free[number] == 1:
            heapq.heappush(self._ready, (self._newest[number], number))


class _Rank:
    """A trainer rank: its credits, and the slots that it holds in the order in which they were granted."""

    def __init__(self, process: Process, link: Link, rotation: _Rotation, allowance: int) -> None:
        self.process = process
        self.link = link
        self.rotation = rotation
        self.allowance = allowance
        """Lanes that may be granted."""
        self.granted: deque[_Slot] = deque()
        """Those of which an older one, or they themselves, have not come."""
        self.held: deque[_Slot] = deque()
        """Those that a batch may take."""
        self.held_lanes = 0

    def received(self, slot: _Slot) -> None:
        """A slot came."""
        slot.received = True
        while self.granted and self.granted[0].received:
            self.held.append(self.granted.popleft())
            self.held_lanes += self.held[-1].lanes

    def take(self, lanes: int) -> int:
        """A batch leaves; returns the oldest version in it."""
        self.held_lanes -= lanes
        oldest = self.held[0].began_with
        while lanes:
            slot = self.held[0]
            oldest = min(oldest, slot.began_with)
            taken = min(lanes, slot.left)
            slot.left -= taken
            lanes -= taken
            if not slot.left:
                self.held.popleft()
        return oldest

    @property
    def untrained(self) -> int:
        """Lanes that were posted and that no batch has taken."""
        return sum(slot.left for slot in (*self.held, *self.granted) if slot.posted)


@dataclass(eq=False, slots=True, kw_only=True)
class _Actor:
    """An actor: what it may fill, and with which weights."""

    number: int
    process: Process
    lanes: int
    """Of one slot."""
    idle_groups: int
    credits: deque[_Slot] = field(default_factory=deque)
    version: int = -1
    """The newest that was delivered; not used where policy workers act."""
    loaded: int = -1


@dataclass(eq=False, slots=True, kw_only=True)
class _Request:
    """What an actor asks for the next piece of a slot."""

    slot: _Slot
    piece: int


@dataclass(eq=False, slots=True, kw_only=True)
class _PolicyWorker:
    """A policy worker and the requests that wait for it."""

    process: Process
    inward: Link
    outward: Link
    waiting: deque[_Request] = field(default_factory=deque)
    version: int = -1
    loaded: int = -1


@dataclass(eq=False, slots=True, kw_only=True)
class _Buffer:
    """A buffer worker: its actors, and what it was granted and has not granted on."""

    process: Process
    inward: Link
    actors: list[_Actor]
    rotation: _Rotation
    orders: deque[_Slot] = field(default_factory=deque)


class _Simulation:
    """One experiment. Methods named in the past tense are events."""

    def __init__(self, workload: Workload, costs: Costs, pieces: int) -> None:
        self._workload = workload
        self._costs = costs
        self._work = Work(workload=workload, costs=costs)
        self._clock = Clock()
        self._hop = costs.hop_seconds + workload.place.hop_seconds
        self._pieces = pieces
        self._steps = workload.rollout_length / pieces
        """Of a piece."""
        cores = workload.place.cores
        self._shared = None if cores is None else self._machine(cores)
        self._actors = [
            _Actor(
                number=number,
                process=self._process(),
                lanes=lanes // workload.ring_size,
                idle_groups=workload.ring_size,
            )
            for number, lanes in enumerate(workload.actor_lanes)
        ]
        self._policy_workers = [
            _PolicyWorker(process=self._process(), inward=self._link(), outward=self._link())
            for _ in range(workload.num_policy_workers)
        ]
        slots_an_actor = workload.slots_per_group * workload.ring_size
        self._buffers = [self._buffer(number, slots_an_actor) for number in range(workload.num_buffer_workers)]
        num_producers = len(self._buffers) or len(self._actors)
        slots_a_producer = min(MAX_SLOTS_PER_PRODUCER, slots_an_actor * len(self._actors) // num_producers)
        self._ranks = [
            _Rank(
                self._process(),
                self._link(),
                _Rotation(num_producers, slots_a_producer),
                (1 + workload.max_policy_lag) * workload.rank_lanes,
            )
            for _ in range(workload.num_trainers)
        ]
        self._coordinator, self._weights_out = self._process(), self._link()
        self._attention = self._work.attention()
        self._version = 0
        self._parts_in_training = 0
        self._distributing = 0
        self._next_distributed: int | None = None
        # Counters since the beginning:
        self._slots = 0
        self._versions_out = 0
        self._produced = 0
        self._max_policy_lag = 0

    def _machine(self, cores: float) -> Machine:
        return Machine(self._clock, cores, full_load_speed=self._costs.full_load_speed)

    def _process(self) -> Process:
        return Process(self._clock, self._shared or self._machine(1.0))

    def _link(self) -> Link:
        return Link(self._clock, self._workload.place.bandwidth, self._hop)

    def _buffer(self, number: int, slots_an_actor: int) -> _Buffer:
        actors = self._actors[number :: self._workload.num_buffer_workers]
        rotation = _Rotation(len(actors), slots_an_actor)
        return _Buffer(process=self._process(), inward=self._link(), actors=actors, rotation=rotation)

    def run(self, num_batches: int) -> Outcome:
        """See ``simulate``."""
        for rank in self._ranks:
            self._grant(rank)
        self._publish()
        warm = WARM_BATCHES + self._workload.max_policy_lag
        self._until(warm)
        began, before = self._clock.now, self._counters()
        self._until(warm + num_batches)
        return self._outcome(began, before)

    def _until(self, version: int) -> None:
        while self._version < version:
            if not self._clock.step():
                raise Stuck(
                    f"after {self._version} training steps no slot can be granted, filled or trained: a larger "
                    "pacing.maxPolicyLag or trainers.batchEnvironments leaves room for whole rollouts"
                )

    # Granting.

    def _grant(self, rank: _Rank) -> None:
        """Grant what fits."""
        while (number := rank.rotation.first) is not None:
            lanes = self._lanes_of(number)
            if lanes > rank.allowance:
                return
            rank.rotation.take()
            rank.allowance -= lanes
            slot = _Slot(rank=rank, producer=number, lanes=lanes, min_version=self._version, left=lanes)
            rank.granted.append(slot)
            if self._buffers:
                self._clock.after(self._hop, self._ordered, self._buffers[number], slot)
            else:
                slot.actor = self._actors[number]
                self._clock.after(self._hop, self._granted, slot)

    def _lanes_of(self, producer: int) -> int:
        """Of one of its slots."""
        return (self._buffers[producer].actors[0] if self._buffers else self._actors[producer]).lanes

    def _ordered(self, buffer: _Buffer, slot: _Slot) -> None:
        buffer.orders.append(slot)
        self._grant_on(buffer)

    def _grant_on(self, buffer: _Buffer) -> None:
        """One for one, in turn."""
        while buffer.orders and (number := buffer.rotation.first) is not None:
            buffer.rotation.take()
            slot = buffer.orders.popleft()
            slot.actor = buffer.actors[number]
            self._clock.after(self._hop, self._granted, slot)

    def _granted(self, slot: _Slot) -> None:
        slot.actor.credits.append(slot)
        self._begin(slot.actor)

    # Filling.

    def _begin(self, actor: _Actor) -> None:
        """Start idle groups on the credits that are there, as far as there are weights for them."""
        while actor.idle_groups and actor.credits:
            if not self._policy_workers and actor.version < actor.credits[0].min_version:
                return
            actor.idle_groups -= 1
            slot = actor.credits.popleft()
            if self._policy_workers:
                self._ask(_Request(slot=slot, piece=0))
            else:
                self._begin_acting(actor, slot)

    def _begin_acting(self, actor: _Actor, slot: _Slot) -> None:
        loading = self._work.loading() if actor.version > actor.loaded else 0.0
        slot.began_with = actor.loaded = actor.version
        self._act(slot, 0, loading)

    def _act(self, slot: _Slot, piece: int, before: float) -> None:
        """The next piece of a slot whose actor acts by itself."""
        work = before + self._steps * self._work.acting_step(slot.lanes)
        wait = self._steps * self._work.waiting_step(slot.lanes)
        slot.actor.process.do(work, self._acted, slot, piece, wait=wait)

    def _acted(self, slot: _Slot, piece: int) -> None:
        if piece + 1 < self._pieces:
            self._act(slot, piece + 1, 0.0)
        else:
            self._post(slot)

    def _ask(self, request: _Request) -> None:
        """A question goes to the actor's policy worker."""
        worker = self._policy_workers[request.slot.actor.number % len(self._policy_workers)]
        nbytes = self._steps * self._work.request_bytes(request.slot.lanes)
        worker.inward.carry(nbytes, self._clock.after, self._other_hops, self._asked, worker, request)

    @property
    def _other_hops(self) -> float:
        """A piece stands for the messages of its steps, which hop one after the other."""
        return (self._steps - 1.0) * self._hop

    def _asked(self, worker: _PolicyWorker, request: _Request) -> None:
        worker.waiting.append(request)
        self._evaluate(worker)

    def _evaluate(self, worker: _PolicyWorker) -> None:
        """Begin on what waits, as far as it fits into a batch and once there are weights for it."""
        if not worker.waiting or not worker.process.is_idle:
            return
        batch, lanes = self._next_batch(worker)
        if worker.version < max(request.slot.min_version for request in batch):
            return
        for request in batch:
            worker.waiting.popleft()
            if request.piece == 0:
                request.slot.began_with = worker.version
        work = self._work.loading() if worker.version > worker.loaded else 0.0
        worker.loaded = worker.version
        work += self._steps * self._work.evaluating(len(batch), lanes)
        worker.process.do(work, self._evaluated, worker, batch)

    def _next_batch(self, worker: _PolicyWorker) -> tuple[list[_Request], int]:
        batch: list[_Request] = []
        lanes = 0
        for request in worker.waiting:
            if batch and lanes + request.slot.lanes > self._workload.max_batch_size:
                break
            batch.append(request)
            lanes += request.slot.lanes
        return batch, lanes

    def _evaluated(self, worker: _PolicyWorker, batch: Sequence[_Request]) -> None:
        for request in batch:
            nbytes = self._steps * self._work.answer_bytes(request.slot.lanes)
            worker.outward.carry(nbytes, self._clock.after, self._other_hops, self._answered, request)
        self._evaluate(worker)

    def _answered(self, request: _Request) -> None:
        lanes = request.slot.lanes
        work = self._steps * self._work.asking_step(lanes)
        wait = self._steps * self._work.waiting_step(lanes)
        request.slot.actor.process.do(work, self._stepped, request, wait=wait)

    def _stepped(self, request: _Request) -> None:
        request.piece += 1
        if request.piece < self._pieces:
            self._ask(request)
        else:
            self._post(request.slot)

    # Posting and receiving.

    def _post(self, slot: _Slot) -> None:
        slot.actor.process.do(self._work.posting(slot.lanes), self._posted, slot)

    def _posted(self, slot: _Slot) -> None:
        slot.posted = True
        slot.actor.idle_groups += 1
        self._slots += 1
        self._produced += slot.lanes
        nbytes = self._work.slot_bytes(slot.lanes)
        if self._buffers:
            buffer = self._buffers[slot.producer]
            buffer.inward.carry(nbytes, self._relay, buffer, slot)
        else:
            slot.rank.link.carry(nbytes, self._receive, slot)
        self._begin(slot.actor)

    def _relay(self, buffer: _Buffer, slot: _Slot) -> None:
        buffer.process.do(self._work.relaying(slot.lanes, len(buffer.actors)), self._relayed, buffer, slot)

    def _relayed(self, buffer: _Buffer, slot: _Slot) -> None:
        buffer.rotation.release(slot.actor.number // len(self._buffers))
        self._grant_on(buffer)
        slot.rank.link.carry(self._work.slot_bytes(slot.lanes), self._receive, slot)

    def _receive(self, slot: _Slot) -> None:
        num_producers = len(self._buffers) or len(self._actors)
        slot.rank.process.do(self._work.receiving(slot.lanes, num_producers), self._received, slot)

    def _received(self, slot: _Slot) -> None:
        slot.rank.received(slot)
        slot.rank.rotation.release(slot.producer)
        self._grant(slot.rank)
        self._train()

    # Training.

    def _train(self) -> None:
        """A step begins when every rank has its part of the batch and the step before has ended."""
        lanes = self._workload.rank_lanes
        if self._parts_in_training or any(rank.held_lanes < lanes for rank in self._ranks):
            return
        self._parts_in_training = len(self._ranks)
        work = self._work.training() + self._work.reducing()
        for number, rank in enumerate(self._ranks):
            self._max_policy_lag = max(self._max_policy_lag, self._version - rank.take(lanes))
            rank.process.do(work + (0.0 if number else self._work.publishing()), self._trained_part)

    def _trained_part(self) -> None:
        """Ranks wait for each other; then there is a version more, and with it a batch of credits."""
        self._parts_in_training -= 1
        if self._parts_in_training:
            return
        self._version += 1
        self._publish()
        for rank in self._ranks:
            rank.allowance += self._workload.rank_lanes
            self._grant(rank)
        self._train()

    # Weights.

    def _publish(self) -> None:
        if self._workload.shared_memory:
            self._deliver(self._version)
        elif self._distributing:
            self._next_distributed = self._version  # those in between are passed over
        else:
            self._distribute(self._version)

    def _distribute(self, version: int) -> None:
        """To all who act: the coordinator computes while its link carries."""
        self._distributing = 2
        work = self._work.distributing(self._workload.num_watchers) / self._attention
        nbytes = float(self._workload.num_watchers * self._workload.network.weight_bytes)
        self._coordinator.do(work, self._half_distributed, version)
        self._weights_out.carry(nbytes, self._half_distributed, version)

    def _half_distributed(self, version: int) -> None:
        self._distributing -= 1
        if self._distributing:
            return
        self._versions_out += 1
        newer, self._next_distributed = self._next_distributed, None
        if newer is not None:
            self._distribute(newer)
        self._deliver(version)

    def _deliver(self, version: int) -> None:
        """All who act have the weights."""
        for worker in self._policy_workers:
            worker.version = version
            self._evaluate(worker)
        if not self._policy_workers:
            for actor in self._actors:
                actor.version = version
                self._begin(actor)

    # Counting.

    def _roles(self) -> dict[str, list[Process]]:
        roles = {
            "actor": [actor.process for actor in self._actors],
            "policy": [worker.process for worker in self._policy_workers],
            "buffer": [buffer.process for buffer in self._buffers],
            "trainer": [rank.process for rank in self._ranks],
            "coordinator": [self._coordinator],
        }
        return {role: processes for role, processes in roles.items() if processes}

    def _counters(self) -> dict[str, float]:
        computed = {
            role: sum(process.computed for process in processes) / len(processes)
            for role, processes in self._roles().items()
        }
        return {**computed, "steps": self._version, "slots": self._slots, "versions": self._versions_out}

    def _outcome(self, began: float, before: dict[str, float]) -> Outcome:
        seconds = self._clock.now - began
        rates = {name: (value - before[name]) / seconds for name, value in self._counters().items()}
        busy = {role: min(1.0, rates[role]) for role in self._roles()}
        if self._workload.shared_memory:
            busy["coordinator"] = min(1.0, self._work.heartbeats())
        else:
            busy["coordinator"] = min(1.0, busy["coordinator"] * self._attention + self._work.heartbeats())
        at_hand = self._workload.batch_lanes if self._parts_in_training else 0
        return Outcome(
            env_steps_a_second=rates["steps"] * self._workload.batch_transitions,
            train_steps_a_second=rates["steps"],
            seconds=seconds,
            busy=busy,
            rates=Rates(slots=rates["slots"], versions=rates["versions"]),
            produced=self._produced,
            trained=self._version * self._workload.batch_lanes,
            in_flight=at_hand + sum(rank.untrained for rank in self._ranks),
            max_policy_lag=self._max_policy_lag,
        )
