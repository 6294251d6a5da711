"""Weights of runs on a cluster, through a fake kubectl, and the errors when they are out of reach."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rlsrl.cli import main
from rlsrl.testing.cluster_objects import UID, experiment, pod, token_secret
from rlsrl.testing.kubectl_standin import KubectlStandIn

SECRET = token_secret("the-token")


def listed(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["params", "list", *arguments])
    return result.exit_code, result.output


def test_a_misspelt_experiment_is_named_with_the_nearest(cluster: KubectlStandIn) -> None:
    cluster.show(experiment("Running"))
    code, said = listed("cartpol", "-n", "research")
    assert code == 2
    assert "experiment cartpol does not exist in this namespace (did you mean 'cartpole'?)" in said
    assert cluster.calls[0].startswith("--namespace research get rlexperiments")


def test_what_kubectl_says_is_passed_on(cluster: KubectlStandIn) -> None:
    cluster.show(experiment("Running"), SECRET)
    code, said = listed("cartpole", "-n", "research")
    assert code == 2
    assert "the coordinator of cartpole cannot be reached: error: unable to forward port" in said
    assert any(f"--selector rlsrl.dev/uid={UID}" in call for call in cluster.calls)


def test_before_there_is_a_token_it_says_so(cluster: KubectlStandIn) -> None:
    cluster.show(experiment("Pending"))
    assert listed("cartpole", "-n", "research") == (
        2,
        "Error: cartpole has no token yet: the operator has not created its Secret\n",
    )


@pytest.mark.parametrize("phase", ["Queued", "Suspended", "Succeeded", "Failed"])
def test_an_experiment_that_no_pod_serves_is_reported_at_once(cluster: KubectlStandIn, phase: str) -> None:
    """`kubectl port-forward` waits a minute for a pod."""
    cluster.show(experiment(phase), SECRET)
    code, said = listed("cartpole", "-n", "research")
    assert code == 2
    assert said.startswith("Error: no pod serves cartpole: it")
    assert "cartpole" in said.partition("`kubectl ")[2], "with a command to go on"
    assert not any("port-forward" in call for call in cluster.calls)


def test_a_coordinator_that_still_runs_is_asked(cluster: KubectlStandIn) -> None:
    cluster.show(experiment("Suspended"), SECRET, pod("cartpole-coordinator-0", "coordinator"))
    assert "cannot be reached: error: unable to forward port" in listed("cartpole", "-n", "research")[1]


def test_as_a_plugin_runs_are_on_the_cluster(cluster: KubectlStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/local/bin/kubectl-rlsrl"])
    assert listed("cartpole")[0] == 2
    assert cluster.calls[0].startswith("get rlexperiments"), "in kubectl's own namespace"
