"""Properties of every experiment's manifests. The golden files show the manifests themselves."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsrl.api.live import with_settings
from rlsrl.api.load import SpecError, load_file
from rlsrl.api.placement import HTTP_PORT
from rlsrl.api.resolved import BufferConfig
from rlsrl.api.role_names import BUFFER, COORDINATOR, TRAINER
from rlsrl.api.roles import ROLES
from rlsrl.rpc.tls import FILES
from rlsrl.testing.documents import MINIBATCH_SIZES, JsonDocument, inside, minimal, variation
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    first_revision,
    render,
    revision_object,
    token_secret,
    volume_claim,
)
from rlsrl_operator.manifests.source import SourceExperiment, source_secret
from rlsrl_operator.roles import roles_of
from rlsrl_operator.settings import NetworkPolicies, OperatorSettings, PodDefaults, read_settings
from rlsrl_operator.testing import SETTINGS, UID, context_of, faults_of_restricted

HTTP_PORTS = [{"port": HTTP_PORT, "protocol": "TCP"}]
GOLDEN = Path(__file__).parents[2] / "golden" / "manifests"
SEEDS = st.integers(0, 2**32)
OPERATOR = {"podSelector": {"matchLabels": {"app": "operator"}}}
VIEWER = {"podSelector": {"matchLabels": {"app": "page"}}}
SCRAPER = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
OPEN_SETTINGS = SETTINGS.model_copy(
    update={
        "network_policies": NetworkPolicies(
            operator=OPERATOR, viewer=VIEWER, scrapers=(SCRAPER,), dns={"podSelector": {}}
        )
    }
)


def document_of(seed: int) -> JsonDocument:
    """Return a variation with several ranks and GPUs, if it is valid with them."""
    rng = random.Random(seed)
    document = variation(rng)
    several = copy.deepcopy(document)
    ranks = rng.choice([2, 4, 8])
    several["spec"]["trainers"] |= {"replicas": ranks, "gpusPerPod": rng.choice([0, 1, 2, ranks])}
    several["spec"]["pacing"]["maxPolicyLag"] = 64
    ((algorithm, _),) = several["spec"]["algorithm"].items()
    *above, size = MINIBATCH_SIZES[algorithm]
    inside(several["spec"], tuple(above))[size] *= ranks
    try:
        context_of(several)
    except SpecError:
        return document
    return several


def golden(case: str) -> ExperimentContext:
    return ExperimentContext(
        experiment=load_file(GOLDEN / case / "experiment.yaml"),
        namespace="research",
        uid=UID,
        generation=1,
        settings=OPEN_SETTINGS,
    )


VOLUMES = [
    pytest.param({}, "10Gi", "Delete", id="by default"),
    pytest.param({"volume": {"size": "3Ti", "whenDeleted": "Retain"}}, "3Ti", "Retain", id="as asked"),
]

GOLDEN_CONTEXTS = [golden(path.name) for path in sorted(GOLDEN.iterdir()) if path.is_dir()]


def of_any_context(test: Callable[[ExperimentContext], None]) -> Callable[[], None]:
    """Run the test with the golden experiments and with variations."""

    def run() -> None:
        for context in GOLDEN_CONTEXTS:
            test(context)

        @settings(max_examples=20, deadline=None)
        @given(SEEDS)
        def vary(seed: int) -> None:
            test(context_of(document_of(seed), settings=OPEN_SETTINGS))

        vary()

    run.__name__ = test.__name__
    return run


def everything(context: ExperimentContext) -> list[Manifest]:
    rendered = render(context)
    claim = volume_claim(context)
    made = [
        token_secret(context, "token", "viewing"),
        revision_object(context, first_revision(context), b"key"),
        *rendered,
    ]
    if context.source is not None:
        found = SourceExperiment(uid="of-the-source", has_version=True)
        made.append(source_secret(context.metadata(context.source_secret_name), context.source, found, "token"))
    return made if claim is None else [*made, claim]


def workloads(context: ExperimentContext) -> dict[str, Manifest]:
    """Return the workloads by role."""
    found = [each for each in render(context) if each["kind"] in ("Deployment", "StatefulSet")]
    return {each["metadata"]["labels"]["rlsrl.dev/role"]: each for each in found}


def container(workload: Manifest) -> Manifest:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def ports(workload: Manifest, prefix: str = "") -> set[int]:
    """Return the container's ports whose names begin with the prefix."""
    return {each["containerPort"] for each in container(workload)["ports"] if each["name"].startswith(prefix)}


