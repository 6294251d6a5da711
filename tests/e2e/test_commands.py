"""``kubectl rlsrl status``, ``top``, ``why`` and ``logs`` on real pods."""

from __future__ import annotations

import subprocess

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import GATE
from rlsrl.testing.kubectl import COMMAND_SECONDS, ClusterExperiment, Namespace
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def result_of(experiment: ClusterExperiment, command: str, *arguments: str) -> tuple[int, str, str]:
    """Return the command's exit status and output."""
    words = ["kubectl", "rlsrl", command, experiment.name, "--namespace", experiment.where.name, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def names(experiment: ClusterExperiment, role: str | None = None) -> set[str]:
    return {pod["metadata"]["name"] for pod in experiment.pods(role)}


def test_every_command_shows_a_healthy_run(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"]["stop"] = {"wallSeconds": 600}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.condition("Ready").get("status") == "True", "every pod is ready")
    until(lambda: experiment.env_steps() > 0, "the first numbers")

    code, view, _ = result_of(experiment, "status")
    assert code == 0
    assert f"experiment  {where.name}/cartpole, created " in view
    assert "phase       Running for " in view
    for role, count in {"actor": 2, "buffer": 1, "coordinator": 1, "policy": 1, "trainer": 2}.items():
        assert f"{role:<11}  {count}/{count}" in view
    assert result_of(experiment, "why")[:2] == (0, "cartpole has no problems: Running: The trainers train.\n")

    until(lambda: "batch" in result_of(experiment, "top")[1], "the trainers' shares")
    table = result_of(experiment, "top")[1]
    for role in ("actor", "buffer", "policy", "trainer"):
        for name in names(experiment, role):
            assert name in table, f"hosts are pods: {table}"

    code, lines, _ = result_of(experiment, "logs", "--role", "trainer", "--index", "1")
    assert code == 0
    assert lines
    assert all(line.startswith("[pod/cartpole-trainer-1/worker] ") for line in lines.splitlines())
    code, lines, _ = result_of(experiment, "logs", "--role", "actor", "--index", "0", "--tail", "1")
    assert code == 0
    (line,) = lines.splitlines()
    assert line.removeprefix("[pod/").partition("/")[0] in names(experiment, "actor")
    code, lines, _ = result_of(experiment, "logs", "--tail", "1")
    assert code == 0
    assert {line.removeprefix("[pod/").partition("/")[0] for line in lines.splitlines()} == names(experiment)


def test_an_unschedulable_pod_is_named_with_the_cure(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"]["trainers"] = {"replicas": 1, "gpusPerPod": 1, "gpuResource": "example.com/none-has-it"}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    until(lambda: experiment.condition("Ready").get("reason") == "Unschedulable", "the operator has seen it")
    code, output, _ = result_of(experiment, "why")
    assert code == 1
    assert "Ready: Unschedulable, for " in output
    assert "pod cartpole-trainer-0 (trainer): Unschedulable, for " in output
    assert "Insufficient example.com/none-has-it" in output
    assert "cure: Add nodes, or change `resources`" in output


def test_a_failing_worker_is_reported_with_its_last_output(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"]["environment"] = {"id": "CartPole-v9"}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Failed")
    code, output, _ = result_of(experiment, "why")
    assert code == 1
    assert output.startswith("Finished: ConfigurationError, for ")
    assert "CartPole-v9" in output
    assert "cure: Correct the spec or the image" in output


def test_a_failed_experiment_is_tried_again(where: Namespace, cartpole: Object) -> None:
    cartpole["spec"] |= {"restarts": {"budget": 0}, "stop": {"wallSeconds": 600}}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    for attempt, options in ((1, []), (2, ["--fresh"])):
        experiment.await_phase("Running")
        assert result_of(experiment, "retry", *options)[0] == 2, "it has not failed"
        where.delete("pod", f"{experiment.name}-trainer-0")
        experiment.await_phase("Failed")
        assert experiment.condition("Finished")["reason"] == "BudgetExhausted"
        code, output, _ = result_of(experiment, "retry", *options)
        assert code == 0
        assert output.startswith(f"attempt {attempt + 1} of {experiment.name} ")
        experiment.await_phase("Running")
        assert experiment.condition("Finished")["reason"] == "Retried"
        assert experiment.status["attempt"] == attempt + 1
        log = where.kubectl("logs", f"{experiment.name}-trainer-0")
        assert ('"resumed"' in log) == (not options), log
    assert experiment.status["freshAttempt"] == 3


def test_the_volume_of_a_deleted_experiment_is_listed(where: Namespace, cartpole: Object) -> None:
    where.apply(cartpole)
    name = cartpole["metadata"]["name"]
    until(lambda: where.get("persistentvolumeclaim", f"{name}-data"), "the claim exists")

    def listed() -> str:
        words = ["kubectl", "rlsrl", "volumes", "--namespace", where.name]
        return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True).stdout

    assert f"{name}-data" not in listed()
    where.delete("rlexperiment", name, wait=True)
    assert f"{name}-data" in listed()
    assert f"kubectl delete pvc CLAIM --namespace {where.name}" in listed()


def test_an_environment_that_raises_is_shown_with_its_own_traceback(where: Namespace, cartpole: Object) -> None:
    kwargs = {"gate": GATE, "step_seconds": "none"}  # each step raises a TypeError
    cartpole["spec"]["environment"] = {"factory": "rlsrl.testing.environments:GatedEnv", "kwargs": kwargs}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    until(lambda: "    rlsrl: environment rank " in result_of(experiment, "why")[1], "an actor has given up")
    code, output, _ = result_of(experiment, "why")
    assert code == 1
    lines = [line.removeprefix("    ") for line in output.splitlines()]
    begin = lines.index("Traceback (most recent call last):")
    assert lines[begin + 1].startswith('  File "')
    assert 'environments.py", line ' in lines[begin + 1]
    assert any(line.startswith("TypeError: ") for line in lines[begin:])


def test_an_unknown_experiment_is_reported_with_the_nearest_name(where: Namespace, cartpole: Object) -> None:
    where.apply(cartpole)
    misspelt = ClusterExperiment(where, "cartpol")
    for command in ("status", "top", "why", "logs"):
        assert result_of(misspelt, command) == (
            2,
            "",
            "Error: experiment cartpol does not exist in this namespace (did you mean 'cartpole'?)\n",
        )
