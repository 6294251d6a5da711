from typing import Any

import pytest

from rlsrl.sizing.limits import broken_limits
from rlsrl.sizing.workload import Workload
from rlsrl.testing.workloads import REPLAYING, costs, pods, workload


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (pods(321), "a trainer takes 320 connections, and 321 actors would connect: bufferWorkers.replicas"),
        (pods(642, num_buffer_workers=2), "a buffer worker takes 320 connections, and 321 actors would connect"),
        (workload(actor_lanes=(1,) * 257, batch_lanes=257), "a trainer takes 256 connections"),
        (pods(8200, num_buffer_workers=100), "the coordinator takes 16384 connections, and workers would make 16501"),
        (workload(num_trainers=2, max_policy_lag=0), "a rollout has 8 environments, and a trainer's part of a batch 4"),
        (workload(actor_lanes=(16,), batch_lanes=24, max_policy_lag=0), "a rollout has 16 environments"),
        (pods(1, lane_bytes=1e7), "a rollout has 80 MB, and a message takes 67 MB: a smaller actors.rolloutLength"),
    ],
)  # fmt: skip
def test_a_broken_limit_is_reported_with_the_cure(given: Workload, said: str) -> None:
    (line,) = broken_limits(given, costs())

    assert line.startswith(said)


def test_heartbeats_that_take_most_of_the_coordinator_cannot_work() -> None:
    """100 workers, for each a heartbeat of 1 ms and a look at 50 leases of 100 us, once a second."""
    (line,) = broken_limits(pods(99), costs(heartbeat_seconds=1e-3, lease_scan_seconds=1e-4))

    assert line.startswith("heartbeats of 100 workers take 60% of the coordinator's core: fewer actors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_policy_lag": 0},
        {"batch_lanes": 768, "max_policy_lag": 1},
        {"num_policy_workers": 2, "ring_size": 2},
        {"num_buffer_workers": 2},
        {"actor_lanes": (2, 2, 1, 1), "batch_lanes": 6, "num_trainers": 2, "max_policy_lag": 0, "replay": REPLAYING},
    ],
)
def test_a_few_actors_are_within_every_limit(changes: dict[str, Any]) -> None:
    assert broken_limits(pods(64, **changes), costs(heartbeat_seconds=2e-4)) == []
