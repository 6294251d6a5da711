"""Lanes that request distributions: what the slot says of versions, and how waits end."""

from __future__ import annotations

import numpy as np
import pytest

from rlsrl.data.inference import RolloutResult
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.version import Version
from rlsrl.envs.threads import lane_of
from rlsrl.policies.lane_requests import LaneRequests, LanesAbandoned, RequestingLanes
from rlsrl.testing.rollouts import discrete_env_spec

NUM_STEPS, NUM_LANES = 2, 2
SPEC = discrete_env_spec()


def lanes_and_slot(requests: LaneRequests) -> tuple[RequestingLanes, Slot]:
    """Return lanes that have begun a slot."""
    lanes = RequestingLanes(
        SPEC, requests, number=1, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0)
    )
    layout = rollout_layout(SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES)
    slot = Slot(arrays=layout.view(bytearray(layout.nbytes)), min_version=Version(1, 1))
    lanes.begin(slot)
    for number, lane in enumerate(lanes.lanes):
        lane.begin(Slot(arrays=lane_of(slot.arrays, number)))
    return lanes, slot


def result(version: Version) -> RolloutResult:
    size = SPEC.action.distribution_size
    return RolloutResult(distribution=np.zeros((1, size), np.float32), version=version)


def test_a_step_has_the_oldest_version_of_its_lanes() -> None:
    requests = LaneRequests(NUM_LANES)
    lanes, slot = lanes_and_slot(requests)
    versions = {(0, 0): Version(1, 3), (0, 1): Version(1, 2), (1, 0): Version(1, 3), (1, 1): Version(2, 1)}
    for (step, number), version in versions.items():
        requests.answer(number, result(version))  # before the request: the lane does not wait
        lanes.lanes[number].act(step)
    lanes.finish()
    assert [*slot.arrays["version_attempt"]] == [1, 1]
    assert [*slot.arrays["version_step"]] == [2, 3]
    assert slot.oldest_version == Version(1, 2)
    assert (slot.arrays["behavior_log_prob"] < 0).all()


def test_requests_say_whose_they_are_and_which_weights_may_answer() -> None:
    requests = LaneRequests(NUM_LANES)
    lanes, _ = lanes_and_slot(requests)
    assert not requests
    for number in (1, 0):
        requests.answer(number, result(Version(1, 1)))
        lanes.lanes[number].act(0)
    assert requests
    asked = requests.take()
    assert [(each.lane, each.slot, each.request.min_version) for each in asked] == [
        (1, 1, Version(1, 1)),
        (0, 1, Version(1, 1)),
    ]
    assert [each.request.num_lanes for each in asked] == [1, 1]
    assert requests.take() == []


def test_no_lane_waits_once_the_requests_are_closed() -> None:
    requests = LaneRequests(NUM_LANES)
    lanes, _ = lanes_and_slot(requests)
    requests.close()
    for lane in lanes.lanes:
        with pytest.raises(LanesAbandoned):
            lane.act(0)
