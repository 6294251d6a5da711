"""The rules of ``environment.egress``: errors, the CRD's verdict, and what workers get of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlsrl.api.crd import schema
from rlsrl.api.explain import explain
from rlsrl.api.live import name_of, settings_of
from rlsrl.api.load import Problem, SpecError, dump, load_text
from rlsrl.api.placement import cluster_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.spec import RLExperiment, WorkerEnvironment
from rlsrl.testing.api_server import faults
from rlsrl.testing.documents import BROKEN_EGRESS, EGRESS, JsonDocument, minimal

AT = "spec.environment.egress[0]"
PEER, PORTS = {"cidr": "203.0.113.0/24"}, [{"port": 8443}]


def with_rules(*rules: Any) -> JsonDocument:
    document = minimal()
    document["spec"] |= {"policyWorkers": {}, "bufferWorkers": {}, "evaluators": {}}
    document["spec"]["environment"]["egress"] = list(rules)
    return document


def load(*rules: Any) -> RLExperiment:
    return load_text(json.dumps(with_rules(*rules)))


def problems_of(*rules: Any) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        load(*rules)
    return caught.value.problems


def to(**peer: Any) -> JsonDocument:
    return {"to": peer, "ports": PORTS}


def ports(*ports: Any) -> JsonDocument:
    return {"to": PEER, "ports": list(ports)}


FAULTS: dict[str, tuple[Any, str, str, str]] = {
    # Each case: the rule, the field, what is wrong with it, what is allowed.
    "nothing selected": (to(), ".to", "has none of cidr, namespaceSelector, podSelector", "at least one of cidr"),
    "nothing selected, by a null": (to(cidr=None), ".to", "has none of cidr", "at least one of cidr"),
    "both kinds": (to(**PEER, podSelector={}), ".to.cidr", "is given beside podSelector", "addresses or selectors"),
    "no range": (
        to(cidr="203.0.113.256/24"),
        ".to.cidr",
        "203.0.113.256/24 is not a range",
        "for example 203.0.113.0/24",
    ),
    "a prefix that is too long": (to(cidr="10.0.0.0/33"), ".to.cidr", "10.0.0.0/33 is not a range", "for example"),
    "a netmask": (to(cidr="10.0.0.0/255"), ".to.cidr", "10.0.0.0/255 is not a range", "for example"),
    "an address": (to(cidr="10.0.0.1"), ".to.cidr", "does not have the right form", "for example 203.0.113.0/24"),
    "a name": (to(cidr="example.com/32"), ".to.cidr", "does not have the right form", "for example 203.0.113.0/24"),
    "bits beyond the prefix": (to(cidr="10.0.0.5/24"), ".to.cidr", "bits beyond the prefix", "10.0.0.0/24"),
    "bits of IPv6": (to(cidr="2001:DB8::5/32"), ".to.cidr", "bits beyond the prefix", "2001:db8::/32"),
    "a mapped address": (to(cidr="::ffff:169.254.169.254/128"), ".to.cidr", "mapped IPv4", "169.254.169.254/32"),
    "labels one level up": (to(podSelector={"app": "a"}), ".to.podSelector.app", "is not a field", "matchLabels"),
    "a label's name": (
        to(podSelector={"matchLabels": {"a b": "c"}}),
        ".to.podSelector.matchLabels",
        "'a b' is not",
        "example.com/app",
    ),
    "a label's value": (
        to(podSelector={"matchLabels": {"a": "b c"}}),
        ".to.podSelector.matchLabels.a",
        "right form",
        "simulator",
    ),
    "no ports": (ports(), ".ports", "has too few entries", "list of 1 to 16 items"),
    "no port": (ports({"protocol": "TCP"}), ".ports[0].port", "is required and missing", "integer from 1 to 65535"),
    "port 0": (ports({"port": 0}), ".ports[0].port", "is out of range", "integer from 1 to 65535"),
    "a named port": (ports({"port": "https"}), ".ports[0].port", "has the wrong type", "integer from 1 to 65535"),
    "a range that descends": (
        ports({"port": 80, "endPort": 79}),
        ".ports[0].endPort",
        "79 is below port 80",
        "from 80 to",
    ),
    "no such protocol": (
        ports({"port": 80, "protocol": "tcp"}),
        ".ports[0].protocol",
        "not one of",
        "TCP or UDP or SCTP",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_rule_is_one_error_with_field_value_and_what_is_allowed(name: str) -> None:
    rule, field, message, allowed = FAULTS[name]
    (problem,) = problems_of(rule)
    assert problem.path == AT + field
    assert message in problem.message
    assert allowed in problem.allowed
    assert problem.place.line == 1


def test_a_misspelt_field_of_a_rule_has_a_nearest_match() -> None:
    found = {problem.path: problem for problem in problems_of({"too": PEER, "ports": PORTS})}
    assert found[f"{AT}.too"].nearest == f"{AT}.to"
    assert "is required and missing" in found[f"{AT}.to"].message
    found = {problem.path: problem for problem in problems_of(to(ipBlock=PEER))}
    assert found[f"{AT}.to.ipBlock"].nearest == f"{AT}.to.cidr", "a NetworkPolicy's word"


@pytest.mark.parametrize("rule", BROKEN_EGRESS, ids=json.dumps)
def test_the_api_server_refuses_what_the_models_refuse(rule: JsonDocument) -> None:
    assert problems_of(rule)
    assert faults(schema(), with_rules(rule))


def test_both_accept_correct_rules() -> None:
    assert faults(schema(), with_rules(*EGRESS)) == []
    experiment = load(*EGRESS)
    assert len(experiment.spec.environment.egress) == len(EGRESS)
    assert load_text(dump(experiment)) == experiment
    assert "null" not in dump(experiment)


def test_ranges_have_one_form() -> None:
    (rule,) = load(to(cidr="2001:0DB8:0000::/032")).spec.environment.egress
    assert rule.to.cidr == "2001:db8::/32"


def test_no_worker_gets_the_rules_so_that_an_edit_restarts_none() -> None:
    def configs(*rules: Any) -> dict[str, Any]:
        placement = cluster_placement(
            run_uid="u",
            coordinator_host="c",
            record_folder="/r",
            state_folder="/l",
            settings_path="/s",
            first_attempt=1,
        )
        return dict(resolve(load(*rules), placement).configs)

    with_none, with_all = configs(), configs(*EGRESS)
    assert len(with_none) == 6
    for role, config in with_none.items():
        assert "egress" not in config.to_json()
        assert (name_of(config), settings_of(config)) == (name_of(with_all[role]), settings_of(with_all[role]))
        assert type(config).from_json(config.to_json()) == config
    assert type(with_all["actor"].environment) is WorkerEnvironment


def test_explain_shows_the_rules_and_that_one_machine_ignores_them() -> None:
    text = " ".join(explain("environment.egress").split())
    assert "`rlsrl run` ignores the field" in text
    assert "An edit takes effect within seconds, without a restart." in text
    assert "to <mapping> required" in text
    assert "endPort <integer>" in explain("spec.environment.egress.ports")
    assert "FIELD: spec.environment.egress.to.cidr <string>" in " ".join(explain("environment.egress.to.cidr").split())
