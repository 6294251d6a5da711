"""Builds what a trainer rank replays from, and rows to compile its step with."""

from __future__ import annotations

import mmap

import numpy as np

from rlsrl.api.resolved import ReplayPace, TrainerConfig
from rlsrl.buffers.replay.draws import UniformDraws
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.ratio import Ratio, RatioLimiter
from rlsrl.buffers.replay.rows import rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.data.slots import SlotLayout
from rlsrl.data.specs import Arrays
from rlsrl.parameters.protocols import TrainerState
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.build.common import derived_seed
from rlsrl.workers.experience import TrainingLedger
from rlsrl.workers.replay_experience import Drawing, ReplayExperience


def replay_experience(
    config: TrainerConfig,
    pace: ReplayPace,
    state: TrainerState | None,
    slot: SlotLayout,
    consumer: SampleConsumer,
    ledger: TrainingLedger,
) -> ReplayExperience:
    """Return a rank's experience: a store in its memory, which is empty at its start."""
    replay = config.algorithm.chosen.replay
    assert replay is not None, "there is a pace"
    layout = ReplayLayout.of(slot, capacity=replay.capacity, stacks=_stacks(config, slot))
    segments = Segments(layout, mmap.mmap(-1, layout.nbytes))
    limiter = RatioLimiter(
        Ratio(updates_per_env_step=pace.updates_per_env_step, bound=pace.most_updates_behind),
        start=replay.start,
        updates_per_step=pace.updates_per_step,
        steps_per_lane=config.rollout_length,
        most_lanes=pace.most_lanes,
    )
    if state is not None:
        limiter.load_state_dict(state.values["limiter"], stored=0, held=0)
    return ReplayExperience(
        segments=segments,
        draws=UniformDraws(segments),
        limiter=limiter,
        drawing=drawing_of(config, pace),
        grant=consumer.grant,
        ledger=ledger,
        rng=np.random.default_rng(derived_seed(config.seed, "minibatches", 0 if state is None else state.version.step)),
    )


def drawing_of(config: TrainerConfig, pace: ReplayPace) -> Drawing:
    """Return what a training step of the rank draws."""
    settings = config.algorithm.chosen
    assert settings.replay is not None, "there is a pace"
    return Drawing(
        updates=pace.updates_per_step,
        minibatch_rows=settings.minibatch_rows // config.num_trainers,
        num_steps=settings.replay.n_step,
        discount=settings.discount,
        reward_clip=settings.reward_clip,
    )


def example_rows(config: TrainerConfig, pace: ReplayPace, slot: SlotLayout) -> Arrays:
    """Return the rows of a training step, filled with zeros."""
    drawing = drawing_of(config, pace)
    layout = ReplayLayout.of(slot, capacity=1, stacks=_stacks(config, slot))
    segments = Segments(layout, bytearray(layout.nbytes))
    keys = np.zeros(drawing.num_rows, np.int64)
    return rows_of(segments, keys, num_steps=drawing.num_steps, discount=drawing.discount)


def _stacks(config: TrainerConfig, slot: SlotLayout) -> dict[str, int]:
    """Return the number of images of each observation that ``environment.frameStack`` stacks."""
    images = config.environment.frame_stack
    if images is None:
        return {}
    mask = config.environment.action_mask
    return {
        name: images
        for name, field in slot.fields.items()
        if field.axes == "frames" and field.array.shape[:1] == (images,) and not (mask and name.endswith(f"/{mask}"))
    }
