"""Every inference stream passes the conformance suite."""

from __future__ import annotations

import pytest

from rlsrl.testing.inference_bench import (
    DEADLINE,
    InferenceBench,
    InferenceTransport,
    InlineInferenceTransport,
    TcpInferenceTransport,
    TlsInferenceTransport,
    UnixInferenceTransport,
    answer,
    answer_of,
    small_layout,
)
from rlsrl.testing.inference_streams import (
    InferenceStreamConformance,
    InferenceStreamProcessConformance,
    ask,
    take,
)
from rlsrl.testing.leaks import assert_leaks_nothing


class TestInline(InferenceStreamConformance):
    @pytest.fixture
    def transport(self) -> InferenceTransport:
        return InlineInferenceTransport()

    def test_servers_that_start_and_close_leak_nothing(self, bench: InferenceBench) -> None:
        client = bench.client()

        def come_and_go() -> None:
            server = bench.transport.server(bench.address, layout=small_layout(), on_refused=print)
            (answered,) = ask(client, 1)
            answer(take(server))
            assert answer_of(answered.result(DEADLINE)) == 1
            server.close()

        assert_leaks_nothing(come_and_go, times=20)


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
