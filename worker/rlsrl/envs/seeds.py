"""Seeds of environments, derived from the experiment's seed: no two environments share a random stream."""

from __future__ import annotations

from typing import Literal

import numpy as np

Purpose = Literal["training", "evaluation"]
"""The use of an environment. Equal environment ranks of different purposes have unrelated seeds."""

_DOMAINS: dict[Purpose, int] = {"training": 1, "evaluation": 2}


def environment_seed(
    experiment_seed: int, environment_rank: int, incarnation: int, *, purpose: Purpose = "training"
) -> int:
    """Return the seed of one environment's first reset, in ``[0, 2**32)``: every simulator takes that range.

    Equal arguments give equal seeds on every machine. ``environment_rank`` is a number among the environments of all
    actors.
    ``incarnation`` is that of the actor's lease: a restarted actor does not replay its earlier episodes.
    """
    key = (_DOMAINS[purpose], environment_rank, incarnation)
    return int(np.random.SeedSequence(experiment_seed, spawn_key=key).generate_state(1, np.uint32)[0])
