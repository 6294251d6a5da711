"""The spread of environments over workers: pure arithmetic, the same for actors, trainers and evaluators.

Environment ranks count over all actors, so that per-environment quantities (seeds, epsilons) do not depend on the
number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpread:
    """The environments of each worker."""

    counts: tuple[int, ...]
    """Environments of each worker, by worker index; each at least 1."""
    warnings: tuple[str, ...]
    """Warnings for the user about this spread."""

    @property
    def num_workers(self) -> int:
        """Workers with at least one environment."""
        return len(self.counts)

    @property
    def num_environments(self) -> int:
        """Environments of all workers."""
        return sum(self.counts)

    def ranks_of(self, worker: int) -> range:
        """Return the environment ranks of one worker.

        Raises:
            IndexError: the worker does not exist.
        """
        if not 0 <= worker < self.num_workers:
            raise IndexError(f"worker {worker} is not one of the {self.num_workers} that have environments")
        starts = list(accumulate(self.counts, initial=0))
        return range(starts[worker], starts[worker + 1])


def spread_environments(num_environments: int, num_workers: int) -> EnvironmentSpread:
    """Spread B environments over W workers.

    With B < W only B workers are used. Otherwise the first B mod W workers get one environment more than the others.
    ``warnings`` reports both.

    Raises:
        ValueError: a count is below 1.
    """
    _check_counts(num_environments, num_workers)
    warnings: list[str] = []
    used = min(num_environments, num_workers)
    if used < num_workers:
        warnings.append(
            f"{num_environments} environments need no more than {used} of {num_workers} workers: {used} are used"
        )
    each, remainder = divmod(num_environments, used)
    if remainder:
        warnings.append(
            f"{num_environments} environments do not divide evenly over {used} workers: the first {remainder} step "
            f"{each + 1}, the others {each}, which may cost speed"
        )
    return EnvironmentSpread(
        counts=(each + 1,) * remainder + (each,) * (used - remainder),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSpread:
    """Environments and steps of one evaluation, rounded to equal shares."""

    num_per_worker: int
    """Environments of each worker, at least 1."""
    num_environments: int
    """Environments of all workers together, after rounding."""
    max_steps_per_environment: int
    """Steps after which an environment stops, so that all together stay within the limit."""


def spread_evaluation(num_environments: int, num_workers: int, *, max_steps: int) -> EvaluationSpread:
    """Spread evaluation environments evenly: every worker gets ``max(1, num_environments // num_workers)``.

    The step limit is shared among the rounded total.

    Raises:
        ValueError: a count below 1, or a limit that leaves an environment no step.
    """
    _check_counts(num_environments, num_workers)
    num_per_worker = max(1, num_environments // num_workers)
    total = num_per_worker * num_workers
    if max_steps < total:
        raise ValueError(f"{max_steps} steps are too few for {total} evaluation environments: at least {total}")
    return EvaluationSpread(
        num_per_worker=num_per_worker, num_environments=total, max_steps_per_environment=max_steps // total
    )


def _check_counts(num_environments: int, num_workers: int) -> None:
    if num_environments < 1 or num_workers < 1:
        raise ValueError(f"cannot spread {num_environments} environments over {num_workers} workers: at least 1 each")
