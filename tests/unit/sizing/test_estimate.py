"""The estimate of an experiment's speed."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rlsrl.api.spec import UpdateWork
from rlsrl.policies.effort import NetworkEffort
from rlsrl.policies.products import MKL_OPERATIONS, Product
from rlsrl.sizing.ceilings import ceilings
from rlsrl.sizing.demands import Demand
from rlsrl.sizing.estimate import estimate, shared_seconds
from rlsrl.sizing.workload import EnvironmentSpeed, Hardware, Workload
from rlsrl.testing.workloads import REPLAYING, TYPICAL, costs, pods, workload

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
    "beside evaluators": workload(num_evaluators=2),
    "ten thousand pods": pods(10_000),
    "replay": workload(replay=REPLAYING),
    "replay, in turns": workload(replay=REPLAYING, max_policy_lag=0),
    "replay, two ranks": workload(replay=REPLAYING, actor_lanes=(4, 4), num_trainers=2),
    "replay, pods": pods(12, replay=REPLAYING),
}
SIMULATED = {
    "inline": 9431,
    "inline, lag 0": 8572,
    "two ranks": 7953,
    "uneven actors": 14763,
    "batches of half the fleet": 16170,
    "policy workers": 8995,
    "policy worker with small batches": 6700,
    "waiting environments": 985,
    "pods": 112617,
    "pods with buffer workers": 112617,
    "pods with everything": 54170,
}
"""Env steps a second by the discrete-event simulation that the closed form replaced (decision 0043), with ``TYPICAL``
costs. The simulation followed each slot, credit and version."""


def rate_of(given: Workload, **cost: float) -> float:
    return estimate(given, costs(**cost)).env_steps_a_second


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_faster_than_its_ceilings(name: str) -> None:
    rate = estimate(WORKLOADS[name], TYPICAL).env_steps_a_second

    assert 0 < rate <= 1.0001 * ceilings(WORKLOADS[name], TYPICAL)[0].env_steps_a_second


@pytest.mark.parametrize("name", SIMULATED)
def test_the_closed_form_agrees_with_a_simulation_of_every_slot(name: str) -> None:
    assert estimate(WORKLOADS[name], TYPICAL).env_steps_a_second == pytest.approx(SIMULATED[name], rel=0.08)


def test_one_bottleneck_gives_its_own_rate() -> None:
    """Steps for which only the environment takes time: 8 environments one after the other, 1 ms each."""
    slow = workload(environment=EnvironmentSpeed(step_seconds=1e-3))

    assert rate_of(slow) == pytest.approx(1000.0)


def test_a_trainer_that_is_the_bottleneck_gives_its_own_rate() -> None:
    """8 x 32 transitions in a step of 0.1 s."""
    assert rate_of(workload(environment=EnvironmentSpeed(step_seconds=1e-6)), step_seconds=0.1) == pytest.approx(2560.0)


def test_a_policy_worker_that_is_the_bottleneck_gives_its_own_rate() -> None:
    """One request at a time for 4 environments, 2 ms each."""
    asking = workload(
        environment=EnvironmentSpeed(step_seconds=1e-6), num_policy_workers=1, ring_size=2, max_batch_size=4
    )

    assert rate_of(asking, evaluation_seconds=2e-3) == pytest.approx(2000.0, rel=1e-3)


def test_a_policy_worker_that_threads_ask_is_the_bottleneck() -> None:
    """Each of 64 environments sends a request of its own, and the policy worker takes 1 ms for a message."""
    asking = workload(
        environment=EnvironmentSpeed(step_seconds=1e-6),
        num_policy_workers=1,
        environment_threads=True,
        actor_lanes=(8,) * 8,
        batch_lanes=64,
        max_batch_size=64,
    )

    assert rate_of(asking, answer_seconds=1e-3) == pytest.approx(1000.0, rel=0.1)
    (ceiling,) = [each for each in ceilings(asking, costs(answer_seconds=1e-3)) if each.role == "policy"]
    assert ceiling.env_steps_a_second == pytest.approx(1000.0, rel=1e-3)


@pytest.mark.parametrize("num_actors", [1, 4, 16])
def test_environments_that_wait_give_the_latency_limit(num_actors: int) -> None:
    """No core is short: each actor steps 8 environments one after the other, 5 ms each."""
    sleeping = workload(
        environment=EnvironmentSpeed(step_seconds=0.0, wait_seconds=5e-3),
        actor_lanes=(8,) * num_actors,
        batch_lanes=8 * num_actors,
    )

    assert rate_of(sleeping) == pytest.approx(200.0 * num_actors)


def test_an_actor_runs_again_some_time_after_each_wait() -> None:
    """8 environments wait for 5 ms each, and the actor runs 1 ms later. Environments that never wait cost nothing."""
    waits = workload(environment=EnvironmentSpeed(step_seconds=0.0, wait_seconds=5e-3))
    computes = workload(environment=EnvironmentSpeed(step_seconds=5e-3))

    assert rate_of(waits, wake_seconds=1e-3) == pytest.approx(1 / 6e-3)
    assert rate_of(computes, wake_seconds=1e-3) == pytest.approx(1 / 5e-3)


def test_environment_threads_wait_together_and_compute_one_after_the_other() -> None:
    """8 environments: each computes for 0.1 ms and waits for 5 ms, or for no time."""
    waits, computes = (
        workload(environment=EnvironmentSpeed(step_seconds=1e-4, wait_seconds=seconds), environment_threads=True)
        for seconds in (5e-3, 0.0)
    )

    assert rate_of(waits) == pytest.approx(8 / 5.1e-3)
    assert rate_of(computes) == pytest.approx(1 / 1e-4)


def test_environment_threads_wake_up_one_after_the_other() -> None:
    """8 environments: each computes for 0.1 ms, waits, and holds the interpreter for 0.5 ms while it wakes up."""
    long, short, never = (
        workload(environment=EnvironmentSpeed(step_seconds=1e-4, wait_seconds=seconds), environment_threads=True)
        for seconds in (5e-3, 1e-3, 0.0)
    )

    assert rate_of(long, wake_seconds=5e-4) == pytest.approx(8 / 5.6e-3), "the wait is longer than all others' turns"
    assert rate_of(short, wake_seconds=5e-4) == pytest.approx(8 / (8 * 1e-4 + 7 * 5e-4)), "the interpreter is busy"
    assert rate_of(never, wake_seconds=5e-4) == pytest.approx(1 / 1e-4)


def test_environment_threads_ask_policy_workers_one_by_one() -> None:
    """8 environments that wait for 5 ms. Each sends requests of its own, and waits for answers beside the others."""
    environment = EnvironmentSpeed(step_seconds=1e-4, wait_seconds=5e-3)
    threads = workload(environment=environment, environment_threads=True, num_policy_workers=1)
    groups = workload(environment=environment, num_policy_workers=1)

    assert (threads.request_lanes, threads.requests_a_step) == (1, 8)
    assert (groups.request_lanes, groups.requests_a_step) == (8, 1)
    assert rate_of(threads) == pytest.approx(8 / 5.1e-3)
    assert 800 < rate_of(threads, answer_seconds=1e-3) < 1000, "the policy worker's messages: 1 ms for each environment"
    assert rate_of(threads, ask_seconds=1e-3) == pytest.approx(1 / 1.1e-3), "the actor's"


def test_compiled_steps_have_costs_of_their_own() -> None:
    fast = {"environment": EnvironmentSpeed(step_seconds=1e-6)}

    assert rate_of(workload(**fast), minibatch_seconds=0.1) == pytest.approx(2560.0)
    assert rate_of(workload(**fast, compiled=True), compiled_minibatch_seconds=0.01) == pytest.approx(25600.0)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 1.0])
def test_with_replay_the_slower_of_gathering_and_training_decides(ratio: float) -> None:
    """An env step takes 1 ms, an update 5 ms."""
    pace = replace(REPLAYING, updates_per_env_step=ratio, most_updates_behind=2000)
    found = estimate(
        workload(environment=EnvironmentSpeed(step_seconds=1e-3), replay=pace), costs(minibatch_seconds=5e-3)
    )

    assert found.env_steps_a_second == pytest.approx(min(1000.0, 200.0 / ratio))
    assert found.train_steps_a_second == pytest.approx(found.env_steps_a_second * ratio / pace.updates_per_step)


def test_steps_that_only_reset_call_for_no_updates() -> None:
    fast = EnvironmentSpeed(step_seconds=1e-9, transition_share=0.5)

    assert rate_of(workload(environment=fast, replay=REPLAYING), minibatch_seconds=0.01) == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        ("drawn_row_seconds", 64e-4),
        ("priority_row_seconds", 64e-4),
        ("copied_byte_seconds", 64 * 40e-4),
        ("row_seconds", 64e-4),
        ("training_mac_seconds", 64 * (2 * 100 + 3 * 10) * 1e-4),
        ("minibatch_seconds", 1.5e-4),
        ("trained_weight_seconds", 10e-4),
        ("replay_step_seconds", 1e-4 / 16),
    ],
)
def test_an_update_costs_its_losses_its_rows_and_a_part_of_a_training_step(cost: str, seconds: float) -> None:
    """Of 64 drawn rows of 40 bytes. Slots and weights have next to none."""
    network = NetworkEffort(
        num_weights=0,
        products=[Product(macs=100.0)],
        acting_macs=0.0,
        exported=True,
        critic_products=[Product(macs=4.0), Product(macs=6.0)],
    )
    found = workload(
        environment=EnvironmentSpeed(step_seconds=1e-9),
        network=network,
        minibatch_size=64,
        lane_bytes=0.0,
        update_work=UpdateWork(losses=1.5, network_passes=2.0, critic_passes=3.0),
        replay=replace(REPLAYING, by_priority=True),
    )

    assert rate_of(found, **{cost: 1e-4}) == pytest.approx(2 / seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("product", "compiled", "cost"),
    [
        (Product(macs=MKL_OPERATIONS / 2 / 32), True, "training_mac_seconds"),
        (Product(macs=MKL_OPERATIONS / 2 / 32 + 1), True, "onednn_mac_seconds"),
        (Product(macs=MKL_OPERATIONS / 2 / 32 + 1), False, "training_mac_seconds"),
        (Product(macs=100.0, dense=False), False, "onednn_mac_seconds"),
        (Product(macs=100.0, dense=False, bfloat16=True), True, "bfloat16_mac_seconds"),
        (Product(macs=100.0, bfloat16=True), True, "bfloat16_mac_seconds"),
    ],
)
def test_a_product_costs_what_its_library_takes(product: Product, compiled: bool, cost: str) -> None:
    """Each of two ranks has half of the 64 rows of a minibatch."""
    found = workload(
        environment=EnvironmentSpeed(step_seconds=1e-9),
        network=NetworkEffort(num_weights=0, products=[product], acting_macs=0.0, exported=True),
        minibatch_size=64,
        num_trainers=2,
        compiled=compiled,
    )

    of_libraries = ("training_mac_seconds", "onednn_mac_seconds", "bfloat16_mac_seconds")
    rates = {name: rate_of(found, **{name: 1e-3}) for name in of_libraries}
    assert rates.pop(cost) == pytest.approx(2 / (product.macs * 1e-3), rel=1e-3)
    assert min(rates.values()) > 1e6, "the others have no part"


def test_draws_without_priorities_have_no_cost_of_them() -> None:
    fast = EnvironmentSpeed(step_seconds=1e-6)

    assert rate_of(workload(environment=fast, replay=REPLAYING), priority_row_seconds=1.0) > 1e5


def test_ranks_share_the_rows_of_each_minibatch() -> None:
    fast = {"environment": EnvironmentSpeed(step_seconds=1e-9), "minibatch_size": 64, "replay": REPLAYING}
    both = workload(actor_lanes=(4, 4), num_trainers=2, **fast)

    assert rate_of(both, row_seconds=1e-4) == pytest.approx(2 * rate_of(workload(**fast), row_seconds=1e-4), rel=1e-3)
    assert both.num_collective_calls == 128 + 4 * 128 / 16


def test_replay_with_a_lag_of_0_gathers_and_trains_in_turn() -> None:
    """A rollout of 8 x 32 steps takes 25.6 ms, and its 128 updates as long."""
    turns, both = (workload(max_policy_lag=lag, replay=REPLAYING) for lag in (0, 1))

    assert rate_of(turns, minibatch_seconds=2e-4) == pytest.approx(256 / 0.0512, rel=1e-3)
    assert rate_of(both, minibatch_seconds=2e-4) == pytest.approx(256 / 0.0256, rel=1e-3)


def test_actors_wait_where_training_may_be_behind_by_little() -> None:
    """With the least bound of four actors, one rollout and a training step, one of them gathers at a time."""
    least = replace(REPLAYING, most_updates_behind=16 + 128)
    four = {"actor_lanes": (8,) * 4, "batch_lanes": 32, "hardware": Hardware()}

    assert rate_of(workload(replay=least, **four)) == pytest.approx(1e4, rel=0.01)
    assert rate_of(workload(replay=replace(least, most_updates_behind=16 + 4 * 128), **four)) == pytest.approx(4e4)


def test_an_idle_core_shares_the_training_and_a_busy_one_does_not() -> None:
    """Training takes 100 ms of a core, filling next to nothing or as long."""
    idle = workload(environment=EnvironmentSpeed(step_seconds=1e-9), shares_microbatches=True)
    busy = workload(environment=EnvironmentSpeed(step_seconds=0.1 / 256), shares_microbatches=True)

    assert rate_of(idle, step_seconds=0.1) == pytest.approx(5120.0, rel=1e-3)
    assert rate_of(busy, step_seconds=0.1) == pytest.approx(2560.0, rel=1e-3)


def test_threads_divide_the_rows_among_idle_cores() -> None:
    """Rows take 256 ms an epoch: with four threads a quarter, and 5 ms a minibatch until all are done. Calls take 1 ms.

    On two cores it takes twice as long.
    """
    found = {
        number: workload(environment=EnvironmentSpeed(step_seconds=1e-9), threads=number, hardware=Hardware(cores=4.0))
        for number in (1, 4)
    }
    crowded = replace(found[4], hardware=Hardware(cores=2.0))
    cost = {"row_seconds": 1e-3, "minibatch_seconds": 1e-3, "join_seconds": 5e-3}
    rows, minibatches = found[1].rank_rows, found[1].num_minibatches

    assert rate_of(found[1], **cost) == pytest.approx(256 / (rows * 1e-3 + minibatches * 1e-3), rel=1e-3)
    threaded = rows * 1e-3 / 4 + minibatches * 6e-3
    assert rate_of(found[4], **cost) == pytest.approx(256 / threaded, rel=1e-3)
    assert rate_of(crowded, **cost) == pytest.approx(256 / (2 * threaded), rel=1e-3)
    assert ceilings(crowded, costs(**cost))[0].part == "machine"


def test_an_evaluator_takes_its_share_of_a_machine_and_none_of_a_pod() -> None:
    """An actor and an evaluator share one core; the trainer takes no time."""
    alone, beside = (workload(hardware=Hardware(cores=1.0), num_evaluators=number) for number in (0, 1))

    assert rate_of(beside) == pytest.approx(rate_of(alone) / 2)
    assert ceilings(beside, costs())[0].env_steps_a_second == pytest.approx(rate_of(beside))
    assert rate_of(pods(2, num_evaluators=1)) == pytest.approx(rate_of(pods(2)))


def test_a_ring_hides_the_wait_for_answers() -> None:
    """A step computes 0.4 ms and an answer takes 0.4 ms: with two groups the actor computes while it waits."""
    steps = {"environment": EnvironmentSpeed(step_seconds=1e-4), "num_policy_workers": 1}
    alone = workload(actor_lanes=(4,), batch_lanes=4, minibatch_size=128, **steps)
    ring = workload(actor_lanes=(8,), ring_size=2, **steps)

    assert rate_of(alone, hop_seconds=2e-4) == pytest.approx(4 / 8e-4, rel=0.02)
    assert rate_of(ring, hop_seconds=2e-4) == pytest.approx(4 / 4e-4, rel=0.02)


def test_requests_of_two_actors_meet_at_a_policy_worker() -> None:
    """A step computes 1 ms and an answer takes 1 ms. With a second actor a request meets 0.62 others on average: the
    answer takes a = 1 + a / (1 + a) milliseconds, the golden ratio."""
    steps = {"environment": EnvironmentSpeed(step_seconds=1e-3 / 8), "num_policy_workers": 1}
    alone, both = (rate_of(pods(number, hardware=Hardware(), **steps), answer_seconds=1e-3) for number in (1, 2))

    assert alone == pytest.approx(8 / 2e-3, rel=1e-3)
    assert both == pytest.approx(2 * 8 / (1e-3 + (1 + math.sqrt(5)) / 2 * 1e-3), rel=1e-3)


def test_without_lag_gathering_and_training_take_turns() -> None:
    """Filling 8 x 32 steps takes 25.6 ms, and training as long."""
    assert rate_of(workload(max_policy_lag=0), step_seconds=0.0256) == pytest.approx(256 / 0.0512, rel=1e-3)
    assert rate_of(workload(max_policy_lag=1), step_seconds=0.0256) == pytest.approx(256 / 0.0256, rel=1e-3)


def test_a_slot_of_two_batches_takes_turns_with_their_training() -> None:
    """The next slot of 8 x 32 steps needs the weights of the step before its second batch. Filling half a slot takes
    12.8 ms, and training on it as long."""
    wide = workload(batch_lanes=4, minibatch_size=128)

    assert rate_of(wide, step_seconds=0.0128) == pytest.approx(128 / 0.0256, rel=1e-3)
    assert rate_of(replace(wide, max_policy_lag=2), step_seconds=0.0128) == pytest.approx(128 / 0.0128, rel=1e-3)


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
    steady = replace(TYPICAL, full_load_speed=1.0, crowded_speed=1.0)
    fast, slow = (estimate(workload(hardware=Hardware(cores=cores)), steady) for cores in (1.0, 0.5))

    assert slow.env_steps_a_second == pytest.approx(fast.env_steps_a_second / 2, rel=0.02)


def test_the_coordinator_saturates_where_weights_go_to_very_many() -> None:
    heavy: dict[str, Any] = {"transfer_seconds": 1e-3}
    few, many = (estimate(pods(number), costs(step_seconds=1e-4, **heavy)) for number in (4, 400))

    assert few.busy["coordinator"] < 0.5
    assert many.busy["coordinator"] == pytest.approx(1.0, abs=0.05)
    assert many.train_steps_a_second == pytest.approx(1 / 0.401, rel=0.05)


def test_buffer_workers_spread_every_rank_over_all_actors() -> None:
    """Without them all ranks grant to the same actors first, and a quarter of the 32 actors works at a time: a rank's
    credits are for 2 of its batches, an eighth of the fleet each."""
    slow = EnvironmentSpeed(step_seconds=1e-3)
    direct = estimate(pods(32, num_trainers=8, environment=slow), costs())
    buffered = estimate(pods(32, num_trainers=8, num_buffer_workers=2, environment=slow), costs())

    assert direct.env_steps_a_second == pytest.approx(32_000 / 4, rel=0.02)
    assert buffered.env_steps_a_second == pytest.approx(32_000, rel=0.01)


def test_a_network_link_bounds_what_it_carries() -> None:
    """32 slots of 8 x 2000 bytes over 1 MB/s."""
    light = NetworkEffort(num_weights=1, products=[Product(macs=1.0)], acting_macs=1.0, exported=True)
    slow = pods(32, hardware=Hardware(bandwidth=1e6), network=light)

    assert rate_of(slow) == pytest.approx(1e6 / 2000 * 32, rel=0.05)
    assert math.isclose(ceilings(slow, costs())[0].env_steps_a_second, 1e6 / 2000 * 32)


def demand(computing: float, *, workers: int = 1, waiting: float = 0.0) -> Demand:
    return Demand(part="actors", role="actor", workers=workers, computing=computing, waiting=waiting)


@pytest.mark.parametrize(
    ("cores", "found", "seconds"),
    [
        (2.0, [], 0.0),
        (2.0, [demand(1.0)], 1.0),
        (2.0, [demand(1.0), demand(3.0)], 3.0),
        # Three share two cores for 1.5 s; then the long one has a core for itself.
        (2.0, [demand(1.0, workers=2), demand(3.0)], 3.5),
        (1.0, [demand(1.0), demand(1.0)], 2.0),
        (float("inf"), [demand(1.0, workers=100), demand(2.0)], 2.0),
        # Each computes for half of its time, so that two fit on one core.
        (1.0, [demand(1.0, workers=2, waiting=1.0)], 2.0),
        (0.5, [demand(1.0)], 2.0),
    ],
)
def test_cores_are_shared_equally_until_the_last_is_done(cores: float, found: list[Demand], seconds: float) -> None:
    assert shared_seconds(found, cores=cores) == pytest.approx(seconds)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_processes_beyond_the_cores_slow_all_down(share: float) -> None:
    """On two cores beside two that compute all the time, a third process computes always or half of the time."""
    others, third = demand(1.0, workers=2), demand(share, waiting=1.0 - share)
    steady, crowded = (
        shared_seconds([others, third], cores=2.0, full_load_speed=0.8, crowded_speed=speed) for speed in (0.8, 0.6)
    )

    assert steady == shared_seconds([others, third], cores=2.0, full_load_speed=0.8)
    assert crowded > steady
    if share == 1.0:
        assert crowded == pytest.approx(1.5 / 0.6)


def test_ranks_wait_for_each_other_without_a_core() -> None:
    """Two ranks and 8 collective calls of a tenth of a second: 4 minibatches and 4 agreements."""
    both = workload(num_trainers=2, environment=EnvironmentSpeed(step_seconds=1e-6), max_policy_lag=0)

    calls = both.num_collective_calls
    assert calls == both.num_minibatches + 4
    waits = 1 / rate_of(both, reduce_wait_seconds=0.1) - 1 / rate_of(both)
    assert waits * both.batch_transitions == pytest.approx(0.1 * calls, rel=0.01)
    assert workload(num_trainers=1).num_collective_calls == 0


def test_full_cores_are_slower_and_one_that_is_alone_is_not() -> None:
    alone, both = [demand(1.0)], [demand(1.0, workers=2)]

    assert shared_seconds(alone, cores=2.0, full_load_speed=0.8) == pytest.approx(1.0)
    assert shared_seconds(both, cores=2.0, full_load_speed=0.8) == pytest.approx(1.25)
