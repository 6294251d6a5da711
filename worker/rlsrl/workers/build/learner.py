"""Builds a trainer rank's learner; the process that compiles the step beside training builds the same one."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from rlsrl.algorithms.adam import OPTIMIZERS
from rlsrl.algorithms.base import Reduce
from rlsrl.algorithms.catalog import implementation_of
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.normalizer import Normalizer, ReplayNormalizer, normalizable
from rlsrl.algorithms.schedules import Scheduled, scheduled
from rlsrl.api.resolved import TrainerConfig
from rlsrl.data.slots import SlotLayout, rollout_layout
from rlsrl.data.specs import Arrays, EnvSpec, state_specs
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import seeded
from rlsrl.policies.device import device_for
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.common import derived_seed, torch_policy
from rlsrl.workers.build.replay import example_rows


def build_learner(
    config: TrainerConfig,
    env_spec: EnvSpec,
    policy: TorchPolicy,
    initial: Parameters,
    reduce: Reduce,
    device: torch.device,
    *,
    rank: int = 0,
) -> Learner:
    """Return a rank's learner on its device, with the parameters ``initial``. ``reduce`` sums over the ranks.

    ``policy`` is on the CPU. On another device the learner has a network of its own.

    Raises:
        ConfigurationError: the config asks to normalise observations, and none can be normalised.
    """
    settings = config.algorithm.chosen
    if device.type != "cpu":
        policy = torch_policy(config.network, env_spec, outputs=settings.outputs, seed=config.seed, device=device)
    build = implementation_of(config.algorithm).build
    with seeded(derived_seed(config.seed, "algorithm")):  # equal networks of the algorithm's own on all ranks
        algorithm = build(settings, policy, config.num_trainers, config.stop.env_steps)
    return Learner(
        algorithm,
        initial,
        learning_rate=learning_rate_of(config),
        optimizer=OPTIMIZERS[settings.optimizer](
            epsilon=settings.adam_epsilon, max_gradient_norm=settings.max_gradient_norm
        ),
        seed=derived_seed(config.seed, "minibatches"),
        normalizer=_normalizer(config, env_spec),
        reduce=reduce,
        parallel=config.num_trainers > 1,
        stream=rank if config.replay is not None else 0,  # on policy only the order of rows is drawn
        device=device,
        threads=min(config.threads, len(os.sched_getaffinity(0))),
    )


def rank_device(config: TrainerConfig, policy: TorchPolicy) -> torch.device:
    """Return the device on which this process trains, or compiles for the rank that does.

    torchrun's variables say which of the machine's ranks it is. A policy that can be exported counts as small.

    Raises:
        ConfigurationError: the machine has fewer GPUs than ranks.
    """
    place, places = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_small = policy.export() is not None
    return device_for(config.device, field="trainers.device", is_small=is_small, place=place, places=places)


def batch_layout(config: TrainerConfig, env_spec: EnvSpec) -> SlotLayout:
    """Return the layout of one rank's part of a batch."""
    return rollout_layout(
        env_spec,
        num_steps=config.rollout_length,
        num_lanes=config.lanes_per_rank,
        state=state_specs(config.network.state_sizes),
        discounted_return=config.algorithm.chosen.normalize_rewards,
        episode_info=config.environment.episode_info,
    )


def example_batch(config: TrainerConfig, env_spec: EnvSpec) -> Arrays:
    """Return one rank's part of a batch, filled with zeros."""
    layout = batch_layout(config, env_spec)
    if config.replay is not None:
        return example_rows(config, config.replay, layout)
    arrays = layout.view(bytearray(layout.nbytes))
    arrays["mask"][...] = True
    return arrays


def learning_rate_of(config: TrainerConfig) -> Scheduled:
    """Return the learning rate or its schedule."""
    settings = config.algorithm.chosen
    return scheduled(settings.learning_rate, settings.learning_rate_schedule, config.stop.env_steps)


def coefficients_of(config: TrainerConfig) -> Mapping[str, Scheduled]:
    """Return the loss's coefficients that may change, by name."""
    return implementation_of(config.algorithm).coefficients(config.algorithm.chosen, config.stop.env_steps)


def _normalizer(config: TrainerConfig, env_spec: EnvSpec) -> Normalizer:
    observation = normalizable(env_spec) if config.normalize_observations else {}
    if config.normalize_observations and not observation:
        dtypes = ", ".join(f"{path} {spec.dtype}" for path, spec in env_spec.observation.items())
        raise ConfigurationError(
            f"policy.normalizeObservations is true, but the environment observes {dtypes}: only floats are normalised. "
            f"Set it to false."
        )
    settings = config.algorithm.chosen
    kind = Normalizer if settings.draws_from is None else ReplayNormalizer
    return kind(observation, rewards=settings.normalize_rewards, reward_clip=settings.reward_clip)
