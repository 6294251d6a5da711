"""Destinations of environments: what the administrator allows of them, and the NetworkPolicies that open them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from operator_world import ApiServer, World

from rlsrl.api.reasons import ACCEPTED, READY
from rlsrl.api.role_names import COORDINATOR
from rlsrl.testing.documents import ALLOWED_EGRESS, EGRESS, JsonDocument, minimal
from rlsrl_operator.manifests import ExperimentContext, first_revision, next_revision, render
from rlsrl_operator.manifests.egress import METADATA
from rlsrl_operator.manifests.permissions import disallowed
from rlsrl_operator.manifests.revision import derive_revision
from rlsrl_operator.settings import Environments, OperatorSettings
from rlsrl_operator.testing import SETTINGS, context_of

API_SERVER = ("172.18.0.2/32", "10.96.0.1/32")
PORTS = [{"port": 8443}]
AT = "spec.environment.egress[0].to"


def allowing(*egress: JsonDocument, api_server: Sequence[str] | None = API_SERVER) -> OperatorSettings:
    """Return settings of an administrator that allow these destinations."""
    allowed = {"egress": list(egress), **({} if api_server is None else {"apiServer": list(api_server)})}
    return SETTINGS.model_copy(update={"environments": Environments.model_validate(allowed)})


def reaching(*peers: JsonDocument, settings: OperatorSettings = SETTINGS, **spec: Any) -> ExperimentContext:
    """Return an experiment whose environments connect to these peers."""
    document = minimal()
    document["spec"] |= spec
    document["spec"]["environment"]["egress"] = [{"to": peer, "ports": PORTS} for peer in peers]
    return context_of(document, settings=settings)


def faults(peer: JsonDocument, *egress: JsonDocument, api_server: Sequence[str] | None = API_SERVER) -> list[str]:
    return disallowed(reaching(peer).experiment, allowing(*egress, api_server=api_server))


def opened(context: ExperimentContext, role: str = "actor") -> list[JsonDocument]:
    """Return the rules of the role's NetworkPolicy that lead out of the experiment, DNS excluded."""
    (policy,) = (
        each
        for each in render(context)
        if each["kind"] == "NetworkPolicy" and each["metadata"]["labels"]["rlsrl.dev/role"] == role
    )
    ours = context.own_labels.items()
    return [
        rule
        for rule in policy["spec"]["egress"]
        if all(port["port"] != 53 for port in rule["ports"])
        and not any(ours <= peer.get("podSelector", {}).get("matchLabels", {}).items() for peer in rule["to"])
    ]


def named(name: str) -> JsonDocument:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


