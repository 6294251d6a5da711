"""How a run ends, pauses, restarts, is tracked and is protected.

``spec.stop``, ``paused``, ``restarts``, ``tracking`` and ``security``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsrl.api.model import GANG, INTEGRAL, Model
from rlsrl.api.role_names import TRAINER
from rlsrl.api.rules import CrossFieldRule, Fault
from rlsrl.api.spec.scalars import Count, ObjectName, PositiveSeconds


class Stop(Model):
    """When training ends: at the first of these limits that is reached."""

    at_least_one: ClassVar[tuple[str, ...]] = ("return_mean", "env_steps", "train_steps", "wall_seconds")

    return_mean: Annotated[float, Field(ge=-1e15, le=1e15)] | None = None
    """Mean undiscounted return of the last ``episodes`` episodes."""
    episodes: Annotated[int, Field(ge=1, le=1_000_000), GANG, INTEGRAL] = 100
    """Number of episodes that returnMean covers. It is not compared before as many episodes have ended."""
    env_steps: Count | None = None
    """Transitions trained on; with replay, transitions that were gathered and stored."""
    train_steps: Count | None = None
    """Batches trained on."""
    wall_seconds: PositiveSeconds | None = None
    """Seconds of training, earlier attempts of the same run included and pauses of the trainers excluded."""
    now: bool = False
    """Whether training ends at the next step, as at a limit. `rlsrl control RUN stop` and `kubectl rlsrl control NAME
    stop` set it. With ``false`` again, `rlsrl run` continues the run."""


MAX_INDICES = 1024
"""Largest number of indices of one entry of ``paused``."""


def _trainers_have_no_indices(paused: PausedWorkers) -> Fault | None:
    if paused.role != TRAINER or paused.indices is None:
        return None
    return Fault("trainers train together, so all of them pause or none", "an entry without indices")


class PausedWorkers(Model):
    """Workers that are paused."""

    rules: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            at="indices",
            check=_trainers_have_no_indices,
            cel="self.role != 'trainer' || !has(self.indices)",
            message="trainers pause together, without indices",
        ),
    )

    role: Literal["actor", "buffer", "evaluator", "policy", "trainer"]
    """The role of the workers."""
    indices: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=999_999), INTEGRAL], ...],
            Field(strict=False, min_length=1, max_length=MAX_INDICES),
        ]
        | None
    ) = None
    """The indices of the workers. By default all workers of the role. An index without a worker has no effect."""

    def covers(self, role: str, index: int) -> bool:
        """Return whether the worker of that role with that index is one of these."""
        return role == self.role and (self.indices is None or index in self.indices)


class Restarts(Model):
    """How many failures a run survives. On a cluster only failures of the trainers count: Kubernetes restarts all other
    workers without a limit. With ``rlsrl run`` each role has this budget of its own."""

    budget: Annotated[int, Field(ge=0, le=10_000), INTEGRAL] = 10
    """Largest count of recent failures. One more ends the run, and so does the same failure three times in a row
    without progress."""
    decay_seconds: PositiveSeconds = 600.0
    """Seconds in which the count falls by one. On a cluster these seconds restart with each failure."""


WandbName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128, examples=["my-project"])]
"""A project, user or team of Weights & Biases."""


class Wandb(Model):
    """Weights & Biases. Off by default. Needs the extra ``wandb``. Its failures are logged and counted, and never end a
    run."""

    project: WandbName
    """The project that shows the run."""
    entity: WandbName | None = None
    """The user or team that owns the project; by default that of the API key."""
    mode: Literal["offline", "online"] = "offline"
    """``online`` sends each row at once, with the API key in the coordinator's environment (``WANDB_API_KEY``).
    ``offline`` keeps rows in the run folder, under ``wandb/``, for ``wandb sync``."""


class Tracking(Model):
    """Where the learning curve is shown, beside ``metrics.jsonl`` and TensorBoard, which are always written. How often
    the workers' own metrics are shown there."""

    wandb: Wandb | None = None
    worker_seconds: Annotated[float, Field(ge=0, le=31_536_000)] = 60.0
    """Seconds between two values of the workers' own metrics in TensorBoard and Weights & Biases: speed, waits, batch
    sizes, lag, CPU, memory. Their names are ``workers/<role>/<index>/<metric>``. A role of more than 16 workers has
    ``mean``, ``min`` and ``max`` in the place of the index. 0 switches these metrics off; Prometheus still has them.
    """


class Security(Model):
    """Protection of the workers on a cluster, beside the token that each of them presents."""

    tls_secret: ObjectName | None = None
    """On a cluster: a Secret of the type kubernetes.io/tls with the keys tls.crt, tls.key and ca.crt, for mutual TLS
    between workers. Its certificate is for servers and clients and carries the DNS name
    ``<name>-coordinator.<namespace>.svc`` or ``*.<namespace>.svc``. New certificates are used without a restart.
    Ignored on one machine, where traffic does not leave the machine."""
