"""Evaluates an exported actor without torch: for actors, for evaluators and for policy workers. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.inference import (
    RolloutRequest,
    RolloutResult,
    batch_observations,
    batch_states,
    split_results,
)
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import LocalActor, Policy, RolloutActor
from rlsrl.policies.epsilon_greedy import epsilon_of, values_to_logits
from rlsrl.policies.exploration import is_uniform, log_deviation_of, make_uniform
from rlsrl.policies.exported import (
    ACTIVATIONS,
    MASKED_LOGIT,
    CategoricalHead,
    ClippedHead,
    DenseLayer,
    ExportedActor,
    Floats,
    GaussianHead,
    Head,
    JointHead,
    LayoutMismatch,
    RecurrentLayer,
)
from rlsrl.policies.lane_states import LaneStates
from rlsrl.policies.normalization import Standardization
from rlsrl.policies.numpy_recurrence import RecurrentStep, RecurrentWeights
from rlsrl.policies.one_hot import OneHot
from rlsrl.policies.sampling import AS_DISTRIBUTED, Exploration, Sampler, make_sampler

NORM_EPSILON = 1e-5
"""Added to the variance in a layer normalisation, as ``nn.LayerNorm`` does by default."""
MAX_SIZES = 64
"""Batch sizes whose memory is kept. Actors of one kind request in few sizes."""


_Hidden = tuple[Floats, Floats, Floats | None, Callable[..., Any] | None, tuple[Floats, Floats] | None]
"""Of a dense layer: [W, b], inputs, outputs, activation, and (gain, shift) of its normalisation."""


class DenseWeights:
    """The loaded weights of an exported actor, and the statistics that normalise its observations.

    One thread uses them.
    """

    def __init__(self, exported: ExportedActor) -> None:
        self.exported = exported
        self.version: Version | None = None
        """The version that is loaded; None before the first ``load``."""
        dense = [layer for layer in exported.all_layers if isinstance(layer, DenseLayer)]
        self._dense = dense
        self.layers: Sequence[Floats] = [np.zeros((layer.out_size, layer.in_size + 1), np.float32) for layer in dense]
        """[W, b] of each dense layer, [out_size, in_size + 1]. ``load`` refills these arrays in place."""
        self.recurrent = None if exported.recurrent is None else RecurrentWeights(exported.recurrent)
        """Those of the recurrent layer, if there is one."""
        self.norms: Sequence[tuple[Floats, Floats] | None] = [
            None
            if layer.norm_offset is None
            else (np.zeros((layer.out_size, 1), np.float32), np.zeros((layer.out_size, 1), np.float32))
            for layer in dense
        ]
        """(gain, shift), each [out_size, 1], of each layer that is normalised. ``load`` refills them in place."""
        self.epsilon = 0.0
        """The probability of a random action, where actions are chosen by their values."""
        self.is_uniform = False
        """Whether all actions are equally probable."""
        head = exported.head
        self.log_std: Floats = np.zeros((head.distribution_size - head.num_outputs, 1), np.float32)
        """Of all means, [D, 1]. ``load`` refills it in place."""
        self.standardizations: Sequence[Standardization | None] = [None] * len(exported.observation)
        """For each observation [features, N]; None: it is not normalised."""

    def load(self, parameters: Parameters) -> None:
        """Evaluate with these weights from now on.

        Raises:
            LayoutMismatch: the weights belong to another network.
        """
        exported, vector = self.exported, parameters.vector
        if parameters.layout != exported.layout or vector.size != exported.num_parameters:
            raise LayoutMismatch(
                f"weights of layout {parameters.layout} ({vector.size} values) do not fit the exported actor's "
                f"{exported.layout} ({exported.num_parameters})"
            )
        if self.recurrent is not None:
            self.recurrent.load(vector)
        for layer, weight, norm in zip(self._dense, self.layers, self.norms, strict=True):
            begin, size, of = layer.weight_offset, layer.num_rows * layer.in_size, layer.means_of
            rows = vector[begin : begin + size].reshape(layer.out_size, of, layer.in_size)
            biases = vector[layer.bias_offset : layer.bias_offset + layer.num_rows].reshape(layer.out_size, of)
            weight[:, :-1] = rows[:, 0] if of == 1 else rows.mean(axis=1)
            weight[:, -1] = biases[:, 0] if of == 1 else biases.mean(axis=1)
            if norm is not None and (start := layer.norm_offset) is not None:
                for place, part in enumerate(norm, start=1):
                    part[:, 0] = vector[start : start + place * layer.out_size][-layer.out_size :]
        if isinstance(exported.head, GaussianHead | JointHead):
            self.log_std[:, 0] = vector[exported.head.log_std]
        elif isinstance(exported.head, ClippedHead):
            self.log_std[:, 0] = log_deviation_of(parameters.statistics)
        found = [Standardization.of(parameters.statistics, path) for path in exported.observation]
        self.standardizations = [each and each.as_column() for each in found]
        self.epsilon = epsilon_of(parameters.statistics)
        self.is_uniform = is_uniform(parameters.statistics)
        self.version = parameters.version


class DenseStack:
    """Evaluates the loaded weights for N lanes at a time. One thread uses it.

    All arrays are feature-major, [features, N]. A constant row of ones below each layer's inputs carries the bias. So
    a layer is one matrix product straight into the next layer's contiguous input: no transposed weights, no addition.
    """

    def __init__(self, weights: DenseWeights, num_lanes: int, *, product: Callable[..., Any] = np.dot) -> None:
        """Evaluate with ``weights``; ``product`` multiplies two matrices into ``out``."""
        exported = weights.exported
        self._product = product
        self._weights = weights
        recurrent = None if weights.recurrent is None else RecurrentStep(weights.recurrent, num_lanes)
        self.state: Mapping[str, Floats] = {} if recurrent is None else recurrent.state
        """The recurrent state by name, [size, N]: that before the next ``forward``. Callers write it in place."""
        inputs = [
            recurrent.joint
            if recurrent is not None and isinstance(layer, RecurrentLayer)
            else np.ones((layer.in_size + 1, num_lanes), np.float32)
            for layer in exported.layers
        ]
        features = [_features(rows, layer) for rows, layer in zip(inputs, exported.layers, strict=True)]
        encoders = _Encoders(exported, features[0])
        self._observation = encoders.observation
        """The input rows of each observation path."""
        encodings = [OneHot.of(spec) for spec in exported.observation.values()]
        self._one_hots = [None if each is None else (each.entries, each.values[:, np.newaxis]) for each in encodings]
        place = _place_of_recurrent(exported)
        outputs = [*features[1:], None]
        self._recurrent = None
        if recurrent is not None:
            output = outputs[place]
            assert output is not None, "the recurrent layer is not the last"
            self._recurrent = partial(recurrent.forward, out=output, product=product)
            del inputs[place], outputs[place]
        inputs, outputs, place = encoders.inputs + inputs, encoders.outputs + outputs, place + len(encoders.inputs)
        activations = [ACTIVATIONS[layer.activation] for layer in exported.all_layers if isinstance(layer, DenseLayer)]
        *hidden, self._last = zip(weights.layers, inputs, outputs, activations, weights.norms, strict=True)
        self._hidden, self._behind = hidden[:place], hidden[place:]
        self._has_values = isinstance(exported.head, CategoricalHead) and exported.head.is_values
        self._parts = exported.head.parts
        self._num_outputs = exported.head.num_outputs
        self._log_std = weights.log_std
        self._has_deviations = weights.log_std.size > 0
        self._scatter = _scatter_of(exported.head, num_lanes)

    def forward(self, observation: Sequence[NDArray[Any]], out: Floats, mask: NDArray[Any] | None = None) -> None:
        """Write the parameters of the action distribution, [A, N], for observations [entries, N] by path in order.

        ``mask`` [A, N] is the array at the head's mask path; None if the head has no mask.
        """
        standardizations, product = self._weights.standardizations, self._product
        for rows, standardization, one_hot, values in zip(
            self._observation, standardizations, self._one_hots, observation, strict=True
        ):
            if standardization is not None:
                standardization.apply(values, out=rows)
            elif one_hot is not None:
                np.equal(values[one_hot[0]], one_hot[1], out=rows)
            else:
                rows[...] = values
        _apply(self._hidden, product)
        if self._recurrent is not None:
            self._recurrent()
            _apply(self._behind, product)
        weight, inputs, _, activate, _ = self._last
        scatter = self._scatter
        outputs = out[: self._num_outputs] if self._has_deviations else out
        if scatter is not None:
            outputs = scatter.outputs
        product(weight, inputs, out=outputs)
        if activate is not None:
            activate(outputs, out=outputs)
        if scatter is not None:
            out[scatter.output_rows] = outputs
            out[scatter.deviation_rows] = self._log_std
        elif self._has_deviations:
            out[self._num_outputs :] = self._log_std
        if mask is not None:
            np.copyto(out, MASKED_LOGIT, where=mask == 0)
        if self._has_values:
            values_to_logits(out, self._weights.epsilon)
        if self._weights.is_uniform:
            make_uniform(out, self._parts)


class _Encoders:
    """Memory for the encoders of an exported actor: which rows each of their layers reads and writes."""

    def __init__(self, exported: ExportedActor, first: Floats) -> None:
        """``first``: the rows of the first layer behind them, [in_size, N]."""
        self.observation: list[Floats] = []
        """The input rows of each observation path."""
        self.inputs: list[Floats] = []
        """Of each layer, with the row of ones."""
        self.outputs: list[Floats | None] = []
        """Of each layer."""
        place = 0
        for part in exported.parts:
            sizes = [exported.observation[path].num_features for path in part.paths]
            out_size = part.layers[-1].out_size if part.layers else sum(sizes)
            joined, place = first[place : place + out_size], place + out_size
            inputs: list[Floats] = [np.ones((layer.in_size + 1, first.shape[1]), np.float32) for layer in part.layers]
            rows = [_features(each, layer) for each, layer in zip(inputs, part.layers, strict=True)] + [joined]
            self.observation += np.split(rows[0], np.cumsum(sizes)[:-1])
            self.inputs += inputs
            self.outputs += rows[1:]


def _apply(layers: Sequence[_Hidden], product: Callable[..., Any]) -> None:
    """Compute the outputs of dense layers, one after the other."""
    for weight, inputs, outputs, activate, norm in layers:
        product(weight, inputs, out=outputs)
        if norm is not None and outputs is not None:
            _normalize(outputs, *norm)
        if activate is not None:
            activate(outputs, out=outputs)


def _place_of_recurrent(exported: ExportedActor) -> int:
    """Return the place of the recurrent layer, or of the last layer without one."""
    recurrent = exported.recurrent
    return exported.layers.index(recurrent) if recurrent is not None else len(exported.layers) - 1


def _features(inputs: Floats, layer: DenseLayer | RecurrentLayer) -> Floats:
    """Return the rows of a layer's inputs that the layer before it computes."""
    return inputs[-1 - layer.in_size : -1]


