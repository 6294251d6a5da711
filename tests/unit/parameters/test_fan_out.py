from __future__ import annotations

import uuid
from contextlib import closing

import pytest

from rlsrl.data.version import Version
from rlsrl.parameters.broadcast import BroadcastPublisher, BroadcastReader
from rlsrl.parameters.fan_out import FanOutPublisher
from rlsrl.parameters.protocols import Parameters, SourceClosed, StaleAttempt
from rlsrl.testing.parameter_dbs import make_parameters

LONG = 60.0
"""Seconds to wait for what will come: never reached."""


class Fenced:
    """A publisher of a superseded gang, whose ``close`` fails, too."""

    def publish(self, parameters: Parameters) -> None:
        raise StaleAttempt("succeeded")

    def close(self) -> None:
        raise OSError("cannot be closed")


def test_every_kind_of_reader_gets_every_version() -> None:
    names = [f"rlsrl-test-{uuid.uuid4()}" for _ in range(2)]
    publishers = [BroadcastPublisher(name, "token", {}) for name in names]
    with closing(FanOutPublisher(publishers)) as publisher:
        for step in (1, 2):
            publisher.publish(make_parameters(Version(1, step)))
            for name in names:
                with closing(BroadcastReader(name, "token")) as reader:
                    assert reader.wait(Version(1, step), LONG).version == Version(1, step)
    for closed in publishers:
        with pytest.raises(SourceClosed):
            closed.publish(make_parameters(Version(1, 3)))


def test_a_refusal_is_raised_and_close_closes_every_publisher() -> None:
    last = BroadcastPublisher(f"rlsrl-test-{uuid.uuid4()}", "token", {})
    publisher = FanOutPublisher([Fenced(), last])
    with pytest.raises(StaleAttempt):
        publisher.publish(make_parameters(Version(1, 1)))
    with pytest.raises(OSError, match="cannot be closed"):
        publisher.close()
    with pytest.raises(SourceClosed):
        last.publish(make_parameters(Version(1, 1)))
