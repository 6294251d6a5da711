"""The whole document: ``RLExperiment``, its ``spec``, and the rules over several sections of the spec.

CEL has neither loops nor local names, so the rules spell out its arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.alias_generators import to_camel

from rlsrl.api.model import GANG, INTEGRAL, LIVE, MAX_ARGUMENTS, REFUSE, ROLL, Ignored, Model
from rlsrl.api.rules import CrossFieldRule, Fault, near_divisors
from rlsrl.api.spec.algorithm import ActionValueSettings, AlgorithmSettings, AlgorithmSpec, PpoSpec, ReplaySettings
from rlsrl.api.spec.environment import PLACE_ARGUMENT, EnvironmentSpec, WorkerEnvironment
from rlsrl.api.spec.metadata import Metadata
from rlsrl.api.spec.parameters import ParameterVersions
from rlsrl.api.spec.policy import VALUE_OPTIONS, Mlp, PolicySpec
from rlsrl.api.spec.recurrent_rules import RECURRENT_RULES
from rlsrl.api.spec.run import PausedWorkers, Restarts, Security, Stop, Tracking
from rlsrl.api.spec.workers import Actors, BufferWorkers, Evaluators, Pacing, PolicyWorkers, Trainers

API_VERSION = "rlsrl.dev/v1alpha1"
KIND = "RLExperiment"

MOST_UPDATES = 64
"""Most minibatches of a training step with replay. Weights are published once a step."""

_ACTORS, _TRAINERS = "self.actors", "self.trainers.replicas"
_GROUPS = f"{_ACTORS}.ringSize"
_ENVIRONMENTS = (
    f"(has({_ACTORS}.environments) ? {_ACTORS}.environments : {_ACTORS}.environmentsPerActor * {_ACTORS}.replicas)"
)
_BATCH = f"(has(self.trainers.batchEnvironments) ? self.trainers.batchEnvironments : {_ENVIRONMENTS})"
_USED = f"({_ENVIRONMENTS} < {_ACTORS}.replicas ? {_ENVIRONMENTS} : {_ACTORS}.replicas)"
"""Actors that have environments."""
_FEWEST = f"({_ENVIRONMENTS} / {_USED})"
"""Environments of the smallest actor. Other actors have as many or one more."""
_EVEN = f"({_ENVIRONMENTS} % {_USED} == 0)"
_NARROW = f"({_FEWEST} / {_GROUPS})"
"""Environments of the narrowest rollout."""
_EQUAL = f"({_EVEN} || {_NARROW} == ({_FEWEST} + 1) / {_GROUPS})"
"""Whether all rollouts have the same width."""
_AROUND_REGISTERED = " || ".join(
    f"has(self.environment.{name})"
    for name in ("factory", "http", "kwargsByRank", "atari", "maxEpisodeSteps", "frameStack", "actionMask")
)
"""See ``Environment.around_registered``."""
_PART = f"({_BATCH} / {_TRAINERS})"
"""One trainer's part of a batch."""
_LEAST_LAG = (
    # Rollouts of two widths begin anywhere in a part: their greatest common divisor with it is 1.
    f"(!{_EQUAL} ? ({_PART} + {_NARROW} - 1) / {_PART} : {_NARROW} == 0 ? 0"
    # Rollouts of one width begin at multiples of its greatest common divisor with the part.
    f" : {_NARROW} % {_PART} == 0 ? {_NARROW} / {_PART} - 1"
    f" : {_PART} % ({_NARROW} % {_PART}) == 0 ? {_NARROW} / {_PART} : {_NARROW} / {_PART} + 1)"
)
"""See ``ExperimentSpec.least_policy_lag``."""
_STORES = {
    name: f"algorithm.{name}." + ".".join(settings.replay_path)
    for name, settings in AlgorithmSpec.blocks().items()
    if settings.replay_path
}
"""Paths of the ``ReplaySpec`` of algorithms that have one, by name."""


def _has(path: str) -> str:
    """Return the expression that a field is set, whose parents may be missing."""
    steps = path.split(".")
    return " && ".join(f"has(self.{'.'.join(steps[:end])})" for end in range(2, len(steps) + 1))


