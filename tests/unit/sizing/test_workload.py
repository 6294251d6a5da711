from dataclasses import replace
from pathlib import Path

import pytest

from rlsrl.algorithms.gradients import MICROBATCH_ELEMENTS
from rlsrl.api.load import load_file
from rlsrl.api.spec import DqnSpec
from rlsrl.data.slots import rollout_layout
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.effort import NetworkEffort
from rlsrl.policies.products import Product
from rlsrl.sizing.traffic import Rates, traffic
from rlsrl.sizing.workload import EnvironmentSpeed, Hardware, ReplayWorkload, Workload, workload_of
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.testing.workloads import pods

EXAMPLES = Path(__file__).parents[3] / "examples"
ENV_SPEC = discrete_env_spec(num_features=4, num_actions=2)
POD = Hardware(bandwidth=1e9)
NETWORK = NetworkEffort(num_weights=1000, products=[Product(macs=900.0)], acting_macs=450.0, exported=True)


def of(name: str, *overrides: str, hardware: Hardware | None = None, env_spec: EnvSpec = ENV_SPEC) -> Workload:
    return workload_of(
        load_file(EXAMPLES / f"{name}.yaml", overrides).spec,
        env_spec,
        environment=EnvironmentSpeed(step_seconds=1e-6),
        network=NETWORK,
        hardware=hardware or Hardware(cores=2.0),
    )


def test_an_experiment_in_numbers() -> None:
    found = of("cartpole-policy-worker")

    assert found.actor_lanes == (16,)
    assert (found.ring_size, found.rollout_length, found.batch_lanes) == (2, 128, 8)
    assert (found.num_policy_workers, found.num_buffer_workers, found.num_trainers) == (1, 0, 1)
    assert found.num_minibatches == 4 * 8 * 128 // 256
    assert found.lane_bytes == rollout_layout(ENV_SPEC, num_steps=128, num_lanes=8).nbytes / 8
    assert (found.request_bytes, found.answer_bytes) == (16.0, 8.0)
    assert found.network.weight_bytes == 4000


def test_an_experiment_with_replay_in_numbers() -> None:
    """Half a minibatch for each of 8 x 16 env steps: a training step has those of a rollout, and gathering leads by two
    more."""
    found = of("cartpole-dqn")

    assert found.replay == ReplayWorkload(
        updates_per_env_step=0.5, updates_per_step=64, most_updates_behind=64 + 128, row_bytes=2 * 16 + 8
    )
    assert (found.num_minibatches, found.num_train_steps, found.rank_rows) == (64, 1, 64 * 64)
    assert found.update_work == DqnSpec().update_work
    assert (found.granted_share, found.batches_in_flight) == (1, 3)
    assert of("cartpole-dqn", "algorithm.dqn.replay.priorities={}").replay == replace(found.replay, by_priority=True)
    assert of("cartpole").replay is None


def test_many_updates_for_a_rollout_are_several_training_steps() -> None:
    found = of("cartpole-dqn", "actors.rolloutLength=128")

    assert (found.num_minibatches, found.num_train_steps) == (512, 8)
    assert found.versions_a_batch == 1, "one slot asks for a version"


def test_an_evaluator_that_plays_one_version_once_is_left_out() -> None:
    assert of("cartpole-evaluated").num_evaluators == 1
    assert of("cartpole-evaluated", "evaluators.parameters.tag=best").num_evaluators == 0


def test_memory_is_shared_on_one_machine_unless_grpc_is_asked_for() -> None:
    assert of("cartpole").shared_memory
    assert not of("cartpole", "transport=grpc").shared_memory
    assert not of("cartpole", hardware=POD).shared_memory


@pytest.mark.parametrize(
    ("mode", "lag", "compiled"),
    [("background", 1, True), ("background", 0, False), ("upfront", 0, True), ("off", 1, False)],
)
def test_steps_are_compiled_as_the_spec_says(mode: str, lag: int, compiled: bool) -> None:
    overrides = (f"trainers.compile='{mode}'", f"pacing.maxPolicyLag={lag}")

    assert of("cartpole", *overrides).compiled is compiled
    assert of("cartpole", *overrides, hardware=POD).compiled is compiled


def test_a_trainer_has_at_most_a_thread_for_each_core_of_its_machine() -> None:
    asked = "trainers.threads=4"

    assert of("cartpole").threads == 1
    assert of("cartpole", asked, hardware=Hardware(cores=2.0)).threads == 2
    assert of("cartpole", asked, hardware=POD).threads == 4, "the pod asks for its cores by itself"


def test_a_rank_shares_microbatches_of_large_observations_on_one_machine() -> None:
    large = discrete_env_spec(num_features=MICROBATCH_ELEMENTS // 256 + 1, num_actions=2)

    assert of("cartpole", env_spec=large).shares_microbatches
    assert not of("cartpole").shares_microbatches
    assert not of("cartpole", "trainers.compile='off'", env_spec=large).shares_microbatches
    assert not of("cartpole", "trainers.compile=upfront", env_spec=large, hardware=POD).shares_microbatches


def test_what_actors_send_is_what_trainers_receive() -> None:
    fleet = pods(10, num_trainers=2, num_buffer_workers=5)
    found = traffic(fleet, Rates(slots=100.0, versions=2.0))

    assert found["actor"].bytes_out * 10 == pytest.approx(found["buffer"].bytes_in * 5)
    assert found["buffer"].bytes_out * 5 == pytest.approx(found["trainer"].bytes_in * 2)
    assert found["trainer"].messages == pytest.approx(3 * 100 / 2 + 1)


def test_weights_go_from_the_coordinator_to_all_that_act() -> None:
    rates = Rates(slots=100.0, versions=2.0)
    weight_bytes = pods(10).network.weight_bytes
    inline = traffic(pods(10), rates)
    remote = traffic(pods(10, num_policy_workers=2, ring_size=2), rates)

    assert inline["coordinator"].bytes_out == 2 * 10 * weight_bytes
    assert remote["coordinator"].bytes_out == 2 * 2 * weight_bytes
    assert inline["actor"].bytes_in == 2 * weight_bytes


def test_environments_with_threads_send_a_message_each() -> None:
    rates = Rates(slots=100.0, versions=0.0)
    together = traffic(pods(10, num_policy_workers=2), rates)["policy"]
    alone = traffic(pods(10, num_policy_workers=2, environment_threads=True), rates)["policy"]
    lanes = pods(10).group_lanes
    beats = traffic(pods(10, num_policy_workers=2), Rates(slots=0.0, versions=0.0))["policy"].messages
    assert alone.messages - beats == pytest.approx(lanes * (together.messages - beats))
    assert alone.bytes_in == together.bytes_in


def test_policy_workers_get_a_request_a_step() -> None:
    fleet = pods(10, num_policy_workers=2, ring_size=2)
    found = traffic(fleet, Rates(slots=100.0, versions=0.0))

    # 100 slots of 32 steps, 4 environments each: over two workers, in and out, beside a heartbeat.
    assert found["policy"].messages == pytest.approx(2 * 100 * 32 / 2 + 1)
    assert found["policy"].bytes_in == pytest.approx(100 * 32 * 4 * 16 / 2)
    assert found["actor"].bytes_in == pytest.approx(100 * 32 * 4 * 8 / 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_seconds": -1.0},
        {"step_seconds": 0.0, "wait_seconds": -1.0},
        {"step_seconds": 1.0, "transition_share": 0.0},
    ],
)
def test_impossible_speeds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="times must be 0 or above"):
        EnvironmentSpeed(**wrong)
