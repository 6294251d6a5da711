"""The network rule of ``environment.http``: what it opens for which URL, and how it follows the Service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import NAMESPACE, World
from structlog.testing import capture_logs

from rlsrl.api.load import SpecError
from rlsrl.api.pods import UID_LABEL
from rlsrl.api.reasons import ACCEPTED, READY
from rlsrl.testing.documents import JsonDocument, minimal
from rlsrl_operator.manifests import ExperimentContext
from rlsrl_operator.manifests.servers import EnvironmentService, ServerRule, ServiceName
from rlsrl_operator.outside_objects import OUTSIDE_SECONDS
from rlsrl_operator.settings import Environments, OperatorSettings
from rlsrl_operator.testing import SETTINGS, context_of

URL = "spec.environment.http.url"
RANGES = [{"cidr": "10.0.0.0/8", "except": ["10.9.0.0/16"]}, {"cidr": "2001:db8::/32"}]
EVERYWHERE = [{"namespaceSelector": {}}]
TWICE_A_MINUTE, MAX_CALLS = 2, 10


def in_namespace(name: str) -> JsonDocument:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


def allowing(*egress: JsonDocument) -> OperatorSettings:
    allowed = Environments.model_validate({"egress": list(egress), "apiServer": ["10.96.0.1/32"]})
    return SETTINGS.model_copy(update={"environments": allowed})


def service(*, name: str = "simulators", namespace: str = NAMESPACE, **spec: Any) -> JsonDocument:
    """Return a Service as the API server has it."""
    ports = [{"port": 80, "protocol": "TCP", "targetPort": 8765}, {"port": 81, "protocol": "UDP", "targetPort": 8766}]
    default = {"type": "ClusterIP", "clusterIP": "10.96.0.7", "selector": {"app": "simulator"}, "ports": ports}
    spec = {key: value for key, value in (default | spec).items() if value is not None}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def reaching(
    url: str,
    *services: JsonDocument,
    egress: list[JsonDocument] | None = None,
    allowed: list[JsonDocument] | None = None,
) -> ExperimentContext:
    """Return an experiment with the URL in a cluster with these Services."""
    document = minimal()
    document["spec"]["environment"] = {"http": {"url": url}, "egress": egress or []}
    context = context_of(document, settings=allowing(*(RANGES + EVERYWHERE if allowed is None else allowed)))
    found = {ServiceName(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in services}
    known = {
        name: EnvironmentService.of(found[name]) if name in found else EnvironmentService(unknown=f"no Service {name}")
        for name in ([] if context.service is None else [context.service])
    }
    return ExperimentContext(**{**vars(context), "services": known})


def pods(namespace: str, **labels: str) -> JsonDocument:
    return {"namespaceSelector": in_namespace(namespace), "podSelector": {"matchLabels": labels}}


SIMULATORS = pods(NAMESPACE, app="simulator")
HEADLESS = service(clusterIP="None", ports=None)
OPENED: dict[str, tuple[str, list[JsonDocument], JsonDocument, int | str]] = {
    "an address": ("http://10.1.2.3:8765", [], {"ipBlock": {"cidr": "10.1.2.3/32"}}, 8765),
    "the default port": ("http://10.1.2.3", [], {"ipBlock": {"cidr": "10.1.2.3/32"}}, 80),
    "the default port of https": ("https://10.1.2.3/path", [], {"ipBlock": {"cidr": "10.1.2.3/32"}}, 443),
    "IPv6": ("http://[2001:db8::1]:8765", [], {"ipBlock": {"cidr": "2001:db8::1/128"}}, 8765),
    "mapped IPv4": ("http://[::ffff:10.1.2.3]:8765", [], {"ipBlock": {"cidr": "10.1.2.3/32"}}, 8765),
    "a Service": ("http://simulators", [service()], SIMULATORS, 8765),
    "in capitals": ("http://Simulators.Research.SVC", [service()], SIMULATORS, 8765),
    "its namespace": (
        "http://simulators.games/",
        [service(), service(namespace="games", selector={"app": "b"})],
        pods("games", app="b"),
        8765,
    ),
    "its kind": ("http://simulators.research.svc:80", [service()], SIMULATORS, 8765),
    "its domain": ("http://simulators.research.svc.cluster.local", [service()], SIMULATORS, 8765),
    "another domain, with a dot": ("http://simulators.research.svc.example.com.", [service()], SIMULATORS, 8765),
    "a named port": ("http://simulators", [service(ports=[{"port": 80, "targetPort": "http"}])], SIMULATORS, "http"),
    "the same port": ("http://simulators", [service(ports=[{"port": 80}])], SIMULATORS, 80),
    "without an address": ("http://simulators:8765", [HEADLESS], SIMULATORS, 8765),
    "one pod": ("http://pod-0.simulators.research.svc:8765", [HEADLESS], SIMULATORS, 8765),
    "many labels": (
        "http://simulators",
        [service(selector={f"label-{number}": "a" for number in range(20)})],
        pods(NAMESPACE, **{f"label-{number}": "a" for number in range(20)}),
        8765,
    ),
}


@pytest.mark.parametrize("name", OPENED)
def test_the_rule_follows_from_the_url(name: str) -> None:
    url, services, peer, port = OPENED[name]
    expected = {"to": [peer], "ports": [{"port": port, "protocol": "TCP"}]}
    assert reaching(url, *services).server == ServerRule(rule=expected)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.1:8765", "http://[::1]", "http://127.8.8.8"])
def test_a_server_in_the_pod_needs_no_rule(url: str) -> None:
    assert reaching(url, allowed=[]).server == ServerRule()


USE_EGRESS = "needs a rule with a cidr and port {} in spec.environment.egress"
REFUSED: dict[str, tuple[str, list[JsonDocument], list[str]]] = {
    "another address": (
        "http://192.0.2.1:80",
        [],
        ["192.0.2.1/32 is not within an allowed range; allowed: 10.0.0.0/8"],
    ),
    "an excepted address": ("http://10.9.0.1:80", [], ["10.9.0.1/32 is not within an allowed range"]),
    "metadata": ("http://169.254.169.254", [], ["169.254.169.254/32 is within 169.254.0.0/16, where clouds"]),
    "mapped metadata": ("http://[::ffff:169.254.169.254]", [], ["169.254.169.254/32 is within 169.254.0.0/16"]),
    "the API server": ("https://10.96.0.1", [], ["10.96.0.1/32 is the API server's"]),
    "another host": ("http://simulators.example.com:8765", [], [USE_EGRESS.format(8765)]),
    "no Service's name": ("http://sim_1", [], [USE_EGRESS.format(80)]),
    "no Service": ("http://simulators", [], ["no Service research/simulators", USE_EGRESS.format(80)]),
    "another port": (
        "http://simulators:81",
        [service()],
        ["research/simulators has no TCP port 81; its TCP ports: 80"],
    ),
    "no port": ("http://simulators", [service(ports=None)], ["no TCP port 80; its TCP ports: none"]),
    "no selector": ("http://simulators", [service(selector=None)], ["research/simulators has no selector"]),
    "an alias": (
        "http://simulators",
        [service(type="ExternalName", externalName="sim.example.com", clusterIP=None, selector=None)],
        ["research/simulators is an ExternalName, another name of sim.example.com"],
    ),
}
UNUSABLE = ("no Service", "another port", "no port", "no selector", "an alias")


@pytest.mark.parametrize("name", REFUSED)
def test_what_gives_no_rule_has_one_clear_error(name: str) -> None:
    url, services, said = REFUSED[name]
    found = reaching(url, *services).server
    assert found.rule is None
    assert found.fault.startswith(f"{URL}: {url}: ")
    assert "\n" not in found.fault
    for text in said:
        assert text in found.fault
    assert found.reason == ("ServiceUnusable" if name in UNUSABLE else "InvalidSpec")


def test_selected_pods_are_judged_as_those_of_a_written_rule() -> None:
    def fault(*allowed: JsonDocument) -> str:
        return reaching("http://simulators", service(), allowed=list(allowed)).server.fault

    shown = "namespaceSelector {kubernetes.io/metadata.name: research} podSelector {app: simulator}"
    refused = fault({"podSelector": {"matchLabels": {"app": "other"}}})
    assert refused.startswith(
        f"{URL}: http://simulators: Service research/simulators: {shown} is not within an allowed"
    )
    for entry in (
        {"podSelector": {}},
        {"podSelector": {"matchLabels": {"app": "simulator"}}},
        {"namespaceSelector": in_namespace("research")},
        {"namespaceSelector": {}},
    ):
        assert fault(entry) == ""
    elsewhere = reaching("http://simulators.games", service(namespace="games"), allowed=[{"podSelector": {}}, *RANGES])
    assert elsewhere.service is None, "users learn nothing of Services where nothing is allowed"
    assert "pods of the namespace games are not within an allowed selection" in elsewhere.server.fault


RULE_FOR_RANGE = {"to": {"cidr": "10.1.0.0/16"}, "ports": [{"port": 8000, "endPort": 9000}]}
RULE_FOR_PODS = {"to": {"podSelector": {}}, "ports": [{"port": 8765}]}
WRITTEN: dict[str, tuple[str, list[JsonDocument], JsonDocument, bool]] = {
    "the address": ("http://10.1.2.3:8765", [], RULE_FOR_RANGE, False),
    "another address": ("http://10.2.2.3:8765", [], RULE_FOR_RANGE, True),
    "another port": ("http://10.1.2.3:80", [], RULE_FOR_RANGE, True),
    "UDP": (
        "http://10.1.2.3:8765",
        [],
        {"to": RULE_FOR_RANGE["to"], "ports": [{"port": 8765, "protocol": "UDP"}]},
        True,
    ),
    "a host": ("http://simulators.example.com:8765", [], RULE_FOR_RANGE, False),
    "the Service's pods": ("http://simulators", [service()], RULE_FOR_PODS, False),
    "its pods by their namespace": (
        "http://simulators.games",
        [service(namespace="games")],
        {"to": {"namespaceSelector": in_namespace("games")}, "ports": [{"port": 8765}]},
        False,
    ),
    "another port of pods": (
        "http://simulators",
        [service(ports=[{"port": 80, "targetPort": 1}])],
        RULE_FOR_PODS,
        True,
    ),
    "something else": ("http://simulators", [service()], RULE_FOR_RANGE, True),
    "a Service without pods": ("http://simulators", [service(selector=None)], RULE_FOR_RANGE, False),
    "a host that may be a Service": ("http://example.com:8765", [], RULE_FOR_RANGE, False),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_by_hand_is_not_derived(name: str) -> None:
    url, services, rule, is_derived = WRITTEN[name]
    found = reaching(url, *services, egress=[rule]).server
    assert (found.fault, found.rule is not None) == ("", is_derived)


def test_a_host_needs_a_range_for_its_port() -> None:
    for rule in (RULE_FOR_PODS, {"to": RULE_FOR_RANGE["to"], "ports": [{"port": 1}]}):
        assert USE_EGRESS.format(8765) in reaching("http://a.example.com:8765", egress=[rule]).server.fault


def test_a_written_range_does_not_excuse_a_closed_address() -> None:
    wide = {"to": {"cidr": "10.0.0.0/8"}, "ports": [{"port": 443}]}
    assert (
        "the API server's" in reaching("https://10.96.0.1", egress=[wide], allowed=[{"cidr": "0.0.0.0/0"}]).server.fault
    )


@pytest.mark.parametrize(
    "url", ["http://a:99999", "http://a:0", "http://:80", "http://a:b", "http://[::1", "http://[1.2.3.4]", "http://::1"]
)
def test_urls_without_a_usable_host_or_port_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match=r"environment\.http\.url: .*host"):
        reaching(url)


def world_of(url: str, *allowed: JsonDocument) -> World:
    world = World(environment={"http": {"url": url}})
    world.reconciler = world.new_reconciler(allowing(*allowed))
    return world


def opened(world: World) -> dict[str, list[JsonDocument]]:
    """Return what each NetworkPolicy opens beside peers and DNS, by the policy's name."""
    found = {}
    for each in world.server.of_kind("NetworkPolicy"):
        rules = [
            rule
            for rule in each["spec"]["egress"]
            if all(port["port"] != 53 for port in rule.get("ports", ())) and UID_LABEL not in str(rule["to"])
        ]
        if rules:
            found[each["metadata"]["name"]] = rules
    return found