_VALUES = " || ".join(
    f"has(self.algorithm.{name})" + (f" && self.algorithm.{name}.{'.'.join(path)} == 'actionValues'" if path else "")
    for name, settings in AlgorithmSpec.blocks().items()
    if (path := settings.outputs_path) or issubclass(settings, ActionValueSettings)
)
"""Whether the algorithm learns the values of actions."""
_WITHOUT_VALUES = {option: str(Mlp.model_fields[option].default).lower() for option in VALUE_OPTIONS}
"""What ``VALUE_OPTIONS`` have to be with other algorithms, in YAML."""
_ALWAYS_REPLAY = tuple(
    name for name, settings in AlgorithmSpec.blocks().items() if issubclass(settings, ReplaySettings)
)
"""Algorithms that have a store whatever their block says."""
_REPLAYS = (
    "("
    + " || ".join(
        f"has(self.algorithm.{name})" if name in _ALWAYS_REPLAY else f"({_has(path)})" for name, path in _STORES.items()
    )
    + ")"
)
"""Whether the algorithm draws from a store."""
_DIVISORS = " && ".join(f"{each} > 0" for each in (_ENVIRONMENTS, f"{_ACTORS}.replicas", _GROUPS, _BATCH, _TRAINERS))


def _with_divisors(cel: str) -> str:
    """Return the expression that applies the rule only if every divisor is above 0.

    An API server applies rules to documents with numbers below their bounds, too. It would report a division by zero
    beside the bound.
    """
    return f"!({_DIVISORS}) || ({cel})"


def _ranks_fill_pods(spec: ExperimentSpec) -> Fault | None:
    trainers = spec.trainers
    if trainers.replicas % trainers.ranks_per_pod == 0:
        return None
    return Fault(
        f"{trainers.replicas} replicas cannot be spread over pods of {trainers.gpus_per_pod} ranks each",
        near_divisors(trainers.replicas, trainers.gpus_per_pod),
    )


def _minibatch_divides_batch(spec: ExperimentSpec) -> Fault | None:
    size = spec.algorithm.chosen.minibatch_rows
    if spec.algorithm.chosen.draws_from is not None or spec.batch_transitions % size == 0:
        return None
    batch = f"rolloutLength {spec.actors.rollout_length} x {spec.batch_environments} environments of a batch"
    return Fault(
        f"{size} does not divide a batch of {spec.batch_transitions} transitions ({batch})",
        near_divisors(spec.batch_transitions, size),
    )


def _minibatch_is_shared(spec: ExperimentSpec) -> Fault | None:
    size, replicas = spec.algorithm.chosen.minibatch_rows, spec.trainers.replicas
    if size % replicas == 0:
        return None
    return Fault(f"{replicas} trainers cannot share {size} transitions evenly", f"a multiple of {replicas}")


def _rules_of(name: str, settings: type[AlgorithmSettings]) -> tuple[CrossFieldRule, ...]:
    """Return the rules of an algorithm's block: minibatches are equal parts of a batch, and schedules end."""
    block = f"algorithm.{name}"
    at = ".".join((block, *settings.minibatch_size_path))
    size = f"self.{at}"

    def rule(
        at: str, check: Callable[[ExperimentSpec], Fault | None], cel: str, message: str, **numbers: str
    ) -> CrossFieldRule:
        return CrossFieldRule(
            at=at,
            check=lambda spec: check(spec) if spec.algorithm.name == name else None,
            cel=f"!has(self.{block}) || ({cel})",
            message=message,
            numbers=tuple(numbers.items()),
        )

    batch = f"{_ACTORS}.rolloutLength * {_BATCH}"
    of_a_batch = rule(
        at,
        _minibatch_divides_batch,
        _with_divisors(
            f"{size} <= 0 || ({_has(_STORES[name])}) || {batch} % {size} == 0"
            if name in _STORES
            else f"{size} <= 0 || {batch} % {size} == 0"
        ),
        "must divide a batch: actors.rolloutLength x environments of a batch",
        minibatch=size,
        batch=batch,
    )
    return (
        *(() if name in _ALWAYS_REPLAY else (of_a_batch,)),
        rule(
            at,
            _minibatch_is_shared,
            f"{_TRAINERS} <= 0 || {size} % {_TRAINERS} == 0",
            "must be a multiple of trainers.replicas, which share each minibatch evenly",
            minibatch=size,
            trainers=_TRAINERS,
        ),
        *(
            rule(
                f"{block}.{schedule}.linear.envSteps",
                _schedule_has_end(schedule),
                f"!has(self.{block}.{schedule}) || has(self.{block}.{schedule}.linear.envSteps)"
                " || has(self.stop.envSteps)",
                "is missing, and stop.envSteps, its default, is missing, too",
            )
            for schedule in settings.schedule_names()
        ),
    )


def _schedule_has_end(name: str) -> Callable[[ExperimentSpec], Fault | None]:
    def check(spec: ExperimentSpec) -> Fault | None:
        schedule = spec.algorithm.chosen.schedules.get(name)
        if schedule is None or schedule.env_steps is not None or spec.stop.env_steps is not None:
            return None
        return Fault(
            "is missing, and stop.envSteps, its default, is missing, too",
            "integer from 1 to 1000000000000000, here or as stop.envSteps",
        )

    return check


