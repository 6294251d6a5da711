import json
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from rlsrl.api.live import name_of
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.placement import Placement, cluster_placement, local_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.resolved import (
    ActorConfig,
    BufferConfig,
    CoordinatorConfig,
    EvaluatorConfig,
    ObjectStoreConfig,
    ParameterStoreConfig,
    PolicyWorkerConfig,
    TrainerConfig,
)
from rlsrl.api.spec import Mlp, Network, ParameterVersions, PpoSpec, Stop, WorkerEnvironment
from rlsrl.streams.handshake import MAX_SLOTS
from rlsrl.workers.build.actor import _exploration, _exponents

ConfigT = TypeVar("ConfigT")
PLACEMENT = local_placement(run_uid="0f3a", run_folder=PurePosixPath("/runs/one"))


def resolved(*overrides: str, placement: Placement = PLACEMENT) -> ResolvedExperiment:
    text = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: one}
spec:
  environment: {id: CartPole-v1, kwargs: {sutton_barto_reward: true}}
  actors: {environments: 8, replicas: 2}
  stop: {returnMean: 475}
"""
    return resolve(load_text(text, overrides=overrides), placement)


def config_of(experiment: ResolvedExperiment, kind: type[ConfigT]) -> ConfigT:
    (config,) = (config for config in experiment.configs.values() if isinstance(config, kind))
    return config


def test_each_role_has_the_config_that_it_needs() -> None:
    experiment = resolved("seed=3", "algorithm.ppo.epochs=2", "pacing.maxPolicyLag=2", "parameters.keepLast=7")

    environment = WorkerEnvironment(id="CartPole-v1", kwargs={"sutton_barto_reward": True})
    network = Network(mlp=Mlp())
    for config in (experiment.coordinator, experiment.trainer, experiment.actor):
        assert (config.experiment, config.run_uid, config.seed) == ("one", "0f3a", 3)
        assert config.coordinator_address == "unix-abstract:rlsrl-0f3a-coordinator"
        assert config.metrics_address == "127.0.0.1:0"
        assert (config.log_folder, config.ledger_folder) == ("/runs/one/logs", "/runs/one/ledger")
        assert config.heartbeat_seconds < experiment.coordinator.lease_seconds
    assert experiment.coordinator.http_address == "127.0.0.1:0"
    assert experiment.coordinator.roster_path == "/runs/one/roster.json"
    assert experiment.coordinator.record_folder == "/runs/one"
    assert experiment.coordinator.parameter_store == experiment.trainer.parameter_store
    assert (experiment.coordinator.num_actors, experiment.coordinator.num_trainers) == (2, 1)
    trainer = experiment.trainer
    assert (trainer.environment, trainer.network, trainer.algorithm.chosen) == (environment, network, PpoSpec(epochs=2))
    assert (trainer.rollout_length, trainer.batch_lanes) == (128, 8)
    assert (trainer.max_policy_lag, trainer.num_producers) == (2, 2)
    assert (trainer.policy_name, trainer.parameter_store.folder) == ("default", "/runs/one/parameters")
    assert (trainer.versions, trainer.stop) == (ParameterVersions(keep_last=7), Stop(return_mean=475.0))
    assert trainer.num_trainers == 1
    actor = experiment.actor
    assert (actor.environment, actor.network, actor.rollout_length) == (environment, network, 128)
    assert actor.samples_endpoints == trainer.samples_endpoints == ("rlsrl-0f3a-trainer-0",)
    assert actor.parameters_endpoint == trainer.parameters_endpoint == "rlsrl-0f3a-parameters"
    assert actor.policy_name == trainer.policy_name
    assert (experiment.coordinator.num_actors, experiment.warnings) == (2, ())


@pytest.mark.parametrize(
    ("overrides", "num_actors", "lanes", "batch", "warning"),
    [
        ([], 2, [4, 4], 8, ""),
        (["actors.replicas=1"], 1, [8], 8, ""),
        (["actors.replicas=3"], 3, [3, 3, 2], 8, "do not divide evenly"),
        (["actors.replicas=16"], 8, [1] * 8, 8, "8 of 16 workers"),
        (["actors={environmentsPerActor: 6, replicas: 4}"], 4, [6, 6, 6, 6], 24, ""),
        (["actors={environmentsPerActor: 6, replicas: 4}", "trainers.batchEnvironments=12"], 4, [6] * 4, 12, ""),
    ],
)
def test_environments_are_spread_over_actors(
    overrides: list[str], num_actors: int, lanes: list[int], batch: int, warning: str
) -> None:
    experiment = resolved(*overrides)

    assert experiment.coordinator.num_actors == experiment.trainer.num_producers == num_actors
    assert experiment.actor.num_actors == (None if experiment.actor.environments is None else num_actors)
    assert [len(experiment.actor.environment_ranks_of(index)) for index in range(num_actors)] == lanes
    ranks = [rank for index in range(num_actors) for rank in experiment.actor.environment_ranks_of(index)]
    assert ranks == list(range(sum(lanes)))
    assert experiment.trainer.batch_lanes == batch
    assert bool(experiment.warnings) == bool(warning)
    assert all(warning in each for each in experiment.warnings)


def test_over_grpc_samples_go_directly_and_weights_through_the_coordinator() -> None:
    experiment = resolved("transport=grpc", "policyWorkers={}")
    policy = config_of(experiment, PolicyWorkerConfig)
    endpoints = [config.parameters_endpoint for config in (experiment.trainer, experiment.actor, policy)]
    assert (endpoints, experiment.trainer.publishes_live) == ([None] * 3, True)
    samples = ("unix-abstract:rlsrl-0f3a-trainer-0",)
    assert experiment.actor.samples_endpoints == experiment.trainer.samples_endpoints == samples
    experiment = resolved("policyWorkers={}")
    assert experiment.trainer.parameters_endpoint is not None
    assert not experiment.trainer.publishes_live


def test_without_policy_workers_actors_evaluate_the_policy() -> None:
    experiment = resolved()
    assert "policy" not in experiment.configs
    assert experiment.coordinator.num_policy_workers == 0
    assert (experiment.actor.inference_endpoints, experiment.actor.ring_size) == ((), 1)
    assert experiment.trainer.slots_per_producer == 2


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], "background"),
        (["trainers.compile=upfront"], "upfront"),
        (['trainers.compile="off"'], "off"),
        (["pacing.maxPolicyLag=0"], "off"),
        (["pacing.maxPolicyLag=0", "trainers.compile=upfront"], "upfront"),
    ],
)
def test_a_reproducible_run_does_not_compile_in_the_background(overrides: list[str], mode: str) -> None:
    assert resolved(*overrides).trainer.compile == mode


def test_actors_have_the_endpoints_of_policy_workers() -> None:
    experiment = resolved(
        "policyWorkers={replicas: 2, maxBatchSize: 32, parameterPullSeconds: 0.1}", "actors.ringSize=4", "seed=3"
    )
    policy = config_of(experiment, PolicyWorkerConfig)
    assert policy.inference_endpoints == experiment.actor.inference_endpoints
    assert len(set(policy.inference_endpoints)) == experiment.coordinator.num_policy_workers == 2
    assert (policy.max_batch_size, policy.parameter_pull_seconds, policy.seed) == (32, 0.1, 3)
    assert policy.parameters_endpoint == experiment.trainer.parameters_endpoint
    assert (policy.environment, policy.network) == (experiment.trainer.environment, experiment.trainer.network)
    assert experiment.actor.ring_size == 4
    assert experiment.trainer.slots_per_producer == 8


def test_without_buffer_workers_actors_post_to_every_trainer() -> None:
    experiment = resolved("trainers.replicas=2", "actors.replicas=2")
    assert "buffer" not in experiment.configs
    assert experiment.coordinator.num_buffer_workers == 0
    assert experiment.actor.consumers_of(1) == dict(enumerate(experiment.trainer.samples_endpoints))
    assert (experiment.trainer.takes_from_buffers, experiment.trainer.num_producers) == (False, 2)
    assert experiment.actor.consumer_role == "trainer"


REPLAY = ("algorithm={dqn: {minibatchSize: 48, replay: {start: 100}}}", "pacing={trainStepsPerEnvStep: 0.25}")


def test_with_replay_each_actor_has_a_home_trainer_and_each_trainer_a_part_of_the_pace() -> None:
    overrides = (*REPLAY, "actors={environments: 24, replicas: 6, rolloutLength: 8}")
    one, three = (resolved(*overrides, f"trainers.replicas={number}") for number in (1, 3))
    assert [list(one.actor.consumers_of(index)) for index in range(6)] == [[0]] * 6
    endpoints = three.trainer.samples_endpoints
    homes = [three.actor.consumers_of(index) for index in range(6)]
    assert homes == [{rank: endpoints[rank]} for rank in (0, 1, 2, 0, 1, 2)]
    assert (one.trainer.num_producers, three.trainer.num_producers) == (6, 2)
    assert one.trainer.replay is not None
    assert three.trainer.replay is not None
    assert one.trainer.replay.updates_per_env_step == 0.25
    assert three.trainer.replay.updates_per_env_step == 3 * 0.25
    assert one.trainer.replay.updates_per_step == 8, "4 environments x 8 steps x 0.25"
    assert three.trainer.replay.updates_per_step == 24, "so many of each trainer"
    assert one.trainer.replay.most_updates_behind == 8 + 2 * 24 * 8 / 4
    assert three.trainer.replay.most_updates_behind == 24 + 2 * 8 * 8 * 3 / 4
    in_turn = resolved(*overrides, "trainers.replicas=3", "pacing.maxPolicyLag=0").trainer.replay
    assert in_turn is not None
    assert in_turn.lanes_in_turn == 8


THIRTEEN = ("actors={environments: 13, replicas: 4, rolloutLength: 8}",)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("actors={environments: 12, replicas: 4}",), None),
        (("actors={environments: 13, replicas: 4}",), None),
        (("actors={environments: 12, replicas: 3}",), "actors.replicas: 3 actors with environments cannot be shared"),
        (("actors={environments: 3, replicas: 4}",), "actors.replicas: 3 actors with environments cannot be shared"),
        ((*THIRTEEN, "algorithm.dqn.replay={start: 1, capacity: 224}"), None),
        (
            (*THIRTEEN, "algorithm.dqn.replay={start: 1, capacity: 223}"),
            "capacity: 223 is less than start, 1, or two rollouts of each environment\n    allowed: integer >= 224",
        ),
        (("actors={environments: 12, replicas: 2}", "pacing.maxPolicyLag=0"), None),
        (
            ("actors={environments: 13, replicas: 4}", "pacing.maxPolicyLag=0"),
            "trainers.replicas: 2 trainers take turns with their actors, and cannot have equal parts of 13",
        ),
    ],
)
def test_with_replay_trainers_share_the_actors(overrides: tuple[str, ...], problem: str | None) -> None:
    def load() -> ResolvedExperiment:
        return resolved(*REPLAY, "trainers.replicas=2", *overrides)

    if problem is None:
        assert load().trainer.num_trainers == 2
        return
    with pytest.raises(SpecError) as raised:
        load()
    assert problem in str(raised.value)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_buffer_workers_stand_between_actors_and_trainers(transport: str) -> None:
    experiment = resolved(
        "bufferWorkers.replicas=2", "actors.replicas=4", "trainers.replicas=2", f"transport={transport}"
    )
    buffer = config_of(experiment, BufferConfig)
    assert experiment.coordinator.num_buffer_workers == len(set(buffer.buffer_endpoints)) == 2
    assert [experiment.actor.consumers_of(index) for index in range(4)] == [
        {index % 2: buffer.buffer_endpoints[index % 2]} for index in range(4)
    ]
    assert buffer.samples_endpoints == experiment.trainer.samples_endpoints
    assert len({*buffer.buffer_endpoints, *buffer.samples_endpoints}) == 4
    assert all(("unix-abstract:" in each) == (transport == "grpc") for each in buffer.buffer_endpoints)
    assert (buffer.num_actors, buffer.slots_per_actor, buffer.lanes_per_slot) == (2, 2, 2)
    assert (experiment.trainer.num_producers, experiment.trainer.slots_per_producer) == (2, 4)
    assert experiment.trainer.takes_from_buffers
    assert experiment.actor.consumer_role == "buffer"
    assert buffer.has_discounted_return == (experiment.actor.return_discount is not None)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_buffer_workers_keep_the_transitions_of_an_algorithm_that_replays(transport: str) -> None:
    roles = ("bufferWorkers.replicas=4", "actors.replicas=4", "trainers.replicas=2")
    experiment = resolved(*REPLAY, *roles, f"transport={transport}")
    buffer, trainer = config_of(experiment, BufferConfig), experiment.trainer
    assert buffer.replay is not None
    assert trainer.replay is not None
    assert trainer.replay.num_shards == 2
    assert buffer.replay.algorithm == trainer.algorithm
    assert (buffer.replay.folder, buffer.replay.volume) == (trainer.replay.folder, None)
    assert [buffer.trainer_of(index) for index in range(4)] == 2 * [*trainer.samples_endpoints]
    assert all("unix-abstract:" in each for each in trainer.samples_endpoints), "shards speak gRPC"
    assert [[*experiment.actor.consumers_of(index)] for index in range(4)] == [[0], [1], [2], [3]]
    alone = resolved(*REPLAY)
    assert alone.trainer.replay is not None
    assert alone.trainer.replay.num_shards == 0
    assert config_of(resolved(*roles), BufferConfig).replay is None


def test_store_and_ledger_page_of_a_buffer_worker_are_in_one_folder_of_its_volume() -> None:
    """A store is used again only with the page of the life that wrote it."""
    placement = cluster_placement(run_uid="5b1e", coordinator_host="one-coordinator.lab", state_folder="/state")
    buffer = config_of(resolved(*REPLAY, "bufferWorkers.replicas=1", placement=placement), BufferConfig)
    assert buffer.replay is not None
    assert buffer.replay.volume == "/state"
    assert (buffer.replay.folder, buffer.ledger_folder) == ("/state/5b1e/replay", "/state/5b1e/ledger")


def test_a_buffer_worker_of_many_actors_asks_for_at_most_the_slots_of_a_stream() -> None:
    experiment = resolved(
        "bufferWorkers={}", "actors={replicas: 100, environmentsPerActor: 1}", "trainers.batchEnvironments=8"
    )
    assert experiment.trainer.slots_per_producer == MAX_SLOTS == 64


def test_evaluators_step_environments_side_by_side_that_wait() -> None:
    def steps_side_by_side(*overrides: str) -> bool:
        return config_of(resolved("evaluators={}", *overrides), EvaluatorConfig).side_by_side

    assert not steps_side_by_side()
    assert steps_side_by_side("actors.vectorization=threads")
    assert steps_side_by_side("environment={http: {url: 'http://localhost:8000'}}")


def test_without_evaluators_there_is_no_evaluator_config() -> None:
    experiment = resolved()

    assert "evaluator" not in experiment.configs
    assert experiment.coordinator.num_evaluators == 0


@pytest.mark.parametrize(
    ("evaluators", "each", "max_steps_each", "warning"),
    [
        ("{}", 10, 1_000_000, ""),
        ("{environments: 8, replicas: 2, maxSteps: 100}", 4, 12, ""),
        ("{environments: 7, replicas: 2, maxSteps: 100}", 3, 16, "7 environments do not divide evenly over 2"),
        ("{environments: 2, replicas: 4, maxSteps: 100}", 1, 25, "each steps 1, together 4"),
    ],
)
def test_evaluators_share_environments_and_steps(evaluators: str, each: int, max_steps_each: int, warning: str) -> None:
    experiment = resolved(f"evaluators={evaluators}", "evaluators.everySeconds=5", "evaluators.greedy=false", "seed=3")

    evaluator = config_of(experiment, EvaluatorConfig)
    assert experiment.coordinator.num_evaluators == evaluator.num_evaluators
    assert (evaluator.environments, evaluator.max_steps_per_environment) == (each, max_steps_each)
    assert (evaluator.episodes_per_environment, evaluator.every_seconds, evaluator.every_versions) == (2, 5.0, None)
    assert (evaluator.greedy, evaluator.seed, evaluator.environment) == (False, 3, experiment.trainer.environment)
    assert (evaluator.policy_name, evaluator.parameter_store) == ("default", experiment.trainer.parameter_store)
    assert bool(experiment.warnings) == bool(warning)
    assert all(warning in text for text in experiment.warnings)
    assert ResolvedExperiment.from_json(experiment.to_json()) == experiment


@pytest.mark.parametrize("parameters", ['{version: "1.2500"}', "{tag: best}", "{file: /models/best.safetensors}"])
def test_the_evaluator_gets_its_fixed_version(parameters: str) -> None:
    experiment = resolved(f"evaluators.parameters={parameters}")

    fixed = config_of(experiment, EvaluatorConfig).parameters
    assert fixed is not None
    assert fixed.model_dump(exclude_none=True) == yaml.safe_load(parameters)
    assert config_of(resolved("evaluators={}"), EvaluatorConfig).parameters is None
    assert ResolvedExperiment.from_json(experiment.to_json()) == experiment


def test_every_run_has_its_own_prefix_in_an_object_store() -> None:
    store = "{url: 's3://bucket/team/', endpoint: 'http://127.0.0.1:9000', region: eu-central-1, answerSeconds: 5}"
    experiment = resolved(f"parameters.store={{objectStore: {store}}}", "evaluators={}")

    for config in (experiment.coordinator, experiment.trainer, config_of(experiment, EvaluatorConfig)):
        assert config.parameter_store == ParameterStoreConfig(
            object_store=ObjectStoreConfig(
                url="s3://bucket/team/one-0f3a",
                endpoint="http://127.0.0.1:9000",
                region="eu-central-1",
                answer_seconds=5.0,
            )
        )
    assert ResolvedExperiment.from_json(experiment.to_json()) == experiment


def test_the_roles_that_normalise_have_the_normalisation_config() -> None:
    plain = resolved()
    assert (plain.trainer.normalize_observations, plain.actor.return_discount) == (False, None)
    experiment = resolved(
        "policy.normalizeObservations=true", "algorithm.ppo.normalizeRewards=true", "algorithm.ppo.discount=0.9"
    )
    assert experiment.trainer.normalize_observations
    assert experiment.trainer.algorithm.chosen.normalize_rewards
    assert experiment.actor.return_discount == 0.9


def test_algorithms_that_replay_normalise_too() -> None:
    experiment = resolved(
        "policy.normalizeObservations=true",
        "algorithm={sac: {normalizeRewards: true, discount: 0.9}}",
        "pacing.trainStepsPerEnvStep=1",
    )
    assert experiment.trainer.normalize_observations
    assert experiment.actor.return_discount == 0.9


def test_an_index_beyond_a_spread_total_has_no_environments() -> None:
    with pytest.raises(IndexError, match="worker 2"):
        resolved().actor.environment_ranks_of(2)


def test_environments_per_actor_allow_more_actors() -> None:
    actor = resolved("actors={environmentsPerActor: 6, replicas: 2}").actor

    assert actor.environment_ranks_of(7) == range(42, 48)
    with pytest.raises(IndexError):
        actor.environment_ranks_of(-1)


@pytest.mark.parametrize("environments", ["environments: 12", "environmentsPerActor: 6"])
def test_actors_know_the_number_of_all_environments_where_the_environment_gets_its_place(environments: str) -> None:
    actor = resolved(f"actors={{{environments}, replicas: 2}}", "environment.passPlace=true").actor
    assert actor.num_environments == 12
    assert actor.environment_ranks_of(1) == range(6, 12)
    with pytest.raises(IndexError, match="2 is not one of the 2 that have environments"):
        actor.environment_ranks_of(2)


@pytest.mark.parametrize(
    ("environment", "same"),
    [("{id: A-v0}", True), ("{id: A-v0, kwargsByRank: {addRank: {port: 9000}}}", True),
     ("{id: A-v0, passPlace: true}", False)],
)  # fmt: skip
def test_the_number_of_actors_changes_the_config_only_of_environments_that_get_it(environment: str, same: bool) -> None:
    before, after = (
        resolved(f"actors={{environmentsPerActor: 6, replicas: {number}}}", f"environment={environment}").actor
        for number in (2, 3)
    )
    assert (name_of(before) == name_of(after)) is same


@pytest.mark.parametrize("environments", ["environments: 12", "environmentsPerActor: 6"])
@pytest.mark.parametrize("spread", [0, 7])
def test_actors_whose_environments_have_epsilons_of_their_own_know_how_many_there_are(
    environments: str, spread: int
) -> None:
    dqn = f"algorithm={{dqn: {{epsilonSpread: {spread}}}}}"
    actor = resolved(dqn, "pacing={trainStepsPerEnvStep: 1}", f"actors={{{environments}, replicas: 2}}").actor
    assert actor.epsilon_spread == spread
    assert (actor.num_environments == 12) is bool(spread or environments == "environments: 12")
    exponents = [_exponents(actor, actor.environment_ranks_of(index)) for index in range(2)]
    if spread:
        assert all(each is not None for each in exponents)
        np.testing.assert_allclose(np.concatenate(exponents), [1 + 7 * i / 11 for i in range(12)], rtol=1e-6)
    else:
        assert exponents == [None, None]


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_actors_know_the_noise_of_their_actions(name: str) -> None:
    for noise in ("white", "pink"):
        algorithm = f"algorithm={{{name}: {{noiseColor: {noise}}}}}"
        actor = resolved(algorithm, "pacing={trainStepsPerEnvStep: 1}").actor
        assert (_exploration(actor, range(2)).pink is not None) is (noise == "pink")


def test_arguments_by_rank() -> None:
    environment = resolved(
        "environment.kwargsByRank={each: {shard: [a, b, c, d, e, f, g, h]}, cycle: {level: [1, 2, 3]},"
        " addRank: {port: 9000}}"
    ).actor.environment
    assert environment.kwargs_at(0) == {"shard": "a", "level": 1, "port": 9000}
    assert environment.kwargs_at(4) == {"shard": "e", "level": 2, "port": 9004}
    assert environment.kwargs_at(9)["shard"] == "b", "evaluation environments may be more than those of the actors"
    assert resolved().actor.environment.kwargs_at(3) == {}


def test_values_that_no_environment_takes_cause_a_warning() -> None:
    (warning,) = resolved("environment.kwargsByRank.cycle={level: [0, 1, 2, 3, 4, 5, 6, 7, 8]}").warnings
    assert "'level' has 9 values, and all actors together have 8 environments" in warning
    assert resolved("environment.kwargsByRank.cycle={level: [0, 1, 2, 3, 4, 5, 6, 7]}").warnings == ()


def test_runs_share_no_endpoint() -> None:
    other = resolved(placement=local_placement(run_uid="77", run_folder=PurePosixPath("/runs/one")))

    assert not endpoints(resolved()) & endpoints(other)


def endpoints(experiment: ResolvedExperiment) -> set[str]:
    return {
        experiment.coordinator.coordinator_address,
        *experiment.actor.samples_endpoints,
        experiment.actor.parameters_endpoint,
    }


def test_a_uid_of_32_digits_fits_into_a_socket_name() -> None:
    experiment = resolved(placement=local_placement(run_uid="f" * 32, run_folder=PurePosixPath("/r")))

    assert all(len(endpoint.removeprefix("unix-abstract:")) < 107 for endpoint in endpoints(experiment))


def test_configs_go_through_json_in_snake_case() -> None:
    experiment = resolved("policy.network.custom.factory=my.module:net", "policy.network.custom.kwargs.a=[null, 1.0]")

    assert ResolvedExperiment.from_json(experiment.to_json()) == experiment
    for config in (experiment.coordinator, experiment.trainer, experiment.actor):
        assert type(config).from_json(config.to_json().encode()) == config
    trainer = json.loads(experiment.trainer.to_json())
    assert trainer["algorithm"]["ppo"]["minibatch_size"] == 256
    assert not [key for key in keys_of(trainer) if key != key.lower()]


def test_the_coordinators_json_leaves_newer_fields_out_where_they_have_their_default() -> None:
    config, changed = resolved().coordinator, resolved("tracking.workerSeconds=5").coordinator

    assert (config.worker_seconds, changed.worker_seconds) == (60.0, 5.0)
    assert {"worker_seconds", "num_others"}.isdisjoint(json.loads(config.to_json()))
    assert CoordinatorConfig.from_json(config.to_json()).worker_seconds == 60.0
    assert CoordinatorConfig.from_json(changed.to_json()).worker_seconds == 5.0


def keys_of(value: Any) -> list[str]:
    if isinstance(value, list):
        return [key for item in value for key in keys_of(item)]
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in keys_of(item))]
    return []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_lanes": 0}, "batch_lanes"),
        ({"batchLanes": 8}, "batchLanes"),
        ({"samples_endpoints": []}, "samples_endpoints"),
        ({"seed": None}, "seed"),
        ({"algorithm": {"minibatchSize": 8}}, "minibatchSize"),
    ],
)
def test_the_error_of_an_invalid_config_names_the_field(change: dict[str, Any], field: str) -> None:
    value = json.loads(resolved().trainer.to_json()) | change

    with pytest.raises(ValidationError, match=field):
        TrainerConfig.from_json(json.dumps(value))


def test_environments_are_given_in_total_or_per_actor() -> None:
    value = json.loads(resolved().actor.to_json())

    for change in ({"environments": None}, {"environments_per_actor": 3}):
        with pytest.raises(ValidationError, match=r"none of|has environments and"):
            ActorConfig.from_json(json.dumps(value | change))


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        resolved().trainer.seed = 3  # type: ignore[misc]


def test_pods_serve_at_their_own_host_and_are_found_through_the_coordinator() -> None:
    """One config serves all workers of a role, wherever their pods are."""
    placement = cluster_placement(run_uid="5b1e", coordinator_host="one-coordinator.lab")
    experiment = resolved(
        "trainers.replicas=2", "policyWorkers.replicas=2", "bufferWorkers.replicas=1", placement=placement
    )
    buffer = config_of(experiment, BufferConfig)
    workers = (experiment.trainer, experiment.actor, config_of(experiment, PolicyWorkerConfig), buffer)
    for config in workers:
        assert config.coordinator_address == "one-coordinator.lab:7000"
        assert (config.metrics_address, config.log_folder) == (":8080", None)
        assert "127.0.0.1" not in config.to_json()
        assert "unix-abstract" not in config.to_json()
    assert experiment.coordinator.serves_at == ":7000"
    assert [config.serves_at for config in workers] == [":7001", None, ":7001", ":7001"]
    assert experiment.trainer.samples_endpoints == ("roster:trainer/0", "roster:trainer/1")
    assert experiment.trainer.parameters_endpoint is None
    assert experiment.trainer.publishes_live
    assert experiment.actor.connects_to == ("roster:buffer/0", "roster:policy/0", "roster:policy/1")
    assert buffer.connects_to == ("roster:trainer/0", "roster:trainer/1")


def test_only_the_coordinator_pod_mounts_the_volume_and_all_pods_reach_a_bucket() -> None:
    placement = cluster_placement(run_uid="5b1e", coordinator_host="one-coordinator.lab")
    experiment = resolved("evaluators.replicas=1", "evaluators.episodesPerEnvironment=1", placement=placement)
    assert experiment.coordinator.parameter_store == ParameterStoreConfig(folder="/data/parameters")
    service = ParameterStoreConfig(service="one-coordinator.lab:7000")
    assert experiment.trainer.parameter_store == config_of(experiment, EvaluatorConfig).parameter_store == service
    experiment = resolved("parameters.store.objectStore.url=s3://lab/runs", placement=placement)
    assert experiment.trainer.parameter_store == experiment.coordinator.parameter_store
    assert experiment.trainer.parameter_store.object_store is not None
    assert experiment.trainer.parameter_store.object_store.url == "s3://lab/runs/one-5b1e"
