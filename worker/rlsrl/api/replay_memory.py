"""The memory that replay stores take, as far as the spec says it: the operator requests it for their pods.

The operator makes no environment, so it does not know the spaces from which the bytes of a transition follow.
``rlsrl.workers.build.replay_stores`` computes them exactly.
"""

from __future__ import annotations

from rlsrl.api.role_names import BUFFER, TRAINER
from rlsrl.api.spec import ExperimentSpec

_STEP_BYTES = 64
"""What a store keeps of a step beside its observation: action, reward, ends, the training step, the priority."""
_VECTOR_BYTES = 256
"""An observation that is no image: 64 floats."""
_IMAGE_SIZE = 84
"""Height and width in pixels of an image whose size the spec does not say (Mnih et al. 2015)."""


def assumed_store_bytes(spec: ExperimentSpec, role: str) -> int:
    """Return the bytes of the replay store of one worker of the role: a trainer's rank or a buffer worker.

    0 for workers without a store. Observations are assumed to have 64 floats, or one byte a pixel of 84 x 84 for each
    image that the network takes; ``environment.atari`` says the size. Images that ``frameStack`` stacks are kept once.
    """
    settings = spec.algorithm.chosen.draws_from
    if settings is None or role != (BUFFER if spec.keeps_in_buffers else TRAINER):
        return 0
    num_steps, images = spec.actors.rollout_length, spec.environment.frame_stack or 1
    num_segments = -(-settings.capacity // (spec.num_replay_stores * num_steps))
    state = 4 * sum(spec.policy.network.state_sizes.values())
    return num_segments * (num_steps * _STEP_BYTES + (num_steps + images) * _frame_bytes(spec) + state)


def _frame_bytes(spec: ExperimentSpec) -> int:
    if (atari := spec.environment.atari) is not None:
        return atari.screen_size**2
    network = spec.policy.network
    return network.num_images * _IMAGE_SIZE**2 + (_VECTOR_BYTES if network.mlp or network.custom else 0)