@of_any_context
def test_every_pod_satisfies_the_restricted_profile(context: ExperimentContext) -> None:
    for role, workload in workloads(context).items():
        pod = workload["spec"]["template"]["spec"]
        assert list(faults_of_restricted(pod)) == [], role
        assert container(workload)["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["automountServiceAccountToken"] is False, "no pod of ours talks to the API server"


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("hostNetwork", {"hostNetwork": True}),
        ("volume of type hostPath", {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}),
        ("runs as root", {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}),
        ("seccompProfile", {"securityContext": {"runAsNonRoot": True}}),
        ("capabilities", {"containers": [{"securityContext": {"allowPrivilegeEscalation": False}}]}),
        ("allowPrivilegeEscalation", {"containers": [{"securityContext": {"capabilities": {"drop": ["ALL"]}}}]}),
    ],
)
def test_the_check_of_the_restricted_profile_finds_violations(fault: str, change: dict[str, Any]) -> None:
    pod = workloads(context_of(minimal()))[TRAINER]["spec"]["template"]["spec"]
    assert fault in set(faults_of_restricted(pod | change))


def option(workload: Manifest, name: str) -> str:
    command = container(workload)["command"]
    return str(command[command.index(name) + 1])


@of_any_context
def test_gpus_ranks_and_ports_of_a_trainer_pod_are_as_many(context: ExperimentContext) -> None:
    trainers, workload = context.experiment.spec.trainers, workloads(context)[TRAINER]
    ranks = int(option(workload, "--ranks"))
    limits = container(workload)["resources"].get("limits", {})
    assert limits == ({trainers.gpu_resource: str(ranks)} if trainers.gpus_per_pod else {})
    assert len(ports(workload, "streams")) == len(ports(workload, "http")) == ranks
    assert workload["spec"]["replicas"] == int(option(workload, "--machines")) == trainers.replicas / ranks


CHART = yaml.safe_load((Path(__file__).parents[3] / "charts" / "values.yaml").read_text(encoding="utf-8"))
BY_DEFAULT = SETTINGS.model_copy(update={"resources": CHART["resources"]})
EVERY_ROLE = {"policyWorkers": {"replicas": 1}, "bufferWorkers": {"replicas": 1}, "evaluators": {"environments": 1}}


def resources_of(role: str, settings: OperatorSettings = BY_DEFAULT, **spec: Any) -> Manifest:
    """Return the requests and limits of a role's pods."""
    document = minimal()
    document["spec"] |= EVERY_ROLE | spec
    resources: Manifest = container(workloads(context_of(document, settings=settings))[role])["resources"]
    return resources


@pytest.mark.parametrize("role", [role.name for role in ROLES])
def test_by_default_no_pod_is_best_effort_and_memory_has_a_limit(role: str) -> None:
    resources = resources_of(role)
    assert resources == CHART["resources"][role]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert set(resources["limits"]) == {"memory"}, "a limit of cpu would waste idle cores"


def test_by_default_an_experiment_of_every_role_requests_half_a_core() -> None:
    cpu = [resources_of(role.name)["requests"]["cpu"] for role in ROLES]
    assert sum(int(each.removesuffix("m")) for each in cpu) <= 500


