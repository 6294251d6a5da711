"""Threads fill slots as lockstep does, bit for bit. Abandoned slots stay as they are."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import structlog
from gymnasium import spaces
from numpy.typing import NDArray

from rlsrl.data.inference import InferenceLayout, RolloutRequest, RolloutResult
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import EnvSpec
from rlsrl.data.version import Version
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.envs.wrappers import ActionMask
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import (
    Activation,
    CategoricalHead,
    DenseLayer,
    ExportedActor,
    GaussianHead,
    Head,
)
from rlsrl.policies.lane_requests import LaneRequests, RequestingLanes
from rlsrl.policies.numpy_policy import NumpyActor, NumpyLanes, NumpyPolicy
from rlsrl.runtime.errors import EnvironmentFailed
from rlsrl.streams.inference import InferenceFailed
from rlsrl.testing.environments import Episode, MaskedEnv, ScriptedEnv, at_any_rank
from rlsrl.testing.inline_inference import InlineInferenceChannel, InlineInferenceClient, InlineInferenceServer
from rlsrl.testing.waiting import until
from rlsrl.workers.env_groups import EnvGroup, LockstepEnvGroup, ThreadedEnvGroup
from rlsrl.workers.lane_evaluation import LaneEvaluation, LocalEvaluation, RemoteEvaluation

LOG = structlog.stdlib.get_logger("test")
NUM_STEPS, NUM_ENVS, NUM_SLOTS, HIDDEN = 24, 6, 5, 8

Load = Callable[[Parameters], None]
Made = tuple[EnvGroup, Load, Any]


class WalkEnv(gymnasium.Env[Any, Any]):
    """A walk over small integers that ends on either side. Its steps take random times.

    With integer observations and simple fractions as weights, a network's sums are exact in any order. So equal
    rollouts are equal bit for bit, whatever the sizes of the matrix products.
    """

    def __init__(self, *, continuous: bool = False) -> None:
        self.observation_space = spaces.Box(-64, 64, (3,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32) if continuous else spaces.Discrete(2)
        self._chance = random.Random()
        self._place, self._wind, self._taken = 0, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._place, self._taken = int(self.np_random.integers(-2, 3)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._chance.choice([0.0, 0.0, 0.0002, 0.002]))
        assert self.action_space.contains(action)
        right = bool(action[0] > 0) if isinstance(self.action_space, spaces.Box) else bool(action)
        self._place += (1 if right else -1) + self._wind
        self._taken += 1
        observation = self._observe()
        return observation, float(self._place), abs(self._place) > 5, self._taken == 11, {}

    def _observe(self) -> NDArray[np.float32]:
        self._wind = int(self.np_random.integers(-1, 2))
        return np.array([self._place, self._wind, self._taken], np.float32)


def cartpole() -> gymnasium.Env[Any, Any]:
    return make_environment(EnvironmentSource(id="CartPole-v1"))


def masked() -> gymnasium.Env[Any, Any]:
    return ActionMask(MaskedEnv(3), "action_mask")


def exported_for(env_spec: EnvSpec) -> ExportedActor:
    """Return an exported actor of two layers."""
    unmasked = env_spec.unmasked
    in_size = sum(int(np.prod(spec.shape)) for spec in unmasked.observation.values())
    size = env_spec.action.num_actions or env_spec.action.array.shape[0]
    ends = np.cumsum([in_size * HIDDEN, HIDDEN, HIDDEN * size, size, size]).tolist()
    head: Head = (
        CategoricalHead(num_actions=size, mask=env_spec.action.mask)
        if env_spec.action.kind == "discrete"
        else GaussianHead(num_dimensions=size, log_std_offset=ends[3])
    )
    layers = (
        layer("hidden", 0, ends[0], in_size, HIDDEN, "relu"),
        layer("output", ends[1], ends[2], HIDDEN, size, "identity"),
    )
    return ExportedActor(
        layout="test", num_parameters=ends[4], observation=unmasked.observation, layers=layers, head=head
    )


def layer(
    name: str, weight_offset: int, bias_offset: int, in_size: int, out_size: int, activation: Activation
) -> DenseLayer:
    return DenseLayer(
        name=name,
        weight_offset=weight_offset,
        bias_offset=bias_offset,
        in_size=in_size,
        out_size=out_size,
        activation=activation,
    )


def weights_for(exported: ExportedActor, step: int, *, whole: bool) -> Parameters:
    rng = np.random.default_rng(step)
    vector = rng.integers(-3, 4, exported.num_parameters) / 8 if whole else rng.standard_normal(exported.num_parameters)
    return Parameters(version=Version(1, step), vector=vector.astype(np.float32), layout="test")


def lockstep(
    make: Callable[[], gymnasium.Env[Any, Any]], resources: ExitStack, **options: Any
) -> tuple[EnvGroup, Load, Any]:
    envs = LoopVectorEnv(at_any_rank(make), seeds=options.pop("seeds", range(NUM_ENVS)), **options)
    resources.callback(envs.close)
    exported, rng = exported_for(envs.spec), np.random.default_rng(7)
    actor = NumpyActor(exported, num_steps=NUM_STEPS, num_lanes=envs.num_envs, rng=rng)
    return LockstepEnvGroup(envs, actor, num_steps=NUM_STEPS), actor.load, envs


def threaded(
    make: Callable[[], gymnasium.Env[Any, Any]], resources: ExitStack, **options: Any
) -> tuple[EnvGroup, Load, Any]:
    envs = EnvironmentThreads(at_any_rank(make), seeds=options.pop("seeds", range(NUM_ENVS)), **options)
    resources.callback(envs.close)
    exported, rng = exported_for(envs.spec), np.random.default_rng(7)
    one, another = (NumpyLanes(exported, num_steps=NUM_STEPS, num_lanes=envs.num_envs, rng=rng) for _ in range(2))
    group = ThreadedEnvGroup(envs, (one, another), num_steps=NUM_STEPS, wait_seconds=0.01)
    return group, group.load, envs


def requesting(
    make: Callable[[], gymnasium.Env[Any, Any]], resources: ExitStack, **options: Any
) -> tuple[EnvGroup, Load, Any]:
    """As ``threaded``, with evaluations for all lanes of a slot that wait at a moment, as for a network in torch."""
    envs = EnvironmentThreads(at_any_rank(make), seeds=options.pop("seeds", range(NUM_ENVS)), **options)
    resources.callback(envs.close)
    policies = [CountingPolicy(exported_for(envs.spec)) for _ in range(2)]
    requests = LaneRequests(envs.num_envs)
    evaluation = LocalEvaluation(envs, requests, policies)
    group = requesting_group(envs, requests, evaluation, loads=[each.load for each in policies])
    resources.callback(group.abandon)
    return group, group.load, envs


def asking(
    make: Callable[[], gymnasium.Env[Any, Any]], resources: ExitStack, **options: Any
) -> tuple[EnvGroup, Load, Any]:
    """As ``requesting``, by a policy worker in a thread of its own. It has the weights of the slot that begins."""
    envs = EnvironmentThreads(at_any_rank(make), seeds=options.pop("seeds", range(NUM_ENVS)), **options)
    resources.callback(envs.close)
    worker = PolicyThread(envs.spec)
    resources.callback(worker.close)
    requests = LaneRequests(envs.num_envs)
    evaluation = RemoteEvaluation(
        envs, requests, worker.client, waiting=lambda _: nullcontext(), report_version=lambda _: None, log=LOG
    )
    group = requesting_group(envs, requests, evaluation, loads=[lambda _: None] * 2)
    resources.callback(group.abandon)
    return group, worker.load, envs


def requesting_group(
    envs: EnvironmentThreads, requests: LaneRequests, evaluation: LaneEvaluation, *, loads: Sequence[Load]
) -> ThreadedEnvGroup:
    rng = np.random.default_rng(7)
    one, another = (
        RequestingLanes(
            envs.spec, requests, number=number, num_steps=NUM_STEPS, num_lanes=envs.num_envs, rng=rng, load=load
        )
        for number, load in enumerate(loads)
    )
    return ThreadedEnvGroup(envs, (one, another), num_steps=NUM_STEPS, evaluation=evaluation, wait_seconds=0.01)


class CountingPolicy(NumpyPolicy):
    """Counts the lanes of its evaluations."""

    def __init__(self, exported: ExportedActor) -> None:
        super().__init__(exported)
        self.sizes: list[int] = []

    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        self.sizes.append(sum(request.num_lanes for request in requests))
        return super().predict(requests)


class PolicyThread:
    """A policy worker as a thread: answers each batch with the weights of the version that it asks for."""

    def __init__(self, env_spec: EnvSpec) -> None:
        channel, layout = InlineInferenceChannel("policy"), InferenceLayout.of(env_spec)
        self.server = InlineInferenceServer(channel, layout=layout, on_refused=pytest.fail)
        self.client = InlineInferenceClient(channel, layout=layout)
        self.policy = CountingPolicy(exported_for(env_spec))
        self.fails = 0
        """Batches that fail from now on."""
        self._weights: dict[Version, Parameters] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def load(self, parameters: Parameters) -> None:
        self._weights[parameters.version] = parameters

    def close(self) -> None:
        self._ending.set()
        self._thread.join(60)
        self.client.close()
        self.server.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            if (batch := self.server.next_batch(1000, 0.01)) is None:
                continue
            if self.fails:
                self.fails -= 1
                batch.fail(ValueError("a policy that fails"))
                continue
            results = []
            for request in batch.requests:  # lanes of two slots may ask together
                self.policy.load(self._weights[max(request.min_version, min(self._weights))])
                results += self.policy.predict([request])
            batch.respond(results)


def slot_for(env_spec: EnvSpec, num_lanes: int = NUM_ENVS) -> Slot:
    """Return a slot full of garbage."""
    layout = rollout_layout(env_spec, num_steps=NUM_STEPS, num_lanes=num_lanes)
    slot = Slot(arrays=layout.view(bytearray(b"\x2a" * layout.nbytes)))
    slot.arrays["mask"].fill(False)
    return slot


def slots_of(kind: Any, make: Callable[[], gymnasium.Env[Any, Any]], *, whole: bool, **options: Any) -> list[Slot]:
    """Fill several slots in turn, each with other weights."""
    with ExitStack() as resources:
        group, load, envs = kind(make, resources, **options)
        slots, filled = [slot_for(envs.spec) for _ in range(NUM_SLOTS)], list[Slot]()
        begun = 0
        while len(filled) < NUM_SLOTS:
            if begun < NUM_SLOTS and group.has_room:
                weights = weights_for(exported_for(envs.spec), begun, whole=whole)
                load(weights)
                slots[begun].min_version = weights.version
                group.begin(slots[begun])
                begun += 1
            if (slot := group.advance(touch=lambda: None, still_wanted=lambda: True)) is not None:
                filled.append(slot)
        assert group.is_idle
        assert filled == slots, "in order"
    return slots


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(WalkEnv, {}, id="discrete"),
        pytest.param(WalkEnv, {"max_decorrelation_steps": 9}, id="decorrelated"),
        pytest.param(partial(WalkEnv, continuous=True), {}, id="continuous"),
        pytest.param(masked, {}, id="masked"),
    ],
)
@pytest.mark.parametrize("kind", [threaded, requesting, asking])
def test_threads_fill_slots_as_lockstep_does_to_the_bit(kind: Any, make: Any, options: dict[str, Any]) -> None:
    expected = slots_of(lockstep, make, whole=True, **options)
    for _ in range(2):  # environments take different times in each round
        for slot, other in zip(slots_of(kind, make, whole=True, **options), expected, strict=True):
            for name, array in other.arrays.items():
                np.testing.assert_array_equal(slot.arrays[name], array, name)
    assert any(slot.arrays["terminated"].any() for slot in expected)
    assert len({slot.arrays["version_step"][0] for slot in expected}) == NUM_SLOTS


def test_threads_and_lockstep_agree_up_to_rounding_for_any_weights() -> None:
    pairs = zip(slots_of(threaded, cartpole, whole=False), slots_of(lockstep, cartpole, whole=False), strict=True)
    for slot, other in pairs:
        for name, array in other.arrays.items():
            if name == "behavior_log_prob":
                np.testing.assert_allclose(slot.arrays[name], array, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(slot.arrays[name], array, name)


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps that take ``SECONDS``."""

    SECONDS = 0.01

    def step(self, action: Any) -> Any:
        time.sleep(self.SECONDS)
        return super().step(action)


