"""Play the stored versions of a run of rlsrl without exploration."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any, cast

import environments
import gymnasium
import numpy as np

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.version import Version
from rlsrl.envs.mujoco import log_mujoco_warnings
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.parameters.protocols import Parameters, VersionInfo
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.numpy_policy import NumpyPolicy
from rlsrl.workers.build.common import exported_actor
from rlsrl.workers.build.run_database import open_run_database

SEEDS_APART = 1_000_000
"""Difference of the first episodes' seeds of two runs with successive seeds, as in the peers' programs."""


class PlayedVersions:
    """The stored versions of a run that may still train, each played once.

    ``seed`` is that of the run: the episodes of its versions begin alike, those of other runs differently.
    """

    def __init__(self, run: Path, env_id: str, *, episodes: int, seed: int) -> None:
        self._run = run
        self._env_id = env_id
        self._episodes = episodes
        self._seed = SEEDS_APART * seed
        self._played: dict[Version, tuple[float, float]] = {}

    def __call__(self) -> list[tuple[float, float]]:
        """Return (env steps, mean return of so many episodes) of each version until now, oldest first."""
        if not (self._run / PARAMETERS).is_dir():
            return []
        database = open_run_database(self._run)
        for info in database.versions(POLICY_NAME):
            if info.version not in self._played:
                actor, parameters = _loaded(database, info)
                found = mean_return(actor, parameters, self._env_id, episodes=self._episodes, seed=self._seed)
                self._played[info.version] = float(info.metadata["env_steps"]), found
        return sorted(self._played.values())


def last_version(run: Path) -> tuple[ExportedActor, Parameters]:
    """Return the newest stored version of a run, and its actor."""
    database = open_run_database(run)
    info = max(database.versions(POLICY_NAME), key=lambda info: info.version)
    return _loaded(database, info)


def _loaded(database: BlobParameterDB, info: VersionInfo) -> tuple[ExportedActor, Parameters]:
    actor, parameters = exported_actor(info.metadata), database.get(POLICY_NAME, info.version)
    assert actor is not None, "dense layers have an exported form"
    assert parameters is not None, "stored"
    return actor, parameters


def mean_return(actor: ExportedActor, parameters: Parameters, env_id: str, *, episodes: int, seed: int = 0) -> float:
    """Return the mean return of that many episodes, side by side, with the most probable actions.

    The environments are seeded with ``seed`` and the numbers after it.
    """
    policy = NumpyPolicy(actor)
    policy.load(parameters)
    with contextlib.suppress(ImportError):  # else it writes its warnings into a file in the working folder
        importlib.import_module("mujoco")
    log_mujoco_warnings()
    envs = [environments.make(env_id) for _ in range(episodes)]
    returns, running = np.zeros(episodes), [*range(episodes)]
    observations = [env.reset(seed=seed + number)[0] for number, env in enumerate(envs)]
    while running:
        seen = np.stack([observations[number] for number in running]).astype(np.float32)
        (answer,) = policy.predict([RolloutRequest(observation={"observation": seen})])
        for number, action in zip(list(running), _actions(actor, answer.distribution, envs[0]), strict=True):
            observations[number], reward, terminated, truncated, _ = envs[number].step(action)
            returns[number] += float(reward)
            if terminated or truncated:
                running.remove(number)
    for env in envs:
        env.close()
    return float(returns.mean())


def _actions(actor: ExportedActor, distribution: np.ndarray, env: gymnasium.Env[Any, Any]) -> list[Any]:
    """Return the most probable action of each lane, as the environment takes it."""
    (part,) = actor.head.parts
    if part.kind == "categorical":
        return [*distribution.argmax(axis=1)]
    mean = distribution[:, : part.num_outputs]
    within = np.tanh(mean) if part.kind == "squashed" else mean
    space = cast("gymnasium.spaces.Box", env.action_space)
    return [*(space.low + (within + 1.0) / 2.0 * (space.high - space.low))]
