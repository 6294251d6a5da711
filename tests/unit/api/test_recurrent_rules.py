"""What goes with a recurrent network is said in one error, before anything starts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlsrl.api.document import SpecError
from rlsrl.api.load import load_text

GRU: dict[str, Any] = {"mlp": {}, "recurrent": {"kind": "gru", "size": 8}}
OWN: dict[str, Any] = {"custom": {"factory": "my:network", "state": {"hidden": 4, "cell": 4}}}


def experiment(network: dict[str, Any], algorithm: dict[str, Any], **spec: Any) -> str:
    document = {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": "live"},
        "spec": {
            "environment": {"id": "CartPole-v1"},
            "policy": {"network": network},
            "algorithm": algorithm,
            "actors": {"environments": 8, "rolloutLength": 24},
            "stop": {"envSteps": 1000},
            **spec,
        },
    }
    return json.dumps(document)


@pytest.mark.parametrize(
    ("network", "sizes"),
    [
        (GRU, {"hidden": 8}),
        ({"mlp": {}, "recurrent": {"kind": "lstm", "size": 8}}, {"hidden": 8, "cell": 8}),
        ({"cnn": {}, "recurrent": {}}, {"hidden": 64}),
        (OWN, {"hidden": 4, "cell": 4}),
        ({"mlp": {}}, {}),
    ],
)
def test_a_network_says_the_sizes_of_its_state(network: dict[str, Any], sizes: dict[str, int]) -> None:
    loaded = load_text(experiment(network, {"ppo": {"minibatchSize": 96, "sequenceLength": 12, "burnIn": 12}}))
    assert loaded.spec.policy.network.state_sizes == sizes


@pytest.mark.parametrize(
    ("network", "algorithm", "field", "message", "allowed"),
    [
        (
            GRU,
            {"ppo": {"minibatchSize": 96}},
            "algorithm.ppo.sequenceLength",
            "16 does not divide actors.rollout",
            "24",
        ),
        (
            GRU,
            {"vtrace": {"minibatchSize": 16, "sequenceLength": 12}},
            "algorithm.vtrace.sequenceLength",
            "12 does not divide minibatchSize 16",
            "a divisor of 16, for example 8 or 16",
        ),
        (
            OWN,
            {"ppo": {"minibatchSize": 96, "sequenceLength": 12, "burnIn": 13}},
            "algorithm.ppo.burnIn",
            "13 is more than sequenceLength 12",
            "integer from 0 to 12",
        ),
        (
            GRU,
            {"vtrace": {"minibatchSize": 96, "sequenceLength": 24, "burnIn": 2}},
            "algorithm.vtrace.burnIn",
            "2 is of no use: each rollout is one sequence",
            "0, or a sequenceLength below actors.rolloutLength 24",
        ),
        (
            GRU,
            {"dqn": {"minibatchSize": 64}},
            "algorithm.dqn.minibatchSize",
            "64 is no multiple of actors.rolloutLength 24",
            "a multiple of 24, for example 48 or 72",
        ),
        (GRU, {"dqn": {"burnIn": 8}}, "algorithm.dqn.burnIn", "value 8 has the wrong type", "true or false"),
        (
            GRU,
            {"pqn": {"minibatchSize": 96}},
            "policy.network.recurrent",
            "pqn trains no recurrent",
            "ppo, vtrace, dqn",
        ),
        (OWN, {"pqn": {"minibatchSize": 96}}, "policy.network.custom.state", "pqn trains no recurrent", "vtrace, dqn"),
        (
            {**OWN, "recurrent": {}},
            {"ppo": {"minibatchSize": 96, "sequenceLength": 12}},
            "policy.network.recurrent",
            "declares custom.state",
            "unset",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    network: dict[str, Any], algorithm: dict[str, Any], field: str, message: str, allowed: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_text(experiment(network, algorithm))
    found = [problem for problem in caught.value.problems if problem.path == f"spec.{field}"]
    assert len(found) == 1, caught.value
    assert message in found[0].message
    assert allowed in found[0].allowed


def test_each_trainer_needs_whole_sequences() -> None:
    block = {"ppo": {"minibatchSize": 48, "sequenceLength": 24}}
    load_text(experiment(GRU, block, trainers={"replicas": 2}))
    with pytest.raises(SpecError, match=r"24 does not divide minibatchSize 48 / 4 trainers = 12"):
        load_text(experiment(GRU, block, trainers={"replicas": 4}, actors={"environments": 8, "rolloutLength": 24}))


def test_each_trainer_needs_whole_rollouts_of_a_store() -> None:
    block, pacing = {"dqn": {"minibatchSize": 48}}, {"trainStepsPerEnvStep": 1}
    actors = {"replicas": 4, "environments": 8, "rolloutLength": 24}
    load_text(experiment(GRU, block, trainers={"replicas": 2}, pacing=pacing, actors=actors))
    with pytest.raises(SpecError, match=r"48 is no multiple of actors.rolloutLength x 4 trainers = 96"):
        load_text(experiment(GRU, block, trainers={"replicas": 4}, pacing=pacing, actors=actors))
    load_text(experiment({"mlp": {}}, block, trainers={"replicas": 4}, pacing=pacing, actors=actors))


def test_without_recurrence_sequences_are_of_no_consequence() -> None:
    load_text(experiment({"mlp": {}}, {"ppo": {"minibatchSize": 96, "sequenceLength": 16, "burnIn": 90}}))
