"""The layout of a replay store as it follows from an experiment."""

from __future__ import annotations

from typing import Any

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.spec import ReplaySpec
from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.workers.build.replay_stores import replay_layout

IMAGE, STACK = 84 * 84, 4


def env_spec_of(**observation: ArraySpec) -> EnvSpec:
    action = ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=STACK)
    return EnvSpec(observation=observation, action=action)


def environment_of(fields: str) -> Any:
    text = """
        apiVersion: rlsrl.dev/v1alpha1
        kind: RLExperiment
        metadata: {name: replay}
        spec:
          environment: {id: Any-v0, %s}
          algorithm: {ppo: {}}
          actors: {environments: 8}
          stop: {envSteps: 1}
    """
    return load_text(text % fields).spec.worker_environment


@pytest.mark.parametrize(("rollout_length", "bound"), [(32, 1 / 3.5), (128, 1 / 3.8)])
def test_stacked_images_are_kept_once(rollout_length: int, bound: float) -> None:
    """The bound is a share of one stack, with the next observation."""
    env_spec = env_spec_of(observation=ArraySpec(shape=(STACK, 84, 84), dtype="uint8"))
    slot = rollout_layout(env_spec, num_steps=rollout_length, num_lanes=8)
    layout = replay_layout(environment_of("frameStack: 4"), slot, ReplaySpec(capacity=100_000))
    assert layout.stacks == {"observation": STACK}
    assert layout.nbytes / 100_000 <= bound * STACK * IMAGE
    whole = replay_layout(environment_of("maxEpisodeSteps: 9"), slot, ReplaySpec(capacity=100_000))
    assert whole.stacks == {}
    assert whole.nbytes / 100_000 > STACK * IMAGE


def test_an_action_mask_is_no_stack_of_images_even_if_as_wide() -> None:
    env_spec = env_spec_of(
        **{
            "observation/image": ArraySpec(shape=(STACK, 8, 8), dtype="uint8"),
            "observation/legal": ArraySpec(shape=(STACK,), dtype="bool"),
        }
    )
    slot = rollout_layout(env_spec, num_steps=32, num_lanes=8)
    layout = replay_layout(environment_of("frameStack: 4, actionMask: legal"), slot, ReplaySpec(capacity=1000))
    assert layout.stacks == {"observation/image": STACK}
