"""A gang of two machines, of one and of two again, as edits of ``trainers.replicas`` make them.

Run in a network namespace of its own; prints the ledger at the end, and how many transitions the trainers know of.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: changing}
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


def train(pods: Pods, *, attempt: int, size: int) -> None:
    """One attempt of the gang with its actor, ended cleanly after a few steps."""
    pods.edit(f"trainers.replicas={size}")
    before = pods.train_steps()
    meeting = ["--ranks", "1", "--machines", str(size), "--meet-at", f"{pods.next_host}:{PORT + attempt}"]
    trainers = [
        pods.start(
            "trainer", pods.told.trainer, "--attempt", str(attempt), launcher=[*meeting, "--machine", str(number)]
        )[0]
        for number in range(size)
    ]
    actor, _ = pods.start("actor", pods.told.actor)

    def goes_on() -> bool:
        assert all(trainer.poll() is None for trainer in trainers), f"attempt {attempt} of {size} ended"
        return pods.train_steps() > before + 3

    until(goes_on, f"training steps of {size}")
    for process in (actor, *trainers):
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 0


def main(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, folder, stack)
        pods.start("coordinator", pods.told.coordinator)
        for attempt, size in enumerate(SIZES, start=1):
            train(pods, attempt=attempt, size=size)
        status = pods.status()
    print(json.dumps({"ledger": status["ledger"], "env_steps": status["totals"]["env_steps"]}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