SIMULATORS = {"namespaceSelector": named("games"), "podSelector": {"matchLabels": {"app": "simulator"}}}
WIDE = {"cidr": "0.0.0.0/0"}
ALLOWED: dict[str, tuple[JsonDocument, list[JsonDocument]]] = {
    "the range": ({"cidr": "203.0.113.0/24"}, [{"cidr": "203.0.113.0/24"}]),
    "a part of it": ({"cidr": "203.0.113.7/32"}, [{"cidr": "192.0.2.0/24"}, {"cidr": "203.0.113.0/24"}]),
    "of IPv6": ({"cidr": "2001:db8:1::/48"}, [{"cidr": "2001:db8::/32"}]),
    "an exception of another entry": (
        {"cidr": "10.1.2.0/24"},
        [WIDE | {"except": ["10.0.0.0/8"]}, {"cidr": "10.1.0.0/16"}],
    ),
    "the selectors": (SIMULATORS, [SIMULATORS]),
    "more labels": (SIMULATORS, [{"namespaceSelector": named("games")}]),
    "all pods of all namespaces": ({"namespaceSelector": {}}, [{"namespaceSelector": {}}]),
    "its own namespace": ({"podSelector": {"matchLabels": {"app": "a"}}}, [{"podSelector": {}}]),
    "its own namespace among all": ({"podSelector": {"matchLabels": {"app": "a"}}}, [{"namespaceSelector": {}}]),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_destination_within_the_administrators_is_allowed(name: str) -> None:
    peer, egress = ALLOWED[name]
    assert faults(peer, *egress) == []
    assert len(opened(reaching(peer, settings=allowing(*egress)))) == 1


SHOWN = "namespaceSelector {kubernetes.io/metadata.name: games} podSelector {app: simulator}"
REFUSED: dict[str, tuple[JsonDocument, list[JsonDocument], str]] = {
    "nothing is allowed": (
        {"cidr": "203.0.113.0/24"},
        [],
        f"{AT}.cidr: 203.0.113.0/24 is not within an allowed range; allowed: none: the adm",
    ),
    "no selectors": (
        SIMULATORS,
        [WIDE],
        f"{AT}: {SHOWN} is not within an allowed selection; allowed: none: the adm",
    ),
    "another range": ({"cidr": "203.0.114.0/24"}, [{"cidr": "203.0.113.0/24"}, SIMULATORS], "allowed: 203.0.113.0/24"),
    "a wider range": ({"cidr": "203.0.112.0/20"}, [{"cidr": "203.0.113.0/24"}], "allowed: 203.0.113.0/24"),
    "two ranges in one": (
        {"cidr": "10.0.0.0/7"},
        [{"cidr": "10.0.0.0/8"}, {"cidr": "11.0.0.0/8"}],
        "allowed: 10.0.0.0/8, 11.0.0.0/8",
    ),
    "the other version": ({"cidr": "::/0"}, [WIDE], "allowed: 0.0.0.0/0"),
    "an exception": (
        {"cidr": "10.1.0.0/16"},
        [WIDE | {"except": ["10.0.0.0/8"]}],
        "allowed: 0.0.0.0/0 except 10.0.0.0/8",
    ),
    "the API server's endpoint": ({"cidr": "172.18.0.2/32"}, [WIDE], f"{AT}.cidr: 172.18.0.2/32 is the API server's"),
    "the API server's Service": ({"cidr": "10.96.0.1/32"}, [WIDE], "is the API server's"),
    "metadata": (
        {"cidr": "169.254.169.254/32"},
        [WIDE, {"cidr": "169.254.169.254/32"}],
        f"{AT}.cidr: 169.254.169.254/32 is within 169.254.0.0/16, where",
    ),
    "link-local": ({"cidr": "169.254.0.0/16"}, [WIDE], "metadata addresses"),
    "metadata of AWS": ({"cidr": "fd00:ec2::254/128"}, [{"cidr": "::/0"}], "metadata addresses"),
    "other pods": (
        {"namespaceSelector": named("games"), "podSelector": {}},
        [SIMULATORS],
        f"podSelector {{}} is not within an allowed selection; allowed: {SHOWN}; also with further labels",
    ),
    "another namespace": (SIMULATORS | {"namespaceSelector": named("kube-system")}, [SIMULATORS], "is not within"),
    "every namespace": (
        {"namespaceSelector": {}},
        [{"namespaceSelector": named("games")}, {"podSelector": {}}],
        "namespaceSelector {} is not",
    ),
    "its own namespace by a label": (
        {"podSelector": {}},
        [{"namespaceSelector": named("research")}],
        "podSelector {} is not",
    ),
    "a namespace instead of its own": (SIMULATORS, [{"podSelector": {}}], "is not within"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_destination_is_refused_with_what_is_allowed(name: str) -> None:
    peer, egress, said = REFUSED[name]
    (fault,) = faults(peer, *egress)
    assert said in fault
    assert fault.startswith(AT)
    assert opened(reaching(peer, settings=allowing(*egress))) == [], "rendered by whatever way, it opens nothing"


def test_each_rule_is_judged_by_itself() -> None:
    context = reaching({"cidr": "203.0.113.0/24"}, {"cidr": "192.0.2.0/24"})
    (fault,) = disallowed(context.experiment, allowing({"cidr": "203.0.113.0/24"}))
    assert fault.startswith("spec.environment.egress[1].to.cidr: 192.0.2.0/24 ")


def test_ranges_are_refused_while_the_api_servers_addresses_are_unknown() -> None:
    (fault,) = faults({"cidr": "203.0.113.0/24"}, WIDE, api_server=None)
    assert "let the operator get the EndpointSlice kubernetes of the namespace default" in fault
    assert faults(SIMULATORS, WIDE, SIMULATORS, api_server=None) == []


def test_a_range_leaves_out_what_no_environment_may_reach() -> None:
    def block(cidr: str, *egress: JsonDocument) -> JsonDocument:
        (rule,) = opened(reaching({"cidr": cidr}, settings=allowing(*egress)))
        assert rule["ports"] == [{"port": 8443, "protocol": "TCP"}]
        (peer,) = rule["to"]
        assert set(peer) == {"ipBlock"}
        return dict(peer["ipBlock"])

    metadata = [str(each) for each in METADATA]
    assert block("203.0.113.0/24", WIDE) == {"cidr": "203.0.113.0/24"}
    everything = block("0.0.0.0/0", WIDE | {"except": ["10.0.0.0/8"]})
    expected = {each for each in metadata if ":" not in each} | {"10.0.0.0/8", "172.18.0.2/32"}
    assert set(everything["except"]) == expected, "the Service's address is inside the administrator's exception"
    assert len(everything["except"]) == len(expected)
    assert set(block("::/0", {"cidr": "::/0"})["except"]) == {each for each in metadata if ":" in each}
    assert block("172.18.0.0/16", WIDE) == {"cidr": "172.18.0.0/16", "except": ["172.18.0.2/32"]}


def test_rules_have_the_words_of_network_policies() -> None:
    document = minimal()
    document["spec"]["environment"]["egress"] = list(EGRESS)
    assert opened(context_of(document, settings=allowing(*ALLOWED_EGRESS))) == [
        {"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 8443, "protocol": "TCP"}]},
        {
            "to": [{"ipBlock": {"cidr": "2001:db8::/32"}}],
            "ports": [{"port": 9000, "endPort": 9010, "protocol": "UDP"}, {"port": 1, "protocol": "TCP"}],
        },
        {"to": [{"podSelector": {"matchLabels": {"app": "simulator"}}}], "ports": [{"port": 80, "protocol": "TCP"}]},
        {"to": [{"namespaceSelector": named("games")}], "ports": [{"port": 80, "protocol": "TCP"}]},
        {
            "to": [{"namespaceSelector": {}, "podSelector": {}}],
            "ports": [{"port": 65535, "endPort": 65535, "protocol": "TCP"}],
        },
    ]


def test_every_role_that_makes_an_environment_reaches_it_and_the_coordinator_does_not() -> None:
    roles = {"policyWorkers": {}, "bufferWorkers": {}, "evaluators": {}}
    context = reaching(SIMULATORS, settings=allowing(SIMULATORS), **roles)
    found = {role: bool(opened(context, role)) for role in context.configs.configs}
    assert found == dict.fromkeys(("actor", "evaluator", "trainer", "policy", "buffer"), True) | {COORDINATOR: False}
    # Environments of these roles are made, though none is stepped.
    assert {role for role, config in context.configs.configs.items() if hasattr(config, "environment")} == {
        role for role, reaches in found.items() if reaches
    }


def test_an_edit_is_rendered_by_what_is_allowed_today() -> None:
    """Other settings stay as recorded, but not the exceptions of a range that is allowed only now."""
    first = first_revision(reaching(settings=allowing()))
    now = allowing(WIDE | {"except": ["10.0.0.0/8"]}).model_copy(update={"pod_templates": "any"})
    after = reaching({"cidr": "0.0.0.0/0"}, settings=now)
    second = next_revision(first, after)
    policies = [each for each in second.manifests if each["kind"] == "NetworkPolicy"]
    excepted = [
        peer["ipBlock"]["except"]
        for each in policies
        for rule in each["spec"]["egress"]
        for peer in rule.get("to", ())
        if "ipBlock" in peer
    ]
    assert len(excepted) == 2, "of actors and trainers"
    assert all("10.0.0.0/8" in each for each in excepted)
    assert second.settings.pod_templates == "restricted"


def test_an_experiment_that_is_tried_again_loses_what_is_no_longer_allowed() -> None:
    before = first_revision(reaching(SIMULATORS, settings=allowing(SIMULATORS)))
    assert "games" in str(before.manifests)
    again = ExperimentContext(
        experiment=before.experiment, namespace="research", uid="u", generation=1, settings=SETTINGS, first_attempt=2
    )
    after = derive_revision(before, again)
    assert after is not None
    assert "games" not in str(after.manifests)


RULE = {"to": SIMULATORS, "ports": PORTS}
SIMULATING = {"id": "CartPole-v1", "egress": [RULE]}


def uids(world: World) -> set[str]:
    return {each["metadata"]["uid"] for each in world.pods()}


def destinations(server: ApiServer) -> set[str]:
    """Return the NetworkPolicies that open the simulators."""
    return {each["metadata"]["name"] for each in server.of_kind("NetworkPolicy") if "games" in str(each["spec"])}


def test_a_new_experiment_begins_once_the_administrator_allows_its_destinations() -> None:
    world = World(environment=SIMULATING)
    world.settle()
    assert (world.condition(ACCEPTED), world.server.of_kind("Deployment")) == (("False", "InvalidSpec"), [])
    world.reconciler = world.new_reconciler(allowing(SIMULATORS))
    world.settle()
    assert (world.condition(ACCEPTED), world.condition(READY)) == (("True", "Accepted"), ("True", "Ready"))
    assert destinations(world.server) == {"a-actor", "a-trainer"}


def test_a_refused_edit_leaves_the_experiment_as_it_was() -> None:
    world = World()
    world.settle()
    pods = uids(world)
    world.edit(environment=SIMULATING)
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec")
    assert destinations(world.server) == set()
    assert uids(world) == pods


def test_an_edit_of_destinations_restarts_nothing() -> None:
    world = World(environment=SIMULATING)
    world.reconciler = world.new_reconciler(allowing(SIMULATORS))
    world.settle()
    pods = uids(world)
    before = len(world.server.writes)
    world.edit(environment={"id": "CartPole-v1"})
    world.settle()
    assert world.condition(ACCEPTED) == ("True", "Accepted")
    assert destinations(world.server) == set()
    assert uids(world) == pods
    writes = [write for write in world.server.writes[before:] if "NetworkPolicy" in write]
    assert {write.split()[-1] for write in writes} == {"a-actor", "a-trainer"}
    others = [write for write in world.server.writes[before:] if write not in writes]
    assert all("RLExperiment" in write or "-record-" in write for write in others), others
