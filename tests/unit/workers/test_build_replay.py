"""The layout of a replay store as it follows from an experiment."""

from __future__ import annotations

from typing import Any

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.spec import DqnSpec, ReplaySpec
from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec, state_specs
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.replay_stores import replay_layout
from rlsrl.workers.build.store_files import replay_codec

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


def test_a_row_that_no_message_holds_is_refused() -> None:
    """Burn-in makes it twice as long as what an actor sends."""
    image = ArraySpec(shape=(256, 256, 3), dtype="uint8")
    env_spec = env_spec_of(observation=image)
    slot = rollout_layout(env_spec, num_steps=200, num_lanes=1, state=state_specs({"hidden": 8}))
    environment = environment_of("maxEpisodeSteps: 9")
    replay_codec(environment, slot, DqnSpec(burn_in=False))
    with pytest.raises(ConfigurationError, match=r"a drawn row has 78,\d+,\d+ bytes.*lower actors.rolloutLength"):
        replay_codec(environment, slot, DqnSpec())