def _groups_need_policy_workers(spec: ExperimentSpec) -> Fault | None:
    if spec.actors.ring_size == 1 or spec.policy_workers is not None:
        return None
    return Fault(
        f"{spec.actors.ring_size} groups hide the wait for policy workers, and the experiment has no policyWorkers",
        "1, or an experiment with policyWorkers",
    )


def _groups_divide_environments(spec: ExperimentSpec) -> Fault | None:
    groups, counts = spec.actors.ring_size, sorted(set(spec.actors.spread.counts))
    if not any(count % groups for count in counts):
        return None
    return Fault(
        f"{groups} does not divide the {' and '.join(map(str, counts))} environments of an actor",
        near_divisors(math.gcd(*counts), groups),
    )


def _native_takes_registered(spec: ExperimentSpec) -> Fault | None:
    added = spec.environment.around_registered
    if spec.actors.vectorization != "native" or not added:
        return None
    return Fault(
        "native steps environments as Gymnasium has registered them, and this one has "
        + ", ".join(f"environment.{name}" for name in added),
        "loop or threads, or an environment.id with kwargs alone",
    )


def _native_steps_together(spec: ExperimentSpec) -> Fault | None:
    steps = spec.actors.max_decorrelation_steps
    if spec.actors.vectorization != "native" or not steps:
        return None
    return Fault(
        f"up to {steps} steps in single environments, and native steps all environments together",
        "0, or actors.vectorization loop or threads",
    )


def _videos_need_pictures(spec: ExperimentSpec) -> Fault | None:
    if spec.evaluators is None or spec.evaluators.video is None or spec.environment.http is None:
        return None
    return Fault(
        f"records what environments render, and those of environment.http {spec.environment.http.url} send no pictures",
        "evaluators without video, or environment.id or environment.factory",
    )


def _threads_need_no_groups(spec: ExperimentSpec) -> Fault | None:
    if spec.actors.vectorization != "threads" or spec.actors.ring_size == 1:
        return None
    return Fault(
        f"{spec.actors.ring_size} groups take turns, and with threads each environment goes its own way",
        "1, or actors.vectorization loop or native",
    )


def _trainers_share_batch(spec: ExperimentSpec) -> Fault | None:
    replicas, replays = spec.trainers.replicas, spec.algorithm.chosen.draws_from is not None
    if spec.batch_environments % replicas == 0 or (replays and spec.pacing.max_policy_lag > 0):
        return None
    if replays:
        return Fault(
            f"{replicas} trainers take turns with their actors, and cannot have equal parts of "
            f"{spec.batch_environments} environments",
            near_divisors(spec.batch_environments, replicas),
        )
    return Fault(
        f"{replicas} trainers cannot share a batch of {spec.batch_environments} environments evenly",
        near_divisors(spec.batch_environments, replicas),
    )


def _trainers_share_actors(spec: ExperimentSpec) -> Fault | None:
    num_actors, replicas = spec.actors.spread.num_workers, spec.trainers.replicas
    if spec.algorithm.chosen.draws_from is None or num_actors % replicas == 0:
        return None
    return Fault(
        f"{num_actors} actors with environments cannot be shared evenly by {replicas} trainers, each of which stores "
        "what its own actors gather",
        f"a multiple of {replicas}",
    )


def _buffers_share_actors(spec: ExperimentSpec) -> Fault | None:
    num_actors = spec.actors.spread.num_workers
    if spec.buffer_workers is None or num_actors % spec.buffer_workers.replicas == 0:
        return None
    replicas = spec.buffer_workers.replicas
    return Fault(
        f"{replicas} buffer workers cannot serve equal parts of {num_actors} actors",
        near_divisors(num_actors, replicas),
    )


def _trainers_share_shards(spec: ExperimentSpec) -> Fault | None:
    replicas = spec.trainers.replicas
    if spec.algorithm.chosen.draws_from is None or spec.buffer_workers is None:
        return None
    if spec.buffer_workers.replicas % replicas == 0:
        return None
    return Fault(
        f"{spec.buffer_workers.replicas} buffer workers, which keep the transitions of an algorithm that replays, "
        f"cannot be shared evenly by {replicas} trainers",
        f"a multiple of {replicas}",
    )


def _volume_needs_replay(spec: ExperimentSpec) -> Fault | None:
    if spec.buffer_workers is None or spec.buffer_workers.volume is None or spec.keeps_in_buffers:
        return None
    return Fault(
        f"is of no use: with {spec.algorithm.name}, which does not replay, buffer workers keep nothing that needs a "
        "volume",
        "unset, or an algorithm that replays",
    )


