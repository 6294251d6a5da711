"""The evaluator over each parameter database: its choices, its records, failures of the store, and commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import structlog
from gymnasium import spaces
from prometheus_client import CollectorRegistry

from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.envs.spaces import spec_of_spaces
from rlsrl.parameters.evaluations import BEST_TAG, EVALUATION_KEY, NUMBER_KEY, evaluation_of
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.layout import NETWORK_KEY
from rlsrl.parameters.names import file_stem
from rlsrl.parameters.objects import StoreRefused
from rlsrl.parameters.protocols import ParameterDB, Parameters, Ref, VersionInfo
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.parameters.weights_file import encode_weights
from rlsrl.policies.build import build_network
from rlsrl.policies.exported import CategoricalHead, DenseLayer, ExportedActor
from rlsrl.policies.networks import MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.memory_parameter_db import MemoryBlobs, MemoryParameterDB
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.evaluator import EvaluatorWorker

POLICY = "default"
ENVIRONMENT = "rlsrl-tests/Graded-v0"
NEVER_ENDS, OVERFLOWS, RAISES, IS_NAN, SOME_END, NUM_GRADES = 8, 9, 10, 11, 12, 13
LENGTH = 3
"""Steps of an episode; its return is the policy's grade times this."""
PLAY_STEPS = 64
"""Steps until an evaluation looks whether its episodes have ended, and so of each evaluation here."""
EXPORTED = ExportedActor(
    layout="graded",
    num_parameters=3 * NUM_GRADES,
    observation={"observation": ArraySpec(shape=(2,), dtype="float32")},
    layers=(
        DenseLayer(
            name="grade",
            weight_offset=0,
            bias_offset=2 * NUM_GRADES,
            in_size=2,
            out_size=NUM_GRADES,
            activation="identity",
        ),
    ),
    head=CategoricalHead(num_actions=NUM_GRADES),
)