def _normalize(outputs: Floats, gain: Floats, shift: Floats) -> None:
    """Normalise each lane's outputs, [features, N], to mean 0 and variance 1, then scale and shift them, in place."""
    outputs -= outputs.mean(axis=0)
    variance = np.square(outputs).mean(axis=0)
    outputs /= np.sqrt(variance + np.float32(NORM_EPSILON))
    outputs *= gain
    outputs += shift


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scatter:
    """Where the outputs and deviations of a joint head stand among its distribution parameters [A, N]."""

    outputs: Floats
    """Receives the last layer's product, [num_outputs, N]."""
    output_rows: NDArray[np.int64]
    deviation_rows: NDArray[np.int64]


def _scatter_of(head: Head, num_lanes: int) -> _Scatter | None:
    """Return the places for a head whose deviations stand between outputs, or None if outputs come first."""
    if not isinstance(head, JointHead):
        return None
    is_output = np.concatenate([
        np.repeat([True, False], [part.num_outputs, part.num_deviations]) for part in head.parts
    ])  # fmt: skip
    if is_output[: head.num_outputs].all():
        return None
    return _Scatter(
        outputs=np.empty((head.num_outputs, num_lanes), np.float32),
        output_rows=np.flatnonzero(is_output),
        deviation_rows=np.flatnonzero(~is_output),
    )


