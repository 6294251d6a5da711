"""Recurrent networks: their layers are torch's, and every way to act starts from the state of the frame before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlsrl.algorithms.check import check_algorithm
from rlsrl.api.spec import AlgorithmSpec, Cnn, Mlp, Network, NetworkOutputs, Recurrent
from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import Slot, state_field
from rlsrl.data.specs import ArraySpec, EnvSpec, state_specs
from rlsrl.data.version import Version
from rlsrl.envs.memory_tasks import DelayedCue
from rlsrl.envs.threads import lane_of
from rlsrl.envs.vector import LoopVectorEnv
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import DistributionActor, Policy, PolicyActor, RolloutActor
from rlsrl.policies.build import build_network
from rlsrl.policies.distributions import log_prob_for
from rlsrl.policies.epsilon_greedy import EPSILON, values_to_logits
from rlsrl.policies.export import ExportMismatch, export_dense
from rlsrl.policies.exported import CategoricalHead, DenseLayer, ExportedActor, RecurrentLayer
from rlsrl.policies.flat import FlatLayout
from rlsrl.policies.lane_requests import LaneRequests, RequestingLanes
from rlsrl.policies.lane_states import LaneStates
from rlsrl.policies.networks import POLICY_HEAD, Heads, Observation, State, acting_output, stepped, unrolled
from rlsrl.policies.numpy_policy import NumpyActor, NumpyLanes, NumpyPolicy
from rlsrl.policies.one_step import OneStepActor
from rlsrl.policies.recurrent import MODULES
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import continuous_env_spec, discrete_action, discrete_env_spec
from rlsrl.workers.build.common import torch_policy
from rlsrl.workers.evaluation import Evaluation

NUM_STEPS, NUM_LANES, SIZE = 12, 5, 7
KINDS = ("gru", "lstm")
LEGAL = "observation/legal"
MASKED = EnvSpec(
    observation={
        "observation/seen": ArraySpec(shape=(3,), dtype="float32"),
        LEGAL: ArraySpec(shape=(4,), dtype="int8"),
    },
    action=replace(discrete_action(4), mask=LEGAL),
)
ENV_SPECS = {
    "discrete": discrete_env_spec(),
    "continuous": continuous_env_spec(),
    "masked": MASKED,
    "values": discrete_env_spec(num_actions=3),
    "masked values": MASKED,
}
EPSILON_OF_VALUES = 0.3


def network_of(kind: str, **options: Any) -> Network:
    mlp = Mlp(hidden_sizes=(6,), **options)
    return Network(mlp=mlp, recurrent=Recurrent(kind=kind, size=SIZE))  # type: ignore[arg-type]


def policy_of(
    kind: str, env_spec: EnvSpec, *, seed: int = 3, has_values: bool = False
) -> tuple[TorchPolicy, Parameters]:
    """Return a policy with random weights, whose actions depend much on its state."""
    network = network_of(kind, dueling=True, quantiles=2) if has_values else network_of(kind)
    outputs: NetworkOutputs = "actionValues" if has_values else "policyAndValue"
    policy = torch_policy(network, env_spec, outputs=outputs, seed=0)
    vector = np.random.default_rng(seed).standard_normal(policy.layout.num_parameters).astype(np.float32)
    statistics = {EPSILON: np.float32(EPSILON_OF_VALUES)} if has_values else {}
    parameters = replace(policy.parameters(Version(1, 2)), vector=vector, statistics=statistics)
    policy.load(parameters)
    return policy, parameters


def slots_of(env_spec: EnvSpec, kind: str, number: int = 3) -> list[Slot]:
    """Return slots that follow each other: the first frame of each is the last of the one before."""
    rng, state = np.random.default_rng(5), state_specs(network_of(kind).state_sizes)
    slots = [
        random_slot(env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng, end_probability=0.2, state=state)
        for _ in range(number)
    ]
    for before, slot in pairwise(slots):
        for path in env_spec.observation:
            slot.arrays[path][0] = before.arrays[path][-1]
    return slots


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_torchs_does(kind: str) -> None:
    torch.manual_seed(0)
    layer = MODULES[kind](4, SIZE)  # type: ignore[index]
    cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind](4, SIZE)
    weights = {name: torch.randn_like(values) for name, values in cell.state_dict().items()}
    layer.load_state_dict(weights)
    cell.load_state_dict(weights)
    inputs, hidden, memory = torch.randn(9, 4), torch.randn(9, SIZE), torch.randn(9, SIZE)
    state = {"hidden": hidden, "cell": memory} if kind == "lstm" else {"hidden": hidden}

    found = layer(inputs, state)

    expected = cell(inputs, (hidden, memory)) if kind == "lstm" else (cell(inputs, hidden),)
    for name, array in zip(state, expected, strict=True):
        torch.testing.assert_close(found[name], array, rtol=1e-6, atol=1e-6)


class ByStep(nn.Module):
    """A network of a user's own without ``unroll``: it counts how often it saw a positive first feature."""

    state_sizes: Mapping[str, int] = {"count": 1}

    def __init__(self, env_spec: EnvSpec) -> None:
        super().__init__()
        self.last = nn.Linear(1, env_spec.action.num_outputs)

    def forward(self, observation: Observation, state: State) -> tuple[Heads, State]:
        (seen,) = observation.values()
        count = state["count"] + (seen.reshape(len(seen), -1)[:, :1] > 0).float()
        return {POLICY_HEAD: self.last(count)}, {"count": count}


