"""Every inference stream passes the conformance suite. A policy worker heeds the versions that requests ask for."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import PolicyWorkerConfig
from rlsrl.data.inference import InferenceLayout, RolloutRequest
from rlsrl.data.version import Version
from rlsrl.envs.factory import environment_spec
from rlsrl.parameters.broadcast import BroadcastPublisher
from rlsrl.parameters.protocols import Parameters
from rlsrl.testing.contexts import TOKEN, RecordingSession, make_context
from rlsrl.testing.inference_bench import (
    DEADLINE,
    DrivenClient,
    InferenceBench,
    InferenceTransport,
    InlineInferenceTransport,
    TcpInferenceTransport,
    TlsInferenceTransport,
    UnixInferenceTransport,
    answer,
    answer_of,
    small_layout,
    until,
)
from rlsrl.testing.inference_streams import (
    InferenceStreamConformance,
    InferenceStreamProcessConformance,
    ask,
    take,
)
from rlsrl.testing.leaks import assert_leaks_nothing
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY, environment_source, torch_policy
from rlsrl.workers.policy import PolicyWorker


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


EXPERIMENT = b"""
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: versions}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 32}}
  actors: {environments: 4}
  policyWorkers: {replicas: 1}
  stop: {trainSteps: 1}
"""
V1, V2 = Version(1, 1), Version(1, 2)


class ServedPolicy:
    """A policy worker that runs in a thread, its client, and the publisher of its weights."""

    def __init__(
        self, folder: Path, resources: ExitStack, transport: UnixInferenceTransport, *, has_exported: bool
    ) -> None:
        resolved = resolve(load_text(EXPERIMENT), local_placement(run_uid=uuid.uuid4().hex[:12], run_folder=folder))
        config = resolved.configs["policy"]
        assert isinstance(config, PolicyWorkerConfig)
        assert config.parameters_endpoint is not None
        env_spec = environment_spec(environment_source(config.environment))
        self._policy = torch_policy(config.network, env_spec, outputs=config.outputs, seed=config.seed)
        exported = self._policy.export()
        assert exported is not None
        self._publisher = resources.enter_context(
            closing(
                BroadcastPublisher(
                    config.parameters_endpoint,
                    TOKEN,
                    {EXPORTED_ACTOR_KEY: exported.to_json() if has_exported else None},
                )
            )
        )
        self.session = RecordingSession()
        address = transport.new_address()
        worker = PolicyWorker(make_context("policy", folder, join_session=self.session))
        worker.start()
        worker.configure(config.model_copy(update={"serves_at": address}))
        running = resources.enter_context(ThreadPoolExecutor(max_workers=1)).submit(worker.run)
        resources.callback(running.result, DEADLINE)
        resources.callback(worker.exit)
        layout = InferenceLayout.of(env_spec)
        self.client = resources.enter_context(
            closing(DrivenClient(lambda: transport.client([address], layout=layout, token=TOKEN)))
        )

    def publish(self, version: Version) -> None:
        vector = np.full(self._policy.layout.num_parameters, version.step / 8, np.float32)
        self._publisher.publish(Parameters(version=version, vector=vector, layout=self._policy.layout.digest))

    def request(self, version: Version) -> RolloutRequest:
        return RolloutRequest(observation={"observation": np.zeros((2, 4), np.float32)}, min_version=version)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServedPolicy]]:
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)  # else other tests would have it, too
    with ExitStack() as resources:
        yield lambda *arguments, **options: ServedPolicy(tmp_path, resources, *arguments, **options)


@pytest.mark.parametrize("has_exported", [True, False], ids=["where received", "two threads"])
@pytest.mark.parametrize("transport", [UnixInferenceTransport, TcpInferenceTransport])
def test_a_policy_worker_answers_what_its_weights_satisfy_before_it_waits_for_newer_ones(
    serve: Callable[..., ServedPolicy], transport: type[UnixInferenceTransport], has_exported: bool
) -> None:
    served = serve(transport(), has_exported=has_exported)
    served.publish(V1)
    requests = [served.request(version) for version in (V2, V1, V2, V1)]
    newer, present, newer_too, present_too = served.client.submit_all(requests)
    later = served.client.submit(served.request(V1))
    for future in (present, present_too, later):
        assert future.result(DEADLINE).version == V1
    until(lambda: "parameters" in served.session.turns)
    assert not newer.done()
    assert not newer_too.done()
    served.publish(V2)
    for future in (newer, newer_too):
        assert future.result(DEADLINE).version == V2
