"""All workers of a run as pods without Kubernetes, and what is done about those that are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsrl.api.placement import HTTP_PORT
from rlsrl.api.resolved import CoordinatorConfig, RoleConfig
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

HEARTBEAT_SECONDS = 0.25
LEASE_SECONDS = 4.0
PROBE_SECONDS = 2.0
"""How long a probe waits for an answer."""
ENDING_ORDER = ("trainer", "evaluator", "policy", "buffer", "actor")

Place = tuple[str, int]
"""A role, and a number among its pods."""


class PodFleet:
    """Starts everybody, and says how they are. What is called with a ``Place`` is about its present pod."""

    def __init__(self, pods: Pods, *, launcher: Sequence[str] = ()) -> None:
        """``launcher`` are the gang launcher's arguments, for trainers of several ranks."""
        self.pods = pods
        self.attempt = 0
        self.running: dict[Place, tuple[subprocess.Popen[bytes], str]] = {}
        self._launcher = launcher
        hasty = {"heartbeat_seconds": HEARTBEAT_SECONDS, "lease_seconds": LEASE_SECONDS}
        self._coordinator = CoordinatorConfig.model_validate(pods.told.coordinator.model_dump() | hasty)
        told = self._coordinator
        numbers = {
            "coordinator": 1,
            "policy": told.num_policy_workers,
            "buffer": told.num_buffer_workers,
            "trainer": 1,
            "actor": told.num_actors,
            "evaluator": told.num_evaluators,
        }
        for role, number in numbers.items():
            for each in range(number):
                self._start((role, each))

    def delete(self, *place: Place) -> None:
        """Delete pods at once, and let others come up in their place; a coordinator's Service leads to its next one."""
        for each in place:
            self.pods.delete(*self.running[each])
        for each in place:
            self._start(each, host=self.running[each][1] if each[0] == "coordinator" else "")

    def restart(self, place: Place) -> None:
        """Kill a pod's container and start it again, as a kubelet does; a trainer's successor is another pod."""
        process, host = self.running[place]
        process.kill()
        process.wait(DEADLINE_SECONDS)
        self._start(place, host="" if place[0] == "trainer" else host)

    def succeed(self, place: Place) -> None:
        """Let another pod take the place of one of which nobody knows what became."""
        self._start(place)

    def answers(self, place: Place, port: int = HTTP_PORT) -> bool:
        """Whether the pod passes its liveness probe."""
        url = f"http://{self.running[place][1]}:{port}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def trains_on(self) -> None:
        """Wait until everybody is there and training goes on."""
        hosts = {host for (role, _), (_, host) in self.running.items() if role != "coordinator"}
        until(lambda: self._hosts() == hosts, "everybody is there")
        self.makes_steps()

    def makes_steps(self) -> None:
        """Wait for training steps."""
        steps = self.pods.train_steps()
        until(lambda: self.pods.train_steps() > steps + 5, "training steps")

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Whom the coordinator has heard of lately."""
        found: list[dict[str, Any]] = self.pods.status()["roles"].get(role, [])
        return found

    def nobody_is_left(self) -> None:
        """Wait until the coordinator knows that."""
        until(lambda: not any(self.workers(role) for role in ENDING_ORDER), "all leases end")

    def end(self) -> None:
        """End everybody but the coordinator, as pods are ended."""
        for (_, _), (process, _) in sorted(self.running.items(), key=lambda item: _order(item[0][0])):
            if process is not self.running["coordinator", 0][0]:
                process.send_signal(signal.SIGTERM)
                code = process.wait(DEADLINE_SECONDS)
                assert code == 0, f"{process.args!r} ended with {code}"

    def check_ledger(self) -> dict[str, int]:
        """See to it that the ledger of the ended run adds up; returns what was lost, by cause."""
        ledger = self.pods.status()["ledger"]
        assert ledger["balanced"], ledger
        assert (ledger["unsettled"], ledger["in_buffer"]) == (0, 0), ledger
        assert ledger["trained"] > 0, ledger
        assert min(ledger["lost"].values()) >= 0, ledger
        lost: dict[str, int] = ledger["lost"]
        return lost

    def _start(self, place: Place, *, host: str = "") -> None:
        role, _ = place
        config: RoleConfig | None = self._coordinator if role == "coordinator" else getattr(self.pods.told, role)
        arguments: list[str] = []
        if role == "trainer":
            self.attempt += 1
            arguments = ["--attempt", str(self.attempt)]
        launcher = self._launcher if role == "trainer" else ()
        self.running[place] = self.pods.start(role, config, *arguments, launcher=launcher, host=host)

    def _hosts(self) -> set[str]:
        """Where the workers are that do their work."""
        roles: dict[str, list[dict[str, Any]]] = self.pods.status()["roles"]
        return {
            worker["endpoints"]["metrics"].rpartition(":")[0]
            for workers in roles.values()
            for worker in workers
            if worker["state"] == "running" and not worker["stale"]
        }


def stop(pid: int) -> None:
    """SIGSTOP; returns when the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _state(pid) == "T", f"process {pid} stands still")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def _order(role: str) -> int:
    return ENDING_ORDER.index(role) if role in ENDING_ORDER else -1
