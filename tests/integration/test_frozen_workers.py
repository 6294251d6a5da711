"""A stopped process (SIGSTOP) is one failure: only it fails its liveness probe, and its kubelet restarts it.

On one machine the run goes on without it, until somebody continues or kills it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlsrl.api.placement import HEALTH_PORT, HTTP_PORT
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.pod_fleet import PodFleet
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: frozen}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 2, environments: 4, rolloutLength: 16}
  parameters: {everySteps: 20}
  stop: {trainSteps: 1000000}
"""
ASKING = ["policyWorkers={replicas: 2}", "evaluators={replicas: 1, environments: 1, everyVersions: 1}"]
BUFFERED = ["bufferWorkers={replicas: 2}"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "others_go_on", "others_wait"),
    [
        pytest.param(ASKING, ["actor", "policy", "evaluator"], ["trainer", "coordinator"], id="with policy workers"),
        # What was granted to a buffer worker waits for its own actors (decision 0013): here it has one.
        pytest.param(BUFFERED, ["buffer"], ["actor"], id="with buffer workers"),
    ],
)
def test_a_stopped_process_is_found_and_restarted(
    tmp_path: Path, stack: ExitStack, overrides: list[str], others_go_on: list[str], others_wait: list[str]
) -> None:
    fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack, overrides=overrides))
    fleet.await_training()
    for role in (*others_go_on, *others_wait):
        frozen = role, 0
        stop(fleet.running[frozen][0].pid)
        for place in fleet.running:
            assert fleet.answers(place) is (place != frozen), f"{place}, while {frozen} stands still"
        if role in others_go_on:
            fleet.await_steps()
        fleet.restart(frozen)
        fleet.await_training()
    fleet.end()
    fleet.check_ledger()


def stop(pid: int) -> None:
    """Send SIGSTOP; return when the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T", f"process {pid} has stopped")


@pytest.mark.slow
def test_on_one_machine_a_stopped_process_is_shown_until_it_is_continued(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        actor, _ = run.workers("actor")
        stop(actor.pid)
        # Its lease expires; before that it is silent.
        run.until(lambda: " gone " in desk.call("top", "live").stdout, "rlsrl top")
        os.kill(actor.pid, signal.SIGCONT)
        run.until(run.is_complete, "all processes at work again")
        gate.touch()
        assert run.wait() == 0, run.output
    assert desk.facts().json("summary.json")["ledger"]["balanced"]


class Gang:
    """Two ranks in one pod, with their launcher."""

    pod = "trainer", 0

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        launcher = ["--ranks", "2", "--health-at", str(HEALTH_PORT)]
        self.fleet = PodFleet(Pods(EXPERIMENT, folder, stack, overrides=["trainers={replicas: 2}"]), launcher=launcher)
        until(
            lambda: self.fleet.answers(self.pod, HEALTH_PORT), "the launcher answers, whatever the state of its ranks"
        )
        self.fleet.await_training()
        assert self.fleet.answers(self.pod, HEALTH_PORT)

    def stop_rank(self, rank: int) -> None:
        (pid,) = (worker["pid"] for worker in self.fleet.workers("trainer") if worker["index"] == rank)
        stop(pid)

    def heals(self) -> None:
        """Kill processes that do not answer; start the next attempt in another pod."""
        assert not self.fleet.answers(self.pod, HEALTH_PORT)
        self.fleet.restart(self.pod)
        self.fleet.await_training()
        assert self.fleet.answers(self.pod, HEALTH_PORT)
        self.fleet.end()
        self.fleet.check_ledger()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_fails_its_own_pod_alone(tmp_path: Path, stack: ExitStack, rank: int) -> None:
    gang = Gang(tmp_path, stack)
    gang.stop_rank(rank)
    assert not gang.fleet.answers(gang.pod, HTTP_PORT + rank)
    assert gang.fleet.answers(gang.pod, HTTP_PORT + 1 - rank), "it waits for the other one, and lives"
    gang.heals()


@pytest.mark.slow
def test_a_launcher_that_is_stopped_fails_its_pod(tmp_path: Path, stack: ExitStack) -> None:
    gang = Gang(tmp_path, stack)
    stop(gang.fleet.running[gang.pod][0].pid)
    gang.fleet.await_steps()
    gang.heals()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "buffer", "trainer"])
def test_a_process_that_wakes_up_too_late_finds_its_index_taken_and_exits(
    tmp_path: Path, stack: ExitStack, role: str
) -> None:
    """As on a lost node that returns: its further work is not counted twice."""
    fleet = PodFleet(Pods(EXPERIMENT, tmp_path, stack, overrides=BUFFERED))
    fleet.await_training()
    sleeper, _ = fleet.running[role, 0]
    stop(sleeper.pid)
    fleet.replace((role, 0))
    fleet.await_training()
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(DEADLINE_SECONDS) == 1
    fleet.await_steps()
    fleet.end()
    fleet.check_ledger()