def _buffers_take_one_width(spec: ExperimentSpec) -> Fault | None:
    if spec.buffer_workers is None or len(set(spec.actors.rollout_environments)) == 1:
        return None
    num_actors = spec.actors.spread.num_workers
    return Fault(
        f"{spec.actors.num_environments} environments do not divide evenly over {num_actors} actors, and buffer "
        "workers take rollouts of one width only",
        f"a multiple of {num_actors}",
    )


def _lag_allows_whole_rollouts(spec: ExperimentSpec) -> Fault | None:
    replicas = spec.trainers.replicas
    if spec.batch_environments % replicas or spec.pacing.max_policy_lag >= spec.least_policy_lag:
        return None
    share = f"{spec.batch_environments // replicas} environments{' for each trainer' if replicas > 1 else ''}"
    widths = " and ".join(map(str, sorted(set(spec.actors.rollout_environments))))
    return Fault(
        f"batches of {share} cannot be made of whole rollouts of {widths} environments without waiting for later "
        "batches",
        f"integer >= {spec.least_policy_lag}, or a trainers.batchEnvironments that is a multiple of "
        f"{f'{replicas} times ' if replicas > 1 else ''}every actor's environments",
    )


def _arguments_fit_together(spec: ExperimentSpec) -> Fault | None:
    custom = spec.policy.network.custom
    return None if custom is None else _too_long(_num_characters(custom.kwargs), _environment_characters(spec))


def _arguments_of_the_algorithm_fit(spec: ExperimentSpec) -> Fault | None:
    custom, network = spec.algorithm.custom, spec.policy.network.custom
    if custom is None:
        return None
    of_network = {} if network is None else {"policy.network.custom.kwargs": _num_characters(network.kwargs)}
    return _too_long(_num_characters(custom.kwargs), _environment_characters(spec) | of_network)


def _environment_characters(spec: ExperimentSpec) -> dict[str, int]:
    return {
        "environment.kwargs": _num_characters(spec.environment.kwargs),
        "environment.kwargsByRank": _num_characters(_by_rank(spec)),
    }


def _arguments_by_rank_fit(spec: ExperimentSpec) -> Fault | None:
    beside = {"environment.kwargs": _num_characters(spec.environment.kwargs)}
    return _too_long(_num_characters(_by_rank(spec)), beside)


def _by_rank(spec: ExperimentSpec) -> dict[str, Mapping[str, Any]]:
    """Return the arguments by rank, by the YAML name of the member of ``kwargsByRank``."""
    by_rank = spec.environment.kwargs_by_rank
    return {} if by_rank is None else {to_camel(name): value for name, value in by_rank if value}


def _num_characters(arguments: Mapping[str, Any]) -> int:
    return len(json.dumps(arguments)) if arguments else 0


def _too_long(number: int, beside: Mapping[str, int]) -> Fault | None:
    if number + sum(beside.values()) <= MAX_ARGUMENTS or not number:
        return None
    others = " and ".join(f"{size} of {name}" for name, size in beside.items() if size)
    return Fault(
        f"has {number} characters as JSON{f', beside {others}' if others else ''}",
        f"at most {MAX_ARGUMENTS} together; put data into a file of the image or a volume, and pass its path",
    )


def _arguments_are_given_once(spec: ExperimentSpec) -> Fault | None:
    given = dict.fromkeys(spec.environment.kwargs, "kwargs")
    for member, arguments in _by_rank(spec).items():
        for name in arguments:
            if name in given:
                return Fault(f"the argument {name!r} is in {given[name]} and in kwargsByRank.{member}", "one of them")
            given[name] = f"kwargsByRank.{member}"
    return None


def _place_is_free(spec: ExperimentSpec) -> Fault | None:
    given = (spec.environment.kwargs, *_by_rank(spec).values())
    if not spec.environment.pass_place or not any(PLACE_ARGUMENT in arguments for arguments in given):
        return None
    return Fault(
        f"passes the argument {PLACE_ARGUMENT!r}, and kwargs or kwargsByRank have it, too",
        f"false, or another name for the argument {PLACE_ARGUMENT!r}",
    )


def _each_environment_has_a_value(spec: ExperimentSpec) -> Fault | None:
    total = spec.actors.num_environments
    for name, values in _by_rank(spec).get("each", {}).items():
        if len(values) != total:
            return Fault(
                f"{name!r} has {len(values)} values, and all actors together have {total} environments",
                f"{total} values; environment.kwargsByRank.cycle takes any number of values, in turn",
            )
    return None


