"""Runs whose environments are in a server: it is killed and restarted, and the run goes on with an exact ledger.

The server's own durable count of steps is the witness: each step that it has taken is explained by the ledger, by a
slot that was never posted, or by an answer that was on its way when the server was killed.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlsrl.runtime.ledger import read_pages
from rlsrl.testing.environment_server import EnvironmentServer
from rlsrl.testing.http_proxy import FaultyProxy, Request
from rlsrl.testing.live_runs import Desk, LiveRun
from rlsrl.testing.run_snapshot import take_snapshot
from rlsrl.testing.served_environments import journaled_steps
from rlsrl.testing.step_witness import LATE_SECONDS, StepWitness

ENVIRONMENTS, ROLLOUT, ENDLESS = 4, 16, 1_000_000_000
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment:
    http: {{url: "{url}", backoffSeconds: 0.05, maxBackoffSeconds: 0.2{http}}}
    {environment}
  actors: {{replicas: 2, environments: {environments}, rolloutLength: {rollout}, vectorization: {vectorization}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: {batch}}}}}
  trainers: {{compile: "off"}}
  stop: {{trainSteps: {steps}}}
  restarts: {{budget: 0}}
{further}"""


def desk_for(
    folder: Path,
    url: str,
    *,
    vectorization: str = "loop",
    steps: int,
    http: str = "",
    environment: str = "",
    further: str = "",
) -> Desk:
    text = EXPERIMENT.format(
        url=url,
        environments=ENVIRONMENTS,
        rollout=ROLLOUT,
        batch=ENVIRONMENTS * ROLLOUT,
        vectorization=vectorization,
        steps=steps,
        http=http,
        environment=environment,
        further=further,
    )
    return Desk(folder, text)


def waits(run: LiveRun) -> dict[str, Any]:
    return (run.facts.status() or {}).get("server_waits") or {}


def cut_episodes(desk: Desk) -> list[int]:
    """Return the environment rank of each episode that was cut because the server was away."""
    return [
        event["rank"]
        for index in (0, 1)
        for event in desk.facts().logged(f"actor-{index}", "environment_fault")
        if event["reason"] == "unreachable"
    ]


def cuts_in_metrics(run: LiveRun) -> float:
    """Return how many episodes the actors' metrics count as cut because the server was away."""
    expositions = take_snapshot(run).expositions
    return sum(
        sample.value
        for index in (0, 1)
        for family in text_string_to_metric_families(expositions[f"actor-{index}"])
        for sample in family.samples
        if sample.name == "rlsrl_environment_faults_total" and sample.labels == {"reason": "unreachable"}
    )


def until_trained(run: LiveRun, num_steps: int) -> None:
    run.until(lambda: run.facts.train_steps() >= num_steps, f"{num_steps} training steps")


@pytest.mark.parametrize("vectorization", ["loop", "threads"])
def test_a_run_goes_on_when_its_server_is_killed_and_comes_back(tmp_path: Path, vectorization: str) -> None:
    with EnvironmentServer(tmp_path, "--id", "CartPole-v1") as server:
        desk = desk_for(tmp_path, server.url, vectorization=vectorization, steps=ENDLESS)
        with desk.begin() as run:
            until_trained(run, 5)
            server.kill()
            run.until(lambda: "has waited for its server" in str(run.facts.status()), "the status shows the wait")
            # An actor without a credit, and a thread whose lanes are full, have nothing to step: they do not wait.
            found = run.until(lambda: waits(run), "environments wait")
            number = f"{found['number']} environments have" if found["number"] > 1 else "1 environment has"
            assert found["text"].startswith(f"{number} waited since {found['since']}: ")
            assert f": the environment server {server.url} is away: " in found["text"]
            run.until(lambda: "ENVIRONMENT SERVER AWAY: " in run.output, "the output says so")
            trained = run.facts.train_steps()
            server.start()
            until_trained(run, trained + 3)
            run.until(lambda: not waits(run), "no environment waits any more")
            ranks = cut_episodes(desk)
            assert ranks, "episodes were cut"
            assert sorted(ranks) == sorted(set(ranks)), "each environment lost its episode once at most"
            counted = f"ENVIRONMENT SERVER AWAY: {len(ranks)} episodes cut"
            run.until(lambda: counted in run.output, "the output counts them")
            assert cuts_in_metrics(run) == len(ranks)
            assert desk.call("control", "live", "stop").returncode == 0
            assert run.wait() == 0, run.output
        assert cut_episodes(desk) == ranks
        summary = desk.facts().json("summary.json")
        assert summary["restarts"] == {}
        ledger = summary["ledger"]
        assert ledger["balanced"]
        # Not posted: the last slots, of which a thread may have two. On its way: a step of each environment.
        unexplained = server.num_steps - ledger["produced"]
        assert 0 <= unexplained <= ENVIRONMENTS * (2 * ROLLOUT + 1)


def test_answers_that_are_lost_step_no_environment_twice(tmp_path: Path) -> None:
    with EnvironmentServer(tmp_path, "--id", "CartPole-v1") as server, FaultyProxy(server.url) as proxy:
        steps: Counter[str] = Counter()

        def passes(request: Request) -> bool:
            """Lose every 7th answer to the steps of each session, after the step was taken: no two in a row."""
            steps[request.path] += request.path.endswith("/step")
            return steps[request.path] % 7 != 6

        proxy.after = passes
        desk = desk_for(tmp_path, proxy.endpoint, steps=20)
        with desk.begin() as run:
            assert run.wait() == 0, run.output
        num_requests = sum(each.path.endswith("/step") for each in proxy.requests)
        summary = desk.facts().json("summary.json")
        assert summary["ledger"]["balanced"]
        assert not desk.facts().logged("actor-0", "environment_fault")
        unexplained = server.num_steps - summary["ledger"]["produced"]
        assert 0 <= unexplained <= ENVIRONMENTS * ROLLOUT, "the last slots were not posted"
        assert len(steps) > 1, "each session has a path of its own"
        assert num_requests > server.num_steps, "some were repeated"
        evaluate = ("eval", "runs/live", "--episodes", "2")
        played = desk.call(*evaluate)
        assert played.returncode == 0, played.stderr
        assert "2 episodes" in played.stdout
        server.kill()
        for command in (evaluate, ("size", "live.yaml")):
            refused = desk.call(*command)
            assert refused.returncode == 1
            assert refused.stderr.splitlines()[-1].startswith("Error: ")
            assert f"the environment server {proxy.endpoint} is away" in refused.stderr


