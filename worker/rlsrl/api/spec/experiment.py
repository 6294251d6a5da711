"""The whole document: ``RLExperiment`` and its ``spec``."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsrl.api.model import GANG, INTEGRAL, LIVE, REFUSE, ROLL, Ignored, Model
from rlsrl.api.rules import CrossFieldRule
from rlsrl.api.spec.algorithm import AlgorithmSpec, PpoSpec
from rlsrl.api.spec.environment import Environment
from rlsrl.api.spec.experiment_rules import EXPERIMENT_RULES
from rlsrl.api.spec.metadata import Metadata
from rlsrl.api.spec.parameters import ParameterVersions
from rlsrl.api.spec.policy import PolicySpec
from rlsrl.api.spec.run import Restarts, Security, Stop, Tracking
from rlsrl.api.spec.workers import Actors, BufferWorkers, Evaluators, Pacing, PolicyWorkers, Trainers

API_VERSION = "rlsrl.dev/v1alpha1"
KIND = "RLExperiment"


class ExperimentSpec(Model):
    """The experiment: environment, policy, algorithm, workers and limits."""

    rules: ClassVar[tuple[CrossFieldRule, ...]] = EXPERIMENT_RULES

    seed: Annotated[int, Field(ge=0, le=2_147_483_647), REFUSE, INTEGRAL] = 0
    """The seed of every random number of the run."""
    environment: Annotated[Environment, REFUSE]
    """What the actors step."""
    policy: Annotated[PolicySpec, REFUSE] = PolicySpec()
    """The network and the normalisation of its input."""
    algorithm: Annotated[AlgorithmSpec, GANG] = AlgorithmSpec(ppo=PpoSpec())
    """The training algorithm."""
    actors: Annotated[Actors, GANG]
    """The workers that step environments."""
    policy_workers: Annotated[PolicyWorkers, ROLL] | None = None
    """The workers that evaluate the policy for the actors. Without them each actor evaluates the policy itself, much
    faster for small networks."""
    buffer_workers: Annotated[BufferWorkers, GANG] | None = None
    """The workers between actors and trainers. Without them actors send samples to the trainers directly."""
    trainers: Annotated[Trainers, GANG] = Trainers()
    """The workers that learn."""
    evaluators: Annotated[Evaluators, ROLL] | None = None
    """The workers that play stored versions. Off by default."""
    pacing: Annotated[Pacing, GANG] = Pacing()
    """How gathering and training keep pace."""
    parameters: Annotated[ParameterVersions, LIVE] = ParameterVersions()
    """Which versions of the weights are stored, and where."""
    transport: Annotated[Literal["auto", "grpc"], GANG] = "auto"
    """How samples and weights travel between workers. ``auto``: shared memory between workers of one machine or one
    pod, gRPC between others. ``grpc``: gRPC everywhere. Requests to policy workers always travel over gRPC."""
    stop: Annotated[Stop, LIVE]
    """When training ends."""
    restarts: Annotated[Restarts, LIVE] = Restarts()
    """How often failed workers are restarted."""
    suspend: Annotated[bool, LIVE] = False
    """On a cluster: whether the experiment is suspended. Its trainers store their state at one common step, then all
    its pods are deleted. Set to ``false`` again, it resumes from that step, with the administrator's images and
    resources of that time."""
    tracking: Annotated[Tracking, ROLL] = Tracking()
    """Where the learning curve is shown."""
    security: Annotated[Security, GANG] = Security()
    """Protection of the workers on a cluster."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000), LIVE, INTEGRAL] | None = None
    """On a cluster: seconds between the end of the experiment and its deletion. ``whenDeleted`` decides on its volume.
    By default a finished experiment stays."""

    @property
    def batch_environments(self) -> int:
        """Environments of one batch."""
        return self.trainers.batch_environments or self.actors.num_environments

    @property
    def batch_transitions(self) -> int:
        """Steps in one batch, masked ones included: rollout length x environments of a batch."""
        return self.actors.rollout_length * self.batch_environments

    @property
    def least_policy_lag(self) -> int:
        """The smallest ``maxPolicyLag`` that lets each trainer form its part of every batch.

        One trainer grants a rollout whole, once all parts that it reaches into are granted. A part is granted
        ``maxPolicyLag`` steps before it is trained. So a rollout that reaches ``m`` parts beyond its first part needs a
        lag of at least ``m``; with less, actor and trainer would wait for each other. Rollouts begin at multiples of
        the greatest common divisor of their sizes and the part.
        """
        counts = self.actors.rollout_environments
        batch = self.batch_environments // self.trainers.replicas
        last_start = batch - math.gcd(batch, *counts)
        return (last_start + max(counts) - 1) // batch


class RLExperiment(Model):
    """One experiment in reinforcement learning, from environment to trained policy."""

    api_version: Literal["rlsrl.dev/v1alpha1"]
    """The version of this schema."""
    kind: Literal["RLExperiment"]
    """The kind of this document."""
    metadata: Metadata
    """Standard object metadata."""
    spec: ExperimentSpec
    """The experiment: environment, policy, algorithm, workers and limits."""
    status: Ignored = None
    """Written by the operator; ignored."""