@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_an_unrolled_network_computes_what_it_does_step_by_step(kind: str) -> None:
    env_spec = discrete_env_spec()
    network = (
        build_network(ByStep, env_spec, {}, seed=0, outputs="policy")
        if kind == "own"
        else policy_of(kind, env_spec)[0].network
    )
    frames = {path: torch.randn(NUM_STEPS, NUM_LANES, *spec.shape) for path, spec in env_spec.observation.items()}
    state = {name: torch.rand(NUM_LANES, size) for name, size in network.state_sizes.items()}
    is_first = torch.rand(NUM_STEPS, NUM_LANES) < 0.2
    is_first[0, 1] = True

    heads, states = unrolled(network, frames, state, is_first)

    for step in range(NUM_STEPS):
        state = {name: array.clone() for name, array in state.items()}
        for array in state.values():
            array[is_first[step]] = 0.0
        expected, state = network({path: array[step] for path, array in frames.items()}, state)
        for name, array in expected.items():
            torch.testing.assert_close(heads[name][step], array, rtol=1e-5, atol=1e-6)
        for name, array in state.items():
            torch.testing.assert_close(states[name][step], array, rtol=1e-5, atol=1e-6)
    assert bool(is_first[1:].any())


def run(actors: Sequence[RolloutActor], slots: Sequence[Slot]) -> None:
    """Fill the slots by the actors in turn."""
    for number, slot in enumerate(slots):
        actor = actors[number % len(actors)]
        actor.begin(slot)
        for step in range(NUM_STEPS):
            assert actor.act(step) is not None
        actor.finish()


class Watched(Policy):
    """A policy that notes the states of its requests."""

    def __init__(self, policy: Policy) -> None:
        self.inner = policy
        self.state, self.is_quick = policy.state, policy.is_quick
        self.states: list[dict[str, np.ndarray]] = []

    def load(self, parameters: Parameters) -> None:
        self.inner.load(parameters)

    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        self.states += [{name: array.copy() for name, array in each.state.items()} for each in requests]
        return self.inner.predict(requests)

    def export(self) -> ExportedActor | None:
        return self.inner.export()


def by_a_policy(exported: bool) -> Callable[[TorchPolicy, Parameters, EnvSpec, Sequence[Slot]], None]:
    def act(policy: TorchPolicy, parameters: Parameters, env_spec: EnvSpec, slots: Sequence[Slot]) -> None:
        actor = policy.export()
        assert actor is not None
        watched = Watched(NumpyPolicy(actor) if exported else policy)
        rng = np.random.default_rng(0)
        acting = PolicyActor(watched, env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng)
        acting.load(parameters)
        run([acting], slots)
        for number, slot in enumerate(slots):
            for name, array in watched.states[number * NUM_STEPS].items():
                assert slot.arrays[state_field(name)].tobytes() == array.tobytes()

    return act


def by_numpy(policy: TorchPolicy, parameters: Parameters, env_spec: EnvSpec, slots: Sequence[Slot]) -> None:
    del env_spec
    exported = policy.export()
    assert exported is not None
    actor = NumpyActor(exported, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0))
    actor.load(parameters)
    run([actor], slots)


def by_lanes(policy: TorchPolicy, parameters: Parameters, env_spec: EnvSpec, slots: Sequence[Slot]) -> None:
    """Each lane by itself, through two sets of lanes that take turns."""
    del env_spec
    exported, rng = policy.export(), np.random.default_rng(0)
    assert exported is not None
    first = NumpyLanes(exported, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng)
    second = NumpyLanes(exported, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng, states=first.states)
    for number, slot in enumerate(slots):
        lanes = (first, second)[number % 2]
        lanes.load(parameters)
        lanes.begin(slot)
        for lane, actor in enumerate(lanes.lanes):
            run([actor], [Slot(arrays=lane_of(slot.arrays, lane))])
        lanes.finish()


