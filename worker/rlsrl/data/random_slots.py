"""Slots with random contents, for checks and tests of what trains on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import Slot, rollout_layout, state_field
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec


def empty_slot(
    env_spec: EnvSpec, *, num_steps: int, num_lanes: int, state: Mapping[str, ArraySpec] | None = None
) -> Slot:
    """Return a slot of zeros with its own memory, with a recurrent state of that spec."""
    layout = rollout_layout(env_spec, num_steps=num_steps, num_lanes=num_lanes, state=state)
    return Slot(arrays=layout.view(bytearray(layout.nbytes)))


def random_slot(
    env_spec: EnvSpec,
    *,
    num_steps: int,
    num_lanes: int,
    rng: np.random.Generator,
    end_probability: float = 0.1,
    state: Mapping[str, ArraySpec] | None = None,
) -> Slot:
    """Return a slot of random observations, actions, rewards and states, with ends as in NEXT_STEP autoreset."""
    slot = empty_slot(env_spec, num_steps=num_steps, num_lanes=num_lanes, state=state)
    arrays, shape = slot.arrays, (num_steps, num_lanes)
    for path in env_spec.observation:
        array, spec = arrays[path], env_spec.observation[path]
        if spec.categories:
            first, number = (np.reshape(each, spec.shape) for each in np.array(spec.categories).T)
            array[...] = rng.integers(first, first + number, array.shape)
        elif array.dtype.kind == "f":
            array[...] = rng.standard_normal(array.shape)
        else:
            array[...] = rng.integers(0, 2, array.shape)
    arrays["action"][...] = random_actions(env_spec.action, arrays["action"].shape, rng)
    arrays["behavior_log_prob"][...] = np.log(rng.uniform(0.2, 0.8, shape))
    arrays["reward"][...] = rng.standard_normal(shape)
    for name in state or ():
        arrays[state_field(name)][...] = 0.5 * rng.standard_normal(arrays[state_field(name)].shape)
    fill_ends(slot, rng=rng, end_probability=end_probability)
    return slot


def random_actions(action: ActionSpec, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Return random actions; ``gaussian`` floats may exceed the bounds, as a policy's do."""
    if action.kind == "discrete":
        return rng.integers(0, action.num_actions, shape)
    leading = shape[:-1]
    parts: list[NDArray[Any]] = []
    for part in action.parts:
        if part.is_vector:
            drawn = rng.standard_normal((*leading, part.num_entries))
            parts.append(drawn if part.kind == "gaussian" else np.clip(drawn, -1.0, 1.0))
        else:
            num_values = part.num_outputs if part.kind == "categorical" else 2
            parts.append(rng.integers(0, num_values, (*leading, part.num_entries)))
    return np.concatenate(parts, axis=-1)


def fill_ends(slot: Slot, *, rng: np.random.Generator, end_probability: float) -> None:
    """End episodes at random, half of them by truncation; the step after an end is masked."""
    arrays = slot.arrays
    resetting = np.zeros(slot.num_lanes, np.bool_)
    for t in range(len(arrays["mask"])):
        ends = ~resetting & (rng.random(slot.num_lanes) < end_probability)
        arrays["terminated"][t] = ends & (rng.random(slot.num_lanes) < 0.5)
        arrays["truncated"][t] = ends & ~arrays["terminated"][t]
        arrays["mask"][t] = ~resetting
        resetting = ends
