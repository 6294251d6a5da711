import math
from itertools import pairwise
from typing import Any

import pytest

from rlsrl.policies.effort import NetworkEffort
from rlsrl.sizing.ceilings import ceilings
from rlsrl.sizing.simulation import Stuck, simulate
from rlsrl.sizing.workload import EnvironmentSpeed, Place, Workload
from rlsrl.testing.workloads import TYPICAL, costs, pods, workload

WORKLOADS = {
    "inline": workload(),
    "inline, lag 0": workload(max_policy_lag=0),
    "two ranks": workload(num_trainers=2),
    "uneven actors": workload(actor_lanes=(3, 2, 2, 2), batch_lanes=9, minibatch_size=288),
    "batches of half the fleet": workload(actor_lanes=(8,) * 4, batch_lanes=16, minibatch_size=512),
    "policy workers": workload(actor_lanes=(8, 8), batch_lanes=16, ring_size=2, num_policy_workers=2),
    "policy worker with small batches": workload(num_policy_workers=1, ring_size=2, max_batch_size=5),
    "waiting environments": workload(environment=EnvironmentSpeed(step_seconds=1e-5, wait_seconds=1e-3)),
    "pods": pods(12),
    "pods with buffer workers": pods(12, num_buffer_workers=3, num_trainers=2),
    "pods with everything": pods(12, num_buffer_workers=2, num_policy_workers=2, ring_size=2, max_policy_lag=3),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_was_produced_was_trained_or_is_in_flight(name: str) -> None:
    outcome = simulate(WORKLOADS[name], TYPICAL, num_batches=13)

    assert outcome.trained > 0
    assert outcome.produced == outcome.trained + outcome.in_flight


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_policy_lag_is_kept(name: str) -> None:
    assert simulate(WORKLOADS[name], TYPICAL).max_policy_lag <= WORKLOADS[name].max_policy_lag


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_faster_than_its_ceilings(name: str) -> None:
    # A window begins and ends at a training step; what was filled before it counts in it.
    rate = simulate(WORKLOADS[name], TYPICAL, num_batches=100).env_steps_a_second

    assert rate <= 1.03 * ceilings(WORKLOADS[name], TYPICAL)[0].env_steps_a_second


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_workloads_have_equal_outcomes(name: str) -> None:
    assert simulate(WORKLOADS[name], TYPICAL) == simulate(WORKLOADS[name], TYPICAL)


def rate_of(given: Workload, **cost: float) -> float:
    return simulate(given, costs(**cost)).env_steps_a_second


def test_one_bottleneck_gives_its_own_rate() -> None:
    """Steps that only the environment takes time for: 8 environments one after the other, 1 ms each."""
    slow = workload(environment=EnvironmentSpeed(step_seconds=1e-3))

    assert rate_of(slow) == pytest.approx(1000.0, rel=1e-6)


def test_a_trainer_that_is_the_bottleneck_gives_its_own_rate() -> None:
    """8 x 32 transitions in a step of 0.1 s."""
    assert rate_of(workload(environment=EnvironmentSpeed(step_seconds=1e-6)), step_seconds=0.1) == pytest.approx(2560.0)


def test_a_policy_worker_that_is_the_bottleneck_gives_its_own_rate() -> None:
    """One request at a time for 4 environments, 2 ms each."""
    asking = workload(
        environment=EnvironmentSpeed(step_seconds=1e-6), num_policy_workers=1, ring_size=2, max_batch_size=4
    )

    assert rate_of(asking, evaluation_seconds=2e-3) == pytest.approx(2000.0, rel=1e-3)


@pytest.mark.parametrize("num_actors", [1, 4, 16])
def test_environments_that_wait_give_the_latency_limit(num_actors: int) -> None:
    """No core is short: each actor steps 8 environments one after the other, 5 ms each."""
    sleeping = workload(
        environment=EnvironmentSpeed(step_seconds=0.0, wait_seconds=5e-3),
        actor_lanes=(8,) * num_actors,
        batch_lanes=8 * num_actors,
    )

    assert rate_of(sleeping) == pytest.approx(200.0 * num_actors, rel=1e-6)


def test_a_ring_hides_the_wait_for_answers() -> None:
    """A step computes 0.4 ms; an answer takes 0.4 ms: two groups in turn do in the one what the other waits."""
    steps = {"environment": EnvironmentSpeed(step_seconds=1e-4), "num_policy_workers": 1}
    alone = workload(actor_lanes=(4,), batch_lanes=4, minibatch_size=128, **steps)
    ring = workload(actor_lanes=(8,), ring_size=2, **steps)

    assert rate_of(alone, hop_seconds=2e-4) == pytest.approx(4 / 8e-4, rel=0.02)
    assert rate_of(ring, hop_seconds=2e-4) == pytest.approx(4 / 4e-4, rel=0.02)


def test_without_lag_gathering_and_training_take_turns() -> None:
    """Filling 8 x 32 steps takes 25.6 ms, training as long."""
    assert rate_of(workload(max_policy_lag=0), step_seconds=0.0256) == pytest.approx(256 / 0.0512, rel=1e-3)
    assert rate_of(workload(max_policy_lag=1), step_seconds=0.0256) == pytest.approx(256 / 0.0256, rel=1e-3)


def test_more_actors_are_never_slower_until_something_saturates_and_then_stay() -> None:
    """Pods: each new actor has a core of its own. The trainer takes 2 ms a batch of 16 x 32 transitions."""
    rates = [
        rate_of(pods(number, batch_lanes=16, minibatch_size=512, max_policy_lag=16), step_seconds=2e-3)
        for number in (1, 2, 4, 8, 16, 32, 64)
    ]

    assert all(after >= 0.999 * before for before, after in pairwise(rates))
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)
    assert rates[-1] == pytest.approx(16 * 32 / 2e-3, rel=0.01)


