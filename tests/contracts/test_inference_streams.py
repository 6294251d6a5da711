"""The inference streams against their common contract."""

from __future__ import annotations

import pytest

from rlsrl.testing.inference_bench import (
    InferenceTransport,
    InlineInferenceTransport,
    TcpInferenceTransport,
    TlsInferenceTransport,
    UnixInferenceTransport,
)
from rlsrl.testing.inference_streams import InferenceStreamConformance, InferenceStreamProcessConformance


class TestInline(InferenceStreamConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return InlineInferenceTransport()


class TestGrpcUnix(InferenceStreamConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return UnixInferenceTransport()


class TestGrpcTcp(InferenceStreamConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return TcpInferenceTransport()


class TestGrpcUnixBetweenProcesses(InferenceStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return UnixInferenceTransport()


class TestGrpcTcpBetweenProcesses(InferenceStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return TcpInferenceTransport()


@pytest.mark.usefixtures("certificates")
class TestGrpcTls(InferenceStreamConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return TlsInferenceTransport()


@pytest.mark.slow
@pytest.mark.usefixtures("certificates")
class TestGrpcTlsBetweenProcesses(InferenceStreamProcessConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return TlsInferenceTransport()
