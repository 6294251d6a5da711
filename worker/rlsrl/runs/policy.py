"""A trained policy in a program of the user's own: ``rlsrl.load("runs/cartpole").act(observation)``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsrl.data.specs import state_specs
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.policies.one_step import OneStepActor
from rlsrl.runs.stored_version import StoredVersion, open_version
from rlsrl.runtime.durable import write_durably
from rlsrl.runtime.extras import extras_named
from rlsrl.workers.build.common import (
    environment_interface_of,
    environment_source,
    exported_actor,
    local_actor,
    torch_policy,
)
from rlsrl.workers.evaluation import acting_noise

if TYPE_CHECKING:
    import gymnasium

    from rlsrl.runs.video import RecordedEpisode


class TrainedPolicy:
    """A stored version of a policy. It acts on one observation at a time; one thread uses it."""

    def __init__(self, stored: StoredVersion, *, seed: int = 0) -> None:
        """Act by a stored version. ``seed`` decides its draws where it samples. See ``load``."""
        self.version: str = str(stored.parameters.version)
        """The version, for example ``"1.2500"``."""
        self.metadata: Mapping[str, Any] = stored.metadata
        """What was stored with the version: env steps, mean return, its evaluation."""
        self._interface = environment_interface_of(stored.metadata)
        self._stored = stored
        self._noise = acting_noise(seed)
        self._actors: dict[bool, OneStepActor] = {}
        """By whether it takes the most probable action."""

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """The space of the observations that ``act`` takes."""
        return self._interface.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """The space of the actions that ``act`` returns."""
        return self._interface.action_space

    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Return the action for an observation of ``observation_space``.

        Args:
            observation: As the environment returns it, with the wrappers of the experiment (``frameStack``, ``atari``).
                With an action mask it is a Dict that contains the mask. Normalisation is the policy's own.
            deterministic: Whether to take the most probable action, as evaluations do. Otherwise it is drawn as in
                training.

        Raises:
            ValueError: the observation is not of the space.
            ConfigurationError: the user's own network cannot be made.
            NotInstalled: the network needs torch, which is missing.
            LayoutMismatch: the weights belong to another network than the experiment's.
        """
        if deterministic not in self._actors:
            self._actors[deterministic] = self._actor(greedy=deterministic)
        (action,) = self._interface.actions(self._actors[deterministic].act(self._interface.arrays(observation)))
        return action

    def restart(self) -> None:
        """Forget what was observed: the next observation is the first of an episode.

        A policy with a recurrent layer needs this call after each ``env.reset()``; others keep nothing between calls.
        Observations that were acted on with another ``deterministic`` are another sequence.
        """
        for actor in self._actors.values():
            actor.restart()

    @extras_named()
    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file for programs without rlsrl, or replace the file.

        The path's suffix chooses the form: ``.pt2`` is a torch program, ``.onnx`` a graph, which needs the extra
        ``onnx``, and ``.safetensors`` the weights, by the names of the network's parameters, and the statistics that
        normalise observations. Programs and graphs take raw observations, [N, *shape] each, and return the most
        probable actions. They are compared with the policy on 1000 observations before they are written.

        Raises:
            ValueError: the suffix is another one.
            ConfigurationError: the user's own network cannot be made.
            NotInstalled: torch is missing.
            LayoutMismatch: the weights belong to another network than the experiment's.
            ExportRefused: the network cannot be traced, a package is missing, or the outputs differ from the policy's.
            OSError: the file cannot be written.
        """
        from rlsrl.runs.export import export_version, format_of

        target = Path(path)
        write_durably(target, export_version(self._stored, format_of(target)))

    @extras_named()
    def record(
        self, path: str | os.PathLike[str], *, episodes: int = 1, seed: int = 0, deterministic: bool = True
    ) -> list[RecordedEpisode]:
        """Play episodes in the experiment's environment, and write what it renders to an mp4 file, or replace the file.

        The environment is made with ``render_mode="rgb_array"``. It needs the extra ``video``.

        Args:
            path: The file, which ends in ``.mp4``.
            episodes: How many are played, one after the other.
            seed: Of the first episode; the following ones have the following numbers.
            deterministic: Whether to take the most probable actions.

        Returns:
            Return and length of each episode.

        Raises:
            NoVideo: the environment does not render, the package is missing, or the suffix is another one.
            ConfigurationError: the environment cannot be made.
            EnvironmentFailed: the environment's own code raised.
            OSError: the file cannot be written.
        """
        from rlsrl.runs.video import record

        place = EnvironmentPlace(
            purpose="evaluation", rank=0, num_environments=1, worker=0, local_rank=0, seed=seed % 2**32
        )
        source = environment_source(self._stored.config.environment, place=place)
        return record(self, source, Path(path), episodes=episodes, seed=seed, deterministic=deterministic)

    @extras_named()
    def _actor(self, *, greedy: bool) -> OneStepActor:
        stored, spec = self._stored, self._interface.spec
        config = stored.config
        actor = local_actor(
            exported_actor(stored.metadata),
            spec,
            make_policy=lambda: torch_policy(
                config.network, spec, outputs=config.algorithm.chosen.outputs, seed=config.seed
            ),
            num_steps=1,
            num_lanes=1,
            rng=self._noise,
            greedy=greedy,
        )
        actor.load(stored.parameters)
        return OneStepActor(actor, spec, state_specs(config.network.state_sizes))


def load(
    run: str | os.PathLike[str],
    *,
    tag: str | None = None,
    version: str | None = None,
    experiment: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> TrainedPolicy:
    """Return the policy of a run, by default its newest version.

    A policy of dense layers acts by numpy alone; others import torch. The user's own network is imported from the
    folder of the experiment file, then from the current folder.

    Args:
        run: A run folder, the name of one in ``runs/``, or with ``experiment`` a file that ``rlsrl params export``
            wrote.
        tag: The version with this tag, for example ``best``.
        version: A version such as ``1.2500``.
        experiment: The experiment file of exported weights.
        seed: Decides the draws of ``act(..., deterministic=False)``.

    Raises:
        RunFolderError: the run does not exist; with the nearest match.
        ConfigurationError: arguments exclude each other, or the parameter store cannot be used from here.
        ParameterError: the version is missing or damaged; with the nearest match.
        SpecError: the experiment file is invalid.
        CodecError: the version does not say of which spaces it is: an older rlsrl stored it.
        OSError: a file cannot be read.
    """
    file = None if experiment is None else Path(experiment)
    return TrainedPolicy(open_version(Path(run), version=version, tag=tag, experiment=file), seed=seed)
