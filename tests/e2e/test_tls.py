"""Pods use TLS with a Secret that arrives late and changes; no status, event or log contains the token."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from rlsrl.api.pods import TOKEN_KEY, certified_name
from rlsrl.rpc.tls import AUTHORITIES, CERTIFICATE, KEY
from rlsrl.testing.certificates import Authority, Pair
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import CLUSTER_SECONDS, ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KUBELETS_SECONDS = 240.0
"""Kubelets update a changed Secret in their pods within about a minute and a half."""


def secret(name: str, pair: Pair, *authorities: Authority) -> Object:
    content = {
        CERTIFICATE: pair.certificate,
        KEY: pair.key,
        AUTHORITIES: b"".join(each.certificate for each in authorities),
    }
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "type": "kubernetes.io/tls",
        "data": data,
    }


def test_pods_wait_for_their_certificates_train_with_them_and_take_new_ones(
    where: Namespace, system: Namespace, cartpole: Object, tmp_path: Path
) -> None:
    cartpole["spec"] |= {"security": {"tlsSecret": "certificates"}, "stop": {"wallSeconds": 1200}}
    name = cartpole["metadata"]["name"]
    old, new = Authority.new(tmp_path), Authority.new(tmp_path)
    carried = certified_name(name, where.name)
    where.apply(cartpole)
    experiment = ClusterExperiment(where, name)
    until(
        lambda: "Secret certificates" in experiment.condition("Ready").get("message", ""),
        "the Secret is asked for",
        timeout=CLUSTER_SECONDS,
    )

    where.apply(secret("certificates", old.issue(carried), old))
    experiment.await_phase("Running", seconds=KUBELETS_SECONDS)

    def goes_on(what: str) -> None:
        steps = experiment.env_steps()
        until(lambda: experiment.env_steps() > steps, what, timeout=CLUSTER_SECONDS)

    goes_on("training over TLS")
    pods = {pod["metadata"]["uid"] for pod in experiment.pods()}
    for step, pair, authorities in (
        ("both trusted", old.issue(carried), (old, new)),
        ("the new one's shown", new.issue(carried), (old, new)),
    ):
        where.apply(secret("certificates", pair, *authorities))
        before = replacements(experiment)
        until(
            lambda before=before: coordinator_answers(where, name) and replacements(experiment) > before,  # type: ignore[misc]
            f"certificates: {step}",
            timeout=KUBELETS_SECONDS,
        )
        goes_on(step)
    assert {pod["metadata"]["uid"] for pod in experiment.pods()} == pods, "no pod is replaced"
    assert experiment.status["restarts"] == 0

    token = base64.b64decode(
        next(each for each in where.list("secrets", experiment=name) if TOKEN_KEY in each["data"])["data"][TOKEN_KEY]
    ).decode()
    texts = {"events": where.kubectl("get", "events", "--output", "yaml")}
    for kind in ("rlexperiments", "pods", "configmaps", "statefulsets", "deployments", "services", "networkpolicies"):
        texts[kind] = where.kubectl("get", kind, "--output", "yaml")
    for pod in experiment.pods():
        texts[pod["metadata"]["name"]] = where.kubectl("logs", pod["metadata"]["name"])
    texts["operator"] = system.kubectl("logs", "--selector", "app.kubernetes.io/name=rlsrl", "--tail", "-1")
    for what, text in texts.items():
        assert text, what
        assert token not in text, what
        assert base64.b64encode(token.encode()).decode() not in text, what


def replacements(experiment: ClusterExperiment) -> int:
    """Return how often pods have logged new certificates."""
    names = [pod["metadata"]["name"] for pod in experiment.pods()]
    return sum(experiment.where.kubectl("logs", name).count("certificates_replaced") for name in names)


def coordinator_answers(where: Namespace, name: str) -> bool:
    """Return whether a command gets an answer from the coordinator over TLS, which makes it load new certificates."""
    return bool(run("kubectl", "rlsrl", "params", "list", name, "-n", where.name))
