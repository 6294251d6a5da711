"""Real runs with vectorised environments, and with one thread for each environment."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.testing.live_runs import Desk, LiveRun
from rlsrl.testing.waiting import until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {environment}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 64, normalizeRewards: true}}}}
  actors: {{replicas: 2, environments: 8, rolloutLength: 16, vectorization: {vectorization}, ringSize: {ring_size}}}
  pacing: {{maxPolicyLag: {lag}}}
  parameters: {{everySteps: 10, keepLast: 1000}}
  stop: {{trainSteps: {steps}}}
  {more}
"""

STUCK = """
import os
from pathlib import Path
import threading
import time
import gymnasium

class Stuck(gymnasium.Wrapper):
    def step(self, action):
        if Path(__file__).with_name("stuck").exists():
            Path(__file__).with_name(f"entered-{os.getpid()}-{threading.get_ident()}").touch()
            time.sleep(3600)
        return self.env.step(action)

def make():
    return Stuck(gymnasium.make("CartPole-v1"))
"""


TORCH = """
from torch import nn

class Plain(nn.Module):
    def __init__(self, env_spec):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, observation):
        features = observation["observation"]
        return {"policy": self.actor(features), "value": self.critic(features).squeeze(-1)}
"""


def experiment(
    vectorization: str,
    *,
    environment: str = "{id: CartPole-v1}",
    steps: int = 20,
    lag: int = 1,
    ring_size: int = 1,
    more: str = "",
) -> str:
    return EXPERIMENT.format(
        vectorization=vectorization, environment=environment, steps=steps, lag=lag, ring_size=ring_size, more=more
    )


def desk_in(folder: Path, text: str) -> Desk:
    folder.mkdir()
    return Desk(folder, text)


def await_training(run: LiveRun) -> None:
    run.until(lambda: run.facts.folder.exists() and len(run.facts.versions()) > 1, "a version that was trained")


@pytest.mark.parametrize(
    ("vectorization", "ring_size", "more"),
    [
        pytest.param("native", 1, "", id="native"),
        pytest.param("threads", 1, "", id="threads"),
        pytest.param("threads", 1, "policyWorkers: {}", id="threads, policy worker"),
        pytest.param("native", 2, "policyWorkers: {}", id="native, policy worker", marks=pytest.mark.slow),
        pytest.param("threads", 1, "bufferWorkers: {}", id="threads, buffer worker", marks=pytest.mark.slow),
        pytest.param("threads", 1, "transport: grpc", id="threads, grpc", marks=pytest.mark.slow),
    ],
)
def test_a_run_counts_every_transition_once(tmp_path: Path, vectorization: str, ring_size: int, more: str) -> None:
    desk = Desk(tmp_path, experiment(vectorization, ring_size=ring_size, more=more))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["train_steps"], summary["restarts"]) == ("trainSteps", 20, {})
    assert summary["max_policy_lag"] <= 1
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert ledger["trained"] == summary["env_steps"]
    # Some of the steps that slots have room for only reset: episodes end, of about twenty steps each at first.
    assert 0.8 * 20 * 16 * 8 < ledger["trained"] < 20 * 16 * 8
    assert summary["untrained"] == 0, "nothing is gathered beyond the last batch"
    assert desk.facts().leftovers() == []


def test_threads_act_by_a_network_that_only_torch_evaluates(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(TORCH)
    network = 'policy: {network: {custom: {factory: "plain:Plain"}}}'
    desk = Desk(tmp_path, experiment("threads", lag=0, more=network))
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert (summary["reason"], summary["train_steps"], summary["restarts"]) == ("trainSteps", 20, {})
    assert summary["max_policy_lag"] == 0
    assert summary["ledger"]["balanced"], summary["ledger"]


def test_hanging_environments_do_not_prevent_the_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "standing.py").write_text(STUCK)
    text = experiment("threads", environment='{factory: "standing:make"}', steps=1_000_000)
    desk = Desk(tmp_path, text)
    with desk.begin() as run:
        await_training(run)
        actors = run.until(run.facts.status, "the coordinator's picture")["roles"]["actor"]
        pids = [worker["pid"] for worker in sorted(actors, key=lambda worker: worker["index"])]
        for pid in pids:
            assert psutil.Process(pid).num_threads() >= 4, "one for each environment"
        (tmp_path / "stuck").touch()
        run.until(lambda: any(tmp_path.glob("entered-*")), "an environment stands still")
        run.send(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.output
    assert "killing the processes that did not end" not in run.output
    assert desk.facts().leftovers() == []
    summary = desk.facts().json("summary.json")
    assert summary["ledger"]["balanced"]
    # An actor whose trainer waits for the other one's samples has nothing to step, and so nothing that stands still.
    standing = [len(list(tmp_path.glob(f"entered-{pid}-*"))) for pid in pids]
    left = [desk.facts().logged(f"actor-{index}", "environments_left") for index in range(len(pids))]
    assert [sum(len(entry["ranks"]) for entry in entries) for entries in left] == standing


@pytest.mark.slow
def test_a_killed_actor_with_threads_leaves_nothing_and_the_run_continues(tmp_path: Path) -> None:
    desk = Desk(tmp_path, experiment("threads", steps=400))
    with desk.begin() as run:
        await_training(run)
        run.send(signal.SIGKILL)
        run.wait()
    # The kernel closes the sockets of a killed process some time after its end.
    until(lambda: desk.facts().leftovers() == [], "nothing is left")
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    assert desk.facts().json("summary.json")["ledger"]["balanced"]
    assert desk.facts().leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["native", "threads"])
def test_the_same_seed_gives_the_same_parameters(tmp_path: Path, vectorization: str) -> None:
    """The speed of single environments has no effect."""
    bits = []
    for name in ("one", "another"):
        desk = desk_in(tmp_path / name, experiment(vectorization, steps=40, lag=0))
        with desk.begin() as run:
            assert run.wait() == 0, run.output
        parameters = FilesystemParameterDB(desk.run_folder / "parameters").get(POLICY_NAME)
        assert parameters is not None
        assert parameters.version.step == 40
        bits.append(parameters.vector.tobytes())
    assert bits[0] == bits[1]
