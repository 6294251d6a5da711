"""Chooses the number of actors for ``actors.replicas: auto``: the fewest that train about as fast as any number.

The speed is the estimate of ``rlsrl size`` for this machine. The choice runs in a process of its own, since it imports
torch and steps the user's environment for a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsrl.api.load import GivenExperiment, SpecError
from rlsrl.local.child import call_in_child
from rlsrl.runtime.cores import usable_cores
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.sizing.advice import MOST_LOSS

if TYPE_CHECKING:
    from rlsrl.data.specs import EnvSpec
    from rlsrl.sizing.costs import Costs
    from rlsrl.sizing.workload import EnvironmentSpeed

MOST_ACTORS_A_CORE = 4
"""Actors beyond this number for each core are not tried."""
LEAST_TRIED = 16
"""At least so many are tried: environments that wait use no core."""
CHOICE_SECONDS = 600
"""The longest time that a choice may take: that of one ``reset`` by default."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen number of actors."""

    num_actors: int
    cores: int
    """Cores that the run may use."""
    env_steps_a_second: float
    """The estimate with these actors."""


def choose_actors(given: GivenExperiment, *, modules: Path) -> Choice:
    """Return the number of actors for an experiment whose ``actors.replicas`` is ``auto``.

    ``modules`` is the folder in which Python looks first for the user's own modules.

    Raises:
        SpecError: the experiment is invalid, with any number of actors.
        ConfigurationError: the environment or the user's network cannot be made, or the choice took too long.
        EnvironmentFailed: the environment raised.
    """
    try:
        return call_in_child(_choose, given, usable_cores(), modules=modules, seconds=CHOICE_SECONDS)
    except BrokenProcessPool as error:
        raise ConfigurationError(
            "actors.replicas is auto, and the process that measures the environment was killed, or took longer "
            f"than {CHOICE_SECONDS} s; give a number"
        ) from error


def fewest(speeds: Mapping[int, float]) -> int:
    """Return the fewest actors whose speed is within ``MOST_LOSS`` of the fastest; speeds by number of actors."""
    enough = (1 - MOST_LOSS) * max(speeds.values())
    return min(number for number, speed in speeds.items() if speed >= enough)


def choice(
    given: GivenExperiment, env_spec: EnvSpec, *, environment: EnvironmentSpeed, costs: Costs, cores: int
) -> Choice:
    """Return the choice for an environment of that speed and these costs of all else. Pure.

    Numbers that the experiment's own rules or the system's limits exclude are no choice.

    Raises:
        SpecError: the experiment is invalid, with any number of actors.
        ConfigurationError: the user's network cannot be made, or every number breaks a limit.
    """
    from rlsrl.sizing.estimate import estimate
    from rlsrl.sizing.limits import broken_limits
    from rlsrl.sizing.workload import Hardware, workload_of
    from rlsrl.workers.build.common import effort_of

    spec = given.load_with_fewest_actors().spec
    network = effort_of(spec, env_spec)
    speeds, broken = {}, ""
    most = max(MOST_ACTORS_A_CORE * cores, LEAST_TRIED, spec.actors.replicas)
    for number in range(spec.actors.replicas, min(spec.actors.num_environments, most) + 1):
        try:
            tried = given.load(auto_actors=lambda number=number: number).spec  # type: ignore[misc]
        except SpecError:
            continue  # for example no multiple of the trainers with replay, or a ringSize that does not fit
        workload = workload_of(
            tried, env_spec, environment=environment, network=network, hardware=Hardware(cores=cores)
        )
        if limits := broken_limits(workload, costs):
            broken = f"with {number}, {limits[0]}"
            continue
        speeds[number] = estimate(workload, costs).env_steps_a_second
    if not speeds:
        raise ConfigurationError(f"actors.replicas is auto, and no number of actors works: {broken}")
    chosen = fewest(speeds)
    return Choice(num_actors=chosen, cores=cores, env_steps_a_second=speeds[chosen])


def _choose(given: GivenExperiment, cores: int) -> Choice:
    from rlsrl.envs.factory import environment_spec
    from rlsrl.envs.unreachable import EnvironmentUnreachable
    from rlsrl.sizing.costs import measured_costs
    from rlsrl.sizing.environment import measure_environment
    from rlsrl.workers.build.common import environment_source

    source = environment_source(given.load_with_fewest_actors().spec.worker_environment)
    try:
        env_spec = environment_spec(source)
        environment = measure_environment(source)
    except EnvironmentUnreachable as error:
        raise ConfigurationError(f"actors.replicas is auto, and {error}") from None  # its locks stay in this process
    return choice(given, env_spec, environment=environment, costs=measured_costs().costs, cores=cores)
