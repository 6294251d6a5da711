"""What a policy is to those who run it: an actor by itself, a policy worker for many, a trainer at its start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.specs import Arrays
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import ExportedActor


class Policy(ABC):
    """Maps observations to action distributions with the weights last loaded. One thread uses it."""

    @abstractmethod
    def load(self, parameters: Parameters) -> None:
        """Evaluate with these weights from now on.

        Raises:
            LayoutMismatch: they are of another network.
        """

    @abstractmethod
    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Answer each request, in order, from one evaluation of all their lanes together."""

    @abstractmethod
    def initial_state(self, num_envs: int) -> Arrays:
        """The recurrent state an episode begins with, each array [num_envs, ...]; empty without memory."""

    @abstractmethod
    def export(self) -> ExportedActor | None:
        """The actor as a program that needs no torch; None if it cannot be one."""
