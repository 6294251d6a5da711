"""Where environments get their seeds from: one experiment seed, spread so that no two share a stream."""

from __future__ import annotations

from typing import Literal

import numpy as np

Purpose = Literal["training", "evaluation"]
"""What an environment is for; equal ranks of different purposes have unrelated seeds."""

_DOMAINS: dict[Purpose, int] = {"training": 1, "evaluation": 2}


def environment_seed(
    experiment_seed: int, environment_rank: int, incarnation: int, *, purpose: Purpose = "training"
) -> int:
    """The seed of one environment's first reset, in ``[0, 2**32)``: what every simulator takes.

    Equal arguments give equal seeds on every machine. ``environment_rank`` counts over the whole fleet;
    ``incarnation`` is that of the actor's lease, so an actor that was restarted does not replay the episodes of its
    former life.
    """
    key = (_DOMAINS[purpose], environment_rank, incarnation)
    return int(np.random.SeedSequence(experiment_seed, spawn_key=key).generate_state(1, np.uint32)[0])
