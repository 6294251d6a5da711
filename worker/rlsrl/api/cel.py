"""The models' cross-field rules once more, in CEL, for a Kubernetes API server to judge by.

Every ``Violation`` of ``rlsrl.api.spec`` has its rule here; generated documents are judged by both, and both have to
come to the same verdict. CEL knows neither loops over numbers nor local names, so that the arithmetic of
``rlsrl.api.spread`` is spelled out, and what stands for a number here is an expression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from rlsrl.api.model import Model
from rlsrl.api.spec import Evaluators, ExperimentSpec, RLExperiment


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule over an object, ``self``."""

    rule: str
    """A CEL expression that is true for what is allowed. Defaults are filled in before it is evaluated."""
    message: str
    """What is allowed, for who wrote something else."""
    at: str | None = None
    """Path of the field to blame, from the object, for example ``.actors.ringSize``; None for the object itself."""


_ACTORS, _TRAINERS, _PPO = "self.actors", "self.trainers.replicas", "self.algorithm.ppo"
_RING = f"{_ACTORS}.ringSize"
_MINIBATCH = f"{_PPO}.minibatchSize"
_ENVIRONMENTS = (
    f"(has({_ACTORS}.environments) ? {_ACTORS}.environments : {_ACTORS}.environmentsPerActor * {_ACTORS}.replicas)"
)
_BATCH = f"(has(self.trainers.batchEnvironments) ? self.trainers.batchEnvironments : {_ENVIRONMENTS})"
_USED = f"({_ENVIRONMENTS} < {_ACTORS}.replicas ? {_ENVIRONMENTS} : {_ACTORS}.replicas)"
"""Actors that have environments."""
_FEWEST = f"({_ENVIRONMENTS} / {_USED})"
"""Environments of an actor that has no more than any other; some have one more unless all have as many."""
_EVEN = f"({_ENVIRONMENTS} % {_USED} == 0)"
_NARROW = f"({_FEWEST} / {_RING})"
"""Environments of the narrowest rollout."""
_EQUAL = f"({_EVEN} || {_NARROW} == ({_FEWEST} + 1) / {_RING})"
"""Whether all rollouts are of one width."""
_AROUND_REGISTERED = " || ".join(
    f"has(self.environment.{name})" for name in ("factory", "atari", "maxEpisodeSteps", "frameStack", "actionMask")
)
"""See ``Environment.around_registered``."""
_PART = f"({_BATCH} / {_TRAINERS})"
"""A trainer's part of a batch."""
_LEAST_LAG = (
    # Rollouts of two widths begin anywhere in a part: their greatest common divisor with it is 1.
    f"(!{_EQUAL} ? ({_PART} + {_NARROW} - 1) / {_PART} : {_NARROW} == 0 ? 0"
    # Those of one width begin at multiples of its greatest common divisor with the part.
    f" : {_NARROW} % {_PART} == 0 ? {_NARROW} / {_PART} - 1"
    f" : {_PART} % ({_NARROW} % {_PART}) == 0 ? {_NARROW} / {_PART} : {_NARROW} / {_PART} + 1)"
)
"""See ``ExperimentSpec.least_policy_lag``."""


def _schedule(field: str) -> Rule:
    linear = f"{_PPO}.{field}Schedule.linear"
    return Rule(
        rule=f"!has({_PPO}.{field}Schedule) || has({linear}.envSteps) || has(self.stop.envSteps)",
        message="needs linear.envSteps, or stop.envSteps to stand in for it",
        at=f".algorithm.ppo.{field}Schedule",
    )