class GradedEnv(gymnasium.Env[Any, Any]):
    """Rewards each step with the action, so that the return grades the policy."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(NUM_GRADES)
    on_step: ClassVar[Callable[[int], object]] = staticmethod(lambda step: None)
    """Called with the number of each step, over all environments of a test, from 1."""
    num_steps: ClassVar[int] = 0
    num_open: ClassVar[int] = 0

    def __init__(self) -> None:
        self._is_first = type(self).num_open == 0
        type(self).num_open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        type(self).num_steps += 1
        type(self).on_step(self.num_steps)
        self._taken += 1
        if action == RAISES:
            raise ConnectionError("no answer")
        # The return of an episode is no 32-bit float if it overflows.
        reward = {OVERFLOWS: 3e38, IS_NAN: float("nan")}.get(int(action), float(action))
        never_ends = action == NEVER_ENDS or (action == SOME_END and not self._is_first)
        is_over = self._taken >= LENGTH and not never_ends
        return np.zeros(2, np.float32), reward, is_over, False, {"graded": int(action)} if is_over else {}

    def close(self) -> None:
        type(self).num_open -= 1


@pytest.fixture(autouse=True)
def graded_environment() -> Iterator[None]:
    gymnasium.register(ENVIRONMENT, entry_point=GradedEnv, disable_env_checker=True)
    GradedEnv.num_steps = GradedEnv.num_open = 0
    GradedEnv.on_step = staticmethod(lambda step: None)
    yield
    del gymnasium.registry[ENVIRONMENT]


class Members:
    """A fake coordinator that records each report."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.waits: list[str] = []
        self.stats: dict[str, float] = {}
        self.failures: list[tuple[float, str]] = []
        """The reports of failed evaluations."""
        self.versions: list[Version] = []
        self.on_wait: Callable[[], object] = lambda: None

    def check(self) -> None:
        pass

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        self.rows.append((step, scalars))

    def report(
        self,
        *,
        stats: Mapping[str, float] | None = None,
        version: Version | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.stats |= stats or {}
        self.failures += [((stats or {})[name], text) for name, text in (texts or {}).items()]
        self.versions += [] if version is None else [version]

    def turn_to(self, doing: str) -> None:
        if doing == "version":
            self.waits.append(doing)
            self.on_wait()


class Bench:
    """A parameter database, with methods that act as the trainer, and evaluators."""

    def __init__(self, open_db: Callable[[], ParameterDB], corrupt: Callable[[Version], None]) -> None:
        self.open_db = open_db
        self.corrupt = corrupt
        self.db = open_db()
        self.members = Members()
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self._number = 0

    def push(self, step: int, grade: int, *, terminal: bool = False) -> Version:
        """Store a version as a trainer does."""
        vector = np.zeros(3 * NUM_GRADES, np.float32)
        vector[2 * NUM_GRADES + grade] = 1.0
        version = Version(1, step)
        metadata = {EXPORTED_ACTOR_KEY: EXPORTED.to_json(), NUMBER_KEY: self._number, "env_steps": 100 * step}
        self._number += 1
        self.db.push(POLICY, Parameters(version=version, vector=vector, layout="graded"), metadata=metadata)
        if terminal:
            self.finish(version)
        return version

    def push_mlp(self, step: int, grade: int, *, hidden_size: int = 4, tags: Sequence[str] = ()) -> Version:
        """Store a version of ``mlp``, as trainers of that network do."""
        parameters, metadata = mlp_version(Version(1, step), grade, hidden_size)
        self.db.push(POLICY, parameters, tags=tags, metadata={**metadata, NUMBER_KEY: self._number})
        self._number += 1
        return parameters.version

    def finish(self, version: Version) -> None:
        self.db.annotate(POLICY, version, {TERMINAL_KEY: {"reason": "envSteps"}})

    def evaluator(
        self, *, index: int = 0, open_db: Callable[[], ParameterDB] | None = None, **config: Any
    ) -> EvaluatorWorker:
        """Return a configured and started evaluator."""
        context = WorkerContext(
            role="evaluator",
            index=index,
            incarnation=0,
            attempt=0,
            token="",
            tls=None,
            log=structlog.stdlib.get_logger(),
            metrics=self.metrics,
            clock=ManualClock(),
            join_session=self.members,
            ledger_folder=Path(),
        )
        worker = EvaluatorWorker(context, open_db=lambda _: (open_db or self.open_db)())
        worker.configure(evaluator_config(**config))
        worker.start()
        return worker

    def infos(self) -> dict[str, VersionInfo]:
        return {str(info.version): info for info in self.db.versions(POLICY)}

    def means(self) -> dict[str, Any]:
        """Return the mean return of each evaluated version; None if it is unfinished."""
        evaluations = {version: evaluation_of(info) for version, info in self.infos().items()}
        return {version: each.get("return_mean") for version, each in evaluations.items() if each is not None}

    def best(self) -> list[str]:
        return [version for version, info in self.infos().items() if BEST_TAG in info.tags]

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("rlsrl_evaluations_total", {"outcome": outcome}) or 0.0


def mlp_version(version: Version, grade: int, hidden_size: int = 4) -> tuple[Parameters, dict[str, Any]]:
    """Return weights of the network ``mlp`` that always choose ``grade``, and the metadata of their version."""
    env_spec = spec_of_spaces(GradedEnv.observation_space, GradedEnv.action_space)
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (hidden_size,)}, seed=1), env_spec)
    exported = policy.export()
    assert exported is not None
    vector = np.zeros(policy.layout.num_parameters, np.float32)
    vector[policy.layout.offsets["actor.2.bias"] + grade] = 1.0
    parameters = Parameters(version=version, vector=vector, layout=policy.layout.digest)
    shapes = {name: list(shape) for name, shape in policy.layout.shapes.items()}
    return parameters, {EXPORTED_ACTOR_KEY: exported.to_json(), NETWORK_KEY: shapes, "env_steps": 100 * version.step}


MLP = {"mlp": {"hidden_sizes": [4]}}
"""The network of ``mlp_version``."""


def evaluator_config(**changes: Any) -> EvaluatorConfig:
    value = {
        "experiment": "test",
        "run_uid": "test",
        "seed": 1,
        "coordinator_address": "unix-abstract:none",
        "heartbeat_seconds": 1.0,
        "metrics_address": "127.0.0.1:0",
        "log_folder": "",
        "ledger_folder": "",
        "environment": {"id": ENVIRONMENT, "max_non_finite": 100, "episode_info": ["graded"]},
        "network": {"mlp": {}},
        "outputs": "policyAndValue",
        "num_evaluators": 1,
        "environments": 2,
        "episodes_per_environment": 4,
        "max_steps_per_environment": 100,
        "greedy": True,
        "policy_name": POLICY,
        "parameter_store": {"folder": ""},
    }
    return EvaluatorConfig.model_validate(value | changes, by_name=True)