def opens(world: World, peer: Mapping[str, Any], port: int) -> bool:
    expected = [{"to": [peer], "ports": [{"port": port, "protocol": "TCP"}]}]
    return opened(world) == {"a-actor": expected, "a-trainer": expected}


def message(world: World) -> str:
    conditions = world.document["status"]["conditions"]
    return str(next(each["message"] for each in conditions if each["type"] == ACCEPTED))


def versions(world: World) -> set[str]:
    return {each["metadata"]["resourceVersion"] for each in world.server.of_kind("NetworkPolicy")}


def uids(world: World) -> set[str]:
    return {each["metadata"]["uid"] for each in world.server.of_kind("Pod")}


def test_an_experiment_begins_when_the_service_of_its_server_appears() -> None:
    world = world_of("http://simulators.games", *EVERYWHERE)
    with capture_logs() as logs:
        world.run_for(60)
        assert world.condition(ACCEPTED) == ("False", "ServiceUnusable")
        assert "Service games/simulators does not exist" in message(world)
        assert not world.server.of_kind("Pod", "StatefulSet", "NetworkPolicy")
        for _ in range(3):
            reads, writes = len(world.server.reads), len(world.server.writes)
            assert world.run_for(60) <= TWICE_A_MINUTE
            assert len(world.server.reads) - reads <= MAX_CALLS
            assert len(world.server.writes) == writes, "nothing has changed"
    assert len([each for each in logs if each["event"] == "blocked"]) == 1
    world.server.put(service(namespace="games"))
    world.run_for(60)
    assert (world.condition(ACCEPTED), world.condition(READY)) == (("True", "Accepted"), ("True", "Ready"))
    assert opens(world, pods("games", app="simulator"), 8765)