@pytest.mark.parametrize(
    ("kind", "at_once"), [(lockstep, 1), (threaded, NUM_ENVS), (requesting, NUM_ENVS), (asking, NUM_ENVS)]
)
def test_the_time_of_environments_and_inference_is_reported(kind: Any, at_once: int) -> None:
    with ExitStack() as resources:
        group, load, envs = kind(lambda: Slow(cartpole()), resources)
        load(weights_for(exported_for(envs.spec), 1, whole=True))
        began = time.monotonic()
        group.begin(slot_for(envs.spec))
        until(lambda: group.advance(touch=lambda: None, still_wanted=lambda: True) is not None, "a slot")
        spent, took = group.take_spent(), time.monotonic() - began
        least = 0.5 * NUM_STEPS * NUM_ENVS / at_once * Slow.SECONDS  # the step after an end only resets
        assert least < spent["environment"] <= took
        assert 0.0 < spent["inference"] <= took
        assert sum(group.take_spent().values()) == 0.0, "reported once"


class Gated(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps that wait until the test opens a gate."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.opened.set()

    def step(self, action: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(60)
        return self.env.step(action)


@pytest.fixture
def gates() -> list[Gated]:
    """The environments that the test has made."""
    return []


@contextmanager
def gated(gates: list[Gated], num_envs: int = 3) -> Iterator[tuple[ThreadedEnvGroup, EnvironmentThreads, Slot]]:
    def make() -> Gated:
        gates.append(Gated(ScriptedEnv([Episode(rewards=(1.0,) * 5)])))
        return gates[-1]

    with ExitStack() as resources:
        faults = EnvironmentFaults(error_budget=0)
        group, load, envs = threaded(make, resources, seeds=range(num_envs), first_rank=40, faults=faults)
        resources.callback(lambda: [gate.opened.set() for gate in gates])
        load(weights_for(exported_for(envs.spec), 0, whole=True))
        assert isinstance(group, ThreadedEnvGroup)
        yield group, envs, slot_for(envs.spec, num_envs)


def test_a_slot_begins_when_the_first_environment_has_finished_the_slot_before(gates: list[Gated]) -> None:
    with gated(gates) as (group, envs, slot):
        gates[1].opened.clear()
        group.begin(slot)
        until(lambda: group.advance(touch=never, still_wanted=lambda: True) or group.has_room, "the first is through")
        assert not group.is_idle
        following = slot_for(envs.spec, 3)
        group.load(weights_for(exported_for(envs.spec), 1, whole=True))
        group.begin(following)
        until(lambda: group.advance(touch=never, still_wanted=lambda: True) or envs.num_done_by_first == 2, "again")
        assert not group.has_room, "no more than two slots"
        assert (following.arrays["version_step"] == 1).all()
        gates[1].opened.set()
        assert until(lambda: group.advance(touch=lambda: None, still_wanted=lambda: True), "the last one") is slot
        assert (slot.arrays["version_step"] == 0).all()
        assert group.has_room


def never() -> None:
    raise AssertionError("one of three stands still in its first step")


def test_a_hanging_environment_stops_the_liveness_touches(gates: list[Gated]) -> None:
    touches: list[int] = []
    with gated(gates) as (group, envs, slot):
        gates[1].opened.clear()
        group.begin(slot)
        until(lambda: envs.num_done_by_first == 1, "two are through")
        for _ in range(5):
            assert group.advance(touch=never, still_wanted=lambda: True) is None
        gates[1].opened.set()
        until(lambda: group.advance(touch=lambda: touches.append(1), still_wanted=lambda: True), "all are")
    assert touches


@pytest.mark.parametrize("kind", [requesting, asking])
def test_lanes_that_wait_are_evaluated_together(kind: Any) -> None:
    barrier = threading.Barrier(NUM_ENVS)

    class Together(gymnasium.Wrapper[Any, Any, Any, Any]):
        """Steps that end together, so that all lanes ask at about the same time."""

        def step(self, action: Any) -> Any:
            barrier.wait(60)
            return super().step(action)

    with ExitStack() as resources:
        group, load, envs = kind(lambda: Together(ScriptedEnv([Episode(rewards=(1.0,) * 100)])), resources)
        load(weights_for(exported_for(envs.spec), 0, whole=True))
        slot = slot_for(envs.spec)
        slot.min_version = Version(1, 0)
        group.begin(slot)
        until(lambda: group.advance(touch=lambda: None, still_wanted=lambda: True) is not None, "a slot")
        policies = [load.__self__.policy] if kind is asking else group._evaluation._policies
        sizes = [size for policy in policies for size in policy.sizes]
    assert sum(sizes) == NUM_STEPS * NUM_ENVS
    assert max(sizes) > 1


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_request_that_fails_is_repeated_and_not_for_ever(failures: int) -> None:
    with ExitStack() as resources:
        group, load, envs = asking(partial(ScriptedEnv, [Episode(rewards=(1.0,) * 100)]), resources, seeds=[0])
        worker = load.__self__  # type: ignore[attr-defined]
        worker.fails = failures
        weights = weights_for(exported_for(envs.spec), 0, whole=True)
        load(weights)
        slot = slot_for(envs.spec, 1)
        slot.min_version = weights.version
        group.begin(slot)

        def is_full() -> bool:
            return group.advance(touch=lambda: None, still_wanted=lambda: True) is not None

        if failures < 3:
            until(is_full, "a slot")
            return
        with pytest.raises(InferenceFailed, match="a policy that fails"):
            until(is_full, "the failure")


@pytest.mark.parametrize("kind", [requesting, asking])
def test_lanes_that_wait_for_an_action_end_with_the_group(kind: Any) -> None:
    with ExitStack() as resources:
        group, load, envs = kind(cartpole, resources)
        load(weights_for(exported_for(envs.spec), 0, whole=True))
        slot = slot_for(envs.spec)
        slot.min_version = Version(1, 0)
        group.begin(slot)
        requests = group._evaluation._requests
        until(lambda: len(requests._waiting) == NUM_ENVS, "every lane waits")
        group.abandon()
        envs.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {f"environment-{rank}" for rank in range(NUM_ENVS)} & names


def test_abandoned_slots_are_left_unchanged(gates: list[Gated]) -> None:
    with gated(gates) as (group, _, slot):
        gates[1].opened.clear()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("environment-4")]
        assert len(threads) == 3
        group.begin(slot)
        assert gates[1].entered.wait(60)
        group.abandon()
        script: Any = gates[1].env.unwrapped
        assert script.actions == [], "it is within its first step"
        before = {name: array.copy() for name, array in slot.arrays.items()}
        gates[1].opened.set()
        until(lambda: not threads[1].is_alive() or len(script.actions) > 1, "the thread finds out, or goes on")
        assert len(script.actions) == 1
        for name, array in before.items():
            np.testing.assert_array_equal(slot.arrays[name], array, name)


def test_the_error_of_an_environment_ends_all_threads_and_is_raised(gates: list[Gated]) -> None:
    def broken(action: Any) -> Any:
        raise ConnectionError("the simulator hung up")

    with gated(gates) as (group, _, slot):
        gates[1].env.step = broken  # type: ignore[method-assign]
        gates[0].opened.clear()
        group.begin(slot)
        with pytest.raises(EnvironmentFailed, match="rank 41 raised ConnectionError: the simulator hung up") as caught:
            until(lambda: group.advance(touch=never, still_wanted=lambda: True), "the failure")
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "_fill_lane" in [entry.name for entry in caught.traceback], "as it happened"


def test_abandoned_lockstep_ends_after_the_present_step() -> None:
    script, wanted = ScriptedEnv([Episode(rewards=(1.0,) * 50)]), iter([True, True, False])
    with ExitStack() as resources:
        group, load, envs = lockstep(lambda: script, resources, seeds=[0])
        load(weights_for(exported_for(envs.spec), 0, whole=True))
        group.begin(slot_for(envs.spec, 1))
        assert group.advance(touch=lambda: None, still_wanted=lambda: next(wanted)) is None
    assert len(script.actions) == 3
