"""The administrator's settings, and the errors for invalid ones: one line with the file and each field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlsrl.api.roles import ROLES
from rlsrl_operator.settings import OperatorSettings, PodDefaults, SettingsError, read_settings

IMAGES = "images: {actor: a, learner: l}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_the_smallest_settings(path: Path) -> None:
    path.write_text(IMAGES)
    settings = read_settings(path)
    assert (settings.images.actor, settings.images.learner, settings.images.pull_policy) == ("a", "l", "IfNotPresent")
    assert settings.namespaces == ()
    assert settings.network_policies.enabled
    assert settings.network_policies.dns == {"namespaceSelector": {}, "podSelector": {}}, "any pod may be the DNS"
    assert all(settings.defaults_of(role.name) == PodDefaults() for role in ROLES)


def test_a_role_has_its_own_pod_defaults_or_the_common_ones(path: Path) -> None:
    roles = {role.name: {"priorityClassName": role.name} for role in ROLES[:2]}
    path.write_text(IMAGES + yaml.safe_dump({"roles": roles | {"default": {"priorityClassName": "default"}}}))
    settings = read_settings(path)
    names = {role.name: settings.defaults_of(role.name).priority_class_name for role in ROLES}
    assert names == {role.name: role.name if role.name in roles else "default" for role in ROLES}


def test_null_means_that_a_field_is_absent(path: Path) -> None:
    """Settings that the chart writes by default."""
    path.write_text(IMAGES + "namespaces:\nroles: {default: {resources: null, priorityClassName: ''}}\n")
    assert read_settings(path).roles == {"default": PodDefaults()}


FAULTS = {
    "no document": ("", "the document: Input should be a valid dictionary or instance of OperatorSettings, not None"),
    "a list": ("- images\n", "the document: Input should be a valid dictionary or instance of OperatorSettings, not ["),
    "no YAML": (
        "images: {actor: a\n",
        'is not YAML: while parsing a flow mapping in "<unicode string>", line 1, column 9',
    ),
    "a tab": ("images:\n\tactor: a\n", "is not YAML: while scanning for the next token found character '\\t'"),
    "missing": ("images: {actor: a}\n", "images.learner is missing"),
    "all missing": ("namespaces: []\n", "images is missing"),
    "a misspelt field": (
        "images: {actor: a, learner: l, pullSecret: []}\n",
        "images.pullSecret is not a field: did you mean pullSecrets?",
    ),
    "an unknown field": (IMAGES + "zzz: 1\n", "zzz is not a field"),
    "not YAML's name": (
        IMAGES + "network_policies: {}\n",
        "network_policies is not a field: did you mean networkPolicies?",
    ),
    "a wrong type": (
        IMAGES + "networkPolicies: {enabled: 'yes'}\n",
        "networkPolicies.enabled: Input should be a valid boolean, not 'yes'",
    ),
    "no choice": (
        "images: {actor: a, learner: l, pullPolicy: Sometimes}\n",
        "images.pullPolicy: Input should be 'Always', 'IfNotPresent' or 'Never', not 'Sometimes'",
    ),
    "an empty image": (
        "images: {actor: '', learner: l}\n",
        "images.actor: String should have at least 1 character, not ''",
    ),
    "no role": (
        IMAGES + "roles: {trainers: {}}\n",
        "roles.trainers: String should match pattern '^(default|coordinator|trainer|buffer|policy|actor|evaluator)$'",
    ),
    "within a role": (
        IMAGES + "roles: {actor: {nodeSelector: {gpu: true}}}\n",
        "roles.actor.nodeSelector.gpu: Input should be a valid string, not True",
    ),
    "root": (
        IMAGES + "roles: {actor: {securityContext: {runAsUser: 0}}}\n",
        "roles.actor.securityContext.runAsUser: Input should be greater than or equal to 1, not 0",
    ),
    "less than restricted": (
        IMAGES + "roles: {actor: {securityContext: {runAsNonRoot: false}}}\n",
        "roles.actor.securityContext.runAsNonRoot: Input should be 'runAsUser', 'runAsGroup' or 'fsGroup', not",
    ),
    "an exception outside": (
        IMAGES + "environments: {egress: [{cidr: 10.0.0.0/8, except: [11.0.0.0/8]}]}\n",
        "environments.egress.0: except: 11.0.0.0/8 is not inside 10.0.0.0/8, not {'cidr': '10.0.0.0/8'",
    ),
    "an exception of everything": (
        IMAGES + "environments: {egress: [{cidr: 10.0.0.0/8, except: [10.0.0.0/8]}]}\n",
        "environments.egress.0: except: 10.0.0.0/8 is not inside 10.0.0.0/8, not",
    ),
    "an exception of the other version": (
        IMAGES + "environments: {egress: [{cidr: 10.0.0.0/8, except: ['2001:db8::/64']}]}\n",
        "environments.egress.0: except: 2001:db8::/64 is not inside 10.0.0.0/8, not",
    ),
    "an exception without a range": (
        IMAGES + "environments: {egress: [{podSelector: {}, except: [10.0.0.0/8]}]}\n",
        "environments.egress.0: except: is given without cidr, not",
    ),
    "a destination without contents": (
        IMAGES + "environments: {egress: [{}]}\n",
        "environments.egress.0: has none of cidr, namespaceSelector, podSelector, not {}",
    ),
    "an invalid range": (
        IMAGES + "environments: {egress: [{cidr: 10.0.0.1/8}]}\n",
        "environments.egress.0.cidr: 10.0.0.1/8 is no range: its address has bits beyond the prefix, not '10.0.0.1/8'",
    ),
    "a misspelt exception": (
        IMAGES + "environments: {egress: [{cidr: 10.0.0.0/8, excepts: []}]}\n",
        "environments.egress.0.excepts is not a field: did you mean except?",
    ),
    "within a list": (IMAGES + "namespaces: [a, 1]\n", "namespaces.1: Input should be a valid string, not 1"),
    "long": (IMAGES + f"namespaces: {'x' * 1000}\n", f"namespaces: Input should be a valid tuple, not '{'x' * 99}..."),
    "two faults": (
        "images: {actor: 1, learner: l}\nrole: {}\n",
        "images.actor: Input should be a valid string, not 1; role is not a field: did you mean roles?",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_that_names_file_and_field(name: str, path: Path) -> None:
    text, expected = FAULTS[name]
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: {expected}")
    assert len(said.splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"^{path}: cannot be read: No such file or directory$"):
        read_settings(path)
    path.mkdir()
    with pytest.raises(SettingsError, match=rf"^{path}: cannot be read: Is a directory$"):
        read_settings(path)
    path.rmdir()
    path.write_bytes(b"images: \xff\n")
    with pytest.raises(SettingsError, match=rf"^{path}: is not UTF-8 text: .*0xff in position 8"):
        read_settings(path)


def test_settings_are_never_changed() -> None:
    settings = OperatorSettings.model_validate({"images": {"actor": "a", "learner": "l"}})
    with pytest.raises(ValueError, match="frozen"):
        settings.namespaces = ("n",)  # type: ignore[misc]