def test_a_slower_core_is_slower_by_as_much_where_it_is_the_bottleneck() -> None:
    fast, slow = (simulate(workload(place=Place(cores=cores)), TYPICAL).env_steps_a_second for cores in (1.0, 0.5))

    assert slow == pytest.approx(fast / 2, rel=0.02)


@pytest.mark.parametrize("num_actors", [1_000, 10_000])
def test_large_fleets_are_simulated_too(num_actors: int) -> None:
    outcome = simulate(pods(num_actors), TYPICAL)

    assert outcome.produced == outcome.trained + outcome.in_flight
    assert outcome.trained >= 4 * 8 * num_actors


def test_the_coordinator_saturates_where_weights_go_to_very_many() -> None:
    heavy: dict[str, Any] = {"transfer_seconds": 1e-3}
    few, many = (simulate(pods(number), costs(step_seconds=1e-4, **heavy)) for number in (4, 400))

    assert few.busy["coordinator"] < 0.5
    assert many.busy["coordinator"] == pytest.approx(1.0, abs=0.05)
    assert many.train_steps_a_second == pytest.approx(1 / 0.401, rel=0.05)


def test_buffer_workers_spread_every_rank_over_all_actors() -> None:
    """Without them each of 8 ranks grants first whom the others grant first, and a quarter of the actors work at a
    time: a rank's credits are for 2 of its batches, an eighth of the fleet each."""
    slow = EnvironmentSpeed(step_seconds=1e-3)
    direct = simulate(pods(32, num_trainers=8, environment=slow), costs())
    buffered = simulate(pods(32, num_trainers=8, num_buffer_workers=2, environment=slow), costs())

    assert direct.env_steps_a_second == pytest.approx(32_000 / 4, rel=0.02)
    assert buffered.env_steps_a_second == pytest.approx(32_000, rel=0.01)


def test_an_experiment_that_cannot_go_on_is_said_to_be_stuck() -> None:
    """No rank is ever granted a slot as wide as 8 lanes: its part of a batch has 4."""
    with pytest.raises(Stuck, match="after 0 training steps"):
        simulate(workload(num_trainers=2, max_policy_lag=0), costs())


def test_a_network_link_bounds_what_it_carries() -> None:
    """32 slots of 8 x 2000 bytes over 1 MB/s."""
    light = NetworkEffort(num_weights=1, forward_macs=1.0, acting_macs=1.0, exported=True)
    slow = pods(32, place=Place(bandwidth=1e6), network=light)
    outcome = simulate(slow, costs(), num_batches=50)

    assert outcome.env_steps_a_second == pytest.approx(1e6 / 2000 * 32, rel=0.05)
    assert math.isclose(ceilings(slow, costs())[0].env_steps_a_second, 1e6 / 2000 * 32)
