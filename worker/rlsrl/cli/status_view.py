"""The text of ``status``: from the API server's objects and the time to lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError

from rlsrl.api.pods import ROLE_LABEL
from rlsrl.api.reasons import ACCEPTED, FINISHED, GANG_COMPLETE, PHASES, STALE, UNSEEN, ConditionType
from rlsrl.api.spec import Stop
from rlsrl.api.status import TERMINAL, ExperimentStatus, Phase, Training
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import Object
from rlsrl.cli.text import printable, since
from rlsrl.runs.text_table import UNKNOWN, columns

STALE_SECONDS = 60.0
"""Age from which the coordinator's numbers are stale."""
SINCE: Mapping[Phase, ConditionType] = {
    "Pending": ACCEPTED,
    "Queued": GANG_COMPLETE,
    "Starting": GANG_COMPLETE,
    "Running": GANG_COMPLETE,
    "Suspended": GANG_COMPLETE,
    "Succeeded": FINISHED,
    "Failed": FINISHED,
}
"""The condition whose last transition began each phase."""


def read_status(experiment: Object) -> ExperimentStatus:
    """Return an experiment's status.

    Raises:
        UserError: the status has fields or values that this version of rlsrl does not know.
    """
    try:
        return ExperimentStatus.model_validate(experiment.get("status") or {}, by_alias=True, by_name=False)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, ("status", *fault["loc"])))
        raise UserError(
            f"{where}: {fault['msg']}: the operator may have another version than this rlsrl, {version('rlsrl')}"
        ) from error


def is_over(status: ExperimentStatus) -> bool:
    """Return whether the experiment has ended."""
    return status.phase in TERMINAL


def is_stale(status: ExperimentStatus, now: datetime) -> bool:
    """Return whether the experiment runs and its numbers are stale."""
    updated = status.training.updated_at if status.training is not None and status.phase == "Running" else None
    return updated is not None and (now - datetime.fromisoformat(updated)).total_seconds() > STALE_SECONDS


def status_view(experiment: Object, workloads: Sequence[Object], now: datetime) -> str:
    """Return the text for an experiment with its Deployments and StatefulSets."""
    status = read_status(experiment)
    blocks = [columns(list(_facts(experiment, status, now)))]
    if workloads:
        blocks.append(columns([("ROLE", "READY"), *sorted(map(_role, workloads))]))
    if status.conditions:
        blocks.append(columns([("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), *_conditions(status, now)]))
    return printable("\n\n".join(blocks))


def _facts(experiment: Object, status: ExperimentStatus, now: datetime) -> Iterator[tuple[str, str]]:
    metadata, spec = experiment["metadata"], experiment.get("spec", {})
    age = since(metadata.get("creationTimestamp"), now)
    yield "experiment", f"{metadata.get('namespace', '')}/{metadata['name']}, created {age} ago"
    yield "phase", _phase(status, now).replace("NAME", metadata["name"])
    if status.attempt is not None:
        yield "attempt", _attempt(status, spec)
    if (training := status.training) is not None:
        yield "trained", _trained(training)
        yield "policy", _policy(training)
        yield "episodes", _episodes(training, spec)
        if not is_over(status):
            updated = f"{since(training.updated_at, now)} ago" if training.updated_at else UNKNOWN
            yield "updated", f"{updated}: {STALE.meaning}" if is_stale(status, now) else updated
    yield "stop", ", ".join(f"{name} {_number(value)}" for name, value in spec.get("stop", {}).items() if value)
    if (end := next((each for each in status.conditions if each.type == FINISHED), None)) is not None:
        yield ("result" if end.status == "True" else "retried"), end.message
    yield "parameters", f"{parameter_store(experiment)}: kubectl rlsrl params list {metadata['name']}"


def _phase(status: ExperimentStatus, now: datetime) -> str:
    if status.phase is None:
        return f"none: {UNSEEN.meaning}"
    changed = next((each for each in status.conditions if each.type == SINCE.get(status.phase)), None)
    lasting = "" if changed is None else f" for {since(changed.last_transition_time, now)}"
    return f"{status.phase}{lasting}: {PHASES[status.phase].meaning}"


def _attempt(status: ExperimentStatus, spec: Mapping[str, Any]) -> str:
    restarts = status.restarts or 0
    text = f"{status.attempt}, {'1 restart' if restarts == 1 else f'{restarts} restarts'}"
    budget = spec.get("restarts", {}).get("budget")
    if status.recent_failures and budget is not None:
        text += f", {status.recent_failures} of the {budget} failures in restarts.budget"
    return text


def _trained(training: Training) -> str:
    return (
        f"{_number(training.env_steps)} env steps, {_number(training.train_steps)} train steps, "
        f"{_number(training.env_steps_per_second)} env steps/s"
    )


def _policy(training: Training) -> str:
    return (
        f"return {training.return_mean or UNKNOWN}, lag {_number(training.policy_lag)}, "
        f"version {training.version or UNKNOWN}"
    )


def _episodes(training: Training, spec: Mapping[str, Any]) -> str:
    length = f"length {training.length_mean or UNKNOWN}"
    if not training.episode_info:
        return length
    from rlsrl.data.episodes import info_texts  # imports numpy, which most experiments do not need here

    num_last = spec.get("stop", {}).get("episodes", Stop.model_fields["episodes"].default)
    info = {
        each.key: {"mean": None if each.mean is None else float(each.mean), "count": each.count}
        for each in training.episode_info
    }
    return ", ".join([length, *info_texts(info, num_last=num_last)])


def parameter_store(experiment: Object) -> str:
    """Return the volume or the bucket that holds an experiment's versions."""
    bucket = experiment.get("spec", {}).get("parameters", {}).get("store", {}).get("objectStore")
    return f"volume {experiment['metadata']['name']}-data" if bucket is None else str(bucket.get("url"))


def _role(workload: Object) -> tuple[str, str]:
    wanted = workload.get("spec", {}).get("replicas", 1)
    ready = workload.get("status", {}).get("readyReplicas", 0)
    return str(workload["metadata"].get("labels", {}).get(ROLE_LABEL, UNKNOWN)), f"{ready}/{wanted}"


def _conditions(status: ExperimentStatus, now: datetime) -> Iterator[tuple[str, ...]]:
    for each in status.conditions:
        message = " ".join(each.message.split())
        yield each.type, each.status, each.reason, since(each.last_transition_time, now), message


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else format(value, ",.0f" if float(value).is_integer() else ",g")
