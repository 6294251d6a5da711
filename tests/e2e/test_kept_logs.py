"""``kubectl rlsrl logs`` prints the logs of workers whose pods are gone."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest

from rlsrl.testing.faults import all_ready, begin, goes_on, reach_the_goal
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace, Nodes
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def logs(experiment: ClusterExperiment, *options: str) -> tuple[int, str]:
    """Return the exit status and the output of ``kubectl rlsrl logs``."""
    words = ["kubectl", "rlsrl", "logs", experiment.name, "--namespace", experiment.where.name, *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


def beginnings(experiment: ClusterExperiment, role: str | None = None) -> list[str]:
    """Return the kept lines with which workers began."""
    chosen = () if role is None else ("--role", role)
    code, output = logs(experiment, "--kept", "--tail", "-1", *chosen)
    return [line for line in output.splitlines() if '"configuring"' in line] if code == 0 else []


def test_logs_outlive_the_pods_until_the_end_and_a_kill(where: Namespace, hands: Nodes) -> None:
    experiment = begin(where)
    until(lambda: '"configuring"' in logs(experiment, "--kept", "--role", "actor")[1], "the actors' lines arrive")
    victim = experiment.pods("actor")[0]
    assert hands.kill(victim) > 0
    until(lambda: all_ready(experiment), "every pod is ready again")
    goes_on(experiment)
    where.delete("pod", experiment.pods("evaluator")[0]["metadata"]["name"], wait=True)
    until(lambda: all_ready(experiment), "the evaluator has another pod")
    until(lambda: len(beginnings(experiment, "evaluator")) > 1, "the lines of the evaluator's next pod arrive")
    begun = beginnings(experiment)
    assert len(set(begun)) == len(begun), "no line is kept twice"
    starts = Counter(line.partition(" ")[0] for line in begun)
    assert sorted(starts[f"[actor-{index}]"] for index in range(2)) == [1, 2], ("one has been killed", begun)
    assert starts["[evaluator-0]"] == 2, ("in two pods", begun)
    reach_the_goal(experiment)

    code, output = logs(experiment, "--tail", "-1")
    assert code == 0, output
    workers = {line.partition(" ")[0] for line in output.splitlines()}
    expected = {"actor-0", "actor-1", "buffer-0", "coordinator-0", "evaluator-0", "policy-0", "trainer-0", "trainer-1"}
    assert workers == {f"[{name}]" for name in expected}
    assert set(begun) <= set(output.splitlines()), "the end loses nothing"
    code, output = logs(experiment, "--role", "trainer", "--index", "1", "--tail", "1")
    assert (code, output.count("\n"), output.startswith("[trainer-1] ")) == (0, 1, True), output


def test_the_logs_of_a_suspended_experiment_are_refused_at_once_and_kept(where: Namespace) -> None:
    experiment = begin(where)

    def suspend(holds: str) -> None:
        patch = f'{{"spec": {{"suspend": {holds}}}}}'
        where.kubectl("patch", "rlexperiment", experiment.name, "--type", "merge", "-p", patch)

    suspend("true")
    until(lambda: not experiment.pods(), "no pod is left")
    code, output = logs(experiment)
    assert code == 2
    assert f"no pod serves {experiment.name}: it is suspended. Its versions and logs are kept" in output
    suspend("false")
    until(lambda: all_ready(experiment), "every pod is ready again")
    of_rank_0 = ("--kept", "--role", "trainer", "--index", "0", "--tail", "-1")
    until(lambda: logs(experiment, *of_rank_0)[1].count('"configuring"') == 2, "the lines from before and after")
