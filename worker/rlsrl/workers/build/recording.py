"""Builds the recording of an evaluated version. Imports torch only where a policy needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsrl.api.spec import EvaluationVideos
from rlsrl.data.specs import state_specs
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.rendering import rendering_environment
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.one_step import OneStepActor
from rlsrl.runtime.call_board import CallBoard
from rlsrl.workers.build.common import exported_actor
from rlsrl.workers.build.evaluator import EvaluationPlan, evaluating_actor, source_of
from rlsrl.workers.evaluation import evaluation_seeds
from rlsrl.workers.recording import BoardCaller, VersionPolicy, VideoRecording


def begin_recording(
    plan: EvaluationPlan,
    videos: EvaluationVideos,
    parameters: Parameters,
    metadata: Mapping[str, Any],
    *,
    board: CallBoard | None = None,
) -> VideoRecording:
    """Return the recording, which the caller closes, of a stored version with its metadata.

    Its episodes have the seeds with which the environments of an evaluation begin. ``board`` shows the environment's
    calls to the call watch, if there is one.

    Raises:
        NoVideo: the environment does not render, or a package is missing.
        ConfigurationError: the environment or the user's network cannot be made.
        EnvironmentFailed: the environment's own code raised another error when it was made.
        LayoutMismatch: the weights belong to another network, or to other observations or actions.
        OSError: the system has no memory for the files.
    """
    seeds = evaluation_seeds(plan.seed, max(videos.episodes, plan.num_environments))
    rank = plan.ranks.start
    caller = BoardCaller(board, rank)
    try:
        env = rendering_environment(source_of(plan, rank, seeds), caller=caller)
    except BaseException:
        caller.close()
        raise
    try:
        spec = EnvironmentInterface.of(env).spec
        actor = evaluating_actor(plan, exported_actor(metadata), spec, num_steps=1, num_lanes=1)
        actor.load(parameters)
        policy = VersionPolicy(OneStepActor(actor, spec, state_specs(plan.network.state_sizes)), env)
    except BaseException:
        env.close()
        caller.close()
        raise
    return VideoRecording(policy, env, caller, seeds=tuple(seeds[: videos.episodes]), max_steps=videos.max_steps)
