"""All pods of a deleted experiment get SIGTERM at about the same time: they end soon and store the last version."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.testing.pod_fleet import PodFleet
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import until

pytestmark = pytest.mark.slow

GONE_SECONDS = 20.0
"""Before, a trainer without a coordinator tried for a minute. On an idle machine each of these ends takes 3 to 10 s."""
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: deleted}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 2, environments: 4, rolloutLength: 16}
  bufferWorkers: {replicas: 1}
  evaluators: {environments: 1}
  parameters: {everySeconds: 86400}
  stop: {trainSteps: 1000000}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PodFleet]:
    """Yield the workers of a run that trains."""
    with ExitStack() as stack:
        fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack))
        fleet.await_training()
        yield fleet


def process_of(fleet: PodFleet, role: str) -> subprocess.Popen[bytes]:
    process, _ = fleet.running[role, 0]
    return process


def newest_step(folder: Path) -> int:
    return FilesystemParameterDB(folder / "data" / "parameters").versions(POLICY_NAME)[-1].version.step


def test_the_last_version_is_stored_although_the_coordinator_was_signalled_first(
    fleet: PodFleet, tmp_path: Path
) -> None:
    steps = fleet.pods.train_steps()
    assert newest_step(tmp_path) == 0
    processes = [process for process, _ in fleet.running.values()]
    assert processes[0] is process_of(fleet, "coordinator")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(GONE_SECONDS) for process in processes] == [0] * len(processes)
    assert newest_step(tmp_path) >= steps


class Service:
    """An address that leads to a coordinator until it is withdrawn. Its connections outlive it, as those of Kubernetes'
    Services do.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def withdraw(self) -> None:
        """Refuse new connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_the_last_version_is_stored_although_the_coordinators_address_is_gone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, tmp_path, stack, overrides=["bufferWorkers=null", "evaluators=null"])
        pods.start("coordinator", pods.resolved.coordinator)
        service = Service(pods.resolved.coordinator.coordinator_address)
        document = json.loads(pods.resolved.trainer.to_json())
        document |= {"coordinator_address": service.address, "parameter_store": {"service": service.address}}
        trainer, _ = pods.start_from("trainer", document, "--attempt", "1")
        for _ in range(2):
            pods.start("actor", pods.resolved.actor)
        until(lambda: pods.train_steps() > 5, "training steps")
        steps = pods.train_steps()
        service.withdraw()
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(GONE_SECONDS) == 0
        assert newest_step(tmp_path) >= steps


def test_a_trainer_without_a_coordinator_ends(fleet: PodFleet) -> None:
    coordinator, trainer = process_of(fleet, "coordinator"), process_of(fleet, "trainer")
    coordinator.kill()
    coordinator.wait()
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(GONE_SECONDS) == 1, "its last version is not stored"
    _, host = fleet.running["trainer", 0]
    assert "no answer from the parameter service" in fleet.pods.log("trainer", host)


def test_a_coordinator_ends_alone_and_the_others_go_on(fleet: PodFleet) -> None:
    coordinator = process_of(fleet, "coordinator")
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(GONE_SECONDS) == 0
    fleet.restart(("coordinator", 0))
    fleet.await_training()
