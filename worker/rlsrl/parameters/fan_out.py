"""Publish to readers with shared memory and to readers without."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from typing_extensions import override

from rlsrl.parameters.protocols import ParameterPublisher, Parameters


class FanOutPublisher(ParameterPublisher):
    """Publishes each version through several publishers, which it owns."""

    def __init__(self, publishers: Sequence[ParameterPublisher]) -> None:
        """Publish in this order."""
        self._publishers = tuple(publishers)

    @override
    def publish(self, parameters: Parameters) -> None:
        # The first error ends the loop: publishers after it do not get the version.
        for publisher in self._publishers:
            publisher.publish(parameters)

    @override
    def close(self) -> None:
        # Every publisher is closed, even if closing another one raises.
        with ExitStack() as closing:
            for publisher in self._publishers:
                closing.callback(publisher.close)
