"""``parameters.from.experiment``: trainers read the weights of another experiment, and can do nothing else there."""

from __future__ import annotations

import base64
from typing import Any

from tests.unit.rlsrl_operator.operator_world import NAME, World

from rlsrl.api.pods import SOURCE_FOLDER_VARIABLE, STARTS_FROM_LABEL
from rlsrl.api.reasons import ACCEPTED, READY
from rlsrl.api.tokens import reading_token
from rlsrl.testing.documents import minimal
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.operator_key import token_of
from rlsrl_operator.outside_objects import OUTSIDE_SECONDS

WAY = "a-source-uid-1"


def starting_from(name: str, **spec: Any) -> World:
    return World(parameters={"from": {"experiment": name}}, **spec)


def other(name: str = "teacher", **spec: Any) -> Manifest:
    document = minimal()
    document["metadata"]["name"] = name
    document["spec"] |= spec
    return document | {"status": {"training": {"version": "1.5"}}}


def message(world: World) -> str:
    conditions = world.document["status"]["conditions"]
    return str(next(each["message"] for each in conditions if each["type"] == ACCEPTED))


def way_of(world: World) -> dict[str, str]:
    data = world.server.objects[world.server.place("Secret", WAY)]["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def policy_of(world: World, role: str) -> Manifest:
    found: Manifest = world.server.objects[world.server.place("NetworkPolicy", f"a-{role}")]["spec"]
    return found


def template_of(world: World, role: str) -> Manifest:
    found: Manifest = world.server.objects[world.server.place("StatefulSet", f"a-{role}")]["spec"]["template"]
    return found


def test_trainers_get_the_way_to_the_source_and_a_token_that_only_reads() -> None:
    world = starting_from("teacher")
    source = world.server.put(other())
    world.settle()
    assert world.condition(READY) == ("True", "Ready")
    token = token_of(b"key", source["metadata"]["uid"])
    assert way_of(world) == {"address": "teacher-coordinator:7000", "reading-token": reading_token(token)}
    assert token not in str(world.server.of_kind("Secret"))
    trainer, coordinator = template_of(world, "trainer"), template_of(world, "coordinator")
    assert trainer["metadata"]["labels"][STARTS_FROM_LABEL] == "teacher"
    (container,) = trainer["spec"]["containers"]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "parameters-source")
    (volume,) = (each for each in trainer["spec"]["volumes"] if each["name"] == "parameters-source")
    assert volume["secret"]["secretName"] == WAY
    assert volume["secret"]["optional"], "a run that has begun does not need it"
    assert {"name": SOURCE_FOLDER_VARIABLE, "value": mount["mountPath"]} in container["env"]
    assert WAY not in str(coordinator["spec"])
    assert STARTS_FROM_LABEL not in coordinator["metadata"]["labels"]


def test_network_policies_let_trainers_reach_the_sources_coordinator_alone() -> None:
    world = starting_from("teacher")
    world.server.put(other())
    world.settle()
    labels = {"rlsrl.dev/experiment": "teacher", "rlsrl.dev/role": "coordinator"}
    way = {"to": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": 7000, "protocol": "TCP"}]}
    assert way in policy_of(world, "trainer")["egress"]
    assert "teacher" not in str(policy_of(world, "actor"))
    readers = {"podSelector": {"matchLabels": {STARTS_FROM_LABEL: NAME}}}
    assert {"from": [readers], "ports": way["ports"]} in policy_of(world, "coordinator")["ingress"]
    assert STARTS_FROM_LABEL not in str(policy_of(world, "trainer"))


def test_an_experiment_begins_when_its_source_is_there() -> None:
    world = starting_from("teacher")
    world.server.put(other("teach"))
    world.run_for(60)
    assert world.condition(ACCEPTED) == ("False", "SourceUnusable")
    expected = (
        "spec.parameters.from.experiment: 'teacher' does not exist in the namespace research (did you mean 'teach'?)"
    )
    assert message(world) == expected
    assert not world.server.of_kind("Pod", "StatefulSet", "Secret")
    begun = world.server.put(other() | {"status": {}})
    world.run_for(60)
    assert world.condition(ACCEPTED) == ("False", "SourceUnusable")
    assert message(world) == "spec.parameters.from.experiment: 'teacher' has no version of its weights yet"
    world.server.change(begun, {"status": {"training": {"version": "1.0"}}})
    world.run_for(60)
    assert (world.condition(ACCEPTED), world.condition(READY)) == (("True", "Accepted"), ("True", "Ready"))


def test_a_source_that_is_made_again_has_another_token_and_no_pod_restarts() -> None:
    world = starting_from("teacher")
    world.server.put(other())
    world.settle()
    before, pods = way_of(world), {each["metadata"]["uid"] for each in world.server.of_kind("Pod")}
    world.server.remove("RLExperiment", "teacher")
    world.due = world.now
    world.run_for(OUTSIDE_SECONDS + 20)
    assert world.condition(READY) == ("True", "Ready"), "the run goes on"
    assert way_of(world) == before
    world.server.put(other())
    world.run_for(OUTSIDE_SECONDS + 20)
    assert way_of(world)["reading-token"] != before["reading-token"]
    assert {each["metadata"]["uid"] for each in world.server.of_kind("Pod")} == pods


def test_a_source_with_certificates_needs_an_experiment_with_certificates() -> None:
    world = starting_from("teacher")
    world.server.put(other(security={"tlsSecret": "certificates"}))
    world.run_for(5)
    assert world.condition(ACCEPTED) == ("False", "SourceUnusable")
    assert "'teacher' have certificates (security.tlsSecret)" in message(world)
    world = starting_from("teacher", security={"tlsSecret": "certificates"})
    world.server.put(other(security={"tlsSecret": "certificates"}))
    world.settle()
    assert way_of(world)["tls-name"] == "teacher-coordinator.research.svc"


def test_an_experiment_does_not_start_from_itself() -> None:
    world = starting_from(NAME)
    world.run_for(5)
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec")
    assert f"spec.parameters.from.experiment: {NAME!r} is this experiment itself" in message(world)
