"""The revision of one generation: the experiment, the settings and the manifests as they were when it was recorded.

A newer operator or other settings of the administrator change nothing of a run that is recorded. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from rlsrl.api.edits import refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.spec import RLExperiment
from rlsrl_operator.manifests.config import live_settings, role_configs
from rlsrl_operator.manifests.context import ExperimentContext
from rlsrl_operator.manifests.kueue import queue_labels
from rlsrl_operator.manifests.network import network_policies
from rlsrl_operator.manifests.permissions import disallowed
from rlsrl_operator.manifests.types import Manifest, key_of
from rlsrl_operator.manifests.workloads import services, workloads
from rlsrl_operator.settings import OperatorSettings

_EXPERIMENT, _SETTINGS, _MANIFESTS = "experiment.json", "settings.json", "manifests.json"
_FIRST_ATTEMPT = "firstAttempt"
_OPERATOR, _SIGNATURE = "operator", "signature"
_WORKLOADS = frozenset({"Deployment", "StatefulSet"})


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One generation as recorded: the experiment, the settings and the rendered objects."""

    experiment: RLExperiment
    settings: OperatorSettings
    """The administrator's settings when the experiment began. Images, resources and the like stay for its life."""
    manifests: tuple[Manifest, ...]
    """In the order in which they are created."""
    first_attempt: int = 1
    """The first attempt since the failed experiment was last tried again."""


def render(context: ExperimentContext) -> list[Manifest]:
    """Return the objects of an experiment, except its token, its volume claim and its revision."""
    policies = network_policies(context) if context.settings.network_policies.enabled else []
    configs = [*role_configs(context), live_settings(context)]
    return [*configs, *services(context), *policies, *workloads(context)]


def first_revision(context: ExperimentContext) -> Revision:
    """Return the revision of an experiment without an earlier one."""
    return Revision(
        experiment=context.experiment,
        settings=context.settings,
        manifests=tuple(render(context)),
        first_attempt=context.first_attempt,
    )


def next_revision(before: Revision, context: ExperimentContext) -> Revision:
    """Return the revision of an edited experiment. Objects and pod templates that the edit does not change stay as
    recorded: both experiments are rendered by this operator, and only their differences count.

    What the administrator allows to environments is that of today: the edit was judged by it.
    """
    settings = before.settings.model_copy(update={"environments": context.settings.environments})
    context = replace(context, settings=settings, experiment=_in_queue_of(before.experiment, context.experiment))
    kept = {key_of(each): each for each in before.manifests}
    as_before = {key_of(each): each for each in render(replace(context, experiment=before.experiment))}
    made = [_carried(each, as_before.get(key_of(each)), kept.get(key_of(each))) for each in render(context)]
    return replace(before, experiment=context.experiment, manifests=tuple(made))


def derive_revision(before: Revision | None, context: ExperimentContext) -> Revision | None:
    """Return the revision of a generation that has none, given the revision before it.

    An edit that is not allowed leaves the experiment as it was. None: there is no revision before it either. A run that
    has begun goes on without its server, and without the experiment from whose weights it started.
    """
    if before is None:
        faults = disallowed(context.experiment, context.settings) or context.server.fault or context.source_fault
        return None if faults else first_revision(context)
    is_accepted = accepts_edit(before, context)
    if before.first_attempt != context.first_attempt:
        # The failed experiment is tried again, and no pods run that would have to keep their manifests.
        return first_revision(context if is_accepted else replace(context, experiment=before.experiment))
    if not is_accepted:
        return before
    # No pods of a suspended experiment run, either.
    return first_revision(context) if before.experiment.spec.suspend else next_revision(before, context)


def accepts_edit(before: Revision, context: ExperimentContext) -> bool:
    """Return whether the experiment may be edited as the context's is, and the administrator allows the result."""
    return not disallowed(context.experiment, context.settings) and not refused(before.experiment, context.experiment)


def revision_object(context: ExperimentContext, revision: Revision, key: bytes) -> Manifest:
    """Return the immutable, signed object of a revision.

    The operator creates the manifests in it with its own rights. The signature shows that the operator wrote them, not
    somebody who may write ConfigMaps but not create pods.
    """
    data = {
        _EXPERIMENT: revision.experiment.model_dump_json(by_alias=True, exclude_none=True, indent=1),
        _SETTINGS: revision.settings.model_dump_json(by_alias=True, exclude_none=True, indent=1),
        # One line each. Indented, they would take json's encoder in Python, which is ten times as slow.
        _MANIFESTS: "[\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in revision.manifests) + "\n]",
        _OPERATOR: str(context.settings.key_secret),
        _FIRST_ATTEMPT: str(revision.first_attempt),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": context.metadata(context.revision_name),
        "immutable": True,
        "data": {**data, _SIGNATURE: _signature(context.uid, context.revision_name, data, key)},
    }


def read_revision(context: ExperimentContext, found: Manifest, key: bytes) -> Revision | None:
    """Return the revision in an object, or None if this operator did not write it or cannot read it."""
    data = dict(found.get("data", {}))
    signature = data.pop(_SIGNATURE, "")
    expected = _signature(context.uid, found["metadata"]["name"], data, key)
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        return None
    try:
        return Revision(
            experiment=load_text(data[_EXPERIMENT]),
            settings=OperatorSettings.model_validate_json(data[_SETTINGS], by_alias=True, by_name=False),
            manifests=tuple(json.loads(data[_MANIFESTS])),
            first_attempt=int(data.get(_FIRST_ATTEMPT, 1)),  # Revisions of earlier operators lack the key.
        )
    except (KeyError, SpecError, ValidationError, ValueError):
        return None


def is_anothers(context: ExperimentContext, found: Manifest) -> bool:
    """Return whether an unreadable revision names another operator: one whose key is in another Secret."""
    ours = str(context.settings.key_secret)
    written: str = found.get("data", {}).get(_OPERATOR, ours)
    return written != ours


def _signature(uid: str, name: str, data: Mapping[str, str], key: bytes) -> str:
    signed = json.dumps(["record", uid, name, data], sort_keys=True)
    return hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()


def _in_queue_of(before: RLExperiment, experiment: RLExperiment) -> RLExperiment:
    """Return the experiment with the queue that it began in: Kueue does not move running workloads."""
    labels = queue_labels(before.metadata.labels)
    return experiment.model_copy(update={"metadata": experiment.metadata.model_copy(update={"labels": labels})})


def _carried(made: Manifest, as_before: Manifest | None, kept: Manifest | None) -> Manifest:
    if kept is None or as_before is None:
        return made
    if made == as_before or made.get("immutable"):
        return kept
    if made["kind"] in _WORKLOADS and made["spec"]["template"] == as_before["spec"]["template"]:
        return {**made, "spec": {**made["spec"], "template": kept["spec"]["template"]}}
    return made
