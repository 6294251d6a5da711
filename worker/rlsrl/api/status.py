"""What the operator says of an experiment: ``status`` of the custom resource. One status, written as a whole."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlsrl.api.model import INTEGRAL, Model

Text = Annotated[str, Field(max_length=1024)]
"""A sentence or two."""
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, seconds."""
Number = Annotated[int, Field(ge=0, le=1_000_000_000_000_000), INTEGRAL]
"""A count."""

Phase = Literal["Pending", "Queued", "Starting", "Running", "Suspended", "Succeeded", "Failed"]
"""Pending: nothing was made yet. Queued: its trainers wait for their turn in a queue, the others for them. Starting:
not all workers are ready. Running: training. Suspended: its pods end or have ended, until it is resumed. The last two
are for good."""


class Condition(Model):
    """One aspect of the experiment's state."""

    type: Annotated[str, Field(max_length=64)]
    """Which aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=64)]
    """Why, in one word for programs."""
    message: Text
    """Why, for people; names the pod where there is one to blame."""
    last_transition_time: Time
    """Since when ``status`` is what it is."""
    observed_generation: Number | None = None
    """The generation of the spec that was judged."""


class RoleStatus(Model):
    """The pods of one role."""

    replicas: Number
    """How many there should be."""
    ready: Number
    """How many are ready."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """The label selector of its pods."""


class Training(Model):
    """Numbers of the run, as the coordinator told them last."""

    env_steps: Number | None = None
    """Transitions trained."""
    train_steps: Number | None = None
    """Training steps."""
    env_steps_per_second: Number | None = None
    """Transitions trained a second."""
    version: Annotated[str, Field(max_length=64)] | None = None
    """The newest version of the weights, ``attempt.step``."""
    policy_lag: Number | None = None
    """Training steps by which the samples of the last batch were behind."""
    return_mean: Annotated[str, Field(max_length=32)] | None = None
    """Mean return of the last episodes: text, because Kubernetes advises against floats in status."""
    updated_at: Time | None = None
    """When the coordinator answered last: older than a minute, the numbers are old too."""


class ExperimentStatus(Model):
    """The experiment as the operator sees it."""

    phase: Phase | None = None
    """Where the experiment is in its life."""
    observed_generation: Number | None = None
    """The generation of the spec that this is about."""
    attempt: Number | None = None
    """The trainer gang's current life, counted from 1."""
    restarts: Number | None = None
    """How often the trainers began anew because one of them was lost."""
    recent_failures: Number | None = None
    """Failures of the gang that are not forgotten yet: more than spec.restarts.budget end the experiment."""
    last_failure_at: Time | None = None
    """When the last of them was, or was forgotten."""
    finished_at: Time | None = None
    """When the experiment succeeded or failed."""
    actors: RoleStatus | None = None
    """The actors' pods."""
    trainers: RoleStatus | None = None
    """The trainers' pods."""
    training: Training | None = None
    """Numbers of the run."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(max_length=16, strict=False, json_schema_extra={"x-kubernetes-list-type": "map", "x-list-key": "type"}),
    ] = ()
    """What holds and what does not."""
