"""Half an hour with a fault every half minute: what it costs in training, and that nothing grows."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import ROLES, all_ready, begin, goes_on, is_ready, reach_the_goal
from rlsrl.testing.kubectl import Experiment, KubectlFailed, Namespace, Nodes
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(3600)]

SEED = 1
QUIET_SECONDS = 120.0
SOAK_SECONDS = 1800.0
FAULT_SECONDS = 30.0
KEPT = 0.9
SETTLED_SECONDS = 20.0
"""After its start a pod's use of memory is its work's."""


class Soak:
    """Faults drawn from a seed, and what pods use meanwhile."""

    def __init__(self, experiment: Experiment, hands: Nodes, system: Namespace) -> None:
        self._experiment = experiment
        self._hands = hands
        self._system = system
        self._random = random.Random(SEED)
        self.counts: Counter[str] = Counter()
        self.used: defaultdict[str, list[dict[str, int]]] = defaultdict(list)

    def hit(self) -> str:
        """Tell the name of one fault of a kind and role drawn uniformly; who is there is hit, well or not."""
        kind, role = self._random.choice(["kill", "deletion"]), self._random.choice([*ROLES])
        pods = [pod for pod in self._experiment.pods(role) if "deletionTimestamp" not in pod["metadata"]]
        if not pods:
            name = f"{kind} of {role}, of whom nobody was there"
            self.counts[name] += 1
            return name
        victim = self._random.choice(pods)
        if kind == "kill":
            self._hands.kill(victim)
        else:
            self._experiment.where.delete("pod", victim["metadata"]["name"])
        name = f"{kind} of {role}"
        self.counts[name] += 1
        return name

    def look(self) -> None:
        """Note what every pod uses that has been at work for a while, the operator's too."""
        for pod in [*self._experiment.pods(), *self._system.list("pods")]:
            if is_ready(pod) and age(pod) > SETTLED_SECONDS:
                role = pod["metadata"]["labels"].get("rlsrl.dev/role", "operator")
                try:
                    self.used[role].append(self._hands.usage(pod))
                except KubectlFailed:
                    continue  # it went meanwhile


def age(pod: Object) -> float:
    """Seconds since its container was started."""
    started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    return (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()


def throughput(experiment: Experiment, seconds: float) -> float:
    """Environment steps a second that are trained, without a fault."""
    first, began = experiment.env_steps(), time.monotonic()
    until(lambda: time.monotonic() - began > seconds, "time goes by", timeout=2 * seconds)
    return (experiment.env_steps() - first) / (time.monotonic() - began)


def test_half_an_hour_of_faults(where: Namespace, system: Namespace, hands: Nodes, recovered: Recovered) -> None:
    experiment = begin(where, restarts={"budget": 1000, "decaySeconds": 600})
    undisturbed = throughput(experiment, QUIET_SECONDS)
    soak = Soak(experiment, hands, system)
    first, began = experiment.env_steps(), time.monotonic()
    due = began
    trained: defaultdict[str, list[int]] = defaultdict(list)
    while time.monotonic() - began < SOAK_SECONDS:
        steps = experiment.env_steps()
        fault = soak.hit()
        due += FAULT_SECONDS
        until(lambda: time.monotonic() > due - FAULT_SECONDS / 2, "half of the time until the next fault")  # noqa: B023
        soak.look()
        until(lambda: time.monotonic() > due, "the next fault is due")  # noqa: B023
        trained[fault].append(experiment.env_steps() - steps)
    disturbed = (experiment.env_steps() - first) / (time.monotonic() - began)
    kept = disturbed / undisturbed
    print(f"seed {SEED}: {dict(sorted(soak.counts.items()))}")  # noqa: T201
    for fault, amounts in sorted(trained.items()):
        lost = FAULT_SECONDS - statistics.mean(amounts) / undisturbed
        print(f"{fault:40s} {lost:6.1f} s of training lost, mean of {len(amounts)}")  # noqa: T201
    print(f"env steps a second: {undisturbed:.0f} undisturbed, {disturbed:.0f} with faults: {kept:.1%}")  # noqa: T201
    growths = {}
    for role, samples in soak.used.items():
        third = len(samples) // 3
        for what in ("bytes", "descriptors", "threads"):
            early, late = (
                statistics.median(each[what] for each in part) for part in (samples[:third], samples[-third:])
            )
            growths[role, what] = late / early
            print(f"{role:12s} {what:12s} {early:14.0f} -> {late:14.0f}")  # noqa: T201

    until(lambda: all_ready(experiment), "all are there after the last fault")
    goes_on(experiment)
    reach_the_goal(experiment)
    assert kept >= KEPT
    assert max(growths.values()) < 1.1, growths
    recovered(f"{sum(soak.counts.values())} faults in half an hour, {kept:.0%} of the throughput kept", SOAK_SECONDS)