class NumpyPolicy(Policy):
    """Evaluates an exported actor for requests of any number of lanes."""

    is_quick = True

    def __init__(self, exported: ExportedActor) -> None:
        self._exported = exported
        self.state = exported.state
        self._weights = DenseWeights(exported)
        self._stacks: dict[int, DenseStack] = {}
        """By number of lanes."""

    @override
    def load(self, parameters: Parameters) -> None:
        self._weights.load(parameters)

    @override
    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        if (version := self._weights.version) is None:
            raise RuntimeError("load() comes before predict()")
        exported, observation = self._exported, batch_observations(requests)
        num_lanes = sum(request.num_lanes for request in requests)
        features = [observation[path].reshape(num_lanes, -1).T for path in exported.observation]
        mask = None if exported.head.mask is None else observation[exported.head.mask].T
        distribution = np.empty((exported.head.distribution_size, num_lanes), np.float32)
        stack = self._stack(num_lanes)
        if stack.state:
            set_state(stack.state, batch_states(requests))
        stack.forward(features, distribution, mask)
        state = {name: rows.T.copy() for name, rows in stack.state.items()}  # the next evaluation overwrites the rows
        return split_results(requests, np.ascontiguousarray(distribution.T), version, state)

    def _stack(self, num_lanes: int) -> DenseStack:
        if num_lanes not in self._stacks:
            if len(self._stacks) == MAX_SIZES:
                self._stacks.clear()
            self._stacks[num_lanes] = DenseStack(self._weights, num_lanes)
        return self._stacks[num_lanes]

    @override
    def export(self) -> ExportedActor:
        return self._exported


