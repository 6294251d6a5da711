"""Real runs with other algorithms than PPO: V-trace, PQN, DQN, SAC, TD3, and three from outside the package.

These are the REINFORCE that ``rlsrl init --algorithm`` writes, one with a critic that actors never get, and Q-learning.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.cli.init import templates
from rlsrl.testing.chaos import INTERRUPTED, KillCampaign
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.ratio_history import check_history, read_lives
from rlsrl.testing.ratio_trace import folder_of
from rlsrl.testing.replayed_runs import is_in_pace
from rlsrl.workers.build.run_database import open_run_database

REINFORCE = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  seed: 1
  environment: {id: CartPole-v1}
  algorithm:
    custom:
      factory: my_algorithm:MyAlgorithm
      kwargs: {value_coefficient: 0.5}
      needs: {minibatchSize: 512}
      learningRate: 0.003
      normalizeRewards: true
  actors: {environments: 8, rolloutLength: 128}
  pacing: {maxPolicyLag: 0}
  stop: {returnMean: 475, envSteps: 3000000}
"""
CRITIC_APART_FACTORY = "rlsrl.testing.actor_and_critic:ActorAndCritic"
CRITIC_APART = REINFORCE.replace("my_algorithm:MyAlgorithm", CRITIC_APART_FACTORY).replace(
    "      kwargs: {value_coefficient: 0.5}\n      needs: {minibatchSize: 512}\n",
    "      kwargs: {critic_learning_rate: 0.003}\n      needs: {minibatchSize: 512, outputs: policy}\n",
)
Q_LEARNING = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  seed: 1
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [128, 128], activation: relu}}}
  algorithm:
    custom:
      factory: rlsrl.testing.q_learning:QLearning
      kwargs: {following: 0.005, epsilon: 0.04}
      needs: {minibatchSize: 64, outputs: actionValues, replay: {capacity: 50000, start: 1000, nStep: 3}}
      learningRate: 0.0005
      maxGradientNorm: 10
  actors: {environments: 8, rolloutLength: 16}
  pacing: {trainStepsPerEnvStep: 0.25}
  stop: {returnMean: 475, envSteps: 400000}
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
VTRACE = (EXAMPLES / "cartpole-vtrace.yaml").read_text()
PQN = (EXAMPLES / "cartpole-pqn.yaml").read_text().replace("  stop:\n", "  stop:\n    returnMean: 475\n")
SAC, TD3 = ((EXAMPLES / f"pendulum-{name}.yaml").read_text() for name in ("sac", "td3"))
DQN = (EXAMPLES / "cartpole-dqn.yaml").read_text().replace("envSteps: 100000", "{returnMean: 475, envSteps: 400000}")
EXPERIMENTS = {
    "REINFORCE": REINFORCE,
    "critic apart": CRITIC_APART,
    "V-trace": VTRACE.replace("name: cartpole-vtrace", "name: live"),
    "PQN": PQN.replace("name: cartpole-pqn", "name: live"),
    "Q-learning": Q_LEARNING,
    "DQN": DQN.replace("name: cartpole-dqn", "name: live"),
    "SAC": SAC.replace("name: pendulum-sac", "name: live"),
    "SAC, normalised": SAC.replace("name: pendulum-sac", "name: live")
    .replace("  policy:\n", "  policy:\n    normalizeObservations: true\n")
    .replace("    sac:\n", "    sac:\n      normalizeRewards: true\n"),
    "TD3": TD3.replace("name: pendulum-td3", "name: live"),
}
TRAINING_SECONDS = 900.0
"""Deadline of a run to its goal, on a machine with other load. SAC takes a minute on two idle cores."""
GOALS = {"SAC": -200, "SAC, normalised": -200, "TD3": -200}
"""The mean return of experiments on Pendulum; of others, on CartPole, 475."""
WAYS = {
    "policy worker": ("policyWorkers.replicas=1",),
    "two ranks": ("trainers.replicas=2", "actors.replicas=2"),
    "buffer worker": ("bufferWorkers.replicas=1",),
    "compiled": ("trainers.compile=upfront",),
}
BLOCKS = {
    "REINFORCE": "custom: {{factory: my_algorithm:MyAlgorithm, needs: {{minibatchSize: 256}}}}",
    "critic apart": (
        f"custom: {{{{factory: {CRITIC_APART_FACTORY}, needs: {{{{minibatchSize: 256, outputs: policy}}}}}}}}"
    ),
    "V-trace": "vtrace: {{minibatchSize: 256}}",
    "PQN": "pqn: {{epochs: 2, minibatchSize: 256}}",
    "Q-learning": (
        "custom: {{factory: rlsrl.testing.q_learning:QLearning, needs: {{minibatchSize: 64, outputs: actionValues, "
        "replay: {{capacity: 5000, start: 500}}}}}}"
    ),
    "DQN": "dqn: {{replay: {{capacity: 5000, start: 500, nStep: 3, priorities: {{}}}}, epsilonSpread: 7}}",
    "SAC": "sac: {{minibatchSize: 64, replay: {{capacity: 5000, start: 500, priorities: {{}}}}}}",
    "TD3": "td3: {{minibatchSize: 64, replay: {{capacity: 5000, start: 500}}, policyPeriod: 3, noiseColor: pink}}",
}
REPLAYING = ("Q-learning", "DQN", "SAC", "SAC, normalised", "TD3")
"""Their stores are the trainers', or those of buffer workers: see ``test_replay_shards_run.py``."""
VARIANT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {environment}
  policy: {{network: {{mlp: {{hiddenSizes: [32], {options}}}, recurrent: {recurrent}}}}}
  algorithm: {{{algorithm}: {{minibatchSize: 64, replay: {{capacity: 5000, start: 500}}}}}}
  actors: {{environments: 8, rolloutLength: 16}}
  pacing: {{trainStepsPerEnvStep: 0.1}}
  stop: {{envSteps: 3000}}
