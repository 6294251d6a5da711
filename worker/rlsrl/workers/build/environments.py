"""Builds the environments of an actor, by its vectorization."""

from __future__ import annotations

from collections.abc import Callable

from rlsrl.api.resolved import ActorConfig
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.native import make_native
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.envs.seeds import environment_seed
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.process import wake_threads_promptly
from rlsrl.workers.build.common import environment_source
from rlsrl.workers.context import WorkerContext


def lockstep_environments(
    config: ActorConfig,
    context: WorkerContext,
    ranks: range,
    faults: EnvironmentFaults,
    reports: EpisodeReports,
    still_wanted: Callable[[], bool] = lambda: True,
) -> VectorEnv:
    """Return the environments of those ranks, stepped together by a loop or in bulk. The caller closes them.

    ``still_wanted`` is asked while an environment's server is away.

    Raises:
        ConfigurationError: the environments cannot be made, or cannot step in bulk.
        WaitAbandoned: an environment's server is away, and the environments are no longer wanted.
    """
    seeds = _seeds(config, context, ranks)
    if config.vectorization == "native":
        return make_native(
            _source(config, context, ranks),
            len(ranks),
            seed=seeds[0],
            first_rank=ranks.start,
            faults=faults,
            board=context.call_board,
            reports=reports,
        )
    return LoopVectorEnv(
        lambda rank: make_environment(_source(config, context, range(rank, rank + 1))),
        seeds=seeds,
        first_rank=ranks.start,
        max_decorrelation_steps=config.max_decorrelation_steps,
        faults=faults,
        board=context.call_board,
        reports=reports,
        still_wanted=still_wanted,
    )


def environment_threads(
    config: ActorConfig,
    context: WorkerContext,
    ranks: range,
    faults: EnvironmentFaults,
    reports: EpisodeReports,
    still_wanted: Callable[[], bool] = lambda: True,
) -> EnvironmentThreads:
    """Return the environments of those ranks, each in a thread of its own. The caller closes them.

    It shortens this process's switch interval, for many threads. ``still_wanted`` is asked while an environment's
    server is away.

    Raises:
        ConfigurationError: the environments cannot be made.
        WaitAbandoned: an environment's server is away, and the environments are no longer wanted.
    """
    wake_threads_promptly()
    return EnvironmentThreads(
        lambda rank: make_environment(_source(config, context, range(rank, rank + 1))),
        seeds=_seeds(config, context, ranks),
        first_rank=ranks.start,
        max_decorrelation_steps=config.max_decorrelation_steps,
        faults=faults,
        board=context.call_board,
        reports=reports,
        still_wanted=still_wanted,
    )


def _seeds(config: ActorConfig, context: WorkerContext, ranks: range) -> list[int]:
    return [environment_seed(config.seed, rank, context.incarnation) for rank in ranks]


def _source(config: ActorConfig, context: WorkerContext, ranks: range) -> EnvironmentSource:
    """Return how one call makes the environments of those ranks."""
    if not config.environment.pass_place:
        return environment_source(config.environment, rank=ranks.start)
    assert config.num_environments is not None, "the config of an environment with a place has the number of actors"
    place = EnvironmentPlace(
        purpose="training",
        rank=ranks.start,
        num_environments=config.num_environments,
        worker=context.index,
        local_rank=ranks.start - config.environment_ranks_of(context.index).start,
        seed=environment_seed(config.seed, ranks.start, context.incarnation),
        num_made=len(ranks),
    )
    return environment_source(config.environment, rank=ranks.start, place=place)
