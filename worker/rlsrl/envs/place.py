"""The place of an environment among all environments of an experiment, for factories that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlsrl.envs.seeds import Purpose


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlace:
    """One environment's place in the experiment. If the environment is made again after an error, it stays."""

    purpose: Purpose | Literal["inspection"]
    """``training``: an actor steps it. ``evaluation``: an evaluator or ``rlsrl eval`` plays it. ``inspection``: a
    process makes it to learn its spaces, to check it or to measure it, and closes it again."""
    rank: int
    """Number among the environments of the same purpose, from 0. Environments of actors have different ranks, and so
    have those of evaluators. Inspections have rank 0, and several may exist at the same time."""
    num_environments: int
    """Environments of the same purpose: those of all actors, or those of all evaluators; 1 for an inspection."""
    worker: int
    """Index of the actor or evaluator; 0 for an inspection and for ``rlsrl eval``."""
    local_rank: int
    """Number among the environments of its worker, from 0."""
    seed: int
    """Seed of its first reset, in ``[0, 2**32)``. A restarted actor has other seeds. All evaluators have the same
    seeds, by local rank."""
    num_made: int = 1
    """Environments that one call makes, with ranks and local ranks from ``rank`` and ``local_rank`` on, all from one
    seed: more than 1 only with ``actors.vectorization: native``."""


INSPECTION = EnvironmentPlace(purpose="inspection", rank=0, num_environments=1, worker=0, local_rank=0, seed=0)
"""The place of every inspection."""