def _ratio_needs_replay(spec: ExperimentSpec) -> Fault | None:
    ratio, replays = spec.pacing.train_steps_per_env_step, spec.algorithm.chosen.draws_from is not None
    if (ratio is not None) == replays:
        return None
    if replays:
        return Fault(
            "is missing, and the algorithm replays: how often it trains does not follow from the batches",
            "a number, for example 0.5: a training step for two env steps",
        )
    return Fault(f"{ratio} is of no use: {spec.algorithm.name} trains on each batch as it arrives", "unset")


def _bound_needs_ratio(spec: ExperimentSpec) -> Fault | None:
    bound = spec.pacing.max_train_steps_behind
    if bound is None or spec.pacing.train_steps_per_env_step is not None:
        return None
    return Fault(f"{bound} is of no use without trainStepsPerEnvStep", "unset")


def _bound_allows_a_step(spec: ExperimentSpec) -> Fault | None:
    bound = spec.pacing.max_train_steps_behind
    if bound is None or spec.pacing.train_steps_per_env_step is None or bound >= spec.least_train_steps_behind:
        return None
    return Fault(
        f"{bound} is less than the {spec.updates_per_train_step} minibatches of a training step and those of a rollout "
        "together, so that actors and trainer could wait for each other",
        f"integer >= {spec.least_train_steps_behind}",
    )


def _not_with_replay(
    at: str, excess: Callable[[ExperimentSpec], Any], cel: str, allowed: str, *, in_buffers: bool = False
) -> CrossFieldRule:
    """Return the rule that a field has no other value than ``allowed`` with an algorithm that replays.

    ``excess`` returns another value, or something false; ``cel`` is true for the allowed value. ``in_buffers``: the
    rule is only for transitions that buffer workers keep.
    """
    beside = " and bufferWorkers" if in_buffers else ""

    def check(spec: ExperimentSpec) -> Fault | None:
        if spec.algorithm.chosen.draws_from is None or (in_buffers and spec.buffer_workers is None):
            return None
        if not (found := excess(spec)):
            return None
        return Fault(f"{str(found).lower()} does not go with an algorithm that replays{beside} yet", allowed)

    message = f"must be {allowed} with an algorithm that replays{beside}"
    applies = f"!{_REPLAYS} || {'!has(self.bufferWorkers) || ' if in_buffers else ''}"
    return CrossFieldRule(at=at, check=check, cel=f"{applies}({cel})", message=message)


def _rewards_normalized_by(name: str) -> Callable[[ExperimentSpec], Any]:
    return lambda spec: spec.algorithm.name == name and spec.algorithm.chosen.normalize_rewards


def _only_for_values(name: str, option: str, without: str) -> Callable[[ExperimentSpec], Fault | None]:
    def check(spec: ExperimentSpec) -> Fault | None:
        network = getattr(spec.policy.network, name)
        value = None if network is None else str(getattr(network, option)).lower()
        if value in (None, without) or spec.algorithm.chosen.outputs == "actionValues":
            return None
        return Fault(f"{value} is for values of actions, and {spec.algorithm.name} learns none", without)

    return check


def _store_holds_the_start(name: str) -> Callable[[ExperimentSpec], Fault | None]:
    def check(spec: ExperimentSpec) -> Fault | None:
        replay = spec.algorithm.chosen.draws_from
        if replay is None or spec.algorithm.name != name:
            return None
        least = max(
            replay.start,
            2 * spec.actors.rollout_length * spec.environments_per_trainer * spec.trainers.replicas,
        )
        if replay.capacity >= least:
            return None
        return Fault(
            f"{replay.capacity} is less than start, {replay.start}, or two rollouts of each environment",
            f"integer >= {least}",
        )

    return check


