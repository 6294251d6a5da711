"""``kubectl rlsrl control`` with a fake kubectl, and a coordinator that only reports its status."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from rlsrl.cli import control as control_module
from rlsrl.cli import main
from rlsrl.cli.control import PATCH_TRIES
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.testing.cluster_objects import NAME, Object, experiment, token_secret
from rlsrl.testing.kubectl_standin import KubectlStandIn

SECRET = token_secret("the-token")
FORBIDDEN = "is forbidden: User viewer cannot {verb} it (ask the administrator of the namespace for permission)"
UNFOLLOWED = "Error: the version is requested, and cannot be followed from here: "
FAILED = (
    f"{NAME} has failed: `kubectl rlsrl why {NAME}` shows the cause, and `kubectl rlsrl retry {NAME}` tries it again"
)
UNANSWERED = "the trainers have not answered; `top` shows what they wait for"
ENDED = f"{NAME} has ended, which is final: `kubectl rlsrl params list {NAME}` shows its stored versions"


class StatusOnly:
    """A coordinator whose trainers answer a request for a version at once, or not."""

    def __init__(self, cluster: KubectlStandIn) -> None:
        self.cluster = cluster
        self.stores = True
        """Whether the trainers store what is requested."""
        self.totals: dict[str, Any] = {}
        self.then: Object | None = None
        """What the experiment is after an answer; None: as before."""

    def status(self, _request: pb.StatusRequest, _context: grpc.ServicerContext) -> pb.StatusReply:
        """Answer with the totals alone."""
        stored = {"stored_on_request": f"{asked_for(self.cluster)} 1.47"} if self.stores else {}
        if self.then is not None:
            self.cluster.show(self.then, SECRET)
        return pb.StatusReply(json=json.dumps({"totals": {**self.totals, **stored}}))


@pytest.fixture
def coordinator(cluster: KubectlStandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusOnly]:
    """Yield the coordinator of a running experiment."""
    monkeypatch.setattr(control_module, "POLL_SECONDS", 0.0)
    cluster.show(of_phase("Running"), SECRET)
    server, service = grpc.server(ThreadPoolExecutor(1)), StatusOnly(cluster)
    handler = grpc.unary_unary_rpc_method_handler(
        service.status,
        request_deserializer=pb.StatusRequest.FromString,
        response_serializer=pb.StatusReply.SerializeToString,
    )
    name = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Status": handler})])
    cluster.reach(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield service
    server.stop(None).wait()


def of_phase(phase: str, **spec: Any) -> Object:
    found = experiment(phase)
    found["spec"] |= {"environment": {"id": "CartPole-v1"}, "actors": {"environments": 8}, **spec}
    return found


def control(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["control", NAME, *arguments, "--namespace", "research"])


def spec_of(cluster: KubectlStandIn) -> Mapping[str, Any]:
    return cluster.spec("RLExperiment", NAME)


def asked_for(cluster: KubectlStandIn) -> str | None:
    """Return the request for a version in the spec."""
    request: str | None = spec_of(cluster)["parameters"].get("storeRequest")
    return request


def num_patches(cluster: KubectlStandIn) -> int:
    return sum(" patch " in call for call in cluster.calls)


def test_a_change_of_others_at_the_same_time_is_kept(cluster: KubectlStandIn) -> None:
    cluster.show(of_phase("Running"))
    cluster.change_before_patches({"spec": {"paused": [{"role": "trainer"}]}})
    result = control("pause", "--role", "actor")
    assert result.exit_code == 0, result.output
    assert result.output == f'paused: [{{"role": "actor"}}, {{"role": "trainer"}}]\nsee: kubectl rlsrl status {NAME}\n'
    assert spec_of(cluster)["paused"] == [{"role": "actor"}, {"role": "trainer"}]
    assert num_patches(cluster) == 2


def test_changes_of_others_without_end_are_an_error_and_change_nothing(cluster: KubectlStandIn) -> None:
    cluster.show(of_phase("Running"))
    cluster.change_before_patches(*({"status": {"attempt": attempt}} for attempt in range(PATCH_TRIES)))
    result = control("pause")
    assert result.exit_code == 2
    told = f"Error: {NAME} is not changed: others changed it at the same time, {PATCH_TRIES} times. Try again\n"
    assert result.output == told
    assert num_patches(cluster) == PATCH_TRIES
    assert "paused" not in spec_of(cluster)


@pytest.mark.parametrize("action", ["pause", "resume", "stop", "checkpoint"])
@pytest.mark.parametrize(("phase", "told"), [("Succeeded", ENDED), ("Failed", FAILED)])
def test_an_experiment_that_has_ended_is_not_changed(
    cluster: KubectlStandIn, action: str, phase: str, told: str
) -> None:
    cluster.show(of_phase(phase))
    result = control(action)
    assert (result.exit_code, result.output) == (2, f"Error: {told}\n")
    assert num_patches(cluster) == 0


def test_an_experiment_that_ends_at_the_same_time_is_not_changed(cluster: KubectlStandIn) -> None:
    cluster.show(of_phase("Running"))
    cluster.change_before_patches({"status": {"phase": "Succeeded"}})
    result = control("pause")
    assert (result.exit_code, result.output) == (2, f"Error: {ENDED}\n")
    assert "paused" not in spec_of(cluster)


@pytest.mark.parametrize("action", ["pause", "stop", "checkpoint"])
def test_a_suspended_experiment_is_changed_and_nothing_is_awaited(cluster: KubectlStandIn, action: str) -> None:
    before = of_phase("Suspended", suspend=True)
    cluster.show(before, SECRET)
    result = control(action)
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"\n{NAME} is suspended: this takes effect once spec.suspend is false\n")
    assert spec_of(cluster) != before["spec"]
    assert not any("secrets" in call for call in cluster.calls), "no coordinator is asked"


def test_without_permission_to_change_the_experiment_the_error_names_the_cure(cluster: KubectlStandIn) -> None:
    cluster.show(of_phase("Running"))
    cluster.forbid("rlexperiments", verb="patch")
    result = control("pause")
    assert result.exit_code == 2
    refused = "Error from server (Forbidden): rlexperiments.rlsrl.dev " + FORBIDDEN.format(verb="patch")
    assert result.output == f"Error: kubectl patch rlexperiments.rlsrl.dev: {refused}\n"
    assert num_patches(cluster) == 1


def test_the_version_that_is_stored_is_printed(cluster: KubectlStandIn, coordinator: StatusOnly) -> None:
    coordinator.totals = {"unstored_reason": "of an earlier one"}
    result = control("checkpoint")
    assert result.exit_code == 0, result.output
    assert result.output == f'parameters.storeRequest: "{asked_for(cluster)}"\nstored version 1.47\n'


def test_without_permission_to_read_the_token_the_version_is_requested(
    cluster: KubectlStandIn, coordinator: StatusOnly
) -> None:
    cluster.forbid("secrets")
    result = control("checkpoint")
    assert result.exit_code == 2
    refused = "kubectl get secrets: Error from server (Forbidden): secrets " + FORBIDDEN.format(verb="list")
    assert result.stderr == f"{UNFOLLOWED}{refused}\n"
    assert asked_for(cluster) is not None


def test_without_a_coordinator_the_version_is_requested(cluster: KubectlStandIn) -> None:
    cluster.show(of_phase("Queued"), SECRET)
    result = control("checkpoint")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{UNFOLLOWED}no pod serves {NAME}: its trainers wait in a queue")
    assert asked_for(cluster) is not None


@pytest.mark.parametrize(
    ("totals", "why"),
    [
        ({"unstored_reason": "1.47: the disk is full"}, "1.47: the disk is full"),
        ({}, "the trainers have not answered; `top` shows what they wait for"),
        (
            {"stored_on_request": "an-earlier-one 1.40"},
            "the trainers have not answered; `top` shows what they wait for",
        ),
    ],
)
def test_a_version_that_is_not_stored_in_time_is_an_error_with_the_reason(
    cluster: KubectlStandIn,
    coordinator: StatusOnly,
    monkeypatch: pytest.MonkeyPatch,
    totals: dict[str, Any],
    why: str,
) -> None:
    monkeypatch.setattr(control_module, "STORE_SECONDS", 0.0)
    coordinator.stores, coordinator.totals = False, totals
    result = control("checkpoint")
    assert result.exit_code == 1
    assert result.stderr == f"Error: no version is stored within 0 s: {why}. The request stays\n"
    assert asked_for(cluster) is not None


def test_an_experiment_that_ends_before_it_stores_the_version_is_reported(
    cluster: KubectlStandIn, coordinator: StatusOnly
) -> None:
    coordinator.stores, coordinator.then = False, of_phase("Succeeded")
    result = control("checkpoint")
    assert (result.exit_code, result.stderr) == (2, f"{UNFOLLOWED}{ENDED}\n")