def test_the_defaults_of_trainers_count_for_each_rank() -> None:
    several = {"replicas": 4, "gpusPerPod": 2}
    assert resources_of(TRAINER, trainers=several, pacing={"maxPolicyLag": 8}) == {
        "requests": {"cpu": "200m", "memory": "1024Mi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }


def test_a_pod_template_replaces_the_defaults_of_the_resources_that_it_names() -> None:
    """A larger request beside the default limit would be refused."""
    mine = {"name": "worker", "resources": {"requests": {"memory": "16Gi"}}}
    actors = {"environments": 8, "podTemplate": {"spec": {"containers": [mine]}}}
    assert resources_of("actor", actors=actors) == {"requests": {"cpu": "50m", "memory": "16Gi"}}


REPLAY: dict[str, Any] = {
    "algorithm": {"dqn": {"replay": {"capacity": 2_000_000}}},
    "actors": {"replicas": 2, "environments": 8, "rolloutLength": 16},
    "pacing": {"trainStepsPerEnvStep": 1},
}
PIXELS: dict[str, Any] = {"environment": {"id": "X", "atari": {}, "frameStack": 4}, "policy": {"network": {"cnn": {}}}}
TEMPLATE = {"spec": {"containers": [{"name": "worker", "resources": {"requests": {"memory": "1Gi"}}}]}}


@pytest.mark.parametrize(
    ("role", "spec", "expected"),
    [
        pytest.param(BUFFER, REPLAY, "769Mi", id="two million vectors"),
        pytest.param(TRAINER, REPLAY, "512Mi", id="buffer workers keep them"),
        pytest.param(TRAINER, REPLAY | {"bufferWorkers": None}, "1153Mi", id="the trainer keeps them"),
        pytest.param(BUFFER, REPLAY | {"bufferWorkers": {"replicas": 2}}, "449Mi", id="half"),
        pytest.param(BUFFER, REPLAY | PIXELS, "4Gi", id="two million images: the limit"),
        pytest.param(BUFFER, REPLAY | {"bufferWorkers": {"podTemplate": TEMPLATE}}, "1Gi", id="the user's own"),
        pytest.param(BUFFER, {}, "128Mi", id="no replay"),
    ],
)
def test_a_pod_with_a_replay_store_requests_its_memory(role: str, spec: dict[str, Any], expected: str) -> None:
    assert resources_of(role, **spec)["requests"]["memory"] == expected


def test_the_resources_of_a_role_replace_all_its_defaults() -> None:
    mine = {"limits": {"memory": "1Gi"}}
    given_settings = BY_DEFAULT.model_copy(update={"roles": {"default": PodDefaults(resources=mine)}})
    assert resources_of("actor", given_settings) == mine


def test_gpus_are_added_to_the_administrators_limits_of_trainers_alone() -> None:
    resources = {"requests": {"cpu": "2"}, "limits": {"memory": "64Gi", "nvidia.com/gpu": "7"}}
    document = minimal()
    document["spec"]["trainers"] = {"gpusPerPod": 1}
    given_settings = SETTINGS.model_copy(update={"roles": {"default": PodDefaults(resources=resources)}})
    made = workloads(context_of(document, settings=given_settings))
    limits = {"memory": "64Gi", "nvidia.com/gpu": "1"}
    assert container(made[TRAINER])["resources"] == {"requests": {"cpu": "2"}, "limits": limits}
    assert container(made["actor"])["resources"] == resources
    assert resources["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "7"}, "rendering does not change the settings"


def allowed(context: ExperimentContext, direction: str, peers: str) -> set[tuple[str, str, int | None]]:
    """Return the allowed (source, target, port) between the experiment's pods in one direction; port None: any.

    Those to the coordinator of another experiment are those of ``test_source``.
    """
    found = set()
    for policy in (each for each in render(context) if each["kind"] == "NetworkPolicy"):
        role = policy["metadata"]["labels"]["rlsrl.dev/role"]
        assert policy["spec"]["podSelector"] == {"matchLabels": context.selector(role)}
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert policy["spec"].get(direction) != [], "the API server takes it for a change each time"
        for rule in policy["spec"].get(direction, ()):
            for peer in rule.get(peers, ()):
                if (labels := peer.get("podSelector", {}).get("matchLabels", {})).get("rlsrl.dev/role"):
                    if labels["rlsrl.dev/experiment"] != context.name:
                        continue
                    assert set(peer) == {"podSelector"}, "in the experiment's namespace"
                    assert labels == context.selector(labels["rlsrl.dev/role"])
                    other = labels["rlsrl.dev/role"]
                    ends = (other, role) if direction == "ingress" else (role, other)
                    found |= {(*ends, port["port"]) for port in rule.get("ports", ())} or {(*ends, None)}
    return found


@of_any_context
def test_the_policies_allow_every_connection_of_the_configs_and_nothing_else(context: ExperimentContext) -> None:
    made, connections = workloads(context), set()
    for role in roles_of(context.configs):
        config = context.configs.configs[role.name]
        if role.name != COORDINATOR:
            connections |= {(role.name, COORDINATOR, port) for port in ports(made[COORDINATOR], "coordinator")}
        for address in config.connects_to:
            target = address.removeprefix("roster:").partition("/")[0]
            connections |= {(role.name, target, port) for port in ports(made[target], "streams")}
    if made[TRAINER]["spec"]["replicas"] > 1:
        connections.add((TRAINER, TRAINER, None))
    assert allowed(context, "ingress", "from") == connections
    assert allowed(context, "egress", "to") == connections


@of_any_context
def test_every_port_that_a_policy_opens_is_one_that_the_container_declares(context: ExperimentContext) -> None:
    made = workloads(context)
    policies = {
        each["metadata"]["labels"]["rlsrl.dev/role"]: each
        for each in render(context)
        if each["kind"] == "NetworkPolicy"
    }
    assert set(policies) == set(made)
    for role, policy in policies.items():
        opened = {port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule.get("ports", ())}
        unused = ports(made[role], "streams") - used(context, role)
        kubelets = ports(made[role], "health")  # the kubelet of the pod's node, which no policy blocks
        assert opened == ports(made[role]) - unused - kubelets
        scraped = [rule for rule in policy["spec"].get("ingress", ()) if rule["from"] == [SCRAPER]]
        assert [{port["port"] for port in rule["ports"]} for rule in scraped] == [ports(made[role], "http")]
        for reader in (OPERATOR, VIEWER):
            asked = [rule for rule in policy["spec"].get("ingress", ()) if rule["from"] == [reader]]
            assert [rule["ports"] for rule in asked] == [HTTP_PORTS] * (role == COORDINATOR)


def used(context: ExperimentContext, role: str) -> set[int]:
    """Return the ports at which other roles connect to this one."""
    return {port for _, target, port in allowed(context, "egress", "to") if target == role and port is not None}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        (None, 443),
        ("https://s3.example.com", 443),
        ("http://s3.example.com/path", 80),
        ("http://s3.example.com:9000", 9000),
        ("https://[2001:db8::1]:9443/path", 9443),
        ("https://[2001:db8::1]", 443),
        ("http://s3.example.com:65536", 65536),
    ],
)
def test_only_the_stores_roles_reach_the_object_store(endpoint: str | None, port: int) -> None:
    """The API server refuses an invalid port, and its message becomes the experiment's condition."""
    document = minimal()
    store = {"url": "s3://bucket/prefix", **({} if endpoint is None else {"endpoint": endpoint})}
    document["spec"] |= {"parameters": {"store": {"objectStore": store}}, "evaluators": {}, "bufferWorkers": {}}
    policies = [each for each in render(context_of(document)) if each["kind"] == "NetworkPolicy"]
    outside = {
        each["metadata"]["labels"]["rlsrl.dev/role"]: [
            rule["ports"] for rule in each["spec"]["egress"] if "to" not in rule
        ]
        for each in policies
    }
    reached = [[{"port": port, "protocol": "TCP"}]]
    assert outside == {COORDINATOR: reached, TRAINER: reached, "evaluator": reached, "actor": [], "buffer": []}


@pytest.mark.parametrize("endpoint", ["https://s3:9O00", "https://::::", "https://s3:", "https://[s3]", "https://s3:0"])
def test_an_endpoint_with_an_invalid_port_is_refused(endpoint: str) -> None:
    document = minimal()
    store = {"url": "s3://bucket/prefix", "endpoint": endpoint}
    document["spec"]["parameters"] = {"store": {"objectStore": store}}
    with pytest.raises(SpecError, match=r"spec\.parameters\.store\.objectStore\.endpoint"):
        context_of(document)


def test_network_policies_can_be_disabled() -> None:
    closed = SETTINGS.model_copy(update={"network_policies": NetworkPolicies(enabled=False)})
    assert {each["kind"] for each in render(context_of(minimal(), settings=closed))} == {
        *("ConfigMap", "Service", "StatefulSet", "Deployment"),
    }


@of_any_context
def test_names_fit_with_the_longest_experiment_name(context: ExperimentContext) -> None:
    longest = context.experiment.model_copy(
        update={"metadata": context.experiment.metadata.model_copy(update={"name": "a" + "-b" * 19 + "c"})}
    )
    about = ExperimentContext(
        experiment=longest, namespace="n", uid=context.uid, generation=999_999, settings=context.settings
    )
    assert len(about.name) == 40
    made = everything(about)
    names = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert len(set(names)) == len(names)
    for kind, name in names:
        # A label of a StatefulSet's pods holds its name and ten characters of a hash.
        most = {"StatefulSet": 63 - len("-0123456789"), "ConfigMap": 253}
        assert len(name) <= most.get(kind, 63), name
        assert name.startswith(about.name)
    for workload in workloads(about).values():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert all(len(value) <= 63 for value in labels.values())
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert all(len(each["name"]) <= 15 for each in container(workload)["ports"])
        declared = [each["containerPort"] for each in container(workload)["ports"]]
        assert len(set(declared)) == len(declared)


@of_any_context
def test_every_object_that_a_pod_names_is_created(context: ExperimentContext) -> None:
    made = {(each["kind"], each["metadata"]["name"]): each for each in everything(context)}
    for role, workload in workloads(context).items():
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            if "configMap" in volume:
                told = made["ConfigMap", volume["configMap"]["name"]]
                assert set(told["data"]) == {"settings.json" if volume["name"] == "settings" else f"{role}.json"}
            if volume["name"] == "tls":
                assert volume["secret"]["secretName"] == context.experiment.spec.security.tls_secret, "the user's"
            elif "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in made
            if "persistentVolumeClaim" in volume:
                assert role == COORDINATOR, "the only mounter"
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made
        mounted = {each["name"]: each["mountPath"] for each in container(workload)["volumeMounts"]}
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = [each["name"] for each in workload["spec"]["template"]["spec"]["volumes"]]
        assert sorted(mounted) == sorted([*volumes, *claims])
        assert option(workload, "--config") == f"{mounted['config']}/{role}.json"
        if role in (COORDINATOR, TRAINER):
            assert ("Service", workload["spec"]["serviceName"]) in made


@of_any_context
def test_only_buffer_workers_that_keep_transitions_have_a_volume_each(context: ExperimentContext) -> None:
    made = workloads(context)
    has_volume = {role: "volumeClaimTemplates" in each["spec"] for role, each in made.items()}
    assert has_volume == {role: role == BUFFER and context.experiment.spec.keeps_in_buffers for role in made}
    assert {role for role, each in made.items() if each["kind"] == "StatefulSet"} == {
        *(COORDINATOR, TRAINER),
        *(role for role, has in has_volume.items() if has),
    }


def test_a_buffer_worker_finds_the_volume_of_its_index_again() -> None:
    context = golden("replay")
    buffer, config = workloads(context)[BUFFER], context.configs.configs[BUFFER]
    assert isinstance(config, BufferConfig)
    assert config.replay is not None
    index = next(each for each in container(buffer)["env"] if each["name"] == "RLSRL_POD_INDEX")
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert option(buffer, "--index") == "$(RLSRL_POD_INDEX)"
    (claim,) = buffer["spec"]["volumeClaimTemplates"]
    mounted = {each["name"]: each["mountPath"] for each in container(buffer)["volumeMounts"]}
    on_volume = (config.ledger_folder, config.replay.folder, config.replay.volume)
    assert all(str(folder).startswith(mounted[claim["metadata"]["name"]]) for folder in on_volume)
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert claim["spec"]["storageClassName"] == "fast"


@pytest.mark.parametrize(("given", "size", "when_deleted"), VOLUMES)
def test_volumes_of_buffer_workers_go_with_the_experiment_and_not_with_its_pods(
    given: dict[str, Any], size: str, when_deleted: str
) -> None:
    document = minimal()
    document["spec"] |= {"algorithm": {"dqn": {}}, "pacing": {"trainStepsPerEnvStep": 1}, "bufferWorkers": given}
    spec = workloads(context_of(document))[BUFFER]["spec"]
    assert spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == size
    policy = spec["persistentVolumeClaimRetentionPolicy"]
    assert policy == {"whenDeleted": when_deleted, "whenScaled": "Retain"}, "a suspended experiment has no pods"


@of_any_context
def test_all_pods_have_the_certificates_that_the_user_names_or_none_has(context: ExperimentContext) -> None:
    secret = context.experiment.spec.security.tls_secret
    for workload in workloads(context).values():
        environment = {each["name"]: each.get("value") for each in container(workload)["env"]}
        mounted = {each["name"]: each for each in container(workload)["volumeMounts"]}
        if secret is None:
            assert "tls" not in mounted
            assert "RLSRL_TLS_FOLDER" not in environment
            continue
        assert environment["RLSRL_TLS_FOLDER"] == mounted["tls"]["mountPath"]
        assert environment["RLSRL_TLS_NAME"] == f"{context.name}-coordinator.research.svc"
        assert "subPath" not in mounted["tls"], "which is not kept up to date"
        (volume,) = [each for each in workload["spec"]["template"]["spec"]["volumes"] if each["name"] == "tls"]
        assert {each["path"] for each in volume["secret"]["items"]} == set(FILES), "where the workers look"


@of_any_context
def test_config_maps_hold_the_configs_and_no_secret(context: ExperimentContext) -> None:
    told = {each["metadata"]["name"]: each for each in render(context) if each["kind"] == "ConfigMap"}
    settings = json.loads(told.pop(context.settings_name)["data"]["settings.json"])
    for role in roles_of(context.configs):
        config = context.configs.configs[role.name]
        mine = told.pop(context.config_name(role.name))
        assert mine["immutable"]
        assert set(mine["data"]) == {f"{role.name}.json"}
        assert type(config).from_json(mine["data"][f"{role.name}.json"]) == config
        assert with_settings(config, settings.get(role.name, {})) == config
    assert not told


@of_any_context
def test_every_object_is_owned_except_a_retained_volume_claim(context: ExperimentContext) -> None:
    for each in everything(context):
        owners = each["metadata"].get("ownerReferences", [])
        kept = context.experiment.spec.parameters.store.filesystem
        if each["kind"] == "PersistentVolumeClaim" and kept is not None and kept.when_deleted == "Retain":
            assert owners == []
        else:
            assert [(owner["kind"], owner["uid"], owner["controller"]) for owner in owners] == [
                ("RLExperiment", context.uid, True)
            ]


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_rendering_again_gives_the_same(seed: int) -> None:
    once, again = (everything(context_of(document_of(seed))) for _ in range(2))
    assert json.dumps(once) == json.dumps(again)


def test_rendering_in_another_process_gives_the_same() -> None:
    """Another process orders sets differently."""
    program = (
        "import json, sys\n"
        "from rlsrl_operator.manifests import render; from rlsrl_operator.testing import context_of\n"
        "print(json.dumps(render(context_of(json.loads(sys.argv[1])))))\n"
        "heavy = {'kopf', 'kubernetes', 'aiohttp', 'torch', 'numpy', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    document = minimal()
    document["spec"] |= {"policyWorkers": {}, "bufferWorkers": {}, "evaluators": {}, "trainers": {"replicas": 2}}
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(document)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {json.dumps(render(context_of(document))) + "\n"}


def test_another_generation_has_another_revision_and_new_pods_only_where_it_differs() -> None:
    first, second = (context_of(minimal(), generation=generation) for generation in (1, 2))
    assert first.revision_name != second.revision_name
    assert first.token_name == second.token_name
    assert render(first) == render(second)
    document = minimal()
    document["spec"]["pacing"] = {"maxPolicyLag": 2}
    marks = [
        {role: each["spec"]["template"]["metadata"]["annotations"]["rlsrl.dev/template"] for role, each in made.items()}
        for made in (workloads(first), workloads(context_of(document, generation=2)))
    ]
    assert {role for role in marks[0] if marks[0][role] != marks[1][role]} == {TRAINER}


def test_settings_reach_the_pods_of_their_role() -> None:
    administrators: OperatorSettings = read_settings(GOLDEN / "gpus" / "settings.yaml")
    document = minimal()
    made = workloads(context_of(document, settings=administrators))
    trainer, actor = (made[role]["spec"]["template"]["spec"] for role in (TRAINER, "actor"))
    assert trainer["priorityClassName"] == "training"
    assert trainer["nodeSelector"] == {"accelerator": "mi300"}
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in trainer["containers"][0]["env"]
    assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in trainer["tolerations"]
    assert not {"priorityClassName", "nodeSelector", "affinity"} & set(actor)
    assert trainer["imagePullSecrets"] == actor["imagePullSecrets"] == [{"name": "registry"}]


def test_user_and_groups_are_chosen_or_left_to_the_cluster_within_the_restricted_profile() -> None:
    chosen = {
        "trainer": PodDefaults(security_context={"runAsUser": 2000, "fsGroup": None}),
        "default": PodDefaults(security_context={"runAsUser": None, "runAsGroup": None, "fsGroup": None}),
    }
    made = workloads(context_of(minimal(), settings=SETTINGS.model_copy(update={"roles": chosen})))
    pods = {role: each["spec"]["template"]["spec"] for role, each in made.items()}
    profile = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pods[TRAINER]["securityContext"] == {**profile, "runAsUser": 2000, "runAsGroup": 10001}
    assert pods["actor"]["securityContext"] == profile
    assert [fault for pod in pods.values() for fault in faults_of_restricted(pod)] == []


@pytest.mark.parametrize(
    ("spec", "images"),
    [
        (
            {"policyWorkers": {}},
            {"actor": "actor", "policy": "actor", "evaluator": "actor", TRAINER: "learner", COORDINATOR: "actor"},
        ),
        ({"policy": {"network": {"cnn": {}}}}, {"actor": "learner", "evaluator": "learner"}),
        (
            {"policy": {"network": {"cnn": {}}}, "policyWorkers": {}, "bufferWorkers": {}},
            {"actor": "actor", "policy": "learner", "buffer": "actor", "evaluator": "learner"},
        ),
    ],
)
def test_roles_that_evaluate_a_torch_network_have_torch(spec: dict[str, Any], images: dict[str, str]) -> None:
    document = minimal()
    document["spec"] |= {"evaluators": {}, **spec}
    made = workloads(context_of(document))
    assert {role: container(made[role])["image"] for role in images} == {
        role: f"registry.example/{image}:1" for role, image in images.items()
    }
