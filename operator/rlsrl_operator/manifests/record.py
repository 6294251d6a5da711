"""What a generation of an experiment was made of, on record: an edit changes what it is about, and a newer operator or
an administrator's other settings change nothing that runs. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from rlsrl.api.load import SpecError, load_text
from rlsrl.api.spec import RLExperiment
from rlsrl_operator.manifests.config import live_settings, role_configs
from rlsrl_operator.manifests.kueue import queue_labels
from rlsrl_operator.manifests.network import network_policies
from rlsrl_operator.manifests.subject import Subject
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.manifests.workloads import services, workloads
from rlsrl_operator.settings import OperatorSettings

_EXPERIMENT, _SETTINGS, _MANIFESTS = "experiment.json", "settings.json", "manifests.json"
_OPERATOR, _SIGNATURE = "operator", "signature"
_WORKLOADS = frozenset({"Deployment", "StatefulSet"})


@dataclass(frozen=True, kw_only=True)
class Record:
    """A generation: what was asked for, by whom it was made, and the objects it was made into."""

    experiment: RLExperiment
    settings: OperatorSettings
    """The administrator's, of the time when the experiment began: images, resources and the like stay for its life."""
    manifests: tuple[Manifest, ...]
    """In the order in which they are made."""


def render(subject: Subject) -> list[Manifest]:
    """The objects that an experiment is made into, but for its token, its volume and its record."""
    policies = network_policies(subject) if subject.settings.network_policies.enabled else []
    configs = [*role_configs(subject), live_settings(subject)]
    return [*configs, *services(subject), *policies, *workloads(subject)]


def first_record(subject: Subject) -> Record:
    """Of an experiment that begins."""
    return Record(experiment=subject.experiment, settings=subject.settings, manifests=tuple(render(subject)))


def next_record(before: Record, subject: Subject) -> Record:
    """Of one that was edited: objects that the edit does not change stay as they were made then, and so do pod
    templates. Whether it changes them is judged by one and the same operator.
    """
    subject = replace(subject, settings=before.settings, experiment=_in_queue_of(before.experiment, subject.experiment))
    kept = _by_name(before.manifests)
    as_before = _by_name(render(replace(subject, experiment=before.experiment)))
    made = [_carried(each, as_before.get(_name(each)), kept.get(_name(each))) for each in render(subject)]
    return replace(before, experiment=subject.experiment, manifests=tuple(made))


def record_object(subject: Subject, record: Record, key: bytes) -> Manifest:
    """The record as an object. Never changed, and signed: what stands there is made with the operator's rights, and
    whoever may write ConfigMaps may not have those.
    """
    data = {
        _EXPERIMENT: record.experiment.model_dump_json(by_alias=True, exclude_none=True, indent=1),
        _SETTINGS: record.settings.model_dump_json(by_alias=True, exclude_none=True, indent=1),
        _MANIFESTS: json.dumps(record.manifests, indent=1, sort_keys=True),
        _OPERATOR: str(subject.settings.key_secret),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": subject.metadata(subject.record_name),
        "immutable": True,
        "data": {**data, _SIGNATURE: _signature(subject.uid, subject.record_name, data, key)},
    }


def read_record(subject: Subject, found: Manifest, key: bytes) -> Record | None:
    """A record of an experiment from its object; None for one that this operator did not write, or cannot read."""
    data = dict(found.get("data", {}))
    signature = data.pop(_SIGNATURE, "")
    expected = _signature(subject.uid, found["metadata"]["name"], data, key)
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        return None
    try:
        return Record(
            experiment=load_text(data[_EXPERIMENT]),
            settings=OperatorSettings.model_validate_json(data[_SETTINGS], by_alias=True, by_name=False),
            manifests=tuple(json.loads(data[_MANIFESTS])),
        )
    except (KeyError, SpecError, ValidationError, ValueError):
        return None


def is_anothers(subject: Subject, found: Manifest) -> bool:
    """Whether a record that cannot be read says that another operator wrote it: one with a key in another place."""
    ours = str(subject.settings.key_secret)
    said: str = found.get("data", {}).get(_OPERATOR, ours)
    return said != ours


def _signature(uid: str, name: str, data: Mapping[str, str], key: bytes) -> str:
    signed = json.dumps(["record", uid, name, data], sort_keys=True)
    return hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()


def _in_queue_of(before: RLExperiment, experiment: RLExperiment) -> RLExperiment:
    """The experiment in the queue that it began in: Kueue moves nothing that runs."""
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


def _by_name(manifests: tuple[Manifest, ...] | list[Manifest]) -> Mapping[tuple[str, str], Manifest]:
    return {_name(each): each for each in manifests}


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