FAULT_SHARE, NUM_KILLS, EVALUATORS = 0.05, 10, 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("vectorization", "further"),
    [("loop", ""), ("threads", ""), ("threads", "  policyWorkers: {replicas: 1}\n")],
    ids=["loop", "threads", "threads with a policy worker"],
)
def test_each_step_of_a_server_that_is_killed_ten_times_is_explained(
    tmp_path: Path, vectorization: str, further: str
) -> None:
    """5 % of the tries of steps are refused, or their answers come ten seconds late.

    Witnesses: the environments in the server count their steps in files; the proxy counts the answers that reach a
    client, and the steps that got none; the ledger and the evaluator count what they used.
    """
    journal = tmp_path / "journal"
    arguments = json.dumps({"folder": str(journal)})
    factory = ("--factory", "rlsrl.testing.served_environments:JournaledCartPole", "--kwargs", arguments)
    evaluators = f"  evaluators: {{replicas: 1, environments: {EVALUATORS}, episodesPerEnvironment: 1}}\n"
    with EnvironmentServer(tmp_path, *factory) as server, StepWitness(server.url, share=FAULT_SHARE) as witness:
        desk = desk_for(
            tmp_path,
            witness.url,
            vectorization=vectorization,
            steps=6 * NUM_KILLS,
            http=f", timeoutSeconds: {LATE_SECONDS / 10}",
            environment="passPlace: true",
            further=evaluators + further,
        )
        with desk.begin() as run:
            for number in range(NUM_KILLS):
                until_trained(run, 2 + 5 * number)
                if number % 2:
                    server.terminate()
                else:
                    server.kill()
                run.until(lambda: waits(run), "environments wait")
                server.start()
            assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {}
    ledger = summary["ledger"]
    assert ledger["balanced"]
    assert min(witness.num_faults["late"], witness.num_faults["refused"]) > 20
    evaluated = sum(each["steps"] for each in desk.facts().logged("evaluator-0", "evaluated"))
    answered = {purpose: witness.answered(purpose) for purpose in ("training", "evaluation")}
    assert answered["training"].total() == ledger["produced"]
    assert answered["evaluation"].total() == evaluated
    taken = journaled_steps(journal)
    assert taken.pop("inspection").total() == 0
    assert taken.keys() == answered.keys()
    for purpose, by_rank in taken.items():
        assert witness.most_unanswered(purpose) <= 1
        for rank, number in by_rank.items():
            abandoned = number - answered[purpose][rank]
            assert 0 <= abandoned <= witness.unanswered(purpose)[rank], (purpose, rank)
    # The server counts a step after the environment has: it may be killed in between.
    uncounted = sum(each.total() for each in taken.values()) - server.num_steps
    assert 0 <= uncounted <= NUM_KILLS * (ENVIRONMENTS + EVALUATORS)


def test_a_run_waits_for_a_server_that_starts_late_and_can_be_interrupted(tmp_path: Path) -> None:
    with EnvironmentServer(tmp_path, "--id", "CartPole-v1") as server:
        server.kill()
        desk = desk_for(tmp_path, server.url, steps=1_000_000)
        with desk.begin() as run:
            run.until(lambda: "has waited for its server" in str(run.facts.status()), "the status shows the wait")
            server.start()
            until_trained(run, 3)
            server.kill()
            run.until(lambda: "has waited for its server" in str(run.facts.status()), "the status shows the wait")
            run.send(signal.SIGINT)
            run.wait()
        summary = desk.facts().json("summary.json")
        assert summary["ledger"]["balanced"]
        assert desk.facts().newest() is not None
        actors = [page for page in read_pages(desk.run_folder / "ledger") if page.role == "actor"]
        assert [page.ended for page in actors] == [True, True], "they abandoned the wait"
        assert not desk.facts().leftovers()


def test_an_evaluator_that_must_end_abandons_the_wait_for_its_server(tmp_path: Path) -> None:
    """Its episode is lost, and the run that is interrupted need not kill it."""
    with EnvironmentServer(tmp_path, "--id", "CartPole-v1") as server:
        evaluators = "  evaluators: {replicas: 1, environments: 2, episodesPerEnvironment: 10000}\n"
        desk = desk_for(tmp_path, server.url, steps=1_000_000, further=evaluators)

        def evaluator(run: LiveRun) -> dict[str, Any]:
            reports = ((run.facts.status() or {}).get("roles") or {}).get("evaluator") or [{}]
            return dict(reports[0])

        with desk.begin() as run:
            run.until(lambda: evaluator(run).get("version") is not None, "it plays a version")
            server.kill()
            # Of the two at least one: the server may have answered the other's step, and the next begins together.
            run.until(lambda: (evaluator(run).get("stats") or {}).get("server_waits"), "its environments wait")
            run.send(signal.SIGINT)
            run.wait()
        assert "killing the processes" not in run.output
        assert not desk.facts().logged("evaluator-0", "evaluated")
        assert desk.facts().json("summary.json")["ledger"]["balanced"]
        assert not desk.facts().leftovers()