def test_an_address_is_refused_as_a_written_range_is() -> None:
    world = world_of("http://203.0.113.7:8765", *RANGES)
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec")
    assert f"{URL}: http://203.0.113.7:8765: 203.0.113.7/32 is not within" in message(world)
    world.reconciler = world.new_reconciler(allowing({"cidr": "203.0.113.0/24"}))
    world.settle()
    assert world.condition(READY) == ("True", "Ready")
    assert opens(world, {"ipBlock": {"cidr": "203.0.113.7/32"}}, 8765)


def test_policies_follow_the_service_and_no_pod_restarts() -> None:
    world = world_of("http://simulators", *EVERYWHERE)
    world.server.put(service())
    world.settle()
    assert opens(world, SIMULATORS, 8765)
    began = uids(world)
    world.due = world.now
    world.run_for(60)

    def change(**spec: Any) -> None:
        found = world.server.objects[world.server.place("Service", "simulators")]
        world.server.change(found, {"spec": service(**spec)["spec"]})

    change(selector={"app": "moved"})
    world.run_for(OUTSIDE_SECONDS + 20)
    assert opens(world, pods(NAMESPACE, app="moved"), 8765)
    change(ports=[{"port": 80, "protocol": "TCP", "targetPort": 9000}])
    world.run_for(OUTSIDE_SECONDS + 20)
    assert opens(world, SIMULATORS, 9000)
    world.server.remove("Service", "simulators")
    world.run_for(OUTSIDE_SECONDS + 20)
    assert opened(world) == {}
    assert world.condition(ACCEPTED) == ("False", "ServiceUnusable")
    assert world.condition(READY) == ("True", "Ready"), "the run goes on"
    writes = len(world.server.writes)
    world.run_for(120)
    assert len(world.server.writes) == writes, "nothing has changed"
    world.server.put(service())
    world.run_for(OUTSIDE_SECONDS + 20)
    assert opens(world, SIMULATORS, 8765)
    assert world.condition(ACCEPTED) == ("True", "Accepted")
    assert uids(world) == began


