import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.load import GivenExperiment, SpecError, dump, load_file, load_text, load_with_fewest_actors
from rlsrl.api.spec import AlgorithmSpec, PpoSpec, RLExperiment

MINIMAL = """\
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata:
  name: minimal
spec:
  environment:
    id: CartPole-v1
  actors:
    environments: 8
  stop:
    returnMean: 475
"""
REPLAY = ("algorithm={dqn: {}}", "pacing.trainStepsPerEnvStep=1")


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_text(text, source="e.yaml", overrides=overrides)
    assert str(caught.value).splitlines() == [
        line for problem in caught.value.problems for line in str(problem).splitlines()
    ]
    return [str(problem) for problem in caught.value.problems]


def test_a_minimal_document_has_defaults_that_run() -> None:
    spec = load_text(MINIMAL).spec

    assert spec.algorithm == AlgorithmSpec(ppo=PpoSpec())
    assert spec.batch_environments == 8
    assert spec.batch_transitions == 1024
    assert spec.policy.network.mlp is not None
    assert spec.policy.network.mlp.hidden_sizes == (64, 64)


def test_all_errors_are_reported_together_in_the_order_of_the_text() -> None:
    text = MINIMAL.replace("environments: 8", "replicas: 0\n    enviroments: 8").replace("name: minimal", "name: M!")
    text = text.replace("returnMean: 475", "returnMean: high")

    assert problems(text) == [
        (
            'e.yaml:4:9: metadata.name: value "M!" does not have the right form\n'
            "    allowed: string of at most 40 characters matching ^[a-z]([-a-z0-9]*[a-z0-9])?$, for example cartpole"
        ),
        (
            "e.yaml:8:3: spec.actors: has none of environments, environmentsPerActor\n"
            "    allowed: exactly one of environments, environmentsPerActor"
        ),
        "e.yaml:9:15: spec.actors.replicas: value 0 is out of range\n    allowed: integer from 1 to 4096",
        (
            "e.yaml:10:5: spec.actors.enviroments: is not a field of spec.actors\n"
            "    allowed: mapping with exactly one of environments, environmentsPerActor; "
            "also replicas, rolloutLength, maxDecorrelationSteps, vectorization, ringSize, podTemplate\n"
            "    did you mean: spec.actors.environments"
        ),
        (
            'e.yaml:12:17: spec.stop.returnMean: value "high" has the wrong type\n'
            "    allowed: number from -1000000000000000 to 1000000000000000"
        ),
    ]


def test_the_error_of_a_misplaced_field_names_the_right_mapping() -> None:
    (problem,) = problems(MINIMAL + "  learningRate: 1e-3\n")

    assert problem.endswith("did you mean: spec.algorithm.ppo.learningRate")


def test_a_document_of_another_kind_has_only_that_error() -> None:
    version, kind = problems("apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: many}\n")

    assert version.startswith('e.yaml:1:13: apiVersion: value "apps/v1"')
    assert kind.startswith('e.yaml:2:7: kind: value "Deployment"')
    assert "RLExperiment" in kind


def test_an_unreadable_field_is_not_also_reported_as_missing() -> None:
    (found,) = problems(MINIMAL.replace("name: minimal", "name: !!binary aGk="))

    assert "metadata.name" in found
    assert "is not supported" in found


def test_a_misspelt_kind_hides_no_other_error() -> None:
    found = problems(MINIMAL.replace("RLExperiment", "RlExperiment").replace("475", "x"))

    assert [each.split(": ")[1] for each in found] == ["kind", "spec.stop.returnMean"]


def test_a_key_that_looks_like_a_pydantic_marker_is_a_key() -> None:
    (found,) = problems(MINIMAL.replace("name: minimal", "name: minimal\n  labels: {'[key]': 1}"))

    assert "metadata.labels" in found


def test_the_error_of_an_unknown_version_names_the_known_one() -> None:
    (problem,) = problems(MINIMAL.replace("v1alpha1", "v2"))

    assert problem.startswith('e.yaml:1:13: apiVersion: value "rlsrl.dev/v2"')
    assert "allowed: rlsrl.dev/v1alpha1" in problem