"""
CART_POLE = "{id: CartPole-v1}"
MASKED = "{factory: rlsrl.testing.environments:MaskedEnv, actionMask: action_mask}"
VARIANTS = {
    "DQN, dueling, with quantiles": {
        "environment": CART_POLE, "options": "dueling: true, quantiles: 8", "algorithm": "dqn"
    },
    "DQN, masked": {"environment": MASKED, "options": "activation: relu", "algorithm": "dqn"},
    "DQN, recurrent": {
        "environment": CART_POLE, "options": "dueling: true, quantiles: 8", "algorithm": "dqn",
        "recurrent": "{size: 16}",
    },
    "DQN, shared layers": {
        "environment": CART_POLE, "options": "dueling: true, shareLayers: true, initialization: uniform",
        "algorithm": "dqn",
    },
    "SAC, discrete": {"environment": CART_POLE, "options": "activation: relu", "algorithm": "sac"},
    "SAC, discrete, masked": {"environment": MASKED, "options": "activation: relu", "algorithm": "sac"},
}  # fmt: skip
NORMALISED = ("policy.normalizeObservations=true", "algorithm.custom.normalizeRewards=true")
"""Changes of an algorithm of one's own."""
OTHER_ROLES = "  policyWorkers: {{replicas: 1}}\n"
ROLES = ("coordinator", "actor", "trainer", "policy")


def with_algorithm(folder: Path, experiment: str) -> Desk:
    (folder / "my_algorithm.py").write_text(templates(has_algorithm=True)["my_algorithm.py"])
    return Desk(folder, experiment)


def settings(*changes: str) -> list[str]:
    """Return arguments of ``rlsrl run`` that change fields of the spec."""
    return [part for change in changes for part in ("--set", f"spec.{change}")]


def train(folder: Path, name: str, *changes: str) -> Desk:
    desk = with_algorithm(folder, EXPERIMENTS[name])
    done = desk.call("run", "live.yaml", *settings(*changes), timeout=TRAINING_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = desk.facts().json("summary.json")
    assert summary["return_mean"] >= GOALS.get(name, 475), summary
    assert summary["ledger"]["balanced"]
    return desk


@pytest.mark.timeout(TRAINING_SECONDS + 60)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in REPLAYING else name for name in EXPERIMENTS]
)
def test_it_reaches_the_goal(name: str, tmp_path: Path) -> None:
    desk = train(tmp_path, name)
    played = desk.call("eval", "runs/live", "--episodes", "5")
    assert played.returncode == 0, played.stderr