def test_a_running_experiment_looks_at_its_service_twice_a_minute() -> None:
    world = world_of("http://simulators.games", *EVERYWHERE)
    world.server.put(service(namespace="games"))
    world.settle()
    world.due = world.now
    world.run_for(60)
    reads = len(world.server.reads)
    world.run_for(60)
    assert world.server.reads[reads:] == [("get", "Service")] * TWICE_A_MINUTE


def test_a_service_that_the_operator_may_not_read_is_reported() -> None:
    world = world_of("http://simulators.games", *EVERYWHERE)
    world.server.put(service(namespace="games"))
    world.server.hides = lambda place: place[1] == "games"
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "ServiceUnusable")
    assert "the operator may not read Service games/simulators: forbidden by the test" in message(world)


def test_an_edit_of_the_url_is_refused_and_the_old_rule_stays() -> None:
    world = world_of("http://simulators", *EVERYWHERE)
    world.server.put(service())
    world.settle()
    world.edit(environment={"http": {"url": "http://other"}})
    world.settle()
    assert world.condition(ACCEPTED) == ("False", "EditRefused")
    assert opens(world, SIMULATORS, 8765)
    world.reconciler = world.new_reconciler(allowing(*EVERYWHERE))
    policies = versions(world)
    world.settle()
    assert versions(world) == policies, "nor does an operator close it that has just started"