@pytest.fixture(params=["memory", "filesystem"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "memory":
        blobs = MemoryBlobs()

        def corrupt(version: Version) -> None:
            path = f"{POLICY}/versions/{file_stem(version)}.safetensors"
            blobs.content[path] = flipped(blobs.content[path])

        return Bench(lambda: MemoryParameterDB(blobs), corrupt)

    def corrupt_file(version: Version) -> None:
        path = tmp_path / POLICY / "versions" / f"{file_stem(version)}.safetensors"
        path.write_bytes(flipped(path.read_bytes()))

    return Bench(lambda: FilesystemParameterDB(tmp_path), corrupt_file)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsrl.workers.evaluator.CHECK_SECONDS", 0.001)


@pytest.fixture(autouse=True)
def everything_is_closed() -> Iterator[None]:
    yield
    assert GradedEnv.num_open == 0


def test_the_last_version_of_a_finished_run_is_evaluated_and_the_evaluator_ends(bench: Bench) -> None:
    bench.push(0, grade=1)
    bench.push(10, grade=4, terminal=True)
    worker = bench.evaluator()

    worker.run()

    assert worker.done
    assert evaluation_of(bench.infos()["1.10"]) == {
        "episodes": 8,
        "steps": 96,
        "faults": 0,
        "return_mean": 12.0,
        "return_std": 0.0,
        "return_min": 12.0,
        "return_max": 12.0,
        "length_mean": 3.0,
        "episode_info": {"graded": {"mean": 4.0, "count": 8}},
        "greedy": True,
    }
    assert bench.means().keys() == {"1.10"}, "older ones are skipped"
    assert bench.best() == ["1.10"]
    assert bench.members.rows == [
        (
            10,
            {
                "evaluation/return_mean": 12.0,
                "evaluation/return_std": 0.0,
                "evaluation/length_mean": 3.0,
                "evaluation/episodes": 8.0,
                "evaluation/episode_info/graded/mean": 4.0,
                "evaluation/episode_info/graded/count": 8.0,
                "evaluation/env_steps": 1000.0,
            },
        )
    ]
    assert bench.members.stats["return_mean"] == 12.0
    assert bench.members.versions == [Version(1, 10)]
    assert bench.count("stored") == 1
    assert bench.registry.get_sample_value("rlsrl_evaluation_return_mean") == 12.0
    assert bench.registry.get_sample_value("rlsrl_evaluation_length_mean") == 3.0
    assert bench.registry.get_sample_value("rlsrl_evaluation_info_mean", {"key": "graded"}) == 4.0
    assert bench.registry.get_sample_value("rlsrl_evaluation_seconds_count") == 1


def test_versions_are_played_as_they_come_and_the_best_stays_tagged(bench: Bench) -> None:
    to_come = [(10, 5), (20, 2), (30, 7), (40, 7), (50, 6)]

    def on_wait() -> None:
        step, grade = to_come.pop(0)
        bench.push(step, grade, terminal=not to_come)

    bench.members.on_wait = on_wait
    worker = bench.evaluator()

    worker.run()

    assert bench.means() == {"1.10": 15.0, "1.20": 6.0, "1.30": 21.0, "1.40": 21.0, "1.50": 18.0}
    assert bench.best() == ["1.30"]
    assert [step for step, _ in bench.members.rows] == [10, 20, 30, 40, 50]
    assert len(bench.members.waits) == 5, "it exits without another check"


def test_a_run_that_ends_while_an_older_version_is_played_has_its_last_version_evaluated(bench: Bench) -> None:
    bench.push(10, grade=1)
    at_step(5, lambda: bench.push(20, grade=2))
    at_step(9, lambda: bench.push(30, grade=3, terminal=True))

    bench.evaluator().run()

    assert bench.means() == {"1.10": 3.0, "1.30": 9.0}


def test_what_carries_an_evaluation_is_not_played_again(bench: Bench) -> None:
    version = bench.push(10, grade=3, terminal=True)
    bench.db.annotate(POLICY, version, {EVALUATION_KEY: {"return_mean": 9.0}})
    worker = bench.evaluator()

    worker.run()

    assert worker.done
    assert GradedEnv.num_steps == 0


def test_what_a_killed_evaluator_had_begun_is_played_again(bench: Bench) -> None:
    """An evaluator writes only complete evaluations, so its successor starts again."""
    bench.push(10, grade=3, terminal=True)
    first = bench.evaluator()
    at_step(7, first.exit)
    first.run()
    assert not first.done
    assert bench.means() == {}

    bench.evaluator().run()

    assert bench.means() == {"1.10": 9.0}


def test_exit_and_pause_are_obeyed_within_a_step(bench: Bench) -> None:
    bench.push(10, grade=3, terminal=True)
    worker = bench.evaluator(environments=1, episodes_per_environment=1)
    steps_at_pause: list[int] = []
    paused, resumed = threading.Event(), threading.Event()

    def pause() -> None:
        worker.pause()
        paused.set()

    at_step(7, pause)
    at_step(8, lambda: steps_at_pause.append(resumed.is_set()))
    at_step(11, worker.exit)
    runner = threading.Thread(target=worker.run)
    runner.start()
    assert paused.wait(30)
    resumed.set()
    worker.start()
    runner.join(30)

    assert steps_at_pause == [True], "not one step between pause and start"
    assert GradedEnv.num_steps == 11, "not one step after exit"
    assert bench.means() == {}


def test_a_pause_changes_no_result(bench: Bench) -> None:
    bench.push(10, grade=3, terminal=True)
    worker = bench.evaluator()
    at_step(7, lambda: (worker.pause(), threading.Thread(target=worker.start).start()))
    worker.run()
    assert bench.means() == {"1.10": 9.0}


def test_an_idle_evaluator_is_woken_to_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wake-up it would wait for an hour, and the test would time out."""
    monkeypatch.setattr("rlsrl.workers.evaluator.CHECK_SECONDS", 3600.0)
    worker = bench.evaluator()
    bench.members.on_wait = lambda: threading.Thread(target=worker.exit).start()
    worker.run()
    assert not worker.done


def test_a_version_that_is_pruned_while_it_is_played_costs_only_its_place_in_the_db(bench: Bench) -> None:
    bench.push(10, grade=7)

    def prune() -> None:
        bench.push(20, grade=2, terminal=True)
        assert bench.db.prune(POLICY, keep_last=1) == [Version(1, 10)]

    at_step(5, prune)

    bench.evaluator().run()

    assert bench.means() == {"1.20": 6.0}
    assert bench.best() == ["1.20"]
    assert [step for step, _ in bench.members.rows] == [10, 20], "it was measured, so it is on the curve"
    assert (bench.count("pruned"), bench.count("stored")) == (1, 1)


def test_a_version_that_is_pruned_before_it_is_read_is_passed_over(bench: Bench) -> None:
    bench.push(10, grade=7)
    trainer = bench.db

    class Slow(MemoryParameterDB):
        """Lists a version that is gone by the time it is read."""

        def versions(self, policy: str) -> list[VersionInfo]:
            return trainer.versions(policy)

        def get(self, *arguments: Any, **options: Any) -> Parameters | None:
            if "1.20" not in bench.infos():
                bench.push(20, grade=2, terminal=True)
                trainer.prune(POLICY, keep_last=1)
            return trainer.get(*arguments, **options)

        def annotate(self, *arguments: Any) -> None:
            trainer.annotate(*arguments)

        def tag(self, *arguments: Any) -> None:
            trainer.tag(*arguments)

    bench.evaluator(open_db=Slow).run()

    assert bench.means() == {"1.20": 6.0}
    assert (bench.count("pruned"), bench.count("stored")) == (1, 1)


def test_a_damaged_version_is_passed_over(bench: Bench) -> None:
    damaged = bench.push(10, grade=7)
    bench.corrupt(damaged)
    bench.members.on_wait = lambda: bench.push(20, grade=2, terminal=True)

    bench.evaluator().run()

    assert bench.means() == {"1.20": 6.0}
    assert (bench.count("corrupt"), bench.count("stored")) == (1, 1)


def test_a_damaged_last_version_does_not_keep_the_run_from_ending(bench: Bench) -> None:
    bench.corrupt(bench.push(10, grade=7, terminal=True))
    worker = bench.evaluator()
    worker.run()
    assert worker.done
    assert bench.count("corrupt") == 1


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(
    ("grade", "reason"),
    [
        (NEVER_ENDS, "0 of 8 episodes ended in 128 steps of each environment; environment 0 ended 0 of 4"),
        (OVERFLOWS, "the mean return is inf"),
        (RAISES, "environment rank 0 raised ConnectionError: no answer"),
        (IS_NAN, "reward is nan at step 1 of its episode"),
    ],
)
def test_a_failed_evaluation_records_its_reason_and_is_not_repeated(bench: Bench, grade: int, reason: str) -> None:
    bench.push(10, grade=grade)
    bench.members.on_wait = lambda: bench.push(20, grade=1, terminal=True)

    bench.evaluator().run()

    evaluation = evaluation_of(bench.infos()["1.10"])
    assert evaluation is not None
    assert evaluation.keys() == {"unfinished"}
    assert reason in evaluation["unfinished"]
    assert bench.best() == ["1.20"]
    assert [step for step, _ in bench.members.rows] == [20]
    assert (bench.count("unfinished"), bench.count("stored")) == (1, 1)


def test_an_evaluation_that_reaches_its_limit_keeps_the_episodes_that_ended(bench: Bench) -> None:
    bench.push(10, grade=SOME_END)
    bench.members.on_wait = lambda: bench.push(20, grade=1, terminal=True)

    bench.evaluator().run()

    evaluation = evaluation_of(bench.infos()["1.10"])
    assert evaluation is not None
    assert (evaluation["episodes"], evaluation["return_mean"]) == (4, SOME_END * LENGTH)
    assert "4 of 8 episodes ended in 128 steps of each environment; environment 1" in evaluation["unfinished"]
    assert bench.best() == ["1.20"], "its mean favours short episodes"
    (step, row), complete = bench.members.rows
    assert (step, row["unfinished_evaluation/episodes"]) == (10, 4)
    assert row["unfinished_evaluation/return_mean"] == SOME_END * LENGTH
    assert not any(name.startswith("evaluation/") for name in row)
    assert complete[0] == 20
    assert (bench.count("unfinished"), bench.count("stored")) == (1, 1)
    assert bench.registry.get_sample_value("rlsrl_evaluation_return_mean") == LENGTH


def test_a_full_disk_costs_the_result_and_nothing_else(bench: Bench) -> None:
    bench.push(10, grade=7)

    def open_db() -> ParameterDB:
        db = bench.open_db()
        annotate = db.annotate

        def refuse_once(policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
            if version == Version(1, 10):
                raise OSError(28, "No space left on device")
            annotate(policy, version, metadata)

        db.annotate = refuse_once  # type: ignore[method-assign]
        return db

    bench.members.on_wait = lambda: bench.push(20, grade=1, terminal=True)

    bench.evaluator(open_db=open_db).run()

    assert bench.means() == {"1.20": 3.0}
    assert (bench.count("failed"), bench.count("stored")) == (1, 1)
    assert bench.members.failures == [(1, "1.10: [Errno 28] No space left on device"), (0, "")]


def test_a_store_that_is_away_for_a_while_is_waited_for(bench: Bench) -> None:
    bench.push(10, grade=7)
    num_looks = 0

    def open_db() -> ParameterDB:
        db = bench.open_db()
        versions, get = db.versions, db.get

        def away_at_first(policy: str) -> list[VersionInfo]:
            nonlocal num_looks
            num_looks += 1
            if num_looks <= 3:
                raise OSError("the store cannot be reached")
            return versions(policy)

        def refuse_one(policy: str, ref: Ref = "latest", newer_than: Version | None = None) -> Parameters | None:
            if ref == Version(1, 10):
                raise OSError("the store cannot be reached")
            return get(policy, ref, newer_than)

        db.versions, db.get = away_at_first, refuse_one  # type: ignore[method-assign]
        return db

    def on_wait() -> None:
        if num_looks > 3:
            bench.push(20, grade=1, terminal=True)

    bench.members.on_wait = on_wait

    bench.evaluator(open_db=open_db).run()

    assert bench.means() == {"1.20": 3.0}
    assert (bench.count("failed"), bench.count("stored")) == (1, 1)
    assert bench.members.failures == [(1, "1.10: the store cannot be reached"), (0, "")]


def test_a_store_that_refuses_ends_the_evaluator(bench: Bench) -> None:
    def open_db() -> ParameterDB:
        db = bench.open_db()

        def refuse(policy: str) -> list[VersionInfo]:
            raise StoreRefused("no such bucket")

        db.versions = refuse  # type: ignore[method-assign]
        return db

    with pytest.raises(ConfigurationError, match="no such bucket"):
        bench.evaluator(open_db=open_db).run()


def test_one_of_so_many_versions_and_the_last_one(bench: Bench) -> None:
    steps = iter(range(1, 9))

    def on_wait() -> None:
        step = next(steps)
        bench.push(step, grade=1, terminal=step == 8)

    bench.members.on_wait = on_wait

    bench.evaluator(every_versions=3).run()

    assert list(bench.means()) == ["1.1", "1.4", "1.7", "1.8"]


def test_two_evaluators_play_each_version_once_and_both_end(bench: Bench) -> None:
    for step in range(4):
        bench.push(step, grade=step)
    workers = [bench.evaluator(index=index, num_evaluators=2) for index in (0, 1)]
    bench.push(4, grade=7)
    bench.push(5, grade=3, terminal=True)
    runners = [threading.Thread(target=worker.run) for worker in workers]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join(60)

    assert all(worker.done for worker in workers)
    assert bench.means() == {"1.4": 21.0, "1.5": 9.0}, "the newest of each share"
    assert bench.best() == ["1.4"]
    assert sorted(step for step, _ in bench.members.rows) == [4, 5]


@pytest.mark.parametrize("parameters", [{"tag": "reference"}, {"version": "1.10"}])
def test_a_fixed_version_is_played_once_and_counts_as_no_evaluation_of_the_run(
    bench: Bench, parameters: dict[str, str]
) -> None:
    bench.push_mlp(10, grade=5, tags=["reference"])
    bench.push_mlp(20, grade=7)
    num_looks = 0

    def on_wait() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            bench.finish(Version(1, 20))

    bench.members.on_wait = on_wait
    worker = bench.evaluator(parameters=parameters, network=MLP)
    at_step(3 * PLAY_STEPS, worker.exit)  # 2 * PLAY_STEPS for its two environments

    worker.run()

    assert worker.done
    assert [step for step, _ in bench.members.rows] == [10], "it is played once, and then the evaluator waits"
    ((_, row),) = bench.members.rows
    assert (row["fixed_evaluation/return_mean"], row["fixed_evaluation/attempt"]) == (5.0 * LENGTH, 1.0)
    assert row["fixed_evaluation/env_steps"] == 1000.0
    assert all(name.startswith("fixed_evaluation/") for name in row)
    assert bench.means() == {}
    assert bench.best() == []
    assert bench.infos()["1.10"].metadata.keys() == {EXPORTED_ACTOR_KEY, NETWORK_KEY, NUMBER_KEY, "env_steps"}, (
        "nothing is stored"
    )
    stats = {name: bench.members.stats[name] for name in ("fixed_return_mean", "version_attempt", "version_step")}
    assert stats == {"fixed_return_mean": 5.0 * LENGTH, "version_attempt": 1.0, "version_step": 10.0}
    assert not {"return_mean", "step"} & bench.members.stats.keys(), "those of the run's newest evaluation"
    assert bench.members.versions == [Version(1, 10)]
    assert bench.count("played") == 1
    assert bench.count("stored") == 0
    assert bench.registry.get_sample_value("rlsrl_evaluation_return_mean") in (None, 0.0)


def test_a_tag_that_moves_has_its_new_version_played(bench: Bench) -> None:
    bench.push_mlp(10, grade=5, tags=["reference"])
    actions: Iterator[Callable[[], object]] = iter([
        lambda: bench.push_mlp(20, grade=7),
        lambda: bench.db.tag(POLICY, "1.20", "reference"),
        lambda: bench.finish(Version(1, 20)),
    ])  # fmt: skip

    def on_wait() -> None:
        next(actions)()

    bench.members.on_wait = on_wait

    bench.evaluator(parameters={"tag": "reference"}, network=MLP).run()

    means = [(step, row["fixed_evaluation/return_mean"]) for step, row in bench.members.rows]
    assert means == [(10, 5.0 * LENGTH), (20, 7.0 * LENGTH)]


def test_a_fixed_version_that_is_pruned_after_it_was_played_is_missed_by_nobody(bench: Bench) -> None:
    bench.push_mlp(10, grade=5)
    last = bench.push_mlp(20, grade=7)

    def on_wait() -> None:
        bench.db.prune(POLICY, keep_last=1)
        bench.finish(last)

    bench.members.on_wait = on_wait
    worker = bench.evaluator(parameters={"version": "1.10"}, network=MLP)

    worker.run()

    assert worker.done
    assert list(bench.infos()) == ["1.20"]
    assert [step for step, _ in bench.members.rows] == [10]


def test_a_fixed_version_with_missing_episodes_has_another_name(bench: Bench) -> None:
    bench.finish(bench.push_mlp(10, grade=SOME_END, tags=["reference"]))

    bench.evaluator(parameters={"tag": "reference"}, network=MLP).run()

    ((_, row),) = bench.members.rows
    assert all(name.startswith("unfinished_fixed_evaluation/") for name in row)
    assert bench.count("unfinished") == 1
    assert bench.means() == {}


CUSTOM = {"custom": {"factory": "rlsrl.policies.networks:MlpActorCritic", "kwargs": {"hidden_sizes": [4]}}}
"""The same network, whose parameters only torch knows."""


@pytest.mark.parametrize("network", [MLP, CUSTOM], ids=["mlp", "custom"])
def test_a_file_of_another_run_is_played(bench: Bench, tmp_path: Path, network: dict[str, Any]) -> None:
    bench.finish(bench.push_mlp(10, grade=1))
    file = weights_file(tmp_path / "other.safetensors", grade=6)
    worker = bench.evaluator(parameters={"file": str(file)}, network=network)
    at_step(3 * PLAY_STEPS, worker.exit)  # 2 * PLAY_STEPS for its two environments

    worker.run()

    assert worker.done
    ((step, row),) = bench.members.rows
    assert (step, row["fixed_evaluation/attempt"], row["fixed_evaluation/return_mean"]) == (900, 7.0, 6.0 * LENGTH)
    assert list(bench.infos()) == ["1.10"]


def weights_file(path: Path, *, grade: int, hidden_size: int = 4) -> Path:
    """Write a file as ``rlsrl params export`` does, of version 7.900."""
    parameters, metadata = mlp_version(Version(7, 900), grade, hidden_size)
    path.write_bytes(encode_weights(parameters, created_at=0.0, metadata=metadata))
    return path


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (
            {"tag": "referense"},
            "policy 'default' has no version or tag 'referense'; tags: reference; versions: 1.10, 1.20 (did you mean",
        ),
        (
            {"version": "1.12"},
            "policy 'default' has no version 1.12; stored: 1.10, 1.20 (nearest: 1.10)",
        ),
    ],
)
def test_a_fixed_version_that_does_not_exist_ends_the_evaluator(
    bench: Bench, parameters: dict[str, str], problem: str
) -> None:
    bench.push_mlp(10, grade=5, tags=["reference"])
    bench.push_mlp(20, grade=5)
    with pytest.raises(ConfigurationError) as caught:
        bench.evaluator(parameters=parameters, network=MLP).run()
    ((field, value),) = parameters.items()
    assert str(caught.value).startswith(f"evaluators.parameters.{field} {value!r}: {problem}")


def test_without_a_version_a_file_is_advised(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match=r"has not stored a version yet; evaluators\.parameters\.file plays"):
        bench.evaluator(parameters={"tag": "best"}, network=MLP).run()


def test_a_damaged_fixed_version_ends_the_evaluator(bench: Bench) -> None:
    bench.corrupt(bench.push_mlp(10, grade=5, tags=["reference"]))
    with pytest.raises(ConfigurationError, match=r"parameters\.tag 'reference': .*checksum of the arrays"):
        bench.evaluator(parameters={"tag": "reference"}, network=MLP).run()


def test_a_fixed_version_waits_for_a_store_that_is_away(bench: Bench) -> None:
    last = bench.push_mlp(10, grade=5, tags=["reference"])
    num_looks = num_reads = 0

    def open_db() -> ParameterDB:
        db = bench.open_db()
        versions, get = db.versions, db.get

        def away_at_first(policy: str) -> list[VersionInfo]:
            nonlocal num_looks
            num_looks += 1
            if num_looks <= 2:
                raise OSError("the store cannot be reached")
            return versions(policy)

        def away(*arguments: Any) -> Parameters | None:
            nonlocal num_reads
            num_reads += 1
            if num_reads <= 2:
                raise OSError("the store cannot be reached")
            return get(*arguments)

        db.versions, db.get = away_at_first, away  # type: ignore[method-assign, assignment]
        return db

    bench.members.on_wait = lambda: bench.finish(last) if bench.members.rows else None

    bench.evaluator(open_db=open_db, parameters={"tag": "reference"}, network=MLP).run()

    assert [step for step, _ in bench.members.rows] == [10]
    assert len(bench.members.waits) >= 4, "it waits after each failure"


def other_weights(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return files that cannot be played, with the end of the error."""
    intact = weights_file(folder / "intact.safetensors", grade=1)
    damaged = folder / "damaged.safetensors"
    damaged.write_bytes(flipped(intact.read_bytes()))
    text = folder / "notes.txt"
    text.write_text("no weights")
    wide = weights_file(folder / "wide.safetensors", grade=1, hidden_size=8)
    parameters, metadata = mlp_version(Version(7, 900), 1)
    program = metadata[EXPORTED_ACTOR_KEY]
    renamed = {**program, "observation": [["observation/renamed", spec] for _, spec in program["observation"]]}
    elsewhere, newer = folder / "elsewhere.safetensors", folder / "newer.safetensors"
    for path, exported in ((elsewhere, renamed), (newer, {**program, "layers": [{"kind": "attention"}]})):
        path.write_bytes(
            encode_weights(parameters, created_at=0.0, metadata={**metadata, EXPORTED_ACTOR_KEY: exported})
        )
    return {
        "missing": (folder / "intakt.safetensors", "does not exist; {folder} has damaged.safetensors, elsewhere"),
        "near": (folder / "intakt.safetensors", "(did you mean 'intact.safetensors'?)"),
        "no folder": (folder / "none" / "a.safetensors", "; neither does a readable folder {folder}/none"),
        "a folder": (folder, "cannot be read: Is a directory"),
        "damaged": (damaged, "damaged.safetensors: the checksum of the arrays does not match"),
        "text": (text, "is no weights file as `rlsrl params export` writes it: notes.txt: no readable header"),
        "custom network": (wide, "another network than the experiment's, which has 94; actor.0.weight is [8, 2] there"),
        "network": (wide, "another network than the experiment's, which has 94; actor.0.weight is [8, 2] there and"),
        "environment": (elsewhere, "version 7.900 is of another environment: its observations: [('observation/renamed"),
        "release": (newer, "another version of rlsrl exported its actor: TypeError"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        *("missing", "near", "no folder", "a folder", "damaged", "text", "network", "custom network"),
        *("environment", "release"),
    ],
)
def test_a_file_that_cannot_be_played_ends_the_evaluator(bench: Bench, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    bench.finish(bench.push_mlp(10, grade=1))
    path, problem = other_weights(folder)[kind]

    with pytest.raises(ConfigurationError) as caught:
        bench.evaluator(parameters={"file": str(path)}, network=CUSTOM if "custom" in kind else MLP).run()

    assert str(caught.value).startswith(f"evaluators.parameters.file '{path}': ")
    assert problem.format(folder=folder) in str(caught.value)
    assert bench.members.rows == []


def at_step(number: int, action: Callable[[], object]) -> None:
    """Run an action during that step, counted over all steps."""
    before = GradedEnv.on_step

    def on_step(step: int) -> None:
        before(step)
        if step == number:
            action()

    GradedEnv.on_step = staticmethod(on_step)
