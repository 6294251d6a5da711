"""The real API server and `rlsrl validate` come to the same verdict on every generated document."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from kubernetes import client, config

from rlsrl.api.cel import RULES, union_rules
from rlsrl.api.load import SpecError, load_text
from rlsrl.testing.documents import MODELS, Document, as_sent, perhaps_broken
from rlsrl.testing.kubectl import Namespace

pytestmark = pytest.mark.e2e

ANSWER_SECONDS = 30
REFUSALS = (400, 422)


def models_say(document: Document) -> str:
    try:
        load_text(json.dumps(document))
    except SpecError as error:
        return str(error)
    return ""


def server_says(api: client.CustomObjectsApi, namespace: str, document: Document) -> str:
    place = ("rlsrl.dev", "v1alpha1", namespace, "rlexperiments")
    options: dict[str, Any] = {"dry_run": "All", "field_validation": "Strict", "_request_timeout": ANSWER_SECONDS}
    try:
        api.create_namespaced_custom_object(*place, document, **options)
    except client.ApiException as error:
        if error.status not in REFUSALS:
            raise
        return str(json.loads(error.body)["message"])
    return ""


@pytest.mark.parametrize(
    "num_documents", [500, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_both_judge_every_document_alike(where: Namespace, num_documents: int) -> None:
    config.load_kube_config()
    api = client.CustomObjectsApi()
    verdicts: Counter[bool] = Counter()
    said: list[str] = []
    for seed in range(num_documents):
        document = as_sent(perhaps_broken(random.Random(seed)))
        document["metadata"] = {"name": "a"}
        server, models = server_says(api, where.name, document), models_say(document)
        assert bool(server) == bool(models), f"seed {seed}: {server!r} but {models!r} of {json.dumps(document)}"
        verdicts[bool(server)] += 1
        said.append(server)
    print(f"{num_documents} documents, {verdicts[True]} refused by both")  # noqa: T201 - the test's figures
    assert 0.4 < verdicts[True] / num_documents < 0.6
    everything = "\n".join(said)
    rules = [rule for model in MODELS.values() for rule in (*RULES.get(model, ()), *union_rules(model))]
    never = {rule.message for rule in rules if rule.message not in everything}
    assert never <= {rule.message for rule in RULES[MODELS[()]]}, "rules that no document broke"
