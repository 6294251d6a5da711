"""All workers of a run as simulated pods, without Kubernetes: start, delete, restart and check them."""

from __future__ import annotations

import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from typing import Any

from rlsrl.api.placement import HTTP_PORT
from rlsrl.api.resolved import CoordinatorConfig, RoleConfig
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

HEARTBEAT_SECONDS = 0.25
LEASE_SECONDS = 4.0
PROBE_SECONDS = 2.0
"""Deadline of a probe."""
ENDING_ORDER = ("trainer", "evaluator", "policy", "buffer", "actor")

Place = tuple[str, int]
"""A role and the number of one of its pods."""


class PodFleet:
    """Starts all workers and reports their state. Methods with a ``Place`` concern its current pod."""

    def __init__(self, pods: Pods, *, launcher: Sequence[str] = (), last_attempt: int = 0) -> None:
        """Start all workers.

        ``launcher`` contains the gang launcher's arguments, for several trainer ranks. ``last_attempt`` is the number
        of the run's last attempt before; 0 for a new run.
        """
        self.pods = pods
        self.attempt = last_attempt
        self.running: dict[Place, tuple[subprocess.Popen[bytes], str]] = {}
        self._launcher = launcher
        short_times = {"heartbeat_seconds": HEARTBEAT_SECONDS, "lease_seconds": LEASE_SECONDS}
        self._coordinator = CoordinatorConfig.model_validate(pods.resolved.coordinator.model_dump() | short_times)
        num_pods = {**self._coordinator.num_workers, COORDINATOR: 1, TRAINER: 1}
        for role in pods.resolved.configs:
            for number in range(num_pods[role]):
                self._start((role, number))

    def delete(self, *place: Place) -> None:
        """Delete pods without a grace period and start new ones. A new coordinator keeps the address of its Service."""
        for each in place:
            self.pods.delete(*self.running[each])
        for each in place:
            self._start(each, host=self.running[each][1] if each[0] == "coordinator" else "")

    def restart(self, place: Place) -> None:
        """Kill a pod's container and start it again, as a kubelet does. A trainer restarts as a new pod."""
        process, host = self.running[place]
        process.kill()
        process.wait(DEADLINE_SECONDS)
        self._start(place, host="" if place[0] == "trainer" else host)

    def replace(self, place: Place) -> None:
        """Start another pod beside one whose state is unknown."""
        self._start(place)

    def answers(self, place: Place, port: int = HTTP_PORT) -> bool:
        """Return whether the pod passes its liveness probe."""
        url = f"http://{self.running[place][1]}:{port}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def await_training(self) -> None:
        """Wait until all workers run and training makes steps."""
        hosts = {host for (role, _), (_, host) in self.running.items() if role != "coordinator"}
        until(lambda: self._hosts() == hosts, "all workers run")
        self.await_steps()

    def await_steps(self) -> None:
        """Wait for training steps."""
        steps = self.pods.train_steps()
        until(lambda: self.pods.train_steps() > steps + 5, "training steps")

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Return the coordinator's entries of a role's workers."""
        found: list[dict[str, Any]] = self.pods.status()["roles"].get(role, [])
        return found

    def await_empty_roster(self) -> None:
        """Wait until no worker but the coordinator has a lease."""
        until(lambda: not any(self.workers(role) for role in ENDING_ORDER), "all leases end")

    def end(self) -> None:
        """End all workers but the coordinator with SIGTERM, as Kubernetes ends pods."""
        others = [place for place in self.running if place[0] != COORDINATOR]
        for place in sorted(others, key=lambda place: ENDING_ORDER.index(place[0])):
            process, _ = self.running[place]
            process.send_signal(signal.SIGTERM)
            code = process.wait(DEADLINE_SECONDS)
            assert code == 0, f"{process.args!r} ended with {code}"

    def check_ledger(self) -> dict[str, int]:
        """Check that the ended run's ledger adds up; return the lost transitions by cause."""
        ledger = self.pods.status()["ledger"]
        assert ledger["balanced"], ledger
        assert (ledger["unsettled"], ledger["in_buffer"]) == (0, 0), ledger
        assert ledger["trained"] > 0, ledger
        assert min(ledger["lost"].values()) >= 0, ledger
        lost: dict[str, int] = ledger["lost"]
        return lost

    def _start(self, place: Place, *, host: str = "") -> None:
        role, _ = place
        config: RoleConfig | None = self._coordinator if role == "coordinator" else self.pods.resolved.configs.get(role)
        arguments: list[str] = []
        if role == "trainer":
            self.attempt += 1
            arguments = ["--attempt", str(self.attempt)]
        launcher = self._launcher if role == "trainer" else ()
        self.running[place] = self.pods.start(role, config, *arguments, launcher=launcher, host=host)

    def _hosts(self) -> set[str]:
        """Return the hosts of the running workers."""
        roles: dict[str, list[dict[str, Any]]] = self.pods.status()["roles"]
        return {
            worker["endpoints"]["metrics"].rpartition(":")[0]
            for workers in roles.values()
            for worker in workers
            if worker["state"] == "running" and not worker["stale"]
        }
