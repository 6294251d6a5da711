"""Half an hour with a fault every half minute: the cost in training, and no growth of memory, files or threads."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from datetime import UTC, datetime

import pytest

from rlsrl.api.pods import is_ready
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import ROLES, all_ready, begin, goes_on, reach_the_goal
from rlsrl.testing.kubectl import ClusterExperiment, KubectlFailed, Namespace, Nodes
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(3600)]

SEED = 1
QUIET_SECONDS = 60.0
SOAK_SECONDS = 1800.0
FAULT_SECONDS = 30.0
ROUNDS = 3
"""The machine's speed drifts, so each fault's cost is relative to the speed measured before and after it."""
KEPT = 0.9
SETTLED_SECONDS = 20.0
"""Age from which a pod's memory counts, after its start-up."""


class Soak:
    """Injects random faults from a seed and records the pods' resources."""

    def __init__(self, experiment: ClusterExperiment, hands: Nodes, system: Namespace) -> None:
        self._experiment = experiment
        self._hands = hands
        self._system = system
        self._random = random.Random(SEED)
        self.used: defaultdict[str, list[dict[str, int]]] = defaultdict(list)

    def hit(self) -> str:
        """Inject a fault of a random kind into a random role and return its name; the target may be unready."""
        kind, role = self._random.choice(["kill", "deletion"]), self._random.choice([*ROLES])
        pods = [pod for pod in self._experiment.pods(role) if "deletionTimestamp" not in pod["metadata"]]
        if not pods:
            return f"{kind} of {role}, without a target"
        victim = self._random.choice(pods)
        if kind == "kill":
            self._hands.kill(victim)
        else:
            self._experiment.where.delete("pod", victim["metadata"]["name"])
        return f"{kind} of {role}"

    def look(self) -> None:
        """Record the resources of every pod that has run for a while, including the operator's."""
        for pod in [*self._experiment.pods(), *self._system.list("pods")]:
            if is_ready(pod) and age(pod) > SETTLED_SECONDS:
                role = pod["metadata"]["labels"].get("rlsrl.dev/role", "operator")
                try:
                    self.used[role].append(self._hands.usage(pod))
                except KubectlFailed:
                    continue  # it went meanwhile


def age(pod: Object) -> float:
    """Return the seconds since the start of its container."""
    started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    return (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()


def throughput(experiment: ClusterExperiment, seconds: float) -> float:
    """Return the trained environment steps a second without a fault."""
    first, began = experiment.env_steps(), time.monotonic()
    until(lambda: time.monotonic() - began > seconds, "time goes by", timeout=2 * seconds)
    return (experiment.env_steps() - first) / (time.monotonic() - began)


def test_half_an_hour_of_faults(where: Namespace, system: Namespace, hands: Nodes, recovered: Recovered) -> None:
    # Who can be doubled is: one that is gone leaves its work to the other.
    experiment = begin(
        where,
        policyWorkers={"replicas": 2},
        bufferWorkers={"replicas": 2},
        restarts={"budget": 1000, "decaySeconds": 600},
    )
    soak = Soak(experiment, hands, system)
    quiet = [throughput(experiment, QUIET_SECONDS)]
    trained: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        faults = []
        due = time.monotonic()
        while len(faults) < SOAK_SECONDS / FAULT_SECONDS / ROUNDS:
            steps, began = experiment.env_steps(), time.monotonic()
            fault = soak.hit()
            due += FAULT_SECONDS
            until(lambda: time.monotonic() > due - FAULT_SECONDS / 2, "half of the time until the next fault")
            soak.look()
            until(lambda: time.monotonic() > due, "the next fault is due")
            faults.append((fault, (experiment.env_steps() - steps) / (time.monotonic() - began)))
        until(lambda: all_ready(experiment), "all are there after the last fault")
        goes_on(experiment)
        quiet.append(throughput(experiment, QUIET_SECONDS))
        for fault, rate in faults:
            trained[fault].append(rate / statistics.mean(quiet[-2:]))
    every = [share for shares in trained.values() for share in shares]
    kept = statistics.mean(every)
    print(f"seed {SEED}, {len(every)} faults")
    for fault, shares in sorted(trained.items()):
        lost = FAULT_SECONDS * (1 - statistics.mean(shares))
        print(f"{fault:40s} {lost:6.1f} s of training lost, mean of {len(shares)}")
    print(f"env steps a second without faults: {[round(each) for each in quiet]}; with them {kept:.1%}")
    growths = {}
    for role, samples in soak.used.items():
        third = len(samples) // 3
        for what in ("bytes", "descriptors", "threads"):
            early, late = (
                statistics.median(each[what] for each in part) for part in (samples[:third], samples[-third:])
            )
            growths[role, what] = late / early
            print(f"{role:12s} {what:12s} {early:14.0f} -> {late:14.0f}")

    reach_the_goal(experiment)
    assert kept >= KEPT
    assert max(growths.values()) < 1.1, growths
    recovered(f"{len(every)} faults in half an hour, {kept:.0%} of the throughput kept", SOAK_SECONDS)