@pytest.mark.slow
@pytest.mark.timeout(TRAINING_SECONDS + 60)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in EXPERIMENTS for way in WAYS if (name, way) != ("SAC, normalised", "buffer worker")],
)
def test_it_reaches_the_goal_with(name: str, way: str, tmp_path: Path) -> None:
    train(tmp_path, name, *WAYS[way])


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_replay_trains_as_often_as_the_ratio_says_to_the_end(num_trainers: int, tmp_path: Path) -> None:
    desk = with_algorithm(tmp_path, Q_LEARNING)
    trainers = (f"trainers.replicas={num_trainers}", f"actors.replicas={num_trainers}")
    changes = ("stop={envSteps: 4000}", "pacing.trainStepsPerEnvStep=0.3", *trainers)
    done = desk.call("run", "live.yaml", *settings(*changes))
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = desk.facts().json("summary.json")
    # Each rank gathers half of what is left. While the other is slower, that becomes less, and its 8 lanes are granted.
    in_flight_of_a_rank = 8 * 16
    assert 4000 <= summary["env_steps"] < 4000 + num_trainers * in_flight_of_a_rank
    updates_of_a_step = round(0.3 * 8 * 16)
    more_of_one_rank = 0.3 * 8 * 16 * (num_trainers - 1)
    due = (summary["env_steps"] - 1000) * 0.3
    assert 0 <= due - summary["minibatches"] < updates_of_a_step + more_of_one_rank
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert ledger["produced"] == ledger["trained"] + sum(ledger["dropped"].values())
    # The limit may be reached before the other ranks' last rollouts have come.
    assert 0 <= ledger["produced"] - summary["env_steps"] <= (num_trainers - 1) * in_flight_of_a_rank


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_trains_as_often_as_the_ratio_says_with_an_exact_ledger(name: str, tmp_path: Path) -> None:
    text = VARIANT.format(**{"recurrent": "null", **VARIANTS[name]})
    desk = Desk(tmp_path, text)
    done = desk.call("run", "live.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = desk.facts().json("summary.json")
    assert (summary["reason"], summary["restarts"], summary["minibatches_skipped"]) == ("envSteps", {}, 0)
    assert summary["minibatches"] > 100
    assert is_in_pace(load_text(text).spec, summary, has_all=True), summary
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert ledger["produced"] == summary["env_steps"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert desk.facts().logged("actor-0", "environment_fault") == [], "the environment refuses illegal actions"
    played = desk.call("eval", "runs/live", "--episodes", "2")
    assert played.returncode == 0, played.stderr


def num_learned(desk: Desk) -> list[float]:
    """Return of how many observations and returns the newest version has the statistics."""
    database = open_run_database(desk.run_folder)
    newest = database.resume_point(POLICY_NAME).version
    assert newest is not None
    state = database.load_state(POLICY_NAME, newest)
    assert state is not None
    return [float(state.arrays[f"normalizer/{name}/count"]) for name in ("observation", "return")]


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_statistics_learn_from_all_that_is_gathered_with_replay(num_trainers: int, tmp_path: Path) -> None:
    """They are those of a version, with which it is played."""
    desk = with_algorithm(tmp_path, Q_LEARNING)
    trainers = (f"trainers.replicas={num_trainers}", f"actors.replicas={num_trainers}")
    done = desk.call("run", "live.yaml", *settings("stop={envSteps: 3000}", *NORMALISED, *trainers))
    assert done.returncode == 0, done.stdout + done.stderr
    newest = open_run_database(desk.run_folder).get(POLICY_NAME)
    assert newest is not None
    assert {"observation/mean", "observation/variance"} < newest.statistics.keys()
    assert num_learned(desk) == [desk.facts().json("summary.json")["env_steps"]] * 2
    played = desk.call("eval", "runs/live", "--episodes", "1")
    assert played.returncode == 0, played.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_trainers"), [*((name, 1) for name in BLOCKS), ("DQN", 2), ("SAC", 2)])
def test_it_survives_a_kill_of_each_role(name: str, num_trainers: int, tmp_path: Path) -> None:
    experiment = GATED_EXPERIMENT.replace("ppo: {{epochs: 2, minibatchSize: 256}}", BLOCKS[name])
    assert experiment != GATED_EXPERIMENT
    if name == "TD3":
        experiment = experiment.replace('"{gate}"', '"{gate}", has_vectors: true')
    with_algorithm(tmp_path, experiment)
    others, roles = "  bufferWorkers: {{replicas: 1}}\n", (*ROLES, "buffer")
    if name in REPLAYING:
        others, roles = "  pacing: {{trainStepsPerEnvStep: 0.1}}\n", ROLES
    others += f"  trainers: {{{{replicas: {num_trainers}}}}}\n"
    with KillCampaign(tmp_path, experiment + OTHER_ROLES + others, seed=1) as campaign:
        for role in roles:
            campaign.kill(role, "training")
        summary = campaign.finish()
    assert summary["restarts"] == dict.fromkeys(roles, 1)


@pytest.mark.parametrize("start", [0, 500])
def test_a_finished_run_that_replays_goes_on_with_an_empty_store(start: int, tmp_path: Path) -> None:
    desk = with_algorithm(tmp_path, Q_LEARNING)
    needs = f"algorithm.custom.needs.replay.start={start}"
    for stop in ("{trainSteps: 4}", "{trainSteps: 6}", "{envSteps: 4000}", "{envSteps: 4100}"):
        done = desk.call("run", "live.yaml", *settings(f"stop={stop}", needs))
        assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = desk.facts().json("summary.json")
    assert summary["env_steps"] >= 4100
    assert summary["ledger"]["balanced"]


def test_a_store_outlives_its_trainer_and_an_interruption(tmp_path: Path) -> None:
    desk, in_a_slot = with_algorithm(tmp_path, Q_LEARNING), 8 * 16
    changes = ("stop={envSteps: 1000000}", "parameters.everySteps=20", *NORMALISED)
    with desk.begin(*settings(*changes)) as run:
        run.until(lambda: run.is_complete() and run.facts.train_steps() > 50, "training")
        os.kill(run.workers("trainer")[0].pid, signal.SIGKILL)
        run.until(lambda: len(run.facts.logged("trainer-0", "replay_store_found")) == 1, "the store again")
        run.until(lambda: run.is_complete() and run.facts.train_steps() > 200, "training again")
        run.send(signal.SIGINT)
        assert run.wait() == INTERRUPTED, run.output
    held: dict[str, Any] = desk.facts().json("summary.json")["ledger"]
    assert held["balanced"]
    assert held["in_buffer"] > 0
    assert held["lost"]["rolled_back"] == 0
    assert held["lost"]["receiver_died"] <= 2 * in_a_slot, "slots on their way into the store"
    end = held["produced"] + 2000
    done = desk.call("run", "live.yaml", *settings(f"stop={{envSteps: {end}}}", *changes[1:]))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = desk.facts().logged("trainer-0", "replay_store_found")
    assert 1000 < first["transitions"] < second["transitions"]
    summary: dict[str, Any] = desk.facts().json("summary.json")
    ledger = summary["ledger"]
    assert (ledger["balanced"], ledger["in_buffer"], ledger["lost"]) == (True, 0, held["lost"])
    never_stored = ledger["produced"] - summary["env_steps"]
    assert 0 <= never_stored <= 3 * in_a_slot, "gathered or on their way when the trainer or the run was ended"
    assert 0 <= (summary["env_steps"] - 1000) * 0.25 - summary["minibatches"] < 0.25 * in_a_slot
    assert num_learned(desk) == [summary["env_steps"]] * 2
    assert not list(tmp_path.rglob("*.store"))


@pytest.mark.slow
def test_150_000_transitions_survive_a_kill_of_their_trainer(tmp_path: Path) -> None:
    desk, in_a_slot, enough = with_algorithm(tmp_path, Q_LEARNING.replace("50000", "1000000")), 8 * 16, 150_000
    changes = ("stop={envSteps: 10000000}", "pacing.trainStepsPerEnvStep=0.01")
    with desk.begin(*settings(*changes)) as run:

        def totals() -> dict[str, Any]:
            return (run.facts.status() or {}).get("totals") or {}

        run.until(lambda: (totals().get("replay_transitions") or 0) >= enough, "transitions", timeout=300)
        steps = totals()["train_steps"]
        killed = time.monotonic()
        os.kill(run.workers("trainer")[0].pid, signal.SIGKILL)
        found = run.until(lambda: next(iter(run.facts.logged("trainer-0", "replay_store_found")), None), "the store")
        run.until(lambda: (totals().get("train_steps") or 0) > steps, "training again")
        print(f"training again {time.monotonic() - killed:.1f} s after the kill")
        run.send(signal.SIGINT)
        assert run.wait() == INTERRUPTED, run.output
    assert found["transitions"] >= enough
    ledger = desk.facts().json("summary.json")["ledger"]
    assert ledger["balanced"]
    assert ledger["lost"]["rolled_back"] == 0
    assert ledger["lost"]["receiver_died"] <= 2 * in_a_slot, "slots on their way into the store"


def test_the_ratio_is_edited_while_a_run_trains(tmp_path: Path) -> None:
    desk = with_algorithm(tmp_path, Q_LEARNING)
    before, after, in_a_slot = 0.1, 0.75, 8 * 16
    updates_of_a_step = round(before * in_a_slot)
    changes = ("stop={envSteps: 1000000}", f"pacing.trainStepsPerEnvStep={before}")
    with desk.begin(*settings(*changes)) as run:
        run.until(lambda: run.is_complete() and run.facts.train_steps() > 50, "training")
        workers = set(run.workers())
        edited = desk.call("edit", "live", "--set", f"pacing.trainStepsPerEnvStep={after}")
        assert edited.returncode == 0, edited.stdout + edited.stderr
        tuned = run.until(lambda: next(iter(run.facts.logged("trainer-0", "tuned")), None), "the new ratio")
        run.until(lambda: run.facts.train_steps() > tuned["step"] + 50, "training at the new ratio")
        assert set(run.workers()) == workers
        end = run.facts.env_steps() + 3000
        assert desk.call("edit", "live", "--set", f"stop.envSteps={end}").returncode == 0
        assert run.wait() == 0, run.output
    due = tuned["step"] * updates_of_a_step + tuned["train_steps_behind"]
    env_steps = 1000 + due / before
    summary: dict[str, Any] = desk.facts().json("summary.json")
    due += after * (summary["env_steps"] - env_steps)
    assert 0 <= due - summary["minibatches"] < updates_of_a_step
    assert summary["ledger"]["balanced"]
    rows = [json.loads(line)["scalars"] for line in (desk.run_folder / "metrics.jsonl").read_text().splitlines()]
    # The run's last slot is gathered whole once one of its eight lanes is granted: nothing else would be.
    last, room = rows[-1]["replay_transitions"], after * 7 * 16
    for row in rows:
        excess = row["train_steps_behind"] - row["train_steps_behind_limit"]
        assert excess <= (room if row["replay_transitions"] == last else 0)
    assert 0 < rows[-1]["replay_age"] < rows[-1]["replay_transitions"]


@pytest.mark.slow
@pytest.mark.timeout(TRAINING_SECONDS)
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_the_ratio_holds_through_twenty_kills_and_two_edits(num_trainers: int, tmp_path: Path) -> None:
    """At every event of the limiters, over the history that survives the kills."""
    trace = tmp_path / "trace"
    block = BLOCKS["Q-learning"].replace("q_learning:QLearning", "ratio_trace:TracedQLearning")
    block = block.replace("needs:", f'kwargs: {{{{trace: "{trace}"}}}}, needs:')
    experiment = GATED_EXPERIMENT.replace("ppo: {{epochs: 2, minibatchSize: 256}}", block)
    experiment = experiment.replace("{{budget: 10, decaySeconds: 1}}", "{{budget: 40, decaySeconds: 1}}")
    others = f"  pacing: {{{{trainStepsPerEnvStep: 0.1}}}}\n  trainers: {{{{replicas: {num_trainers}}}}}\n"
    rng = random.Random(5)
    with KillCampaign(tmp_path, experiment + OTHER_ROLES + others, seed=5) as campaign:
        for number in range(20):
            if number == 7:
                campaign.edit("pacing.trainStepsPerEnvStep=0.3")
            elif number == 14:
                campaign.edit("pacing.trainStepsPerEnvStep=0.15", "pacing.maxTrainStepsBehind=1000")
            role = "trainer" if number % 2 else rng.choice(ROLES)
            campaign.kill(role, rng.choice(("training", "checkpoint")))
        summary = campaign.finish(further_env_steps=3000)
    assert sum(summary["restarts"].values()) == 20
    assert summary["restarts"]["trainer"] >= 10
    reports = [check_history(read_lives(folder_of(trace, rank))) for rank in range(num_trainers)]
    print(*reports, sep="\n")
    for report in reports:
        assert report.updates == summary["minibatches"]
        assert len(report.restores) >= summary["restarts"]["trainer"]
        assert any(each.rolled_back for each in report.restores)
        assert report.events["PaceTuned"] >= 2
    # Several ranks share each minibatch: training ends once one of them has less than a training step left.
    left = min(reports, key=lambda report: report.deficit)
    assert left.deficit < left.updates_per_step
    gathered = sum(report.num_env_steps for report in reports)
    assert 0 <= gathered - summary["env_steps"] <= (num_trainers - 1) * 8 * 64


def test_a_run_that_takes_turns_repeats_bit_for_bit(tmp_path: Path) -> None:
    changes = ("pacing.maxPolicyLag=0", "actors.replicas=2", "seed=3")
    weights: list[list[bytes]] = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        desk = with_algorithm(folder, Q_LEARNING)
        for steps in (30, 50):  # the second continues with a store that it fills anew
            stop = f"stop={{trainSteps: {steps}}}"
            done = desk.call("run", "live.yaml", *settings(*changes, stop))
            assert done.returncode == 0, done.stdout + done.stderr
        newest = open_run_database(desk.run_folder).get(POLICY_NAME)
        assert newest is not None
        assert newest.version.step == 50
        weights.append([newest.vector.tobytes(), *(array.tobytes() for array in newest.statistics.values())])
    assert weights[0] == weights[1]


COUNTING = """

class Counting(MyAlgorithm):
    def __init__(self, setup, file, **options):
        super().__init__(setup, **options)
        self._file = file

    def prepare(self, params, slots, reduce, evaluate):
        with open(self._file, "w") as file:
            file.write(str(torch.get_num_threads()))
        return super().prepare(params, slots, reduce, evaluate)
"""


@pytest.mark.parametrize("asked", [1, 2, 256])
def test_a_trainer_computes_in_as_many_threads_as_asked_and_the_machine_has_cores(asked: int, tmp_path: Path) -> None:
    desk = with_algorithm(tmp_path, REINFORCE)
    with (tmp_path / "my_algorithm.py").open("a") as module:
        module.write(COUNTING)
    found = tmp_path / "threads"
    own = ("algorithm.custom.factory=my_algorithm:Counting", f"algorithm.custom.kwargs.file={found}")
    done = desk.call("run", "live.yaml", *settings(*own, f"trainers.threads={asked}", "stop={trainSteps: 3}"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(found.read_text()) == min(asked, len(os.sched_getaffinity(0)))


def test_other_needs_than_the_spec_says_end_the_run(tmp_path: Path) -> None:
    desk = with_algorithm(tmp_path, REINFORCE)
    done = desk.call("run", "live.yaml", "--set", "spec.algorithm.custom.needs.epochs=2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "algorithm.custom.needs.epochs is 2" in done.stdout + done.stderr
    assert "needs 1" in done.stdout + done.stderr


def test_a_store_of_a_trainer_that_is_gone_is_dropped_and_counted(tmp_path: Path) -> None:
    desk = with_algorithm(tmp_path, Q_LEARNING)
    changes = ("actors.replicas=2", "parameters.everySteps=20", "trainers.replicas=2")
    with desk.begin(*settings("stop={envSteps: 1000000}", *changes)) as run:
        run.until(lambda: run.is_complete() and run.facts.train_steps() > 50, "training")
        run.send(signal.SIGINT)
        assert run.wait() == INTERRUPTED, run.output
    held: dict[str, Any] = desk.facts().json("summary.json")["ledger"]
    assert held["in_buffer"] > 0
    end = held["produced"] + 2000
    done = desk.call("run", "live.yaml", *settings(f"stop={{envSteps: {end}}}", *changes[:2], "trainers.replicas=1"))
    assert done.returncode == 0, done.stdout + done.stderr
    ended: dict[str, Any] = desk.facts().json("summary.json")["ledger"]
    assert ended["balanced"]
    assert ended["in_buffer"] == 0
    of_first = ended["lost"]["receiver_died"] - held["lost"]["receiver_died"]
    assert (of_gone := ended["dropped"]["evicted"]) > 0
    assert of_first + of_gone == held["in_buffer"], "the first one's store has another size now, and is empty"
