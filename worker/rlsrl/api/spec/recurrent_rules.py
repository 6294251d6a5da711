"""The rules of ``RLExperiment`` for recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlsrl.api.rules import CrossFieldRule, Fault, near_divisors, near_multiples
from rlsrl.api.spec.algorithm import ActorCriticSettings, AlgorithmSpec, ReplaySettings
from rlsrl.api.spec.policy import PolicySpec
from rlsrl.api.spec.workers import Actors, Trainers


class _Spec(Protocol):
    """The part of ``ExperimentSpec`` that the rules read."""

    @property
    def policy(self) -> PolicySpec: ...

    @property
    def algorithm(self) -> AlgorithmSpec: ...

    @property
    def actors(self) -> Actors: ...

    @property
    def trainers(self) -> Trainers: ...


_TRAINED_BY = {name: block for name, block in AlgorithmSpec.blocks().items() if block.trains_recurrent}
_RECURRENT = "has(self.policy.network.recurrent)"
_STATE = "self.policy.network.custom.state"
_OWN = f"(has(self.policy.network.custom) && has({_STATE}) && size({_STATE}) > 0)"
_IS_RECURRENT = f"({_RECURRENT} || {_OWN})"


def _network_is_built_in(spec: _Spec) -> Fault | None:
    network = spec.policy.network
    if network.recurrent is None or network.custom is None:
        return None
    return Fault("is for mlp, cnn and impalaCnn; a network of your own declares custom.state", "unset")


def _algorithm_trains(member: str) -> Callable[[_Spec], Fault | None]:
    """Return the check that the algorithm trains a recurrent network, as that member of ``network`` says."""

    def check(spec: _Spec) -> Fault | None:
        network = spec.policy.network
        if not network.state_sizes or (network.custom is None) != (member == "recurrent"):
            return None
        if spec.algorithm.name in _TRAINED_BY:
            return None
        return Fault(
            f"{spec.algorithm.name} trains no recurrent network",
            f"unset, or one of the algorithms {', '.join(_TRAINED_BY)}",
        )

    return check


def _of_block(
    name: str, check: Callable[[_Spec, ActorCriticSettings], Fault | None]
) -> Callable[[_Spec], Fault | None]:
    """Return the check for the block of that name, if it trains a recurrent network."""

    def checked(spec: _Spec) -> Fault | None:
        settings = spec.algorithm.chosen
        if not spec.policy.network.state_sizes or spec.algorithm.name != name:
            return None
        assert isinstance(settings, ActorCriticSettings), "of such a block"
        return check(spec, settings)

    return checked


def _divides_rollout(spec: _Spec, settings: ActorCriticSettings) -> Fault | None:
    length, steps = settings.sequence_length, spec.actors.rollout_length
    if steps % length == 0:
        return None
    return Fault(f"{length} does not divide actors.rolloutLength {steps}", near_divisors(steps, length))


def _divides_minibatch(spec: _Spec, settings: ActorCriticSettings) -> Fault | None:
    length, trainers = settings.sequence_length, spec.trainers.replicas
    share = settings.minibatch_size // trainers
    if settings.minibatch_size % trainers or share % length == 0:
        return None
    of = "minibatchSize" if trainers == 1 else f"minibatchSize {settings.minibatch_size} / {trainers} trainers ="
    return Fault(f"{length} does not divide {of} {share}", near_divisors(share, length))


def _burn_in_is_of_use(spec: _Spec, settings: ActorCriticSettings) -> Fault | None:
    if settings.burn_in and settings.sequence_length >= spec.actors.rollout_length:
        return Fault(
            f"{settings.burn_in} is of no use: each rollout is one sequence, with no steps before it",
            f"0, or a sequenceLength below actors.rolloutLength {spec.actors.rollout_length}",
        )
    if settings.burn_in <= settings.sequence_length:
        return None
    return Fault(
        f"{settings.burn_in} is more than sequenceLength {settings.sequence_length}",
        f"integer from 0 to {settings.sequence_length}",
    )


def _has_whole_rollouts(name: str) -> Callable[[_Spec], Fault | None]:
    """Return the check that minibatches of that block consist of whole rollouts, if it trains a recurrent network."""

    def check(spec: _Spec) -> Fault | None:
        settings = spec.algorithm.chosen
        if not spec.policy.network.state_sizes or spec.algorithm.name != name:
            return None
        trainers = spec.trainers.replicas
        size, together = settings.minibatch_rows, spec.actors.rollout_length * trainers
        if size % trainers or size % together == 0:  # another rule says that trainers share it evenly
            return None
        of = "actors.rolloutLength" if trainers == 1 else f"actors.rolloutLength x {trainers} trainers ="
        return Fault(f"{size} is no multiple of {of} {together}", near_multiples(together, size))

    return check


def _rule_of_replay(name: str) -> CrossFieldRule:
    block = f"self.algorithm.{name}"
    together = "(self.actors.rolloutLength * self.trainers.replicas)"
    return CrossFieldRule(
        at=f"algorithm.{name}.minibatchSize",
        check=_has_whole_rollouts(name),
        cel=f"!{_IS_RECURRENT} || !has({block}) || {together} < 1"
        f" || {block}.minibatchSize % self.trainers.replicas != 0 || {block}.minibatchSize % {together} == 0",
        message="must be a multiple of actors.rolloutLength x trainers.replicas with a recurrent network",
        numbers=(("minibatch", f"{block}.minibatchSize"), ("rollout", "self.actors.rolloutLength")),
    )


def _rules_of(name: str) -> tuple[CrossFieldRule, ...]:
    block = f"self.algorithm.{name}"
    others = f"!{_IS_RECURRENT} || !has({block}) || {block}.sequenceLength < 1"
    share = f"({block}.minibatchSize / self.trainers.replicas)"
    return (
        CrossFieldRule(
            at=f"algorithm.{name}.sequenceLength",
            check=_of_block(name, _divides_rollout),
            cel=f"{others} || self.actors.rolloutLength % {block}.sequenceLength == 0",
            message="must divide actors.rolloutLength with a recurrent network",
            numbers=(("sequence", f"{block}.sequenceLength"), ("rollout", "self.actors.rolloutLength")),
        ),
        CrossFieldRule(
            at=f"algorithm.{name}.sequenceLength",
            check=_of_block(name, _divides_minibatch),
            cel=f"{others} || self.trainers.replicas < 1 || {block}.minibatchSize % self.trainers.replicas != 0"
            f" || {share} % {block}.sequenceLength == 0",
            message="must divide each trainer's share of minibatchSize with a recurrent network",
            numbers=(("sequence", f"{block}.sequenceLength"), ("minibatch", f"{block}.minibatchSize")),
        ),
        CrossFieldRule(
            at=f"algorithm.{name}.burnIn",
            check=_of_block(name, _burn_in_is_of_use),
            cel=f"!{_IS_RECURRENT} || !has({block}) || {block}.burnIn == 0 || ({block}.burnIn <= {block}.sequenceLength"
            f" && {block}.sequenceLength < self.actors.rolloutLength)",
            message="must be at most sequenceLength, and 0 where that is rolloutLength, with a recurrent network",
        ),
    )


RECURRENT_RULES: tuple[CrossFieldRule, ...] = (
    CrossFieldRule(
        at="policy.network.recurrent",
        check=_network_is_built_in,
        cel=f"!{_RECURRENT} || !has(self.policy.network.custom)",
        message="must be unset with policy.network.custom",
    ),
    *(
        CrossFieldRule(
            at=f"policy.network.{member}",
            check=_algorithm_trains(member),
            cel=f"!{applies} || {' || '.join(f'has(self.algorithm.{name})' for name in _TRAINED_BY)}",
            message=f"needs one of the algorithms {', '.join(_TRAINED_BY)}",
        )
        for member, applies in (("recurrent", _RECURRENT), ("custom.state", _OWN))
    ),
    *(
        rule
        for name, block in _TRAINED_BY.items()
        if issubclass(block, ActorCriticSettings)
        for rule in _rules_of(name)
    ),
    *(_rule_of_replay(name) for name, block in _TRAINED_BY.items() if issubclass(block, ReplaySettings)),
)
