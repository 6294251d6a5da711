"""The live fields of a role's config, and the name of the rest."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rlsrl.api.live import changed_settings, name_of, settings_of, with_settings
from rlsrl.api.load import load_text
from rlsrl.api.placement import cluster_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.resolved import TrainerConfig

PLACEMENT = cluster_placement(run_uid="u", coordinator_host="h", record_folder="/data", state_folder="/state")


def resolved(**spec: Any) -> ResolvedExperiment:
    least = {"environment": {"id": "CartPole-v1"}, "actors": {"environments": 8}, "stop": {"trainSteps": 10}}
    document = {"apiVersion": "rlsrl.dev/v1alpha1", "kind": "RLExperiment", "metadata": {"name": "e"}}
    return resolve(load_text(json.dumps({**document, "spec": {**least, **spec}})), PLACEMENT)


def trainer(**ppo: Any) -> TrainerConfig:
    return resolved(algorithm={"ppo": ppo}).trainer


def test_a_config_with_the_settings_of_another_equals_the_other() -> None:
    schedule = {"linear": {"to": 0.5, "envSteps": 100}}
    before = trainer(learningRate=0.5)
    for after in (
        trainer(learningRate=0.25, entropyCoefficient=0.1),
        trainer(clipRangeSchedule=schedule),
        resolved(stop={"returnMean": 4.0}, parameters={"everySeconds": 3, "keepLast": 2}).trainer,
    ):
        assert after != before
        assert name_of(after) == name_of(before)
        assert with_settings(before, settings_of(after)) == after
        assert with_settings(after, settings_of(before)) == before


def test_the_changed_settings_are_named_by_their_paths() -> None:
    before = resolved(stop={"trainSteps": 10})
    after = resolved(algorithm={"ppo": {"learningRate": 0.0625}}, stop={"envSteps": 20})
    assert changed_settings(before.trainer, after.trainer) == {
        "algorithm.ppo.learning_rate": 0.0625,
        "stop.env_steps": 20,
        "stop.train_steps": None,
    }
    assert changed_settings(after.trainer, after.trainer) == {}
    assert changed_settings(before.actor, after.actor) == {}


@pytest.mark.parametrize(
    "ppo", [{"epochs": 3}, {"minibatchSize": 512}, {"normalizeRewards": True}, {"discount": 0.5}], ids=str
)
def test_the_name_of_a_config_covers_only_fields_that_are_not_live(ppo: dict[str, Any]) -> None:
    assert name_of(trainer(**ppo)) != name_of(trainer())
    assert settings_of(trainer(**ppo)) == settings_of(trainer())


def test_a_field_that_the_settings_leave_out_has_its_default() -> None:
    """Newer fields are left out, so that older workers take the settings."""
    plain = resolved()
    changed = resolved(
        paused=[{"role": "actor"}],
        stop={"trainSteps": 10, "now": True},
        parameters={"storeRequest": "a"},
    )
    for role in ("coordinator", "trainer"):
        before, after = getattr(plain, role), getattr(changed, role)
        assert before != after
        assert with_settings(after, settings_of(before)) == before
        assert with_settings(before, settings_of(after)) == after
        assert with_settings(after, {}) == after
    assert "paused" not in settings_of(plain.coordinator)
    assert "now" not in settings_of(plain.trainer)["stop"]
    assert "store_request" not in settings_of(plain.trainer)["versions"]


def test_the_number_of_workers_is_live() -> None:
    one, two = (resolved(actors={"environmentsPerActor": 8, "replicas": number}, **BATCH) for number in (1, 2))
    assert name_of(one.actor) == name_of(two.actor)
    assert name_of(one.trainer) == name_of(two.trainer)
    assert name_of(one.coordinator) == name_of(two.coordinator)
    assert settings_of(two.coordinator)["num_actors"] == 2
    assert settings_of(one.actor) == {}


NEEDS = {"minibatchSize": 64, "outputs": "actionValues", "replay": {"capacity": 5000}}


@pytest.mark.parametrize("max_policy_lag", [0, 1])
@pytest.mark.parametrize("environments", [{"environments": 12}, {"environmentsPerActor": 6}])
def test_a_trainer_that_replays_stays_whatever_the_number_of_actors(
    environments: dict[str, int], max_policy_lag: int
) -> None:
    """Its store would be lost with the pod."""
    algorithm = {"custom": {"factory": "a:b", "needs": NEEDS}}
    pacing = {"trainStepsPerEnvStep": 0.5, "maxPolicyLag": max_policy_lag}
    two, three = (
        resolved(actors={"replicas": number, **environments}, algorithm=algorithm, pacing=pacing).trainer
        for number in (2, 3)
    )
    assert two.replay != three.replay
    assert name_of(two) == name_of(three)
    assert with_settings(two, settings_of(three)) == three


def test_a_trainer_with_shards_restarts_when_slots_get_another_width() -> None:
    """Credits of the old width would wait at a shard that cannot use them, and no other shard would get them."""

    def trainer_for(**actors: int) -> TrainerConfig:
        shards = {"algorithm": {"dqn": {}}, "pacing": {"trainStepsPerEnvStep": 0.5}, "bufferWorkers": {"replicas": 2}}
        return resolved(actors={"replicas": 2, **actors}, **shards).trainer

    eight, four = (trainer_for(environments=number) for number in (16, 8))
    assert eight.replay is not None
    assert four.replay is not None
    assert (eight.replay.lanes_per_grant, four.replay.lanes_per_grant) == (8, 4)
    assert name_of(eight) != name_of(four)
    assert "lanes_per_grant" not in settings_of(eight)["replay"]


BATCH = {"trainers": {"batchEnvironments": 8}}


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(KeyError, match="epochs is not a live setting"):
        with_settings(trainer(), {"algorithm": {"ppo": {"epochs": 3}}})
    with pytest.raises(KeyError, match="seed is not a live setting"):
        with_settings(trainer(), {"seed": 3})
    with pytest.raises(KeyError, match="nothing"):
        with_settings(trainer(), {"nothing": 3})
    with pytest.raises(ValidationError, match="learning_rate"):
        with_settings(trainer(), {"algorithm": {"ppo": {"learning_rate": -1.0}}})