def by_requests(policy: TorchPolicy, parameters: Parameters, env_spec: EnvSpec, slots: Sequence[Slot]) -> None:
    """Each lane in a thread that requests its distributions."""
    policy.load(parameters)
    requests, rng = LaneRequests(NUM_LANES), np.random.default_rng(0)
    states = [LaneStates(policy.state, 1) for _ in range(NUM_LANES)]
    sizes = {"num_steps": NUM_STEPS, "num_lanes": NUM_LANES, "rng": rng}
    both = [RequestingLanes(env_spec, requests, number=number, **sizes, states=states) for number in range(2)]  # type: ignore[arg-type]
    asked = threading.Semaphore(0)
    requests.on_request = asked.release
    for number, slot in enumerate(slots):
        lanes = both[number % 2]
        lanes.begin(slot)
        threads = [
            threading.Thread(target=run, args=([actor], [Slot(arrays=lane_of(slot.arrays, lane))]))
            for lane, actor in enumerate(lanes.lanes)
        ]
        for thread in threads:
            thread.start()
        for _ in range(NUM_STEPS * NUM_LANES):
            asked.acquire()
            for each in requests.take():
                (result,) = policy.predict([each.request])
                requests.answer(each.lane, result)
        for thread in threads:
            thread.join()
        lanes.finish()


class Requesting(DistributionActor, RolloutActor):
    """Acts as ``RemoteActor`` does: each request is answered later, and the first answer to each is lost."""

    def __init__(self, policy: Policy, env_spec: EnvSpec) -> None:
        super().__init__(
            env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0), state=policy.state
        )
        self._policy = policy

    def act(self, step: int) -> np.ndarray:
        self._policy.predict([self._request(step)])
        (result,) = self._policy.predict([self._request(step)])
        return self._choose(step, result)


def by_answers(policy: TorchPolicy, parameters: Parameters, env_spec: EnvSpec, slots: Sequence[Slot]) -> None:
    policy.load(parameters)
    run([Requesting(policy, env_spec)], slots)


WAYS = {
    "exported": by_numpy,
    "exported, by requests": by_a_policy(exported=True),
    "torch": by_a_policy(exported=False),
    "threads": by_lanes,
    "threads that request": by_requests,
    "answers that are lost": by_answers,
}


