"""The sample streams against their common contract."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rlsrl.testing.sample_streams import SampleStreamConformance, SampleStreamProcessConformance
from rlsrl.testing.stream_bench import InlineTransport, SharedMemoryTransport, TcpTransport, Transport, UnixTransport


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


@pytest.mark.usefixtures("quick_turns")
class TestGrpcUnix(SampleStreamConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return UnixTransport()


@pytest.mark.usefixtures("quick_turns")
class TestGrpcTcp(SampleStreamConformance):
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
