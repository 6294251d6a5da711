"""An algorithm of the user's own: what its factory gets and what its class declares.

``algorithm.custom`` in the spec names the factory. It is called with a ``Setup`` and the spec's ``kwargs``, and returns
a ``CustomAlgorithm``. ``rows`` and ``returns`` have parts that many algorithms share; ``vtrace`` is an example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rlsrl.algorithms.base import LEARNING_RATE, POLICY, Algorithm
from rlsrl.algorithms.schedules import Scheduled
from rlsrl.api.spec import AlgorithmNeeds, CustomAlgorithmSpec
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.references import load_callable

INTERFACE = 1
"""The version of the interface: of the names in ``INTERFACE_MODULES``. It rises with every change that an algorithm has
to follow. ``tests/golden/algorithm_interface.txt`` shows the interface of this version."""
INTERFACE_MODULES: Mapping[str, tuple[str, ...]] = {
    "rlsrl.algorithms.adam": ("Adam", "RAdam"),
    "rlsrl.algorithms.base": (),
    "rlsrl.algorithms.check": ("check_algorithm",),
    "rlsrl.algorithms.custom": ("Setup", "CustomAlgorithm"),
    "rlsrl.algorithms.returns": (),
    "rlsrl.algorithms.rows": (),
    "rlsrl.api.spec": ("AlgorithmNeeds",),
    "rlsrl.buffers.replay.rows": ("NEXT", "IMPORTANCE"),
    "rlsrl.data.specs": ("Arrays",),
    "rlsrl.policies.device": ("to_device", "to_host"),
    "rlsrl.policies.distributions": (),
    "rlsrl.policies.epsilon_greedy": ("EPSILON",),
    "rlsrl.policies.exploration": ("DEVIATION", "UNIFORM"),
    "rlsrl.policies.functional": ("PureNetwork",),
    "rlsrl.policies.networks": ("FlattenObservation", "Heads", "Observation"),
}
"""The modules that users' algorithms may import, each with the names that belong to the interface; without names it is
every public name of the module."""

MOST_EVERY = 1000
"""Most minibatches from one update of a group to the next."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What a factory gets."""

    policy: TorchPolicy
    """``policy.pure`` is the network as a function of its parameters; ``policy.env_spec`` describes observations and
    actions; networks of the algorithm's own belong on ``policy.device``. The policy's own weights are not used."""
    settings: CustomAlgorithmSpec
    """The block of the spec, with ``discount`` and ``needs``. The rest is applied for the algorithm: rewards are scaled
    and clipped before it sees them, and the learner makes the optimizer's steps."""
    num_ranks: int
    """Ranks that share each minibatch evenly."""

    @property
    def minibatch_size(self) -> int:
        """Rows of one rank's share of a minibatch."""
        return self.settings.needs.minibatch_size // self.num_ranks


class CustomAlgorithm(Algorithm):
    """Base of the algorithms that users write."""

    interface: ClassVar[int]
    """The version of the interface that the class was written for: a number, not ``INTERFACE``."""

    @property
    @abstractmethod
    def needs(self) -> AlgorithmNeeds:
        """What the algorithm does, for comparison with ``algorithm.custom.needs``.

        Validation, sizing and the operator know only the spec; an algorithm that does something else is refused.
        """


def build(settings: CustomAlgorithmSpec, policy: TorchPolicy, num_ranks: int, end: int | None) -> CustomAlgorithm:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``.

    Raises:
        ConfigurationError: the factory cannot be loaded, raised, did not return a ``CustomAlgorithm``, or returned one
            for another version of the interface, with other needs than the spec's, or with unusable parameter groups.
    """
    del end
    factory = load_callable(settings.factory, where="algorithm factory")
    named = f"algorithm factory {settings.factory!r}"
    try:
        algorithm = factory(Setup(policy=policy, settings=settings, num_ranks=num_ranks), **settings.kwargs)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{named} raised {type(error).__name__} for arguments {settings.kwargs}: {error}"
        ) from error
    if not isinstance(algorithm, CustomAlgorithm):
        raise ConfigurationError(f"{named} returned a {type(algorithm).__name__}, not a CustomAlgorithm")
    written_for = getattr(algorithm, "interface", None)
    if written_for != INTERFACE:
        raise ConfigurationError(
            f"{named} returned a {type(algorithm).__name__} whose attribute 'interface' is {written_for}; this rlsrl "
            f"has version {INTERFACE} of the interface of algorithms"
        )
    _check_needs(algorithm.needs, settings.needs, named)
    _check_groups(algorithm, named)
    return algorithm


def coefficients(settings: CustomAlgorithmSpec, end: int | None) -> Mapping[str, Scheduled]:
    """Return no coefficients: what the spec's ``kwargs`` say does not change during training."""
    del settings, end
    return {}


def _check_needs(found: Any, expected: AlgorithmNeeds, named: str) -> None:
    if not isinstance(found, AlgorithmNeeds):
        raise ConfigurationError(f"{named}: 'needs' is of type {type(found).__name__}, not AlgorithmNeeds")
    by_spec = expected.model_dump(by_alias=True)
    for field, value in found.model_dump(by_alias=True).items():
        if by_spec[field] != value:
            raise ConfigurationError(
                f"algorithm.custom.needs.{field} is {by_spec[field]}, and the algorithm of {named} needs {value}"
            )


def _check_groups(algorithm: CustomAlgorithm, named: str) -> None:
    groups = algorithm.groups
    if POLICY not in groups:
        raise ConfigurationError(f"{named}: 'groups' has {sorted(groups)}, and not {POLICY!r}")
    coefficients = algorithm.coefficients(0)
    if LEARNING_RATE in coefficients:
        raise ConfigurationError(
            f"{named}: 'coefficients' has the name {LEARNING_RATE!r}, which is the spec's; give it another name"
        )
    rates = {LEARNING_RATE, *coefficients}
    first = next(iter(groups))
    for name, group in groups.items():
        where = f"{named}: the parameter group {name!r}"
        if not 1 <= group.every <= MOST_EVERY or (name == first and group.every != 1):
            raise ConfigurationError(
                f"{where} has {group.every} in 'every'; the first group has 1, others a number of minibatches from 1 "
                f"to {MOST_EVERY}"
            )
        if group.learning_rate not in rates:
            raise ConfigurationError(
                f"{where} has the learning rate {group.learning_rate!r}; 'coefficients' adds to {sorted(rates)}"
            )
        if name == POLICY:
            if group.initial is not None:
                raise ConfigurationError(f"{where} has values in 'initial'; its first values are those of a version")
        elif group.initial is None or group.initial.dim() != 1 or group.initial.dtype != torch.float32:
            found = "None" if group.initial is None else f"{group.initial.dtype} {[*group.initial.shape]}"
            raise ConfigurationError(f"{where} has {found} in 'initial'; it needs a vector of torch.float32")
