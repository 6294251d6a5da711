"""The cluster of KUBECONFIG, with the operator. `make e2e` starts one."""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import yaml

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import COMMAND_SECONDS, TAG, Namespace, Nodes, namespace, nodes, run
from rlsrl.testing.recovery import Recovered, record

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts"
SYSTEM = "rlsrl-system"
BUILD_SECONDS = 1800.0
"""Deadline for the first build of an add-on."""
Install = Callable[[str], AbstractContextManager[None]]
VALUES = {
    "images": {"tag": TAG},
    "operator": {"statusSeconds": 1},
    "roles": {
        # Ranks on nodes of their own: what goes between them crosses a network.
        "trainer": {
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 100,
                            "podAffinityTerm": {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchLabels": {"rlsrl.dev/role": "trainer"}},
                            },
                        }
                    ]
                }
            }
        }
    },
}


CARTPOLE: Object = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "cartpole"},
    "spec": {
        "seed": 1,
        "environment": {"id": "CartPole-v1"},
        "policy": {"network": {"mlp": {"hiddenSizes": [64, 64], "activation": "tanh"}}},
        "algorithm": {
            "ppo": {
                "learningRate": 0.001,
                "discount": 0.98,
                "gaeLambda": 0.9,
                "clipValueLoss": False,
                "minibatchSize": 256,
            }
        },
        "actors": {"replicas": 2, "environments": 32, "rolloutLength": 32},
        "policyWorkers": {"replicas": 1},
        "bufferWorkers": {"replicas": 1},
        "trainers": {"replicas": 2},
        "parameters": {"everySeconds": 5},
        "stop": {"returnMean": 475.0, "envSteps": 2_000_000},
    },
}


@pytest.fixture(scope="session", autouse=True)
def kubeconfig() -> str:
    """The path of the cluster's kubeconfig."""
    path = os.environ.get("KUBECONFIG", "")
    if not path:
        pytest.fail("KUBECONFIG names no cluster: `make e2e` brings one up", pytrace=False)
    return path


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """Install the operator with the chart, as a user does, and yield its namespace."""
    values = tmp_path_factory.mktemp("chart") / "values.yaml"
    values.write_text(yaml.safe_dump(VALUES))
    with namespace(SYSTEM) as where:
        run("helm", "install", "rlsrl", str(CHART), "-n", SYSTEM, "-f", str(values), "--wait", "--timeout", "2m")
        yield where
        run("helm", "uninstall", "rlsrl", "-n", SYSTEM, "--wait")
        # The definition stays, and with it every experiment; here both go.
        run("kubectl", "delete", "crd", "rlexperiments.rlsrl.dev")


@contextmanager
def _installed(name: str) -> Iterator[None]:
    folder = Path(run(str(REPOSITORY / "hack" / "addon"), name, seconds=BUILD_SECONDS).strip())
    run(str(REPOSITORY / "hack" / "cluster"), "load", str(folder / "image.tar"))
    objects: list[Object] = list(yaml.safe_load_all((folder / "manifests.yaml").read_text()))
    hooks = [each for each in objects if each["kind"].endswith("WebhookConfiguration")]
    run("kubectl", "apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))
    try:
        for each in objects:
            if each["kind"] == "Deployment":
                target = (f"deployment/{each['metadata']['name']}", "--namespace", each["metadata"]["namespace"])
                run("kubectl", "rollout", "status", *target, f"--timeout={COMMAND_SECONDS:.0f}s")
        yield
    finally:
        # While a webhook does not answer, the API server creates and deletes nothing.
        for part in filter(None, (hooks, objects)):
            run("kubectl", "delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all(part))


@pytest.fixture(scope="session")
def install(kubeconfig: str) -> Install:
    """Install add-ons of hack/addon on the cluster, and remove them at the end."""
    assert kubeconfig
    return _installed


@pytest.fixture(scope="module")
def definition(kubeconfig: str) -> Iterator[None]:
    """Install the CRD if no release has installed it."""
    assert kubeconfig
    if "rlexperiments.rlsrl.dev" in run("kubectl", "get", "crd", "-o", "name"):
        yield
        return
    run("kubectl", "create", "-f", "-", stdin=run("helm", "template", str(CHART), "-s", "templates/crd.yaml"))
    run("kubectl", "wait", "--for=condition=Established", "crd/rlexperiments.rlsrl.dev")
    yield
    run("kubectl", "delete", "crd", "rlexperiments.rlsrl.dev")


@pytest.fixture
def where(system: Namespace) -> Iterator[Namespace]:
    """Yield a namespace for one test's experiments."""
    assert system.name
    with namespace(f"e2e-{uuid.uuid4().hex[:8]}", wait=False) as made:
        yield made


@pytest.fixture(scope="session")
def hands(kubeconfig: str) -> Iterator[Nodes]:
    """Yield privileged access to the nodes."""
    assert kubeconfig
    with nodes(f"rlsrl/worker:{TAG}-actor") as found:
        yield found


@pytest.fixture(scope="session")
def recovered() -> Recovered:
    """Return the function that records rows of the table of faults."""
    return record


@pytest.fixture
def actor_image() -> str:
    """The workers' image without torch."""
    return f"rlsrl/worker:{TAG}-actor"


@pytest.fixture
def cartpole() -> Object:
    """Return CartPole to 475 with every role except evaluators."""
    return copy.deepcopy(CARTPOLE)