def episodes_begin(slots: Sequence[Slot]) -> Iterator[np.ndarray]:
    """Yield, by slot, whether each frame but the last is the first of an episode, [T, N]."""
    before = np.zeros(NUM_LANES, np.bool_)
    for slot in slots:
        mask = slot.arrays["mask"]
        yield np.concatenate([before[np.newaxis], ~mask[:-1]])
        before = ~mask[-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("env", ENV_SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_slot_says_the_state_that_its_actions_began_with(kind: str, env: str, way: str) -> None:
    env_spec = ENV_SPECS[env]
    policy, parameters = policy_of(kind, env_spec, has_values=env.endswith("values"))
    slots = slots_of(env_spec, kind)

    WAYS[way](policy, parameters, env_spec, slots)

    state = {name: torch.zeros(NUM_LANES, *spec.shape) for name, spec in policy.state.items()}
    differs = 0.0
    for slot, is_first in zip(slots, episodes_begin(slots), strict=True):
        for name, array in state.items():
            known = array.masked_fill(torch.from_numpy(is_first[0])[:, None], 0.0)
            np.testing.assert_allclose(slot.arrays[state_field(name)], known, rtol=1e-5, atol=1e-4)
        recorded = {name: torch.from_numpy(slot.arrays[state_field(name)].copy()) for name in state}
        frames = {path: torch.from_numpy(slot.arrays[path][:-1].copy()) for path in env_spec.observation}
        begins = torch.from_numpy(is_first)
        begins[0] = False  # the recorded state is that of frame 0 already
        with torch.no_grad():
            heads, states = unrolled(policy.network, frames, recorded, begins)
            forgetful, _ = unrolled(policy.network, frames, recorded, torch.ones_like(begins))
        log_prob = log_probs(policy, heads, slot)
        np.testing.assert_allclose(slot.arrays["behavior_log_prob"], log_prob, rtol=1e-5, atol=1e-4)
        differs += float(np.abs(log_probs(policy, forgetful, slot) - log_prob).max())
        state = {name: array[-1] for name, array in states.items()}
    assert differs > 0.1, "the state matters"
    assert any(not slot.arrays["mask"].all() for slot in slots)


def log_probs(policy: TorchPolicy, heads: Heads, slot: Slot) -> np.ndarray:
    parameters = acting_output(heads)
    if POLICY_HEAD not in heads:
        values = parameters.numpy().reshape(-1, parameters.shape[-1]).T.copy()
        values_to_logits(values, EPSILON_OF_VALUES)
        parameters = torch.from_numpy(values.T.copy()).reshape(parameters.shape)
    action = torch.from_numpy(slot.arrays["action"].copy())
    return log_prob_for(policy.env_spec.action)(parameters, action).numpy()


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_keeps_its_state_during_later_evaluations(kind: str, num_lanes: int) -> None:
    env_spec = discrete_env_spec()
    policy, parameters = policy_of(kind, env_spec)
    exported = policy.export()
    assert exported is not None
    by_numpy = NumpyPolicy(exported)
    by_numpy.load(parameters)
    rng = np.random.default_rng(0)
    requests = [
        RolloutRequest(
            observation={"observation": rng.standard_normal((num_lanes, *shape)).astype(np.float32)},
            state={name: rng.random((num_lanes, SIZE), np.float32) for name in policy.state},
        )
        for shape in [env_spec.observation["observation"].shape] * 2
    ]
    (first,) = by_numpy.predict(requests[:1])
    known = {name: array.copy() for name, array in first.state.items()}
    (second,) = by_numpy.predict(requests[1:])
    for name, array in known.items():
        assert first.state[name].tobytes() == array.tobytes() != second.state[name].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_of_one_environment_keeps_its_state_until_it_restarts(kind: str) -> None:
    env_spec = discrete_env_spec()
    policy, parameters = policy_of(kind, env_spec, seed=0)
    exported = policy.export()
    assert exported is not None
    actor = NumpyActor(exported, num_steps=1, num_lanes=1, rng=np.random.default_rng(0), greedy=True)
    actor.load(parameters)
    one = OneStepActor(actor, env_spec, policy.state)
    observations = np.random.default_rng(1).standard_normal((60, *env_spec.observation["observation"].shape))

    def episode() -> list[int]:
        return [int(one.act({"observation": each.astype(np.float32)})[0]) for each in observations]

    first = episode()
    going_on = episode()
    one.restart()
    assert episode() == first
    assert going_on != first, "the weights are such that some action depends on the episode before"
    frames = {"observation": torch.from_numpy(observations.astype(np.float32)).unsqueeze(1)}
    state = {name: torch.zeros(1, *spec.shape) for name, spec in policy.state.items()}
    heads, _ = unrolled(policy.network, frames, state, torch.zeros(60, 1, dtype=torch.bool))
    assert first == heads[POLICY_HEAD].argmax(-1).flatten().tolist()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_recurrent_layer_stands_behind_the_convolutional_network(precision: Literal["float32", "bfloat16"]) -> None:
    image = EnvSpec(observation={"observation": ArraySpec(shape=(1, 36, 36), dtype="uint8")}, action=discrete_action(3))
    network = Network(cnn=Cnn(hidden_size=8, precision=precision), recurrent=Recurrent(kind="gru", size=SIZE))
    policy = torch_policy(network, image, outputs="policyAndValue", seed=0)
    assert policy.export() is None, "only dense layers have a torch-free form"
    policy.load(policy.parameters(Version(1, 0)))
    seen = np.random.default_rng(0).integers(0, 255, (2, 1, 36, 36)).astype(np.uint8)
    state = {"hidden": np.zeros((2, SIZE), np.float32)}
    (result,) = policy.predict([RolloutRequest(observation={"observation": seen}, state=state)])
    (following,) = policy.predict([RolloutRequest(observation={"observation": seen}, state=result.state)])
    assert np.abs(result.state["hidden"]).max() > 0
    assert not np.array_equal(result.state["hidden"], following.state["hidden"])


class OtherSizes(ByStep):
    state_sizes: Mapping[str, int] = {"count": 1, "more": 2}


class OtherType(ByStep):
    def forward(self, observation: Observation, state: State) -> tuple[Heads, State]:
        heads, following = super().forward(observation, state)
        return heads, {name: array.double() for name, array in following.items()}


class HeadsAlone(ByStep):
    def forward(self, observation: Observation, state: State) -> Any:
        return super().forward(observation, state)[0]


class StateAlone(ByStep):
    def forward(self, observation: Observation, state: State) -> Any:
        heads, following = super().forward(observation, state)
        return heads, following["count"]


class Endless(ByStep):
    """Its ``unroll`` goes on from one episode to the next."""

    def unroll(self, observation: Observation, state: State, is_first: Tensor) -> tuple[Heads, State]:
        return stepped(self, observation, state, torch.zeros_like(is_first))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (OtherSizes, r"returns a state of .*its state_sizes .*'more': 2"),
        (OtherType, r"torch.float64.* need \[3, size\] of torch.float32"),
        (HeadsAlone, "returned a dict; a pair of mappings is needed: the heads and the next state"),
        (StateAlone, "returned a tuple; a pair of mappings is needed"),
        (Endless, r"has an unroll\(\) whose 'policy' differs from that of forward\(\)"),
    ],
)
def test_a_network_that_breaks_the_protocol_is_refused(network: type[nn.Module], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_network(network, discrete_env_spec(), {}, seed=0, outputs="policy")


def test_an_exported_actor_without_the_networks_state_is_refused() -> None:
    class Exported(ByStep):
        def export_actor(self, layout: FlatLayout) -> ExportedActor:
            return export_dense(
                nn.Sequential(self.last), "tower", FlatLayout(shapes={"tower.0.weight": (2, 1), "tower.0.bias": (2,)}),
                observation,
            )  # fmt: skip

    observation = {"observation": ArraySpec(shape=(1,), dtype="float32")}
    env_spec = EnvSpec(observation=observation, action=discrete_action(2))
    network = build_network(Exported, env_spec, {}, seed=0, outputs="policy")
    with pytest.raises(ExportMismatch, match=r"the state \[\], and the network \['count'\]"):
        TorchPolicy(network, env_spec, outputs="policy").export()


def test_algorithms_of_users_are_checked_without_a_state() -> None:
    needs = {"minibatchSize": 16, "outputs": "policy"}
    spec = AlgorithmSpec.model_validate({"custom": {"factory": "my_algorithm:MyAlgorithm", "needs": needs}})
    with pytest.raises(ConfigurationError, match=r"the network is recurrent, with the state \['count'\]"):
        check_algorithm(spec, discrete_env_spec(), ByStep)


@pytest.mark.parametrize("num_steps", [2, 5])
def test_an_evaluation_keeps_the_state_from_slot_to_slot(num_steps: int) -> None:
    """All answers are right, since a network of weights by hand keeps the cue."""
    exported, parameters = cue_keeper()
    envs = LoopVectorEnv(lambda _: DelayedCue(delay=9), seeds=(1, 2, 3))
    actor = NumpyActor(exported, num_steps=num_steps, num_lanes=3, rng=np.random.default_rng(0), greedy=True)
    actor.load(parameters)
    evaluation = Evaluation(
        actor, envs, num_steps=num_steps, episodes_per_environment=8, max_steps=500, state=exported.state
    )
    result = evaluation.play()
    envs.close()
    assert result.returns == (1.0,) * 24


def cue_keeper() -> tuple[ExportedActor, Parameters]:
    """Return an actor with one unit, positive after cue 0 and negative after cue 1, and its weights."""
    # The update gate keeps the state unless a cue is shown; the third gate is the sign of the cue.
    weight_ih = np.zeros((3, 3), np.float32)
    weight_ih[1] = (-60.0, -60.0, 0.0)
    weight_ih[2] = (20.0, -20.0, 0.0)
    bias_ih = np.array([0.0, 30.0, 0.0], np.float32)
    last = np.array([[1.0], [-1.0]], np.float32)
    parts = (weight_ih, np.zeros((3, 1)), bias_ih, np.zeros(3), last, np.zeros(2))
    sizes = np.cumsum([0, *(np.size(part) for part in parts)])
    layers = (
        RecurrentLayer(
            kind="gru", name="r", in_size=3, size=1, weight_ih=0, weight_hh=int(sizes[1]), bias_ih=int(sizes[2]),
            bias_hh=int(sizes[3]),
        ),
        DenseLayer(
            name="l", weight_offset=int(sizes[4]), bias_offset=int(sizes[5]), in_size=1, out_size=2,
            activation="identity",
        ),
    )  # fmt: skip
    exported = ExportedActor(
        layout="by hand",
        num_parameters=int(sizes[-1]),
        observation={"observation": ArraySpec(shape=(3,), dtype="float32")},
        layers=layers,
        head=CategoricalHead(num_actions=2),
    )
    vector = np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)
    return exported, Parameters(version=Version(1, 0), vector=vector, layout="by hand")