RULES: Mapping[type[Model], tuple[Rule, ...]] = {
    RLExperiment: (
        Rule(
            rule="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 40",
            message="lower-case letters, digits and dashes, beginning with a letter, at most 40 characters",
            at=".metadata.name",
        ),
    ),
    Evaluators: (
        Rule(
            rule="self.maxSteps >= (self.environments > self.replicas ? self.environments : self.replicas)",
            message="leaves some environments without a step: at least as many as environments and as replicas",
            at=".maxSteps",
        ),
    ),
    ExperimentSpec: (
        Rule(
            rule=f"self.trainers.gpusPerPod == 0 || {_TRAINERS} % self.trainers.gpusPerPod == 0",
            message="has to divide trainers.replicas",
            at=".trainers.gpusPerPod",
        ),
        Rule(
            rule=f"{_ACTORS}.rolloutLength * {_BATCH} % {_MINIBATCH} == 0",
            message="has to divide a batch: actors.rolloutLength x environments of a batch",
            at=".algorithm.ppo.minibatchSize",
        ),
        Rule(
            rule=f"{_MINIBATCH} % {_TRAINERS} == 0",
            message="has to be a multiple of trainers.replicas, which share each minibatch evenly",
            at=".algorithm.ppo.minibatchSize",
        ),
        *map(_schedule, ("learningRate", "clipRange", "entropyCoefficient")),
        Rule(
            rule=f"{_RING} == 1 || has(self.policyWorkers)",
            message="more than one group of environments hides the wait for policyWorkers, and there are none",
            at=".actors.ringSize",
        ),
        Rule(
            rule=f"{_FEWEST} % {_RING} == 0 && ({_EVEN} || ({_FEWEST} + 1) % {_RING} == 0)",
            message="has to divide every actor's environments",
            at=".actors.ringSize",
        ),
        Rule(
            rule=f"{_ACTORS}.vectorization != 'native' || !({_AROUND_REGISTERED})",
            message="native steps environments as Gymnasium has them registered: an id with nothing but kwargs beside "
            "it, without factory, atari, maxEpisodeSteps, frameStack and actionMask",
            at=".actors.vectorization",
        ),
        Rule(
            rule=f"{_ACTORS}.vectorization != 'native' || {_ACTORS}.maxDecorrelationSteps == 0",
            message="native environments step together, none by itself: 0, or another vectorization",
            at=".actors.maxDecorrelationSteps",
        ),
        Rule(
            rule=f"{_ACTORS}.vectorization != 'threads' || !has(self.policyWorkers)",
            message="threads evaluate the policy by themselves, and policyWorkers are there to do so",
            at=".actors.vectorization",
        ),
        Rule(
            rule=f"{_ACTORS}.vectorization != 'threads' || !has(self.policy.network.cnn)",
            message="threads evaluate the policy without PyTorch, and policy.network.cnn cannot be",
            at=".actors.vectorization",
        ),
        Rule(
            rule=f"{_BATCH} % {_TRAINERS} == 0",
            message="has to divide the environments of a batch",
            at=".trainers.replicas",
        ),
        Rule(
            rule=f"!has(self.bufferWorkers) || {_USED} % self.bufferWorkers.replicas == 0",
            message="has to divide the number of actors that have environments",
            at=".bufferWorkers",
        ),
        Rule(
            rule=f"!has(self.bufferWorkers) || {_EQUAL}",
            message="has to divide evenly over the actors where there are bufferWorkers",
            at=".actors.environments",
        ),
        Rule(
            rule=f"{_BATCH} % {_TRAINERS} != 0 || self.pacing.maxPolicyLag >= {_LEAST_LAG}",
            message="is too small for batches of whole rollouts: raise it, or make trainers.batchEnvironments a "
            "multiple of every actor's environments, times trainers.replicas",
            at=".pacing.maxPolicyLag",
        ),
    ),
}
"""By the model whose object they judge."""


def union_rules(model: type[Model]) -> tuple[Rule, ...]:
    """The rules for the members of a union, from what the model says of them."""
    rules = []
    if model.exactly_one:
        given = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in _names(model.exactly_one))
        message = f"exactly one of {', '.join(_names(model.exactly_one))}"
        rules.append(Rule(rule=f"{given} == 1", message=message))
    if model.at_least_one:
        given = " || ".join(f"has(self.{name})" for name in _names(model.at_least_one))
        rules.append(Rule(rule=given, message=f"at least one of {', '.join(_names(model.at_least_one))}"))
    return tuple(rules)


def _names(members: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(to_camel, members))


def kept_rule(name: str, *, always: bool, whole: bool) -> Rule:
    """The rule for a member that may not be edited. ``always``: it is never left out. ``whole``: nothing within it may
    be; otherwise only whether it is there is judged here.
    """
    same = f"self.{name} == oldSelf.{name}"
    both = f"has(self.{name}) == has(oldSelf.{name})"
    rule = same if always else f"{both} && (!has(self.{name}) || {same})" if whole else both
    return Rule(
        rule=rule, message="cannot be edited: it would be another experiment, which takes another name", at=f".{name}"
    )
