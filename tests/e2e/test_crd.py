"""The API server and `rlsrl validate` accept and refuse the same generated documents."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from kubernetes import client, config

from rlsrl.api.edits import refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.testing.documents import ALL_MODELS, JsonDocument, as_sent, perhaps_broken, refused_documents, variation
from rlsrl.testing.kubectl import Namespace

pytestmark = pytest.mark.e2e

ANSWER_SECONDS = 30
REFUSALS = (400, 422)
CONFLICT = 409


def models_error(document: JsonDocument) -> str:
    try:
        load_text(json.dumps(document))
    except SpecError as error:
        return str(error)
    return ""


def server_error(
    api: client.CustomObjectsApi, namespace: str, document: JsonDocument, former: JsonDocument | None = None
) -> str:
    """Return why the document is refused as a new object, or as an update of ``former``; empty if it is accepted."""
    place = ("rlsrl.dev", "v1alpha1", namespace, "rlexperiments")
    options: dict[str, Any] = {"dry_run": "All", "field_validation": "Strict", "_request_timeout": ANSWER_SECONDS}
    try:
        if former is None:
            api.create_namespaced_custom_object(*place, document, **options)
        else:
            metadata = {**document["metadata"], "resourceVersion": former["metadata"]["resourceVersion"]}
            name = former["metadata"]["name"]
            api.replace_namespaced_custom_object(*place, name, {**document, "metadata": metadata}, **options)
    except client.ApiException as error:
        if error.status == CONFLICT and former is not None:  # the operator has written the status meanwhile
            there = api.get_namespaced_custom_object(
                *place, former["metadata"]["name"], _request_timeout=ANSWER_SECONDS
            )
            return server_error(api, namespace, document, there)
        if error.status not in REFUSALS:
            raise
        return str(json.loads(error.body)["message"])
    return ""


@pytest.mark.parametrize(
    "num_documents", [500, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_both_accept_and_refuse_the_same_documents(where: Namespace, num_documents: int) -> None:
    config.load_kube_config()
    api = client.CustomObjectsApi()
    verdicts: Counter[bool] = Counter()
    messages: list[str] = []
    for seed in range(num_documents):
        document = as_sent(perhaps_broken(random.Random(seed)))
        document["metadata"] = {"name": "a"}
        server, models = server_error(api, where.name, document), models_error(document)
        assert bool(server) == bool(models), f"seed {seed}: {server!r} but {models!r} of {json.dumps(document)}"
        verdicts[bool(server)] += 1
        messages.append(server)
    for document in refused_documents():
        document["metadata"] = {"name": "a"}
        messages.append(server_error(api, where.name, document))
        assert messages[-1], document
        assert models_error(document), document
    print(f"{num_documents} documents, {verdicts[True]} refused by both")
    assert 0.4 < verdicts[True] / num_documents < 0.6
    everything = "\n".join(messages)
    rules = [rule for model in ALL_MODELS for rule in model.cel_rules()]
    never = {rule.message for rule in rules if rule.message + " (" * bool(rule.numbers) not in everything}
    assert not never, "rules that no document broke"


KWARGS = frozenset({"spec.environment.kwargs", "spec.policy.network.custom.kwargs"})
"""Fields that an API server cannot compare: the operator refuses their edits."""


@pytest.mark.parametrize("num_pairs", [40, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_both_refuse_the_same_edits(where: Namespace, num_pairs: int) -> None:
    config.load_kube_config()
    api = client.CustomObjectsApi()
    # The quota forbids pods: this test needs none.
    where.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    )
    place = ("rlsrl.dev", "v1alpha1", where.name, "rlexperiments")
    verdicts: Counter[bool] = Counter()
    for seed in range(num_pairs):
        rng = random.Random(seed)
        before = as_sent(variation(rng))
        after = as_sent(variation(rng)) if seed % 2 else _nearly(before, rng)
        before["metadata"] = after["metadata"] = {"name": f"a{seed}"}
        there = api.create_namespaced_custom_object(*place, before, _request_timeout=ANSWER_SECONDS)
        try:
            models = set(refused(load_text(json.dumps(before)), load_text(json.dumps(after)))) - KWARGS
            server = server_error(api, where.name, after, there)
        finally:
            api.delete_namespaced_custom_object(*place, f"a{seed}", _request_timeout=ANSWER_SECONDS)
        assert bool(server) == bool(models), f"seed {seed}: {server!r} but {models!r}"
        verdicts[bool(server)] += 1
    print(f"{num_pairs} edits, {verdicts[True]} refused by both")
    assert 0.3 < verdicts[True] / num_pairs < 0.9


def _nearly(document: JsonDocument, rng: random.Random) -> JsonDocument:
    """Change the stop condition, a valid edit."""
    return {**document, "spec": {**document["spec"], "stop": {"envSteps": rng.randint(1, 1000)}}}
