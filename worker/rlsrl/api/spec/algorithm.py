"""``spec.algorithm``: how the policy is trained on the samples."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlsrl.api.model import INTEGRAL, LIVE, REFUSE, Model
from rlsrl.api.spec.scalars import Count


class LinearScheduleSpec(Model):
    """In a straight line from the field's own value."""

    to: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The value at the end of the schedule and after it."""
    env_steps: Count | None = None
    """Length of the schedule in transitions trained on; by default stop.envSteps."""


class ScheduleSpec(Model):
    """How a number changes during training."""

    exactly_one: ClassVar[tuple[str, ...]] = ("linear",)

    linear: LinearScheduleSpec | None = None
    """In a straight line from the field's own value."""

    @property
    def chosen(self) -> LinearScheduleSpec:
        """The schedule that is set."""
        assert self.linear is not None, "validation leaves exactly one"
        return self.linear


class PpoSpec(Model):
    """Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation.

    With the decoupled objective of Hilton et al. (2022), under which a lag of one step costs little learning.
    """

    learning_rate: Annotated[float, Field(gt=0, le=1), LIVE] = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How learningRate changes during training. Constant by default."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Weight of the reward one step later (gamma)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Between one-step advantages (0, biased) and whole returns (1, noisy)."""
    clip_range: Annotated[float, Field(gt=0, le=10), LIVE] = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut. The ratio compares an action's probability
    with the one at the start of the step."""
    clip_range_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How clipRange changes during training. Constant by default."""
    clip_value_loss: bool = True
    """Whether the value may move by at most clipRange from its prediction at the start of the step."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=10), LIVE] = 0.0
    """Weight of the entropy bonus in the loss."""
    entropy_coefficient_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How entropyCoefficient changes during training. Constant by default."""
    value_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Weight of the value loss in the loss."""
    max_gradient_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 0.5
    """Longer gradients are scaled down to this Euclidean norm."""
    epochs: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 4
    """Passes over each batch."""
    minibatch_size: Annotated[int, Field(ge=2, le=16_777_216), INTEGRAL] = 256
    """Transitions of one optimizer step. Must divide the batch: rolloutLength x trainers.batchEnvironments."""
    normalize_advantages: bool = True
    """Whether advantages are normalised to mean 0 and standard deviation 1 in each minibatch."""
    reward_clip: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Rewards are clipped to [-rewardClip, rewardClip] for training, after normalisation if there is one. Atari games
    usually have 1. Reported returns are the environment's own."""
    normalize_rewards: Annotated[bool, REFUSE] = False
    """Whether rewards are divided by the standard deviation of the discounted return and clipped to [-10, 10]."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Added to Adam's denominator."""

    @property
    def schedules(self) -> dict[str, LinearScheduleSpec]:
        """The schedules that are set, by the YAML name of their field."""
        given = {
            "learningRateSchedule": self.learning_rate_schedule,
            "clipRangeSchedule": self.clip_range_schedule,
            "entropyCoefficientSchedule": self.entropy_coefficient_schedule,
        }
        return {name: schedule.chosen for name, schedule in given.items() if schedule is not None}


class AlgorithmSpec(Model):
    """The training algorithm."""

    exactly_one: ClassVar[tuple[str, ...]] = ("ppo",)

    ppo: PpoSpec | None = None
    """Proximal policy optimisation."""

    @property
    def chosen(self) -> PpoSpec:
        """The algorithm that is set."""
        assert self.ppo is not None, "validation leaves exactly one"
        return self.ppo
