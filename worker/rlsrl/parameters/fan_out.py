"""One version to several kinds of readers: those with shared memory, and those without."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from rlsrl.parameters.protocols import ParameterPublisher, Parameters


class FanOutPublisher:
    """A ``ParameterPublisher`` over others, which it owns."""

    def __init__(self, publishers: Sequence[ParameterPublisher]) -> None:
        """Versions go to them in this order."""
        self._publishers = tuple(publishers)

    def publish(self, parameters: Parameters) -> None:
        """See ``ParameterPublisher``. The first refusal is raised, and those after it get nothing."""
        for publisher in self._publishers:
            publisher.publish(parameters)

    def close(self) -> None:
        """See ``ParameterPublisher``. Each is closed, whatever closing another raises."""
        with ExitStack() as closing:
            for publisher in self._publishers:
                closing.callback(publisher.close)
