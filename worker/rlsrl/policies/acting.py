"""How an actor asks for actions within one rollout. numpy only: torch stays behind whoever implements it."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from rlsrl.data.slots import Slot
from rlsrl.parameters.protocols import Parameters


class RolloutActor(Protocol):
    """Chooses the actions of one slot after another. One thread uses it.

    What can be done once a rollout is not done once a step: noise is drawn in ``begin``, log-probabilities are
    computed in ``finish``.
    """

    def load(self, parameters: Parameters) -> None:
        """Act with these weights from the next step on."""

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps."""

    def act(self, step: int) -> NDArray[Any]:
        """Choose the actions of that step.

        Reads the frame ``observation...[step]`` of the slot, writes ``action[step]``, ``version_attempt[step]`` and
        ``version_step[step]``, and returns ``action[step]``, shape [N, ...].
        """

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps; the slot is complete afterwards."""
