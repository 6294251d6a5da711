"""Environments in a server, whose step takes 50 ms: the share of the latency limit that a whole run reaches.

    python benchmarks/remote_environments.py [--rounds N] [--seconds S]

32 CartPoles over two actors, each environment with a thread (`actors.vectorization: threads`). The server is a process
of its own on the loopback interface, and no step fails. The actors evaluate the policy themselves, or ask a policy
worker; both in turn, ``rounds`` times. The limit is one step of each environment every 50 ms. The server counts the
steps of a window of ``seconds``, which begins after some training steps. Prints each round, and writes the shares to
docs/benchmarks/remote-environments.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from machine import described
from results import FOLDER, log, write

from rlsrl.testing.environment_server import EnvironmentServer
from rlsrl.testing.live_runs import Desk

ENVIRONMENTS, STEP_SECONDS = 32, 0.05
LIMIT = ENVIRONMENTS / STEP_SECONDS
"""Steps a second, if nothing but the environments takes time."""
FIRST_STEPS = 3
"""Training steps before the window."""
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{http: {{url: "{url}"}}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 256}}}}
  actors: {{replicas: 2, environments: {environments}, rolloutLength: 16, vectorization: threads}}
  stop: {{wallSeconds: 600}}
  {further}
"""
WAYS = {"inline": "", "policy worker": "policyWorkers: {replicas: 1}"}


def share(further: str, seconds: float) -> float:
    """Return the share of the limit that one run reaches in a window."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = json.dumps({"env_id": "CartPole-v1", "step_seconds": STEP_SECONDS})
        with EnvironmentServer(folder, "--factory", "environments:make", "--kwargs", arguments) as server:
            text = EXPERIMENT.format(url=server.url, environments=ENVIRONMENTS, further=further)
            with Desk(folder, text).begin() as run:
                run.until(lambda: run.facts.train_steps() >= FIRST_STEPS, "training")
                before, began = server.num_steps, time.monotonic()
                time.sleep(seconds)
                return (server.num_steps - before) / (time.monotonic() - began) / LIMIT


def main() -> None:
    """Measure both ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the server finds the environment there
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way, further in WAYS.items():
            found[way].append(share(further, arguments.seconds))
            log(f"round {number + 1}, {way}: {found[way][-1]:.1%} of {LIMIT:.0f} steps/s")
    for way, shares in found.items():
        log(f"{way}: median {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})")
    document = {
        "limit": LIMIT,
        "seconds": arguments.seconds,
        "shares": {way: [round(each, 4) for each in shares] for way, shares in found.items()},
        "machine": described(Path(__file__).parents[1]),
    }
    write(FOLDER / "remote-environments.json", document)
    print(json.dumps(document["shares"]))


if __name__ == "__main__":
    main()