def test_what_the_administrator_takes_away_is_closed_at_the_operators_next_start() -> None:
    world = world_of("http://simulators", *EVERYWHERE)
    world.server.put(service())
    world.settle()
    began = uids(world)
    world.reconciler = world.new_reconciler(allowing())
    world.settle()
    assert opened(world) == {}
    assert world.condition(ACCEPTED) == ("False", "InvalidSpec")
    assert uids(world) == began


STATES = st.sampled_from(
    [
        {},
        {"selector": {"app": "moved"}},
        {"selector": None},
        {"clusterIP": "None"},
        {"ports": [{"port": 80, "targetPort": "http"}]},
        {"ports": [{"port": 82}]},
        None,
    ]
)


@settings(max_examples=20, deadline=None)
@given(st.lists(STATES, min_size=1, max_size=5))
def test_policies_depend_on_the_present_service_only(states: list[JsonDocument | None]) -> None:
    """The history of a Service, and of the operator, leaves no trace."""
    world, began = world_of("http://simulators", *EVERYWHERE), service()
    world.server.put(began)
    world.settle()
    for number, state in enumerate(states):
        if world.server.place("Service", "simulators") in world.server.objects:
            world.server.remove("Service", "simulators")
        if state is not None:
            world.server.put(service(**state))
        if number % 2:
            world.reconciler = world.new_reconciler(allowing(*EVERYWHERE))
        world.due = world.now
        world.run_for(2 * OUTSIDE_SECONDS)
    last = states[-1]
    rule = reaching("http://simulators", *([] if last is None else [service(**last)])).server.rule
    assert opened(world) == ({} if rule is None else {"a-actor": [rule], "a-trainer": [rule]})
