"""The sample streams against their common contract."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rlsrl.testing.clock import ManualClock
from rlsrl.testing.sample_streams import SampleStreamConformance, SampleStreamProcessConformance
from rlsrl.testing.stream_bench import (
    InlineTransport,
    SharedMemoryTransport,
    StreamBench,
    TcpTransport,
    Transport,
    UnixTransport,
)


class TestInline(SampleStreamConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return InlineTransport()


class TestSharedMemory(SampleStreamConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return SharedMemoryTransport()


class TestSharedMemoryBetweenProcesses(SampleStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return SharedMemoryTransport()


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """gRPC's threads need the interpreter that a test holds while it looks again and again."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


class GrpcConformance(SampleStreamConformance):
    """Connections churn in ``make test-slow``: gRPC takes half a minute for what the others do in seconds."""

    @pytest.mark.slow
    def test_reconnecting_leaks_nothing(self, still: tuple[StreamBench, ManualClock]) -> None:
        super().test_reconnecting_leaks_nothing(still)

    @pytest.mark.slow
    def test_a_succession_of_consumers_leaks_nothing(self, still: tuple[StreamBench, ManualClock]) -> None:
        super().test_a_succession_of_consumers_leaks_nothing(still)


@pytest.mark.usefixtures("quick_turns")
class TestGrpcUnix(GrpcConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return UnixTransport()


@pytest.mark.usefixtures("quick_turns")
class TestGrpcTcp(GrpcConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return TcpTransport()


class TestGrpcUnixBetweenProcesses(SampleStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return UnixTransport()


class TestGrpcTcpBetweenProcesses(SampleStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return TcpTransport()