_RULES: tuple[CrossFieldRule, ...] = (
    CrossFieldRule(
        at="policy.network.custom.kwargs",
        check=_arguments_fit_together,
        cel=None,
        message=f"at most {MAX_ARGUMENTS} characters as JSON, together with environment.kwargs and kwargsByRank",
    ),
    CrossFieldRule(
        at="algorithm.custom.kwargs",
        check=_arguments_of_the_algorithm_fit,
        cel=None,
        message=f"at most {MAX_ARGUMENTS} characters as JSON, together with those of environment and network",
    ),
    CrossFieldRule(
        at="environment.kwargsByRank",
        check=_arguments_by_rank_fit,
        cel=None,
        message=f"at most {MAX_ARGUMENTS} characters as JSON, together with environment.kwargs",
    ),
    CrossFieldRule(
        at="environment.kwargsByRank",
        check=_arguments_are_given_once,
        cel=None,
        message="an argument is in one of environment.kwargs and the members of kwargsByRank",
    ),
    CrossFieldRule(
        at="environment.kwargsByRank.each",
        check=_each_environment_has_a_value,
        cel=None,
        message="each argument has one value for each environment of all actors",
    ),
    CrossFieldRule(
        at="environment.passPlace",
        check=_place_is_free,
        cel=None,
        message=f"must be false if environment.kwargs or kwargsByRank have the argument {PLACE_ARGUMENT}",
    ),
    # Not a rule of ``Trainers``: an API server judges the default ``trainers: {}`` before it fills in its members.
    CrossFieldRule(
        at="trainers.gpusPerPod",
        check=_ranks_fill_pods,
        cel=f"self.trainers.gpusPerPod == 0 || {_TRAINERS} % self.trainers.gpusPerPod == 0",
        message="must divide trainers.replicas",
        numbers=(("GPUs of a pod", "self.trainers.gpusPerPod"), ("trainers", _TRAINERS)),
    ),
    *(rule for name, settings in AlgorithmSpec.blocks().items() for rule in _rules_of(name, settings)),
    CrossFieldRule(
        at="pacing.trainStepsPerEnvStep",
        check=_ratio_needs_replay,
        cel=f"has(self.pacing.trainStepsPerEnvStep) == {_REPLAYS}",
        message="is needed with an algorithm that replays, and must be unset with others",
    ),
    CrossFieldRule(
        at="pacing.maxTrainStepsBehind",
        check=_bound_needs_ratio,
        cel="!has(self.pacing.maxTrainStepsBehind) || has(self.pacing.trainStepsPerEnvStep)",
        message="must be unset without trainStepsPerEnvStep",
    ),
    CrossFieldRule(
        at="pacing.maxTrainStepsBehind",
        check=_bound_allows_a_step,
        cel=None,
        message="at least the minibatches of a training step and of a rollout",
    ),
    # An actor's slots go to one trainer: rewards of several steps go on from one slot into the next.
    CrossFieldRule(
        at="actors.replicas",
        check=_trainers_share_actors,
        cel=_with_divisors(f"!{_REPLAYS} || {_USED} % {_TRAINERS} == 0"),
        message="must be a multiple of trainers.replicas with an algorithm that replays",
        numbers=(("actors with environments", _USED), ("trainers", _TRAINERS)),
    ),
    _not_with_replay(
        "trainers.batchEnvironments",
        lambda spec: spec.trainers.batch_environments,
        cel="!has(self.trainers.batchEnvironments)",
        allowed="unset",
    ),
    CrossFieldRule(
        at="bufferWorkers.replicas",
        check=_trainers_share_shards,
        cel=f"!{_REPLAYS} || !has(self.bufferWorkers) || self.bufferWorkers.replicas % {_TRAINERS} == 0",
        message="must be a multiple of trainers.replicas with an algorithm that replays",
        numbers=(("buffer workers", "self.bufferWorkers.replicas"), ("trainers", _TRAINERS)),
    ),
    CrossFieldRule(
        at="bufferWorkers.volume",
        check=_volume_needs_replay,
        cel=f"!has(self.bufferWorkers) || !has(self.bufferWorkers.volume) || {_REPLAYS}",
        message="must be unset with an algorithm that does not replay",
    ),
    _not_with_replay(
        "pacing.maxPolicyLag",
        lambda spec: spec.pacing.max_policy_lag == 0 and "0",
        cel="self.pacing.maxPolicyLag > 0",
        allowed="above 0",
        in_buffers=True,
    ),
    _not_with_replay(
        "policy.normalizeObservations",
        lambda spec: spec.policy.normalize_observations,
        cel="!self.policy.normalizeObservations",
        allowed="false",
        in_buffers=True,
    ),
    *(
        _not_with_replay(
            f"algorithm.{name}.normalizeRewards",
            _rewards_normalized_by(name),
            cel=f"!has(self.algorithm.{name}) || !self.algorithm.{name}.normalizeRewards",
            allowed="false",
            in_buffers=True,
        )
        for name in _STORES
    ),
    # The groups of an actor fill slots in turn: the slot that follows one is of other environments.
    _not_with_replay(
        "actors.ringSize",
        lambda spec: spec.actors.ring_size > 1 and spec.actors.ring_size,
        cel=f"{_GROUPS} <= 1",
        allowed="1",
    ),
    *(
        CrossFieldRule(
            at=f"policy.network.{to_camel(name)}.{option}",
            check=_only_for_values(name, option, without),
            cel=f"!has(self.policy.network.{to_camel(name)})"
            f" || self.policy.network.{to_camel(name)}.{option} == {without} || {_VALUES}",
            message=f"must be {without} with an algorithm that does not learn the values of actions",
        )
        for name in ("mlp", "cnn", "impala_cnn")
        for option, without in _WITHOUT_VALUES.items()
    ),
    *(
        CrossFieldRule(
            at=f"{path}.capacity",
            check=_store_holds_the_start(name),
            cel=_with_divisors(
                f"!({_has(path)}) || (self.{path}.capacity >= self.{path}.start"
                f" && self.{path}.capacity >= 2 * {_ACTORS}.rolloutLength"
                f" * (({_ENVIRONMENTS} + {_TRAINERS} - 1) / {_TRAINERS}) * {_TRAINERS})"
            ),
            message=f"must be at least {path}.start, and at least two rollouts of each environment",
        )
        for name, path in _STORES.items()
    ),
    *RECURRENT_RULES,
    CrossFieldRule(
        at="actors.ringSize",
        check=_groups_need_policy_workers,
        cel=f"{_GROUPS} == 1 || has(self.policyWorkers)",
        message="must be 1 without policyWorkers: more groups hide the wait for policy workers",
    ),
    CrossFieldRule(
        at="actors.ringSize",
        check=_groups_divide_environments,
        cel=_with_divisors(f"{_FEWEST} % {_GROUPS} == 0 && ({_EVEN} || ({_FEWEST} + 1) % {_GROUPS} == 0)"),
        message="must divide every actor's environments",
        numbers=(
            ("groups", _GROUPS),
            ("environments of an actor", f"({_FEWEST} % {_GROUPS} == 0 ? {_FEWEST} + 1 : {_FEWEST})"),
        ),
    ),
    CrossFieldRule(
        at="actors.vectorization",
        check=_native_takes_registered,
        cel=f"{_ACTORS}.vectorization != 'native' || !({_AROUND_REGISTERED})",
        message="native takes an environment.id with kwargs alone, without factory, http, kwargsByRank, atari, "
        "maxEpisodeSteps, frameStack and actionMask",
    ),
    CrossFieldRule(
        at="actors.maxDecorrelationSteps",
        check=_native_steps_together,
        cel=f"{_ACTORS}.vectorization != 'native' || {_ACTORS}.maxDecorrelationSteps == 0",
        message="must be 0 with actors.vectorization native, which steps all environments together",
    ),
    CrossFieldRule(
        at="evaluators.video",
        check=_videos_need_pictures,
        cel=f"!({_has('evaluators.video')}) || !has(self.environment.http)",
        message="excludes environment.http, whose environments send no pictures",
    ),
    CrossFieldRule(
        at="actors.ringSize",
        check=_threads_need_no_groups,
        cel=f"{_ACTORS}.vectorization != 'threads' || {_GROUPS} == 1",
        message="must be 1 with actors.vectorization threads, where each environment goes its own way",
    ),
    CrossFieldRule(
        at="trainers.replicas",
        check=_trainers_share_batch,
        cel=_with_divisors(f"{_BATCH} % {_TRAINERS} == 0 || ({_REPLAYS} && self.pacing.maxPolicyLag > 0)"),
        message="must divide the environments of a batch",
        numbers=(("trainers", _TRAINERS), ("environments", _BATCH)),
    ),
    CrossFieldRule(
        at="bufferWorkers.replicas",
        check=_buffers_share_actors,
        cel="!has(self.bufferWorkers) || self.bufferWorkers.replicas < 1 || "
        f"{_USED} % self.bufferWorkers.replicas == 0",
        message="must divide the number of actors that have environments",
        numbers=(("buffer workers", "self.bufferWorkers.replicas"), ("actors", _USED)),
    ),
    CrossFieldRule(
        at="actors.environments",
        check=_buffers_take_one_width,
        cel=_with_divisors(f"!has(self.bufferWorkers) || {_EQUAL}"),
        message="must divide evenly over the actors where there are bufferWorkers",
        numbers=(("environments", _ENVIRONMENTS), ("actors", _USED)),
    ),
    CrossFieldRule(
        at="pacing.maxPolicyLag",
        check=_lag_allows_whole_rollouts,
        cel=_with_divisors(f"{_BATCH} % {_TRAINERS} != 0 || self.pacing.maxPolicyLag >= {_LEAST_LAG}"),
        message="is too small for batches of whole rollouts: raise it, or make trainers.batchEnvironments a multiple "
        "of every actor's environments, times trainers.replicas",
        numbers=(("needed", _LEAST_LAG),),
    ),
)


