"""The built-in algorithms, by the name of their block in ``spec.algorithm``. Nothing else names one.

An algorithm's module has the functions of ``Implementation``. It is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from rlsrl.algorithms.base import Algorithm
from rlsrl.algorithms.schedules import Scheduled
from rlsrl.api.spec import AlgorithmSpec
from rlsrl.policies.torch_policy import TorchPolicy


class Implementation(Protocol):
    """What the module of an algorithm offers. ``settings`` is the algorithm's block."""

    def build(self, settings: Any, policy: TorchPolicy, num_ranks: int, end: int | None) -> Algorithm:
        """Return the algorithm of one of ``num_ranks`` ranks, which share each minibatch evenly.

        It trains the network of ``policy``, whose own weights are not used. ``end``: env steps after which
        schedules end that do not say when themselves.
        """

    def coefficients(self, settings: Any, end: int | None) -> Mapping[str, Scheduled]:
        """Return the coefficients and acting scalars that may change, by name, for ``Algorithm.adopt``."""


def implementation_of(spec: AlgorithmSpec) -> Implementation:
    """Return the implementation of the algorithm that is set."""
    return cast("Implementation", import_module(f"rlsrl.algorithms.{spec.name}"))
