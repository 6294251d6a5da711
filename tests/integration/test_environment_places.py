"""The places of environments in a real run: with actors and evaluators, after a restart, and after live scaling."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.live import name_of, settings_of
from rlsrl.envs.seeds import environment_seed
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: places}
spec:
  seed: 3
  environment:
    factory: "rlsrl.testing.environments:PlacedEnv"
    kwargs: {gate: no-gate, record: "RECORD"}
    kwargsByRank: {cycle: {level: [easy, hard]}, addRank: {port: 9000}}
    passPlace: true
    episodeInfo: [num_environments]
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {epochs: 1, minibatchSize: 48}}
  actors: {replicas: 2, environmentsPerActor: 3, rolloutLength: 16}
  trainers: {batchEnvironments: 6, compile: "off"}
  evaluators: {environments: 4, episodesPerEnvironment: 1}
  parameters: {everySteps: 5}
  stop: {trainSteps: 1000000}
"""
SETTINGS = "settings.json"

Line = dict[str, Any]


class PlacedRun:
    """The workers of one run as pods, and what their environments have written."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._record = folder / "places.jsonl"
        self._settings = folder / SETTINGS
        self._hosts: dict[int, str] = {}
        self.pods = Pods(EXPERIMENT.replace("RECORD", str(self._record)), folder, stack)
        self._tell()
        coordinator = json.loads(self.pods.resolved.coordinator.to_json())
        self.pods.start_from("coordinator", {**coordinator, "settings_path": str(self._settings)})

    def start(self, role: str, *arguments: str, host: str = "") -> subprocess.Popen[bytes]:
        """Start a worker with the present config."""
        process, host = self.pods.start(role, self.pods.resolved.configs[role], *arguments, host=host)
        self._hosts[process.pid] = host
        return process

    def kill(self, role: str, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Kill a worker's container, and return the one that a kubelet starts in its place."""
        process.kill()
        process.wait(DEADLINE_SECONDS)
        return self.start(role, host=self._hosts[process.pid])

    def edit(self, *overrides: str) -> set[str]:
        """Edit the experiment, publish the live settings, and return the roles whose config has another name."""
        before = self.pods.resolved.configs
        self.pods.edit(*overrides)
        self._tell()
        return {role for role, config in self.pods.resolved.configs.items() if name_of(config) != name_of(before[role])}

    def _tell(self) -> None:
        settings = {role: settings_of(config) for role, config in self.pods.resolved.configs.items()}
        new = self._settings.with_suffix(".new")
        new.write_text(json.dumps(settings))
        new.rename(self._settings)

    def lines(self, call: str, *processes: subprocess.Popen[bytes]) -> list[Line]:
        """Return what the environments of some processes, or of all, have written at that call, by rank."""
        pids = {process.pid for process in processes}
        text = self._record.read_text() if self._record.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        chosen = [line for line in found if line["call"] == call and (not pids or line["pid"] in pids)]
        return sorted(chosen, key=lambda line: int(line["rank"]))

    def await_lines(self, number: int, *processes: subprocess.Popen[bytes]) -> list[Line]:
        """Wait until so many environments of the processes were reset, and return what they wrote when they were made.

        Asserts that each was reset with the seed of its place.
        """
        until(lambda: len(self.lines("reset", *processes)) >= number, f"{number} environments begin")
        began = self.lines("reset", *processes)
        assert [line["first_seed"] for line in began] == [line["seed"] for line in began]
        return self.lines("make", *processes)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PlacedRun]:
    with ExitStack() as stack:
        yield PlacedRun(tmp_path, stack)


def of(lines: list[Line], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in lines]


@pytest.mark.slow
def test_places_are_right_from_the_start_after_a_kill_and_after_scaling(run: PlacedRun) -> None:
    run.start("trainer", "--attempt", "1")
    actors = [run.start("actor") for _ in range(2)]
    evaluator = run.start("evaluator")
    training = run.await_lines(6, *actors)
    assert of(training, "purpose", "rank", "num_environments", "worker", "local_rank", "level", "port") == [
        ("training", rank, 6, rank // 3, rank % 3, ("easy", "hard")[rank % 2], 9000 + rank) for rank in range(6)
    ]
    assert of(training, "seed") == [(environment_seed(3, rank, 0),) for rank in range(6)]
    played = run.await_lines(4, evaluator)
    # The evaluator makes them again for each version.
    assert sorted(set(of(played, "purpose", "rank", "num_environments", "worker", "local_rank", "seed"))) == [
        ("evaluation", rank, 4, 0, rank, environment_seed(3, rank, 0, purpose="evaluation")) for rank in range(4)
    ]
    inspected = [line for line in run.lines("make") if line["purpose"] == "inspection"]
    assert inspected, "the trainer learns the spaces from one"
    assert set(of(inspected, "rank", "num_environments", "port")) == {(0, 1, 9000)}

    first = next(actor for actor in actors if run.lines("make", actor)[0]["worker"] == 0)
    successor = run.kill("actor", first)
    again = run.await_lines(3, successor)
    assert of(again, "rank", "num_environments", "worker", "seed") == [
        (rank, 6, 0, environment_seed(3, rank, 1)) for rank in range(3)
    ], "the same ranks, and other seeds than those of the killed actor"

    assert run.edit("actors.replicas=3") == {"actor"}, "exactly these pods are replaced"
    for actor in (successor, *(each for each in actors if each is not first)):
        actor.send_signal(signal.SIGTERM)
        assert actor.wait(DEADLINE_SECONDS) == 0
    actors = [run.start("actor") for _ in range(3)]
    scaled = run.await_lines(9, *actors)
    assert of(scaled, "purpose", "rank", "num_environments", "worker") == [
        ("training", rank, 9, rank // 3) for rank in range(9)
    ]
    steps = run.pods.train_steps()
    until(lambda: run.pods.train_steps() > steps + 3, "training with all actors")
    until(lambda: newest_mean(run.pods, "num_environments") == 9, "no episode of the former actors is left")
    assert evaluator.poll() is None


def newest_mean(pods: Pods, key: str) -> float | None:
    """Return the mean over the newest episodes of a value of ``info``, of the coordinator's status document."""
    info = pods.status()["totals"]["episode_info"] or {}
    mean: float | None = info[key]["mean"] if key in info else None
    return mean