def set_state(rows: Mapping[str, Floats], state: Arrays) -> None:
    """Write states, each [N, size], to the rows of a stack, each [size, N]."""
    for name, array in rows.items():
        array[...] = state[name].T


class NumpyLane(RolloutActor):
    """Chooses the actions of one lane of a ``NumpyLanes``. One thread uses it at a time."""

    def __init__(self, stack: DenseStack, exported: ExportedActor, sampler: Sampler, states: LaneStates) -> None:
        """``states``: the lane's, between slots."""
        self._stack = stack
        self._exported = exported
        self._sampler = sampler
        self._states = states
        self._is_recurrent = bool(states)
        self._distributions = list(sampler.parameters)

    @override
    def begin(self, slot: Slot) -> None:
        """Start on a slot. The caller has drawn the noise."""
        if self._is_recurrent:
            self._states.begin(slot.arrays)
            set_state(self._stack.state, self._states.arrays)
        arrays, mask = slot.arrays, self._exported.head.mask
        self._frames = [_feature_major(arrays[path]) for path in self._exported.observation]
        self._masks = [None] * len(arrays["mask"]) if mask is None else list(_feature_major(arrays[mask]))
        self._actions = arrays["action"]
        self._steps_mask = arrays["mask"]

    @override
    def act(self, step: int) -> NDArray[Any]:
        """Return the actions of that step, and write them; ``NumpyLanes.begin`` has written the version."""
        if self._is_recurrent and step:
            self._forget(self._steps_mask[step - 1])
        self._stack.forward([frames[step] for frames in self._frames], self._distributions[step], self._masks[step])
        actions: NDArray[Any] = self._actions[step]
        self._sampler.choose(step, actions)
        return actions

    @override
    def finish(self) -> None:
        """Keep the lanes' states for the next slot. ``NumpyLanes.finish`` writes the log-probabilities of all lanes."""
        if self._is_recurrent:
            self._states.take({name: rows.T for name, rows in self._stack.state.items()})
            self._states.forget(self._steps_mask[-1])

    def _forget(self, mask: NDArray[np.bool_]) -> None:
        """Zero the states of lanes whose last step, by its ``mask`` [N], led to the first frame of an episode."""
        if not mask.all():
            for rows in self._stack.state.values():
                rows[:, ~mask] = 0.0