@pytest.mark.parametrize("text", ["- 1", "text", "3", "[]"])
def test_a_document_that_is_not_a_mapping_is_refused(text: str) -> None:
    (problem,) = problems(text)

    assert problem.startswith("e.yaml:1:1: the document: value ")
    assert "apiVersion, kind, metadata, spec" in problem


@pytest.mark.parametrize("name", ["absent.yaml", ".", "nul\0.yaml"])
def test_an_unreadable_file_is_a_spec_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load_file(tmp_path / name)


def test_a_file_is_named_in_its_problems(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINIMAL.replace("475", "x"), encoding="utf-8")

    with pytest.raises(SpecError, match=r"mine\.yaml:11:17: spec\.stop\.returnMean"):
        load_file(file)


@pytest.mark.parametrize(("written", "read"), [("1.0", 1), ("1e3", 1000), ("2", 2)])
def test_whole_numbers_are_integers_however_written(written: str, read: int) -> None:
    seed = load_text(MINIMAL + f"  seed: {written}\n").spec.seed

    assert (seed, type(seed)) == (read, int)


# Rules across fields


@pytest.mark.parametrize(
    ("overrides", "path", "message", "allowed"),
    [
        (
            ["algorithm.ppo.minibatchSize=300"],
            "spec.algorithm.ppo.minibatchSize",
            "300 does not divide a batch of 1024 transitions (rolloutLength 128 x 8 environments of a batch)",
            "a divisor of 1024, for example 256 or 512",
        ),
        (
            ["trainers.batchEnvironments=1"],
            "spec.algorithm.ppo.minibatchSize",
            "256 does not divide a batch of 128 transitions",
            "a divisor of 128, for example 128",
        ),
        (
            ["actors.environments=7", "actors.rolloutLength=256", "actors.replicas=2", "pacing.maxPolicyLag=0"],
            "spec.pacing.maxPolicyLag",
            "batches of 7 environments cannot be made of whole rollouts of 3 and 4 environments",
            "integer >= 1, or a trainers.batchEnvironments that is a multiple of every actor's environments",
        ),
        (
            ["trainers.batchEnvironments=2"],
            "spec.pacing.maxPolicyLag",
            "batches of 2 environments cannot be made of whole rollouts of 8 environments",
            "integer >= 3",
        ),
        (
            ["stop={returnMean: 1}", "algorithm.ppo.learningRateSchedule.linear.to=0"],
            "spec.algorithm.ppo.learningRateSchedule.linear.envSteps",
            "is missing, and stop.envSteps, its default, is missing, too",
            "here or as stop.envSteps",
        ),
        (
            ["actors.ringSize=2"],
            "spec.actors.ringSize",
            "2 groups hide the wait for policy workers, and the experiment has no policyWorkers",
            "1, or an experiment with policyWorkers",
        ),
        (
            ["actors.ringSize=3", "policyWorkers={}"],
            "spec.actors.ringSize",
            "3 does not divide the 8 environments of an actor",
            "a divisor of 8, for example 2 or 4",
        ),
        (
            ["actors.ringSize=2", "policyWorkers={}", "trainers.batchEnvironments=2", "pacing.maxPolicyLag=0"],
            "spec.pacing.maxPolicyLag",
            "cannot be made of whole rollouts of 4 environments",
            "integer >= 1",
        ),
        (
            ["actors.vectorization=native", "environment.frameStack=4", "environment.maxEpisodeSteps=9"],
            "spec.actors.vectorization",
            "this one has environment.maxEpisodeSteps, environment.frameStack",
            "loop or threads, or an environment.id with kwargs alone",
        ),
        (
            ["actors.vectorization=native", "environment={factory: 'a:b'}"],
            "spec.actors.vectorization",
            "this one has environment.factory",
            "loop or threads",
        ),
        (
            ["actors.vectorization=native", "actors.maxDecorrelationSteps=9"],
            "spec.actors.maxDecorrelationSteps",
            "up to 9 steps in single environments, and native steps all environments together",
            "0, or actors.vectorization loop or threads",
        ),
        (
            ["actors.vectorization=threads", "policyWorkers={}", "actors.ringSize=2"],
            "spec.actors.ringSize",
            "2 groups take turns, and with threads each environment goes its own way",
            "1, or actors.vectorization loop or native",
        ),
        (
            ["actors.replicas=4", "bufferWorkers.replicas=3"],
            "spec.bufferWorkers.replicas",
            "3 buffer workers cannot serve equal parts of 4 actors",
            "a divisor of 4, for example 2 or 4",
        ),
        (
            [
                "algorithm={dqn: {}}",
                "pacing.trainStepsPerEnvStep=1",
                "actors.replicas=4",
                "trainers.replicas=4",
                "bufferWorkers.replicas=2",
            ],
            "spec.bufferWorkers.replicas",
            "2 buffer workers, which keep the transitions of an algorithm that replays, cannot be shared evenly by 4",
            "a multiple of 4",
        ),
        (
            [*REPLAY, "policy.normalizeObservations=true", "bufferWorkers={}"],
            "spec.policy.normalizeObservations",
            "true does not go with an algorithm that replays and bufferWorkers yet",
            "false",
        ),
        (
            [*REPLAY, "algorithm.dqn.normalizeRewards=true", "bufferWorkers={}"],
            "spec.algorithm.dqn.normalizeRewards",
            "true does not go with an algorithm that replays and bufferWorkers yet",
            "false",
        ),
        (
            [*REPLAY, "pacing.maxPolicyLag=0", "bufferWorkers={}"],
            "spec.pacing.maxPolicyLag",
            "0 does not go with an algorithm that replays and bufferWorkers yet",
            "above 0",
        ),
        (
            ["actors.replicas=3", "bufferWorkers={}"],
            "spec.actors.environments",
            "8 environments do not divide evenly over 3 actors",
            "a multiple of 3",
        ),
        (
            ["environment.kwargsByRank.each={shard: [1, 2, 3]}"],
            "spec.environment.kwargsByRank.each",
            "'shard' has 3 values, and all actors together have 8 environments",
            "8 values; environment.kwargsByRank.cycle takes any number",
        ),
        (
            ["environment.kwargsByRank.each={shard: [1, 2]}", "actors={environmentsPerActor: 1, replicas: 3}"],
            "spec.environment.kwargsByRank.each",
            "'shard' has 2 values, and all actors together have 3 environments",
            "3 values",
        ),
        (
            ["environment.kwargs.level=1", "environment.kwargsByRank.cycle={level: [1, 2]}"],
            "spec.environment.kwargsByRank",
            "the argument 'level' is in kwargs and in kwargsByRank.cycle",
            "one of them",
        ),
        (
            ["environment.kwargsByRank={cycle: {level: [1, 2]}, addRank: {level: 1}}"],
            "spec.environment.kwargsByRank",
            "the argument 'level' is in kwargsByRank.cycle and in kwargsByRank.addRank",
            "one of them",
        ),
        (
            ["environment.passPlace=true", "environment.kwargsByRank.addRank={place: 1}"],
            "spec.environment.passPlace",
            "passes the argument 'place', and kwargs or kwargsByRank have it, too",
            "another name for the argument 'place'",
        ),
        (
            ["actors.vectorization=native", "environment.kwargsByRank.addRank={port: 1}"],
            "spec.actors.vectorization",
            "this one has environment.kwargsByRank",
            "loop or threads",
        ),
        (
            ["evaluators={environments: 3, replicas: 4, maxSteps: 3}"],
            "spec.evaluators.maxSteps",
            "3 steps leave some of 4 environments without any",
            "integer >= 4",
        ),
        (
            ["evaluators={replicas: 3, parameters: {tag: best}}"],
            "spec.evaluators.replicas",
            "3 evaluators would play the same episodes of one version",
            "1, with parameters",
        ),
        (
            ["evaluators={everySeconds: 3, everyVersions: 2, parameters: {tag: best}}"],
            "spec.evaluators.parameters",
            "which is played once, and everySeconds and everyVersions says how often",
            "parameters without everySeconds and everyVersions",
        ),
        (
            ["environment={http: {url: 'http://simulator:8000'}}", "evaluators.video={}"],
            "spec.evaluators.video",
            "those of environment.http http://simulator:8000 send no pictures",
            "evaluators without video, or environment.id or environment.factory",
        ),
        (["evaluators.video={episodes: 0}"], "spec.evaluators.video.episodes", "value 0", "integer from 1 to 100"),
        (
            ["evaluators.video={everyEvaluation: 1}"],
            "spec.evaluators.video.everyEvaluation",
            "is not a field",
            "everyEvaluations",
        ),
        (
            ["evaluators.parameters.tag=latest"],
            "spec.evaluators.parameters.tag",
            "'latest' is no tag",
            "omit evaluators.parameters",
        ),
        (
            ['evaluators.parameters.tag="2.1500"'],
            "spec.evaluators.parameters.tag",
            "'2.1500' is a version, not a tag",
            'version: "2.1500"',
        ),
        (
            ["evaluators.parameters={tag: best, file: /best.safetensors}"],
            "spec.evaluators.parameters",
            "has tag and file",
            "exactly one of version, tag, file",
        ),
    ],
)
def test_rules_across_fields(overrides: list[str], path: str, message: str, allowed: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_text(MINIMAL, overrides=overrides)

    (problem,) = [problem for problem in caught.value.problems if problem.path == path]
    assert message in problem.message
    assert allowed in problem.allowed


def test_a_version_without_quotes_is_a_number_and_the_error_says_so() -> None:
    with pytest.raises(SpecError) as caught:
        load_text(MINIMAL, overrides=["evaluators.parameters.version=1.2500"])

    (problem,) = caught.value.problems
    assert "value 1.25 has the wrong type" in problem.message
    assert problem.nearest == 'a text, with quotes, such as "1.2500"'


def test_all_rules_across_fields_are_checked_at_once() -> None:
    found = problems(MINIMAL, "actors.replicas=3", "pacing.maxPolicyLag=0", "algorithm.ppo.minibatchSize=1000")

    assert ["minibatchSize" in found[0], "maxPolicyLag" in found[1], len(found)] == [True, True, 2]


def experiment(environments: int, replicas: int, batch: int, trainers: int = 1, **changes: Any) -> RLExperiment:
    spec = {
        "environment": {"id": "E"},
        "actors": {"environments": environments, "replicas": replicas, "rolloutLength": 2},
        "trainers": {"batchEnvironments": batch, "replicas": trainers},
        "algorithm": {"ppo": {"minibatchSize": 2 * trainers}},
        "stop": {"trainSteps": 1},
        "pacing": {"maxPolicyLag": 64},
    }
    return load_text(json.dumps({**json.loads(BARE), "spec": spec | changes}))


BARE = '{"apiVersion": "rlsrl.dev/v1alpha1", "kind": "RLExperiment", "metadata": {"name": "m"}}'


def gets_stuck(counts: tuple[int, ...], batch: int, lag: int) -> bool:
    """Return whether an order of the actors' rollouts ends in a deadlock, by trying all orders.

    The state is the number of lanes credited beyond the trained batches: a rollout is credited whole if the
    lanes granted by then, lag + 1 batches ahead, cover it; a batch is trained once its lanes are credited.
    """
    reached, frontier = {0}, [0]
    while frontier:
        credited = frontier.pop()
        while credited >= batch:
            credited -= batch
        for count in set(counts):
            if credited + count <= (lag + 1) * batch:
                following = (credited + count) % batch if credited + count >= batch else credited + count
                if following not in reached:
                    reached.add(following)
                    frontier.append(following)
            else:
                return True  # less than a batch is credited, and no credit is left for this rollout
    return False


def test_the_least_policy_lag_is_the_smallest_one_without_a_deadlock() -> None:
    for environments, replicas, part, trainers in product(range(1, 13), range(1, 5), range(1, 14), (1, 3)):
        spec = experiment(environments, replicas, part * trainers, trainers).spec
        counts = spec.actors.spread.counts
        stuck = [lag for lag in range(14) if gets_stuck(counts, part, lag)]
        assert stuck == list(range(spec.least_policy_lag)), (counts, part, trainers)


# Overrides


def test_overrides_change_fields_in_order() -> None:
    spec = load_text(
        MINIMAL,
        overrides=[
            "spec.algorithm.ppo.learningRate=1e-3",
            "algorithm.ppo.epochs=2",
            "algorithm.ppo.epochs=3",
            "seed = 7",
            "policy.network.mlp.hiddenSizes=[32]",
            "environment.id=",
            "environment.factory=my.module:make",
            "environment.kwargs.level.name=two",
            "stop={envSteps: 100}",
            "metadata.name=other",
        ],
    )

    assert spec.metadata.name == "other"
    assert spec.spec.seed == 7
    assert spec.spec.algorithm == AlgorithmSpec(ppo=PpoSpec(learning_rate=1e-3, epochs=3))
    assert spec.spec.environment.id is None
    assert spec.spec.environment.factory == "my.module:make"
    assert spec.spec.environment.kwargs == {"level": {"name": "two"}}
    assert (spec.spec.stop.env_steps, spec.spec.stop.return_mean) == (100, None)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("algorithm.ppo.epoch=2", "spec.algorithm.ppo.epoch: is not a field of spec.algorithm.ppo"),
        ("learningRate=2", "did you mean: spec.algorithm.ppo.learningRate"),
        ("algorithm.ppo.learning_rate=1", "did you mean: spec.algorithm.ppo.learningRate"),
        ("actors.replicas=0", "spec.actors.replicas: value 0 is out of range\n    allowed: integer from 1 to 4096"),
        ("actors={replicas: 0, environments: 8}", "spec.actors.replicas: value 0 is out of range"),
        ("actors={replica: 2, environments: 8}", "did you mean: spec.actors.replicas"),
        ("actors.replicas=[", "spec.actors.replicas: not YAML"),
        ("actors.replicas=.nan", "spec.actors.replicas: \".nan\" is not a finite number"),
        ("actors.replicas", "is not of the form path=value"),
        ("=3", "is not of the form path=value"),
        ("environment.factory=a:b", "spec.environment: has id and factory"),
        ("metadata.name.first=x", "metadata.name.first: is not a field of metadata.name"),
        (
            "policy.network.encoders.cnn.hiddenSize=8",
            "encoders.cnn.hiddenSize: is a part of the list spec.policy.network.encoders\n    allowed: the whole ",
        ),
        ("policy.network.encoders[0].cnn.hiddenSize=8", "allowed: the whole list: spec.policy.network.encoders=[...]"),
        ("policy.network.mlp.hiddenSizes[0]=8", "is a part of the list spec.policy.network.mlp.hiddenSizes"),
        ("paused[0].role=actor", "is a part of the list spec.paused"),
        ("environment.kwargs.levels[1]=8", "is a part of the list spec.environment.kwargs.levels"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_override_quotes_it(override: str, problem: str) -> None:
    (found,) = problems(MINIMAL, override)

    assert problem in found
    if not override.startswith("environment."):
        assert found.startswith(f"--set {override}: ")


def test_overrides_do_not_hide_errors_of_the_file() -> None:
    found = problems(MINIMAL.replace("actors:\n    environments: 8", "actors: many"), "actors.replicas=2", "seed=-1")
    assert [each.split(": ")[1] for each in found] == ["spec.seed", "spec.actors"]

    (found_in_yaml,) = problems("a: [", "seed=1")
    assert "not YAML" in found_in_yaml


# Written and compared


def test_a_dump_is_read_back_and_keeps_free_json() -> None:
    kwargs = {"a": None, "b": "1e3", "c": 1.0, "d": ["yes", {"e": None}]}
    text = MINIMAL.replace("id: CartPole-v1", f"factory: m:f\n    kwargs: {json.dumps(kwargs)}")
    once = load_text(text)

    dumped = dump(once)

    assert load_text(dumped) == once
    assert load_text(dumped).spec.environment.kwargs == kwargs
    assert "learningRate: 0.0003" in dumped
    assert "null" not in dumped.replace("a: null", "").replace("e: null", "")


def test_a_word_that_yaml_reads_as_a_boolean_is_suggested_with_quotes() -> None:
    (problem,) = problems(MINIMAL, "trainers.compile=off")
    assert 'did you mean: "off", with quotes' in problem


def test_auto_actors_are_counted_once_the_rest_of_the_document_is_read() -> None:
    text = MINIMAL.replace("environments: 8", "environments: 8\n    replicas: auto")
    numbers = iter([4])

    def loaded(text: str, *overrides: str) -> RLExperiment:
        given = GivenExperiment(text=text.encode(), source="e.yaml", overrides=overrides)
        return given.load(auto_actors=lambda: next(numbers))

    assert loaded(text).spec.actors.spread.counts == (2, 2, 2, 2)
    assert loaded(text, "actors.replicas=3").spec.actors.replicas == 3
    assert loaded(MINIMAL).spec.actors.replicas == 1


def test_auto_actors_need_one_machine_and_a_total_of_environments() -> None:
    text = MINIMAL.replace("environments: 8", "environments: 8\n    replicas: auto")
    (problem,) = problems(text)
    allowed = "allowed: integer from 1 to 4096"
    assert problem == f"e.yaml:10:15: spec.actors.replicas: auto is for `rlsrl run`, on one machine\n    {allowed}"
    each = text.replace("environments: 8", "environmentsPerActor: 8")
    with pytest.raises(SpecError) as caught:
        GivenExperiment(text=each.encode(), source="e.yaml").load(
            auto_actors=lambda: pytest.fail("there is nothing to count")
        )
    assert str(caught.value) == (
        "e.yaml:10:15: spec.actors.replicas: auto divides a fixed number of environments over the actors, and "
        "actors.environments is not set\n    allowed: integer from 1 to 4096"
    )


REPLAYING = MINIMAL.replace("  stop:", "  pacing: {trainStepsPerEnvStep: 1}\n  stop:")


@pytest.mark.parametrize(
    ("algorithm", "trainers", "buffers", "fewest"),
    [("dqn", 1, 0, 1), ("dqn", 2, 0, 2), ("dqn", 4, 0, 4), ("dqn", 2, 4, 4), ("ppo", 2, 0, 1), ("ppo", 1, 2, 2)],
    ids=str,
)
def test_the_fewest_auto_actors_are_those_that_the_other_fields_allow(
    algorithm: str, trainers: int, buffers: int, fewest: int, tmp_path: Path
) -> None:
    """With replay each trainer needs an actor of its own; without, one actor sends to all trainers. So do buffers."""
    file = tmp_path / "e.yaml"
    file.write_text(REPLAYING if algorithm == "dqn" else MINIMAL)
    overrides = ["actors.replicas=auto", f"trainers.replicas={trainers}", f"algorithm={{{algorithm}: {{}}}}"]
    overrides += [f"bufferWorkers.replicas={buffers}"] if buffers else []
    assert load_with_fewest_actors(file, overrides).spec.actors.replicas == fewest
    assert load_with_fewest_actors(file, [*overrides, "actors.replicas=8"]).spec.actors.replicas == 8


def test_problems_beside_auto_actors_are_reported_alone(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(REPLAYING)
    wrong = ["actors.replicas=auto", "trainers.replicas=2", "algorithm={dqn: {epsilon: 2}}"]
    with pytest.raises(SpecError, match="epsilon") as caught:
        load_with_fewest_actors(file, wrong)
    assert len(caught.value.problems) == 1