class ExperimentSpec(Model):
    """The experiment: environment, policy, algorithm, workers and limits."""

    rules: ClassVar[tuple[CrossFieldRule, ...]] = _RULES

    seed: Annotated[int, Field(ge=0, le=2_147_483_647), REFUSE, INTEGRAL] = 0
    """The seed of every random number of the run."""
    environment: Annotated[EnvironmentSpec, REFUSE]
    policy: Annotated[PolicySpec, REFUSE] = PolicySpec()
    """The network and the normalisation of its input."""
    algorithm: Annotated[AlgorithmSpec, GANG] = AlgorithmSpec(ppo=PpoSpec())
    actors: Annotated[Actors, GANG]
    """The workers that step environments."""
    policy_workers: Annotated[PolicyWorkers, ROLL] | None = None
    buffer_workers: Annotated[BufferWorkers, GANG] | None = None
    trainers: Annotated[Trainers, GANG] = Trainers()
    """The workers that learn."""
    evaluators: Annotated[Evaluators, ROLL] | None = None
    pacing: Annotated[Pacing, GANG] = Pacing()
    parameters: Annotated[ParameterVersions, LIVE] = ParameterVersions()
    """Which versions of the weights are stored, and where."""
    transport: Annotated[Literal["auto", "grpc"], GANG] = "auto"
    """How samples and weights travel between workers. ``auto``: shared memory between workers of one machine or one
    pod, gRPC between others. ``grpc``: gRPC everywhere. Requests to policy workers always travel over gRPC."""
    stop: Annotated[Stop, LIVE]
    paused: Annotated[tuple[PausedWorkers, ...], Field(strict=False, max_length=16), LIVE] = ()
    """Workers that are paused: they keep their processes and their state, and do no work. Actors first fill the
    rollouts that they have begun, and trainers end the present step. `rlsrl control RUN pause` and `kubectl rlsrl
    control NAME pause` add entries, and ``resume`` removes them."""
    restarts: Annotated[Restarts, LIVE] = Restarts()
    suspend: Annotated[bool, LIVE] = False
    """On a cluster: whether the experiment is suspended. Its trainers store their state at one common step, then all
    its pods are deleted. Set to ``false`` again, it resumes from that step, with the administrator's images and
    resources of that time."""
    tracking: Annotated[Tracking, ROLL] = Tracking()
    security: Annotated[Security, GANG] = Security()
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000), LIVE, INTEGRAL] | None = None
    """On a cluster: seconds between the end of the experiment and its deletion. ``whenDeleted`` decides on its volume.
    By default a finished experiment stays."""

    @property
    def worker_environment(self) -> WorkerEnvironment:
        """The environment as workers get it."""
        return self.environment.for_workers(self.algorithm.chosen.vector_actions)

    @property
    def batch_environments(self) -> int:
        """Environments of one batch."""
        return self.trainers.batch_environments or self.actors.num_environments

    @property
    def batch_transitions(self) -> int:
        """Steps in one batch, masked ones included: rollout length x environments of a batch."""
        return self.actors.rollout_length * self.batch_environments

    @property
    def updates_per_env_step(self) -> float:
        """With replay: minibatches for each transition that one trainer's actors gather.

        All trainers share each minibatch. So R trainers make ``trainStepsPerEnvStep`` for each transition of all actors
        if each makes R times as many for its own.
        """
        assert self.pacing.train_steps_per_env_step is not None, "set with an algorithm that replays"
        return self.pacing.train_steps_per_env_step * self.trainers.replicas

    @property
    def keeps_in_buffers(self) -> bool:
        """Whether buffer workers keep the transitions of an algorithm that replays."""
        return self.buffer_workers is not None and self.algorithm.chosen.draws_from is not None

    @property
    def num_replay_stores(self) -> int:
        """Number of replay stores: each buffer worker has one; without buffer workers each trainer has one."""
        return self.trainers.replicas if self.buffer_workers is None else self.buffer_workers.replicas

    @property
    def environments_per_trainer(self) -> int:
        """With replay: environments of one trainer's actors, at most."""
        return -(-self.actors.num_environments // self.trainers.replicas)

    @property
    def updates_per_train_step(self) -> int:
        """With replay: minibatches of a training step, those that belong to a rollout for each trainer. At most
        ``MOST_UPDATES``."""
        env_steps = self.actors.rollout_length * max(self.actors.rollout_environments)
        return max(1, min(MOST_UPDATES, round(self.updates_per_env_step * env_steps)))

    @property
    def least_train_steps_behind(self) -> int:
        """With replay: the smallest ``maxTrainStepsBehind`` with which actors and trainer never wait for each other."""
        env_steps = self.actors.rollout_length * max(self.actors.rollout_environments)
        return self.updates_per_train_step + math.ceil(self.updates_per_env_step * env_steps)

    @property
    def train_steps_behind(self) -> int:
        """With replay: ``maxTrainStepsBehind``, or its default."""
        if self.pacing.max_train_steps_behind is not None:
            return self.pacing.max_train_steps_behind
        env_steps = 2 * self.actors.rollout_length * self.environments_per_trainer
        return self.updates_per_train_step + math.ceil(self.updates_per_env_step * env_steps)

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
