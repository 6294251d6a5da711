"""Runs gangs on several simulated machines and injects faults. It needs its own network namespace, because the port of
torch's rendezvous is open to the whole network.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: machines}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 64}}
  actors: {replicas: 1, environments: 4, rolloutLength: 16}
  trainers: {replicas: 2}
  stop: {trainSteps: 1000000}
"""
PORT = 29500
SIZES = (2, 1, 2)


def train(pods: Pods, *, attempt: int, size: int) -> tuple[list[Popen[bytes]], Popen[bytes]]:
    """Start a gang on ``size`` machines and its actor; return them after a few steps."""
    pods.edit(f"trainers.replicas={size}")
    before = pods.train_steps()
    meeting = ["--ranks", "1", "--machines", str(size), "--meet-at", f"{pods.next_host}:{PORT + attempt}"]
    machines = [
        pods.start(
            "trainer", pods.resolved.trainer, "--attempt", str(attempt), launcher=[*meeting, "--machine", str(number)]
        )[0]
        for number in range(size)
    ]
    actor, _ = pods.start("actor", pods.resolved.actor)

    def goes_on() -> bool:
        assert all(machine.poll() is None for machine in machines), f"attempt {attempt} of {size} ended"
        return pods.train_steps() > before + 3

    until(goes_on, f"training steps on {size} machines")
    return machines, actor


def end_one(pods: Pods) -> list[int]:
    """End the second of two machines; return both launchers' exit codes, that machine's first."""
    machines, _ = train(pods, attempt=1, size=2)
    machines[1].terminate()
    return [machine.wait(DEADLINE_SECONDS) for machine in reversed(machines)]


def change_size(pods: Pods) -> dict[str, object]:
    """Two, one and two again, as edits of ``trainers.replicas`` make them; the ledger then, and how many transitions
    the trainers know of.
    """
    for attempt, size in enumerate(SIZES, start=1):
        machines, actor = train(pods, attempt=attempt, size=size)
        for process in (actor, *machines):
            process.terminate()
            assert process.wait(DEADLINE_SECONDS) == 0
    status = pods.status()
    return {"ledger": status["ledger"], "env_steps": status["totals"]["env_steps"]}


def main(what: str, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, folder, stack)
        pods.start("coordinator", pods.resolved.coordinator)
        print(json.dumps({"end-one": end_one, "change-size": change_size}[what](pods)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
