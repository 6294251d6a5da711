"""Every sample stream passes the conformance suite."""

from __future__ import annotations

import pytest

from rlsrl.testing.sample_streams import SampleStreamConformance, SampleStreamProcessConformance
from rlsrl.testing.stream_bench import (
    InlineTransport,
    SharedMemoryTransport,
    TcpTransport,
    TlsTransport,
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


class TestGrpcUnix(SampleStreamConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return UnixTransport()


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


@pytest.mark.usefixtures("certificates")
class TestGrpcTls(SampleStreamConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return TlsTransport()


@pytest.mark.slow
@pytest.mark.usefixtures("certificates")
class TestGrpcTlsBetweenProcesses(SampleStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> Transport:
        return TlsTransport()
