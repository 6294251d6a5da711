"""A gang on two machines, one of which is ended: run in a network namespace of its own, since torchrun's meeting port
is open to all its network. Prints what the launchers ended with.
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


def main(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, folder, stack)
        pods.start("coordinator", pods.told.coordinator)
        meeting = ["--ranks", "1", "--machines", "2", "--meet-at", f"{pods.next_host}:{PORT}"]
        machines = [
            pods.start("trainer", pods.told.trainer, "--attempt", "1", launcher=[*meeting, "--machine", str(number)])[0]
            for number in range(2)
        ]
        pods.start("actor", pods.told.actor)
        until(lambda: pods.train_steps() > 3, "training steps on two machines")
        machines[1].terminate()
        print(json.dumps([machine.wait(DEADLINE_SECONDS) for machine in reversed(machines)]))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
