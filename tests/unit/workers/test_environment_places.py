"""The place and the arguments by rank that each environment of an actor, of an evaluator, or of neither gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import structlog
from gymnasium.vector import SyncVectorEnv

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.data.version import Version
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.factory import environment_spec
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.place import INSPECTION, EnvironmentPlace
from rlsrl.envs.seeds import environment_seed
from rlsrl.testing.contexts import make_context
from rlsrl.testing.environments import GatedEnv
from rlsrl.workers.build.common import environment_source, torch_policy
from rlsrl.workers.build.environments import environment_threads, lockstep_environments
from rlsrl.workers.build.evaluator import begin_evaluation, evaluator_plan

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: placed}
spec:
  seed: 5
  environment:
    factory: "rlsrl.testing.environments:PlacedEnv"
    passPlace: true
    kwargsByRank: {cycle: {level: [easy, medium, hard]}, addRank: {port: 9000}}
  policy: {network: {mlp: {hiddenSizes: [4]}}}
  algorithm: {ppo: {minibatchSize: 64}}
  actors: {replicas: 3, environmentsPerActor: 4, rolloutLength: 16}
  evaluators: {replicas: 2, environments: 6}
  stop: {trainSteps: 1}
"""
ACTOR = 2
INCARNATION = 7
LEVELS = ("easy", "medium", "hard")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "places.jsonl"


def resolved(record: Path, *changes: str) -> ResolvedExperiment:
    given = f'environment.kwargs={{gate: "{record.with_name("gate")}", record: "{record}"}}'
    experiment = load_text(EXPERIMENT, overrides=[given, *changes])
    return resolve(experiment, local_placement(run_uid="0f3a", run_folder=record.parent))


def lines(record: Path, call: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in record.read_text().splitlines()]
    return [line for line in found if line["call"] == call]


def expected(rank: int, **changes: Any) -> dict[str, Any]:
    """Return what an environment of the actor writes when it is made."""
    place = {"purpose": "training", "rank": rank, "num_environments": 12, "worker": ACTOR, "local_rank": rank - 8}
    arguments = {"level": LEVELS[rank % 3], "port": 9000 + rank}
    return {**place, "seed": environment_seed(5, rank, INCARNATION), "num_made": 1, **arguments, **changes}


def without(line: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}


@pytest.mark.parametrize("make", [lockstep_environments, environment_threads])
def test_each_environment_of_an_actor_gets_its_own_place_and_arguments(
    make: Callable[..., Any], record: Path, tmp_path: Path
) -> None:
    config = resolved(record).actor
    context = make_context("actor", tmp_path, index=ACTOR, incarnation=INCARNATION)
    ranks = config.environment_ranks_of(ACTOR)
    make(config, context, ranks, EnvironmentFaults(), EpisodeReports()).close()
    assert [without(line, "call", "pid") for line in lines(record, "make")] == [expected(rank) for rank in ranks]


def test_each_env_group_gets_the_places_of_its_ranks(record: Path, tmp_path: Path) -> None:
    config = resolved(record, "policyWorkers={}", "actors.ringSize=2").actor
    context = make_context("actor", tmp_path, index=ACTOR, incarnation=INCARNATION)
    lockstep_environments(config, context, range(10, 12), EnvironmentFaults(), EpisodeReports()).close()
    assert [without(line, "call", "pid") for line in lines(record, "make")] == [expected(10), expected(11)]


def test_arguments_by_rank_need_no_place(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        '{factory: "rlsrl.testing.environments:PrintingEnv", kwargs: {gate: g}, kwargsByRank: {addRank: {lines: 0}}}'
    )
    config = resolved(record, f"environment={source}").actor
    assert not config.environment.pass_place
    context = make_context("actor", tmp_path)
    lockstep_environments(config, context, range(3), EnvironmentFaults(), EpisodeReports()).close()
    assert capsys.readouterr().out.splitlines() == [
        "printed line 1 of 1", "printed line 1 of 2", "printed line 2 of 2",
    ]  # fmt: skip


def test_a_vectorised_form_gets_the_place_of_all_its_environments(record: Path, tmp_path: Path) -> None:
    made: list[EnvironmentPlace] = []

    def single(place: EnvironmentPlace) -> GatedEnv:
        made.append(place)
        return GatedEnv("gate")

    def bulk(num_envs: int, place: EnvironmentPlace) -> SyncVectorEnv:
        made.append(place)
        return SyncVectorEnv([lambda: GatedEnv("gate")] * num_envs)

    gymnasium.register("Test/Placed-v0", entry_point=single, vector_entry_point=bulk)
    try:
        config = resolved(
            record, "environment={id: Test/Placed-v0, passPlace: true}", "actors.vectorization=native"
        ).actor
        context = make_context("actor", tmp_path, index=ACTOR, incarnation=INCARNATION)
        ranks = config.environment_ranks_of(ACTOR)
        lockstep_environments(config, context, ranks, EnvironmentFaults(), EpisodeReports()).close()
    finally:
        del gymnasium.registry["Test/Placed-v0"]
    assert made == [
        INSPECTION,
        EnvironmentPlace(
            purpose="training",
            rank=8,
            num_environments=12,
            worker=ACTOR,
            local_rank=0,
            seed=environment_seed(5, 8, INCARNATION),
            num_made=4,
        ),
    ]


@pytest.mark.parametrize("evaluator", [0, 1])
def test_evaluators_have_ranks_of_their_own_and_equal_arguments_and_seeds(record: Path, evaluator: int) -> None:
    config = resolved(record).configs["evaluator"]
    assert isinstance(config, EvaluatorConfig)
    policy = torch_policy(
        config.network, environment_spec(environment_source(config.environment)), outputs=config.outputs, seed=0
    )
    envs, _ = begin_evaluation(
        evaluator_plan(config, evaluator),
        policy.parameters(Version(1, 1)),
        {},
        reports=EpisodeReports(),
        log=structlog.stdlib.get_logger("evaluator"),
    )
    envs.close()
    inspected, *played = lines(record, "make")
    assert without(inspected, "call", "pid") == {**asdict(INSPECTION), "level": "easy", "port": 9000}
    assert [without(line, "call", "pid") for line in played] == [
        {
            "purpose": "evaluation",
            "rank": 3 * evaluator + number,
            "num_environments": 6,
            "worker": evaluator,
            "local_rank": number,
            "seed": environment_seed(5, number, 0, purpose="evaluation"),
            "num_made": 1,
            "level": LEVELS[number],
            "port": 9000 + number,
        }
        for number in range(3)
    ]