class NumpyActor(NumpyLane, LocalActor):
    """Acts by evaluating an exported actor for all lanes together."""

    def __init__(
        self,
        exported: ExportedActor,
        *,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        greedy: bool = False,
        exploration: Exploration = AS_DISTRIBUTED,
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``.

        ``greedy``: take the most probable action, as evaluation does. ``exploration``: see ``Exploration``.
        """
        self._weights = DenseWeights(exported)
        head = exported.head
        is_joint = head.kind == "joint"
        sampler = make_sampler(
            head.parts,
            is_joint=is_joint,
            num_steps=num_steps,
            num_lanes=num_lanes,
            rng=rng,
            greedy=greedy,
            exploration=exploration,
        )
        super().__init__(DenseStack(self._weights, num_lanes), exported, sampler, LaneStates(exported.state, num_lanes))
        self._written: Version | None = None
        """The version in the slot's rows from the next step on; None before its first step."""

    @override
    def load(self, parameters: Parameters) -> None:
        self._weights.load(parameters)

    @override
    def begin(self, slot: Slot) -> None:
        if self._weights.version is None:
            raise RuntimeError("load() comes before begin()")
        super().begin(slot)
        arrays = slot.arrays
        self._log_probs = arrays["behavior_log_prob"]
        self._attempts, self._steps = arrays["version_attempt"], arrays["version_step"]
        self._written = None
        self._sampler.begin()

    @override
    def act(self, step: int) -> NDArray[Any]:
        """Return the actions of that step. Without a mask it allocates no array data, and calls no ``super().act``."""
        if (version := self._weights.version) is not self._written:
            assert version is not None, "begin() has checked"
            self._attempts[step:], self._steps[step:] = self._written = version
        if self._is_recurrent and step:
            self._forget(self._steps_mask[step - 1])
        self._stack.forward([frames[step] for frames in self._frames], self._distributions[step], self._masks[step])
        actions: NDArray[Any] = self._actions[step]
        self._sampler.choose(step, actions)
        return actions

    @override
    def finish(self) -> None:
        super().finish()
        self._sampler.log_probs(self._actions, self._log_probs)

    @override
    def restart(self) -> None:
        self._states.restart()


class NumpyLanes(NumpyActor):
    """Acts lane by lane, each lane in its own thread, from the noise that ``NumpyActor`` draws.

    Its owner calls ``load``, ``begin`` and ``finish``. In between, each thread calls ``begin`` and ``act`` of its lane.
    A matrix product of one lane rounds differently than one of many lanes. Results differ from ``NumpyActor`` by that.
    """

    def __init__(
        self,
        exported: ExportedActor,
        *,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        exploration: Exploration = AS_DISTRIBUTED,
        states: Sequence[LaneStates] | None = None,
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes: see ``NumpyActor``.

        ``states``: by lane, those of the actors that fill slots in turn with these. By default new ones.
        """
        super().__init__(exported, num_steps=num_steps, num_lanes=num_lanes, rng=rng, exploration=exploration)
        self.states = states if states is not None else [LaneStates(exported.state, 1) for _ in range(num_lanes)]
        """By lane."""
        self._is_recurrent = False  # here: the lanes keep the states
        self._samplers = [self._sampler.of_lane(lane) for lane in range(num_lanes)]
        # matmul keeps the interpreter lock, dot releases it. Other threads wait for the lock: passing it on takes
        # longer than the product of one lane.
        self.lanes = tuple(
            NumpyLane(DenseStack(self._weights, 1, product=np.matmul), exported, sampler, states)
            for sampler, states in zip(self._samplers, self.states, strict=True)
        )
        """By number of the lane."""

    @override
    def begin(self, slot: Slot) -> None:
        super().begin(slot)
        self._attempts[:], self._steps[:] = self._weights.version  # type: ignore[misc]  # begin() has checked

    @override
    def finish(self) -> None:
        np.concatenate([sampler.parameters for sampler in self._samplers], axis=2, out=self._sampler.parameters)
        super().finish()

    @override
    def restart(self) -> None:
        for states in self.states:
            states.restart()


def _feature_major(frames: NDArray[Any]) -> NDArray[Any]:
    """Return [T+1, N, ...] as a view [T+1, entries, N]."""
    return frames.reshape(*frames.shape[:2], -1).transpose(0, 2, 1)
