"""``status`` of the custom resource, written by the operator as a whole."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlsrl.api.model import INTEGRAL, Model
from rlsrl.api.spec.environment import MAX_INFO_KEY_LENGTH, MAX_INFO_KEYS

Text = Annotated[str, Field(max_length=1024)]
"""One or two sentences."""
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, seconds."""
Number = Annotated[int, Field(ge=0, le=1_000_000_000_000_000), INTEGRAL]
"""A count."""

Phase = Literal["Pending", "Queued", "Starting", "Running", "Suspended", "Succeeded", "Failed"]
TERMINAL: tuple[Phase, ...] = ("Succeeded", "Failed")
"""The phases of an experiment that has ended."""
"""Pending: no object exists yet. Queued: the trainers wait in a queue, and the other workers wait for the trainers.
Starting: some workers are not ready. Running: training. Suspended: its pods end or have ended until it is resumed.
Succeeded is final, Failed until the experiment is tried again."""


class Condition(Model):
    """One aspect of the experiment's state."""

    type: Annotated[str, Field(max_length=64)]
    """The name of the aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Annotated[str, Field(max_length=64)]
    """The reason in one word, for programs."""
    message: Text
    """The reason for people, with the name of the pod at fault."""
    last_transition_time: Time
    """The last change of ``status``."""
    observed_generation: Number | None = None
    """The generation of the spec that the condition describes."""


class RoleStatus(Model):
    """The pods of one role."""

    replicas: Number
    """The desired number of pods."""
    ready: Number
    """The number of ready pods."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """The label selector of the pods."""


class EpisodeInfo(Model):
    """What episodes reported under one key of ``info`` (``spec.environment.episodeInfo``)."""

    key: Annotated[str, Field(max_length=MAX_INFO_KEY_LENGTH)]
    """The key."""
    mean: Annotated[str, Field(max_length=32)] | None = None
    """Mean over the last episodes with a value, as text; absent without a value."""
    count: Number
    """Episodes of the run that had a value."""


class Training(Model):
    """Numbers of the run, as last reported by the coordinator."""

    env_steps: Number | None = None
    """Transitions trained on."""
    train_steps: Number | None = None
    """Training steps."""
    env_steps_per_second: Number | None = None
    """Transitions trained on, a second, over the last ten seconds; 0 in a stall."""
    version: Annotated[str, Field(max_length=64)] | None = None
    """The newest version of the weights, ``attempt.step``."""
    policy_lag: Number | None = None
    """Policy lag of the last batch, in training steps."""
    return_mean: Annotated[str, Field(max_length=32)] | None = None
    """Mean return of the last episodes, as text: Kubernetes advises against floats in status."""
    length_mean: Annotated[str, Field(max_length=32)] | None = None
    """Mean number of steps of the last episodes, as text."""
    episode_info: (
        Annotated[
            tuple[EpisodeInfo, ...],
            Field(
                max_length=MAX_INFO_KEYS,
                strict=False,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-list-key": "key"},
            ),
        ]
        | None
    ) = None
    """What the last episodes reported, by key of ``info``."""
    updated_at: Time | None = None
    """The time of the coordinator's last answer. After a minute without one the numbers are out of date."""


def return_text(value: float) -> str:
    """Return a mean return as text: three digits, or more with one decimal."""
    if abs(value) >= 99.95:  # it rounds to 100.0 or more
        return f"{value:.1f}"
    return f"{value + 0.0:#.3g}"  # -0.0 + 0.0 is 0.0


class LastFailure(Model):
    """The trainers' last failure, except kills and lost connections."""

    signature: Annotated[str, Field(max_length=64)]
    """Equal for the same exception at the same place."""
    env_steps: Number
    """Transitions trained on at the first of these failures."""
    times: Number
    """How often in a row the trainers failed like this, without getting further. The third ends the experiment."""


class ExperimentStatus(Model):
    """The operator's view of the experiment."""

    phase: Phase | None = None
    """The experiment's phase."""
    observed_generation: Number | None = None
    """The generation of the spec that this status describes."""
    attempt: Number | None = None
    """The number of the trainer gang's current attempt, from 1."""
    first_attempt: Number | None = None
    """The first attempt since the failed experiment was last tried again; absent if it never was."""
    fresh_attempt: Number | None = None
    """The attempt that last began again from step 0 (`kubectl rlsrl retry --fresh`); absent if none did."""
    restarts: Number | None = None
    """Restarts of the trainer gang after failures. Drains, evictions, preemptions and edits are no failures.
    Restarts of single containers are in the status of their pods."""
    recent_failures: Number | None = None
    """Failures of the trainer gang that count against spec.restarts.budget. More than the budget end the experiment."""
    last_failure_at: Time | None = None
    """The time of the last failure, or of the last decay of the count."""
    last_failure: LastFailure | None = None
    """The trainers' last failure, to recognise one that is sure to repeat."""
    finished_at: Time | None = None
    """The time when the experiment succeeded or failed."""
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
    """The experiment's conditions."""
