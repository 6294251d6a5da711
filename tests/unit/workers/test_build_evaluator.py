"""How an evaluator's environments are stepped."""

from __future__ import annotations

from pathlib import Path

import structlog

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.data.version import Version
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.factory import environment_spec
from rlsrl.workers.build.common import environment_source, torch_policy
from rlsrl.workers.build.evaluator import begin_evaluation, evaluator_plan

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: together}
spec:
  environment:
    factory: "rlsrl.testing.environments:TogetherEnv"
    kwargs: {group: GROUP, number: 3}
  policy: {network: {mlp: {hiddenSizes: [4]}}}
  algorithm: {ppo: {minibatchSize: 64}}
  actors: {environments: 4, rolloutLength: 16, vectorization: threads}
  evaluators: {environments: 3, episodesPerEnvironment: 2}
  stop: {trainSteps: 1}
"""


def test_an_evaluator_steps_environments_that_wait_side_by_side(tmp_path: Path) -> None:
    experiment = load_text(EXPERIMENT.replace("GROUP", str(tmp_path)))
    config = resolve(experiment, local_placement(run_uid="0f3a", run_folder=tmp_path)).configs["evaluator"]
    assert isinstance(config, EvaluatorConfig)
    env_spec = environment_spec(environment_source(config.environment))
    envs, evaluation = begin_evaluation(
        evaluator_plan(config, 0),
        torch_policy(config.network, env_spec, outputs=config.outputs, seed=0).parameters(Version(1, 1)),
        {},
        reports=EpisodeReports(),
        log=structlog.stdlib.get_logger("evaluator"),
    )
    try:
        result = evaluation.play()
    finally:
        envs.close()
    assert (result.num_episodes, result.num_faults, result.length_mean) == (6, 0, 4)
